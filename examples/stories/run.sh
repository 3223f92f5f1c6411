#!/usr/bin/env bash
# Train a small story-telling model with GRPO to write about the two things that it was asked for, once a seed.
# usage: examples/stories/run.sh MODEL OUTPUT [SEED ...]      MODEL is the folder of stories260K
# KEYS has further keys of the runs, by spaces. One thread: the model is so small that a second one costs more than it brings.
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: examples/stories/run.sh MODEL OUTPUT [SEED ...]" >&2
  exit 2
fi
model=$1 output=$2
shift 2
if [ $# -eq 0 ]; then set -- 1 2 3; fi
python=${PYTHON:-python}
here=$(dirname "$0")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

"$python" "$here/prepare.py" --output "$output/data"
for seed in "$@"; do
  "$python" -m verl.trainer.main_ppo \
    data.train_files="$output/data/train.jsonl" \
    data.val_files="$output/data/val.jsonl" \
    data.train_batch_size=8 \
    data.max_prompt_length=32 \
    data.max_response_length=64 \
    data.seed="$seed" \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.custom_chat_template="'{{ bos_token }}{{ messages[0].content }}'" \
    actor_rollout_ref.model.enable_gradient_checkpointing=False \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.seed="$seed" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    actor_rollout_ref.actor.optim.lr=5e-4 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.1 \
    algorithm.adv_estimator=grpo \
    custom_reward_function.path="$here/reward.py" \
    trainer.device=cpu \
    trainer.seed="$seed" \
    trainer.max_steps=100 \
    trainer.test_freq=100 \
    trainer.log_interval=10 \
    trainer.log_val_generations=128 \
    trainer.logger="[console,file]" \
    trainer.default_local_dir="$output/seed_$seed" \
    trainer.resume_mode=disable \
    ${KEYS:-}
done
"$python" "$here/report.py" "$output"
