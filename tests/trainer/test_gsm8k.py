"""GSM8K from the files and with the tokenizer that users have, on a small random Qwen2."""

import math
import runpy
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.shared_files import SHARED, needs_shared
from tests.trainer.runs import run, step_lines

pytestmark = [
    needs_shared("models/qwen2-tokenizer"),
    needs_shared("data/gsm8k"),
]

SPREAD = ("mean", "max", "min")
ALWAYS = [
    *(
        f"actor/{name}"
        for name in ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "grad_norm", "lr", "kl_loss")
    ),
    *(
        f"critic/{name}/{of}"
        for name in ("score", "rewards", "advantages", "returns")
        for of in SPREAD
    ),
    *(
        f"{name}/{of}"
        for name in ("response_length", "prompt_length")
        for of in (*SPREAD, "clip_ratio")
    ),
    *(
        f"timing_s/{name}"
        for name in ("gen", "reward", "ref", "adv", "update_actor", "sync_weights", "step")
    ),
    *(f"timing_per_token_ms/{name}" for name in ("gen", "ref", "adv", "update_actor")),
    "perf/throughput",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/max_memory_allocated_gb",
    "training/global_step",
    "training/epoch",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "training/rollout_kl",
    "val-core/openai/gsm8k/reward/mean@2",
    "val-core/openai/gsm8k/reward/best@2",
]
OF_A_CRITIC = [
    *(f"critic/values/{of}" for of in SPREAD),
    "critic/vf_loss",
    "critic/vf_explained_var",
    "critic/grad_norm",
    "critic/lr",
    "timing_s/values",
    "timing_s/update_critic",
]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create train.parquet and test.parquet like the example script."""
    folder = tmp_path_factory.mktemp("gsm8k")
    script = Path(__file__).parents[2] / "examples" / "data_preprocess" / "gsm8k.py"
    arguments = [
        "--local_dataset_path",
        str(SHARED / "data" / "gsm8k"),
        "--local_save_dir",
        str(folder),
    ]
    runpy.run_path(str(script))["main"](arguments)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random Qwen2 with the full vocabulary of the real one."""
    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=151_645,
        tie_word_embeddings=True,
    )

    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    shutil.copytree(SHARED / "models" / "qwen2-tokenizer", folder, dirs_exist_ok=True)
    return folder


def test_the_files_have_all_rows(parquet):
    counts = [
        pq.read_metadata(parquet / f"{split}.parquet").num_rows for split in ("train", "test")
    ]
    assert counts == [7_473, 1_319]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"], ALWAYS),
        (["algorithm.adv_estimator=gae", "critic.optim.lr=1e-4"], [*ALWAYS, *OF_A_CRITIC]),
    ],
    ids=["grpo", "ppo"],
)
def test_two_steps_report_every_metric(tmp_path, parquet, model, algorithm, expected):
    few = {}
    for split, rows in (("train", 100), ("test", 3)):
        few[split] = tmp_path / f"{split}.parquet"
        pq.write_table(pq.read_table(parquet / f"{split}.parquet").slice(0, rows), few[split])
    command = [
        f"data.train_files={few['train']}",
        f"data.val_files={few['test']}",
        "data.train_batch_size=2",
        "data.max_prompt_length=256",
        "data.max_response_length=16",
        "data.filter_overlong_prompts=True",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.test_freq=1",
        "trainer.total_training_steps=2",
    ]

    assert run(tmp_path, *algorithm, base=command) == 0
    lines = step_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2]

    for line in lines:
        assert [name for name in expected if name not in line] == []
        assert [
            name for name, value in line.items() if value is None or not math.isfinite(value)
        ] == []
        assert line["training/rollout_probs_diff_max"] < 1e-4
        assert line["prompt_length/max"] > 50
        assert line["response_length/max"] <= 16
