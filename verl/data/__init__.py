"""From files of prompts to batches of prompts. Public names load on first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.data.build import build_dataset as build_dataset
    from verl.data.build import build_sampler as build_sampler
    from verl.data.loader import RLDataLoader as RLDataLoader
    from verl.data.rl_dataset import RLDataset as RLDataset

_PUBLIC = {
    "RLDataLoader": "verl.data.loader",
    "RLDataset": "verl.data.rl_dataset",
    "build_dataset": "verl.data.build",
    "build_sampler": "verl.data.build",
}

__all__ = ["RLDataLoader", "RLDataset", "build_dataset", "build_sampler"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'verl.data' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
