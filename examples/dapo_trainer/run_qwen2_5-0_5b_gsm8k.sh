#!/usr/bin/env bash
# DAPO on GSM8K. Needs one GPU of 22 GiB. Data: examples/data_preprocess/gsm8k.py
# Further keys follow the script, such as trainer.max_steps=2. --dry-run --device-gib L4 prints the memory plan.
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  algorithm.filter_groups.enable=True \
  algorithm.filter_groups.max_num_gen_batches=10 \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.train_batch_size=128 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.clip_ratio_low=0.2 \
  actor_rollout_ref.actor.clip_ratio_high=0.28 \
  actor_rollout_ref.actor.loss_agg_mode=token-mean \
  reward_model.reward_manager=dapo \
  reward_model.overlong_buffer.enable=True \
  reward_model.overlong_buffer.len=256 \
  reward_model.overlong_buffer.penalty_factor=1.0 \
  trainer.logger='["console","file"]' \
  trainer.project_name=verl_gsm8k \
  trainer.experiment_name=dapo_qwen2_5_0_5b \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=15 \
  "$@"
