"""Read the pickles of a checkpoint without running code from them.

Unpickling may call any function that the pickle names. Both readers here accept only the classes
that this package writes.
"""

import copyreg
import datetime
import io
import pathlib
import pickle
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, BinaryIO
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from verl.utils.errors import CheckpointError, OutOfMemoryError, shortage_while_reading

# Raised by unpickling if bytes are missing, changed or forbidden. An OSError (no access) already
# names its file.
UNREADABLE_PICKLE = (
    *(pickle.UnpicklingError, EOFError, MemoryError, ValueError, OverflowError, RuntimeError),
    *(LookupError, TypeError, AttributeError, ImportError, AssertionError),
)
# Raised by pickling for a value that cannot be pickled. A full disk is an OSError or RuntimeError.
_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
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
# Classes of the path of the written folder, which nothing reads. The class depends on the version
# of Python and on the system.
_PATH_MODULES = ("pathlib", "pathlib._local")
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
# Values of Parquet files, which the batches of asynchronous schedules hold. None of them runs code.
_VALUE_CLASSES = (
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(ZoneInfo, Decimal, UUID, set, frozenset),
)


def _by_name(zone: ZoneInfo) -> tuple[type[ZoneInfo], tuple[str]]:
    """Return how to make a time zone again, in place of its own way, which calls `getattr`."""
    zone.__reduce__()  # raises for a zone of a user's file, which its name does not give
    return ZoneInfo, (zone.key,)


copyreg.pickle(ZoneInfo, _by_name)


def read_metadata(file: Path) -> Metadata:
    """Return the metadata of a `torch.distributed.checkpoint` folder.

    Raises one of UNREADABLE_PICKLE for any other file.
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
    """An unpickler that accepts only the classes of `.metadata`."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _PATH_MODULES and name in _PATH_CLASSES:
            return pathlib.PurePosixPath
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)

        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def save_state(file: Path, state: dict[str, Any]) -> None:
    """Write a state of numbers, texts, dates, tensors, arrays and containers of them.

    Raises CheckpointError if `load_state` cannot read it back, so that a failure shows at the save,
    and OutOfMemoryError if the host lacks the memory for that.
    """
    try:
        torch.save(state, file)
    except _UNPICKLABLE as error:
        raise _no_plain_values(file, state) from error
    try:
        with shortage_while_reading(file):
            _load(file)
    except OutOfMemoryError:
        raise
    except UNREADABLE_PICKLE as error:
        raise _no_plain_values(file, state) from error


def _no_plain_values(file: Path, state: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{file.name} must hold numbers, texts, dates, tensors, NumPy arrays and lists or dicts of "
        "them, since checkpoints are read without running code from them, but "
        f"{_unreadable_part(state)}. Return such values from the state_dict of your sampler (or of "
        "your trainer). Asynchronous schedules also save rows of data and results of agents: write "
        "other values there as text."
    )


def _unreadable_part(value: Any, place: str = "state") -> str:
    """Return the place and the class of the first value that cannot be read back."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)

    for key, part in parts:
        if not _can_be_read(part):
            return _unreadable_part(part, f"{place}[{key!r}]")
    return f"{place} is a {type(value).__module__}.{type(value).__qualname__}"


def _can_be_read(value: Any) -> bool:
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        stream.seek(0)
        _load(stream)
    except (*UNREADABLE_PICKLE, *_UNPICKLABLE):
        return False
    return True


def load_state(file: Path) -> dict[str, Any]:
    """Return the state that `save_state` wrote. Raises CheckpointError for any other file."""
    try:
        state = _load(file)
    except (*UNREADABLE_PICKLE, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({_reason(error)}). If it is damaged or incomplete, copy it "
            "again, or use another checkpoint (trainer.resume_from_path)."
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"Expected the state of a run in {file}, found a {type(state).__name__}. Use another "
            "checkpoint (trainer.resume_from_path)."
        )
    return state


def _load(file: Path | BinaryIO) -> Any:
    with torch.serialization.safe_globals(_state_classes()):
        return torch.load(file, map_location="cpu", weights_only=True)


def _state_classes() -> list[Any]:
    """Return the classes and functions that a state may use, in addition to PyTorch's own."""
    functions: list[Any] = [np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType")]

    # NumPy 1 and 2 have the two functions in modules of different names, and read both.
    aliases: list[Any] = []
    for function in functions:
        for core in ("core", "_core"):
            aliases.append((function, f"numpy.{core}.multiarray.{function.__name__}"))
    return [np.ndarray, np.dtype, *_VALUE_CLASSES, *dtypes, *aliases]


def _reason(error: BaseException) -> str:
    """Return the class and the reason in one line, without PyTorch's advice to trust the file."""
    text = str(error)
    forbidden = re.search(r"(?i)unsupported global:?(?: GLOBAL)? (\S+)", text)
    if forbidden is not None:
        return f"it names {forbidden.group(1)}, which no checkpoint needs"

    text = text.partition("WeightsUnpickler error:")[2] or text
    lines = text.strip().splitlines()
    first = lines[0] if lines else ""
    return f"{type(error).__name__}: {first:.300}".removesuffix(": ")
