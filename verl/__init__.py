"""Reinforcement-learning post-training for large language models.

Public names load on first use, so that `import verl` is instant and needs no torch.
"""

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from verl.utils.lazy import lazy_names

if TYPE_CHECKING:
    from verl.protocol import DataProto as DataProto

    # of verl.trainer.api and verl.diagnostics, which rooms below must not import, not even here
    train: Any
    load_run: Any

__version__ = "0.1.0"

__all__ = ["DataProto", "__version__", "load_run", "train"]


class _OldPaths(importlib.abc.MetaPathFinder):
    """Asked last, for modules of ours that do not exist: they may be old paths
    (`verl/compat/paths.py`)."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("verl.") or fullname.startswith("verl.compat"):
            return None
        return importlib.import_module("verl.compat").find_old_module(fullname)


sys.meta_path.append(_OldPaths())


__getattr__ = lazy_names(
    __name__,
    {
        "DataProto": "verl.protocol",
        "load_run": "verl.diagnostics.view.notebook",
        "train": "verl.trainer.api",
    },
)
