"""Read the pickles of a checkpoint without running code from them.

A pickle may name any function and have it called. Both readers here accept the few classes that
this package writes, and refuse every other name.
"""

import pathlib
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from verl.utils.errors import CheckpointError

# Raised by unpickling where bytes are missing, changed or forbidden. An OSError (no access) names
# its file itself.
UNREADABLE_PICKLE = (
    *(pickle.UnpicklingError, EOFError, MemoryError, ValueError, OverflowError, RuntimeError),
    *(LookupError, TypeError, AttributeError, ImportError, AssertionError),
)
_METADATA_CLASSES = {
    metadata.__name__: (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    filesystem.__name__: ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),  # looks a layout up by its name
    "collections": ("OrderedDict",),
}
# The folder that was written to, which nothing reads; the class depends on Python's version and on
# the system.
_PATHS = [
    (module, f"{kind}Path")
    for module in ("pathlib", "pathlib._local")
    for kind in ("Posix", "Windows", "PurePosix", "PureWindows")
]


def read_metadata(file: Path) -> Metadata:
    """Return the metadata of a `torch.distributed.checkpoint` folder.

    Raises one of UNREADABLE_PICKLE for anything else.
    """
    with file.open("rb") as stream:
        found = _MetadataUnpickler(stream).load()

    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"it holds a {type(found).__name__}")
    for place in (found.storage_data or {}).values():
        name = place.relative_path
        if pathlib.PurePath(name).name != name:  # also refuses ".." and absolute paths
            raise pickle.UnpicklingError(f"it names a file outside its folder, {name!r:.100}")
    return found


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes of `.metadata` alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)

        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Write a state of numbers, texts, tensors, arrays and containers of them.

    Raises CheckpointError where `load_state` could not read it back: a save is the time to know.
    """
    torch.save(state, file)
    try:
        _load(file)
    except UNREADABLE_PICKLE as error:
        raise CheckpointError(
            f"{file.name} must hold numbers, texts, tensors, NumPy arrays and lists or dicts of "
            f"them, since checkpoints are read without running code from them: "
            f"{_reason(error)}. Return such values from the state_dict of your sampler (or of your "
            "trainer)."
        ) from error


def load_state(file: Path) -> dict[str, Any]:
    """Return the state that `save_state` wrote. CheckpointError for anything else."""
    try:
        state = _load(file)
    except (*UNREADABLE_PICKLE, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({_reason(error)}). If it is damaged or was not copied whole, "
            "copy it again, or use another checkpoint (trainer.resume_from_path)."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"Expected the state of a run in {file}, found a {type(state).__name__}. Use another "
            "checkpoint (trainer.resume_from_path)."
        )
    return state


def _load(file: Path) -> Any:
    with torch.serialization.safe_globals(_state_classes()):
        return torch.load(file, map_location="cpu", weights_only=True)


def _state_classes() -> list[Any]:
    """Return the names beyond PyTorch's own that a state may hold: NumPy's arrays and numbers."""
    functions: list[Any] = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType")]
    # NumPy 1 and 2 have the two functions in modules of different names, and read both.
    aliases = [
        (function, f"numpy.{core}.multiarray.{function.__name__}")
        for function in functions
        for core in ("core", "_core")
    ]
    return [np.ndarray, np.dtype, set, *dtypes, *aliases]


def _reason(error: BaseException) -> str:
    """Return class and fact in one line, without PyTorch's advice to trust the file."""
    text = str(error)
    forbidden = re.search(r"(?i)unsupported global:?(?: GLOBAL)? (\S+)", text)
    if forbidden is not None:
        return f"it names {forbidden.group(1)}, which no checkpoint needs"

    text = text.partition("WeightsUnpickler error:")[2] or text
    lines = text.strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first:.300}".removesuffix(": ")
