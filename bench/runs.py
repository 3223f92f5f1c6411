"""Training runs of a benchmark: programs of the package, and the metrics that they write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import require_python


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step and validation of the run that wrote to `folder`."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def as_hugging_face(checkpoint: Path, target: Path) -> Path:
    """Write the model of a checkpoint (global_step_N) to `target` in Hugging Face format."""
    places = ["--local_dir", str(checkpoint / "actor"), "--target_dir", str(target)]
    require_python(["-m", "verl.jobs.main_merge", "merge", "--backend", "fsdp", *places])
    return target


def validation_scores(
    keys: Sequence[str], folder: Path, metric: str, *, model: Path, seed: int, steps: int
) -> list[float]:
    """Train with reinforcement learning on one thread, and validate before and after.

    Args:
        keys: of the configuration, as `key=value`.
        folder: that the run writes to.
        metric: of a validation.

    Returns:
        The metric of every validation, the first before any update.
    """
    require_python(
        [
            *("-m", "verl.trainer.main_ppo"),
            *keys,
            f"actor_rollout_ref.model.path={model}",
            f"trainer.max_steps={steps}",
            f"trainer.test_freq={steps}",
            f"trainer.seed={seed}",
            f"data.seed={seed}",
            f"trainer.default_local_dir={folder}",
            'trainer.logger=["file"]',
            "trainer.val_before_train=True",
            "trainer.num_threads=1",
        ]
    )
    return [line[metric] for line in read_metrics(folder) if metric in line]
