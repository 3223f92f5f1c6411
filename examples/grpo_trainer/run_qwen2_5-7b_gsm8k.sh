#!/usr/bin/env bash
# GRPO of a 7B model on GSM8K, by Ray. Needs 8 GPUs of 39 GiB. Data: examples/data_preprocess/gsm8k.py
# Further keys follow the script, such as trainer.max_steps=2. --dry-run --device-gib A100-40 prints the memory plan.
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.logger='["console","file"]' \
  trainer.project_name=verl_gsm8k \
  trainer.experiment_name=grpo_qwen2_5_7b \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=15 \
  "$@"
