# Everything a newcomer types: `make quickstart` (install and the toy training), `make smoke` (the
# tests of a first change, within two minutes) and `make test` (all but the slow tests, within ten).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The default torch wheel on Linux carries 2.8 GB of CUDA libraries. Without an NVIDIA driver the CPU build is taken
# from PyTorch's own index; with one, PyPI's CUDA build; elsewhere (macOS) PyPI's wheel is the CPU/MPS one.
ifeq ($(shell uname -s),Linux)
  ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
    TORCH := --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu
    # Comes with the CUDA builds of torch; here its interpreter runs the tests of our CUDA kernels.
    TRITON := triton==3.6.0
  endif
endif
TORCH ?= 'torch>=2.11'

# One process and no ranks: keys, data, algorithms, rewards by rule, commands, and a whole toy run.
SMOKE := tests/config tests/data tests/protocol tests/algorithms tests/tracking tests/utils \
  tests/cli tests/rewards/test_rules.py tests/trainer/test_toy.py tests/trainer/test_flat_rewards.py
# Compiled files are written even where the shell forbids it: without them every process compiles
# the package, and every worker rewrites all tests.
TEST := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= \
  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --hypothesis-seed=0
# The marker `slow` decides whether `test` or `test-slow` runs a test.
HERE := not gpu and not multi_gpu and not vllm

# vLLM's pins exclude those of this package, so it gets an environment of its own.
VLLM_VENV ?= .venv-vllm
VLLM_PINS := tests/rollout_servers/requirements.txt tests/rollout_servers/overrides.txt

.PHONY: quickstart install smoke test test-slow test-vllm lint check format bench chaos docs clean

quickstart: install
	$(BIN)/python -m verl.trainer.main_ppo data.dataset_name=toy data.train_batch_size=4 \
	  actor_rollout_ref.model.path=toy trainer.max_steps=10 trainer.log_interval=1

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q -e '.[dev]' $(TRITON)
	touch $@

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

check: lint
	$(BIN)/pyright

# Property tests draw the same examples every time here; plain pytest draws others.
smoke: install
	$(TEST) $(SMOKE)

# A test checks the types. Other tests among the slowest, listed at the end, may need the marker `slow`.
test: lint
	$(TEST) -m '$(HERE) and not slow' --durations=10 --durations-min=3

# Whole matrices of ranks, Ray and compilation, and faults at random moments.
test-slow: install
	$(TEST) -m '$(HERE) and slow'

test-vllm: install $(VLLM_VENV)/.installed
	VLLM_PYTHON=$(VLLM_VENV)/bin/python OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	  $(BIN)/python -m pytest -m vllm tests/rollout_servers
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
	  $(VLLM_VENV)/bin/python -m pytest -m vllm tests/rollout_servers/test_in_process.py \
	  tests/rollout_servers/test_recorded_copies.py

# pip cannot leave out the CUDA-only packages that vLLM names; uv can.
$(VLLM_VENV)/.installed: $(VLLM_PINS)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install -q uv $(TORCH)
	UV_COMPILE_BYTECODE=1 UV_SYSTEM_CERTS=1 $(VLLM_VENV)/bin/uv pip install -q \
	  --python $(VLLM_VENV)/bin/python --overrides tests/rollout_servers/overrides.txt \
	  -r tests/rollout_servers/requirements.txt
	touch $@

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python bench/grpo_cpu.py

# Faults at random moments, then faults by phase: tables of survival, and of the time until errors.
TRIES ?= 10
chaos: install
	$(BIN)/python -m tests.chaos --tries $(TRIES)
	$(BIN)/python bench/faults.py

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: pyproject.toml | install
	$(BIN)/pip install -q -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) build site *.egg-info
