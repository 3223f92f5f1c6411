"""Tell folders of models from those in which training saved one, such as global_step_20/actor."""

import re
from pathlib import Path

from verl.checkpoint.manifest import SHARD_METADATA
from verl.checkpoint.sharded import SHARDED_FOLDER
from verl.models.lora import ADAPTER_FOLDER

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


def has_weights(folder: Path) -> bool:
    """Return whether `folder` has weights that transformers reads."""
    return any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


def is_role(folder: Path) -> bool:
    """Return whether `folder` has the weights of a role, which only this package reads."""
    has_shards = (folder / SHARDED_FOLDER / SHARD_METADATA).is_file()
    return has_shards or (folder / ADAPTER_FOLDER).is_dir()


def nearest_role(folder: Path) -> Path | None:
    """Return the role's folder that is meant by a folder in or above it; None if there is none."""
    candidates = [
        folder,
        folder.parent,
        folder / "actor",
        *sorted(folder.glob("global_step_*/actor"), key=_step, reverse=True),
    ]
    return next(filter(is_role, candidates), None)


def _step(actor: Path) -> int:
    return int(re.sub(r"\D", "", actor.parent.name) or 0)
