#!/usr/bin/env bash
# Fine-tuning on the answers of GSM8K. One GPU, or a patient CPU; data: examples/data_preprocess/gsm8k.py.
# MODEL_PATH and DATA_DIR say where things are; further keys follow the script's name, such as model.lora_rank=32.
set -euo pipefail
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
DATA_DIR=${DATA_DIR:-$HOME/data/gsm8k}

python3 -m verl.jobs.main_sft \
  data.train_files="$DATA_DIR/train.parquet" \
  data.val_files="$DATA_DIR/test.parquet" \
  data.prompt_key=extra_info \
  data.prompt_dict_keys='[question]' \
  data.response_key=extra_info \
  data.response_dict_keys='[answer]' \
  data.train_batch_size=256 \
  data.max_length=1024 \
  model.path="$MODEL_PATH" \
  optim.lr=1e-5 \
  trainer.logger='["console","file"]' \
  trainer.project_name=verl_gsm8k \
  trainer.experiment_name=sft_qwen2_5_0_5b \
  trainer.save_freq=20 \
  trainer.test_freq=10 \
  trainer.total_epochs=3 \
  "$@"
