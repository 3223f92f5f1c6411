"""Reinforcement-learning post-training for large language models.

Public names load on first use, so that `import verl` is instant and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.protocol import DataProto as DataProto

__version__ = "0.1.0"

_PUBLIC = {"DataProto": "verl.protocol"}

__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'verl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
