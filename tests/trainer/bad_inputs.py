"""Inputs that a run refuses, and the error that it ends with."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import TOY
from verl.data.toy import toy_files
from verl.models.load import resolve_path


def toy_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(toy_files()[0]).read_text().splitlines()]


def on_files(path: Path) -> list[str]:
    """Return the toy run on a file of the user, with the toy model."""
    settings = [
        f"data.train_files={path}",
        "data.max_prompt_length=64",
        "actor_rollout_ref.model.path=toy",
        "algorithm.adv_estimator=grpo",
    ]
    return [*TOY[1:], *settings]


def message(capfd: pytest.CaptureFixture[str], status: int) -> str:
    """Return the error of a failed run: stderr holds nothing else."""
    err = capfd.readouterr().err
    assert status == 1
    kind, colon, text = err.partition(": ")
    assert colon
    assert kind.endswith("Error")
    assert "/verl/trainer/" not in err, "a traceback of ours"
    return text.strip()


def reward_file(tmp_path: Path, body: str) -> list[str]:
    path = tmp_path / "reward.py"
    path.write_text(
        f"import math, time\n\ndef compute_score(data_source, solution_str, **_):\n    {body}\n"
    )
    return [f"custom_reward_function.path={path}"]


def folder_without_weights(folder: Path) -> Path:
    """Create a folder with the configuration and tokenizer of the toy model alone."""
    for file in Path(resolve_path("toy")).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
