"""Write tensors from all ranks that hold shards of them; read them on any number of ranks.

The files are those of `torch.distributed.checkpoint`: every rank's shards in one file, and
`.metadata`, which locates every part of every tensor. The files do not depend on the number of
ranks.
"""

import functools
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from verl.checkpoint.background import Background
from verl.checkpoint.manifest import SHARD_METADATA, SHARED_FILES
from verl.checkpoint.unpickling import UNREADABLE_PICKLE, read_metadata
from verl.distributed.collectives import Axis
from verl.utils.errors import CheckpointError, describe_error
from verl.utils.launcher import run_rank

SHARDED_FOLDER = "sharded"  # within the folder of a role
# Prefixes of the names of weights and of moments.
MODEL = "model."
OPTIMIZER = "optimizer."
_IF_DAMAGED = "If it is damaged or incomplete, copy it again, or use another checkpoint."

# torch logs every tensor and every part of a save to this logger, as debug messages that a root
# handler would print.
logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False
# A single process works alone, and so does every rank that reads.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class ShardedWriter:
    """Write checkpoints of one module, at once or in the background.

    Every rank of `world` must make the same calls.
    """

    def __init__(self, world: Axis) -> None:
        self.world = world
        self._group: Any = None
        self._background = Background()

    def write(
        self, folder: Path, tensors: Mapping[str, torch.Tensor], *, in_background: bool = False
    ) -> None:
        """Write this rank's shards of `tensors`; replicas are written once.

        In the background, it writes copies on the host, so the tensors may change at once; see
        `is_done`.
        """
        self.is_done(wait=True)
        if self.world.size > 1 and self._group is None:
            # Use a separate group: background messages must not mix with the run's collectives.
            self._group = dist.new_group(backend="gloo")

        if not in_background:
            write_sharded(folder, tensors, self._group)
            return
        copies = {name: host_copy(tensor) for name, tensor in tensors.items()}
        self._background.start(partial(write_sharded, folder, copies, self._group))

    def is_done(self, *, wait: bool) -> bool:
        """Return whether the background work is done, on rank 0 that of all ranks.

        Raises its error.
        """
        return self._background.is_done(wait=wait)


def write_sharded(
    folder: Path, tensors: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Write `tensors` (sharded, or the same on all ranks) into `folder`.

    All ranks of `group` must call it together; None means that this process is alone. When the
    first rank returns, the files of all ranks are on disk. Raises CheckpointError on every rank.
    """
    with _reported(f"writing {folder}"):
        writer = FileSystemWriter(folder)
        dcp.save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


class SavedTensors:
    """A folder of sharded tensors. `tensors` has the whole shape and the dtype of each name.

    Raises CheckpointError for a folder without sharded tensors, and for missing files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not (folder / SHARD_METADATA).is_file():
            raise CheckpointError(
                f"Expected sharded tensors in {folder}, found no {SHARD_METADATA} there. "
                f"{SHARED_FILES}"
            )

        self._reader = _Reader(folder)
        try:
            metadata = self._reader.read_metadata()
            files = {place.relative_path for place in (metadata.storage_data or {}).values()}
            self.tensors: dict[str, tuple[torch.Size, torch.dtype]] = {}
            for name, info in metadata.state_dict_metadata.items():
                if isinstance(info, TensorStorageMetadata):
                    self.tensors[name] = (info.size, info.properties.dtype)
        except UNREADABLE_PICKLE as error:
            reason = describe_error(error)
            raise CheckpointError(
                f"{folder / SHARD_METADATA} cannot be read ({reason}). {_IF_DAMAGED}"
            ) from error

        missing = sorted(name for name in files if not (folder / name).is_file())
        if missing:
            raise CheckpointError(
                f"{folder} lacks files that other ranks wrote: {', '.join(missing)}. {SHARED_FILES}"
            )

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill `tensors` in place with the saved values. Each rank may call it alone.

        Raises CheckpointError for a missing name and for a different shape.
        """
        for name, tensor in tensors.items():
            shape, _ = self.tensors.get(name, (None, None))
            if shape != tensor.shape:
                found = "has none of that name"
                if shape is not None:
                    found = f"has it in shape {tuple(shape)}"
                raise CheckpointError(
                    f"Expected '{name}' of shape {tuple(tensor.shape)} in {self.folder}, which "
                    f"{found}. Another model saved it: set the model's path to that one, or "
                    "start a run in another folder (trainer.default_local_dir)."
                )

        with _reported(f"reading {self.folder}", f" {_IF_DAMAGED}"):
            dcp.load(dict(tensors), storage_reader=self._reader, no_dist=True)

    def read_whole(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read whole tensors to the host, from any shards."""
        whole = {}
        for name in names:
            shape, dtype = self.tensors[name]
            whole[name] = torch.empty(shape, dtype=dtype)
        self.read(whole)
        return whole


class _Reader(FileSystemReader):
    """A reader that reads the metadata once, without running code from it.

    With many ranks and layers the metadata is large, and every `load` needs it.
    """

    @functools.cached_property
    def _metadata(self) -> Metadata:
        metadata = read_metadata(Path(self.path) / SHARD_METADATA)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor, or its shards, to new memory on the host."""
    return tensor.detach().to("cpu", copy=True)


@contextmanager
def _reported(action: str, way_out: str = "") -> Iterator[None]:
    """Turn torch's report of the ranks' failures, a BaseException, into a CheckpointError."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None

        where = f" on rank {run_rank(rank)}" if len(error.failures) > 1 or rank else ""
        first_line = next(iter(str(cause).splitlines()), "")  # PyTorch adds advice in more lines
        reason = f"{type(cause).__name__}: {first_line}".rstrip(": .")  # an EOFError has no text
        raise CheckpointError(f"While {action}{where}: {reason}.{way_out}") from cause
