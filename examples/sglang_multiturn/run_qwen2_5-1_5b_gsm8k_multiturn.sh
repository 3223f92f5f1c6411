#!/usr/bin/env bash
# GRPO on GSM8K in several turns with a tool. Needs 8 GPUs of 22 GiB. Data: data_preprocess/gsm8k_multiturn_w_tool.py
# --dry-run --device-gib L4 plans it. ENGINE names the rollout engine; the embedded one is the default.
# It logs to wandb: run `wandb login` first, or add trainer.logger=[console,file].
set -euo pipefail
PROJECT_DIR=${PROJECT_DIR:-$(cd "$(dirname "$0")/../.." && pwd)}
CONFIG_PATH=${CONFIG_PATH:-$PROJECT_DIR/examples/sglang_multiturn/config}
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-1.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k_multiturn}

python3 -m verl.trainer.main_ppo \
  --config-path="$CONFIG_PATH" \
  --config-name='gsm8k_multiturn_grpo' \
  algorithm.adv_estimator=grpo \
  data.train_batch_size=256 \
  data.max_prompt_length=1024 \
  data.max_response_length=1024 \
  data.filter_overlong_prompts=True \
  data.truncation='error' \
  data.return_raw_chat=True \
  actor_rollout_ref.model.path="$MODEL_PATH" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.actor.entropy_coeff=0 \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.fsdp_config.param_offload=False \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=False \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.name="${ENGINE:-embedded}" \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.n=16 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 \
  actor_rollout_ref.ref.fsdp_config.param_offload=True \
  algorithm.use_kl_in_reward=False \
  trainer.critic_warmup=0 \
  trainer.logger='["console","wandb"]' \
  trainer.project_name='gsm8k_async_rl' \
  trainer.experiment_name='qwen2_5-1_5b_multiturn' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=-1 \
  trainer.test_freq=20 \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$CONFIG_PATH/tool_config/gsm8k_tool_config.yaml" \
  trainer.total_epochs=15 \
  actor_rollout_ref.rollout.update_weights_bucket_megabytes=512 \
  "$@"
