#!/usr/bin/env bash
# Eight responses to each test question of GSM8K, then mean, pass@k and maj@k. One GPU, or a patient CPU.
# MODEL_PATH, DATA_DIR and OUTPUT say where things are; further keys follow the script's name and go to the generation.
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}
OUTPUT=${OUTPUT:-gsm8k_responses.parquet}

python3 -m verl.jobs.main_generation \
  data.path="$DATA_DIR/test.parquet" \
  data.prompt_key=prompt \
  data.batch_size=256 \
  data.n_samples=8 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  data.output_path="$OUTPUT" \
  model.path="$MODEL_PATH" \
  rollout.temperature=0.6 \
  rollout.top_p=0.95 \
  "$@"

python3 -m verl.jobs.main_eval \
  data.path="$OUTPUT" \
  data.output_path="${OUTPUT%.parquet}_scores.json"
