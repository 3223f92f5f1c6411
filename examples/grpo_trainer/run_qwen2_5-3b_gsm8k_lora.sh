#!/usr/bin/env bash
# GRPO of a 3B model with LoRA on GSM8K. Needs one GPU of 22 GiB. Data: examples/data_preprocess/gsm8k.py
# Further keys follow the script, such as trainer.max_steps=2. --dry-run --device-gib L4 prints the memory plan.
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.model.lora_rank=64 \
  actor_rollout_ref.model.lora_alpha=32 \
  actor_rollout_ref.model.target_modules=all-linear \
  actor_rollout_ref.actor.optim.lr=2e-5 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  trainer.logger='["console","file"]' \
  trainer.project_name=verl_gsm8k \
  trainer.experiment_name=grpo_lora_qwen2_5_3b \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=15 \
  "$@"
