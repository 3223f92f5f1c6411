"""Say at the end of a run where it left its files, and which commands to type next."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.checkpoint.hf import WEIGHTS_FOLDER
from verl.utils.commands import verl_command


def last_lines(run: Any) -> Iterator[str]:
    """Yield a line for each thing that a `TrainingRun` has left."""
    root: Path = run.checkpoints.root
    if "file" in run.config.trainer.logger:
        yield f"Metrics: {root / 'metrics.jsonl'}"

    name = run.checkpoints.newest_name()
    if name is not None and run.save_freq > 0:
        folder = root / name
        yield f"Checkpoint: {folder}"

        saved = folder / next(iter(run.checkpointed_groups()))
        weights: Path | str = saved / WEIGHTS_FOLDER
        if not any(saved.glob(f"{WEIGHTS_FOLDER}/*.safetensors")):  # hf_model was not saved
            target = root / f"{name}_hf"
            weights = verl_command("merge", "--local_dir", saved, "--target_dir", target)
        yield f"Weights for transformers: {weights}"

    if run.recorder.is_on:
        yield f"Look at the run: {verl_command('view', run.config.trainer.default_local_dir)}"
