"""The manifest of a checkpoint: its files with sizes and SHA-256 sums, and checks against it."""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import verl
from verl.utils.errors import CheckpointError
from verl.utils.json_text import parse_object
from verl.utils.whole_file import sync

MANIFEST = "manifest.json"
FORMAT = 2  # 1 had whole tensors, written by one rank
SHARD_METADATA = ".metadata"  # locates the parts of every tensor, see `sharded`
SHARED_FILES = (
    "With several hosts, trainer.default_local_dir must be on a file system that all of them share."
)
_CHUNK_BYTES = 1 << 22
# hashlib releases the interpreter's lock, so several files can be read at once.
_NUM_READERS = 4


@dataclass(frozen=True)
class FileSum:
    """The size and the SHA-256 sum of a file when it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's manifest.

    `sequence` counts the checkpoints of a folder in the order in which they were written, from 1.
    It is 0 in manifests of an earlier version, which had no count.
    """

    step: int
    sequence: int
    saved_at_ns: int
    files: dict[str, FileSum]


def write_manifest(folder: Path, step: int, sequence: int = 1) -> None:
    """Write the sums of all files under `folder`, and sync all of it to disk."""
    present = [path for path in folder.rglob("*") if path.is_file()]
    files = sorted(path for path in present if path != folder / MANIFEST)
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        sums = list(pool.map(_sum_and_sync, files))

    entries = {}
    for path, digest in zip(files, sums):
        name = path.relative_to(folder).as_posix()
        entries[name] = {"bytes": path.stat().st_size, "sha256": digest}
    manifest = {
        "format": FORMAT,
        "step": step,
        "sequence": sequence,
        "version": verl.__version__,
        "saved_at_ns": time.time_ns(),  # only for people, because clocks may be set back
        "files": entries,
    }

    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(path)
    for subfolder in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(subfolder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint. Raises CheckpointError if it is missing or unreadable."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is not a complete checkpoint of this package."
        )
    try:
        return _parse_manifest(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{path} is damaged: {error}. Copy the checkpoint again, or use another."
        ) from error


def _parse_manifest(content: bytes) -> Manifest:
    """Parse the manifest from JSON text. Raises ValueError for an unexpected value."""
    values = parse_object(content)
    if values.get("format") != FORMAT:
        raise ValueError(f"its format is {values.get('format')!r:.50}, this version reads {FORMAT}")

    numbers = {"sequence": 0, **values}
    for name in ("step", "sequence", "saved_at_ns"):
        value = numbers.get(name)
        if type(value) is not int or value < 0:
            raise ValueError(f"'{name}' must be an integer of at least 0, got {value!r:.50}")

    files = values.get("files")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"'files' must name the files of the checkpoint, got {files!r:.50}")
    return Manifest(
        step=numbers["step"],
        sequence=numbers["sequence"],
        saved_at_ns=numbers["saved_at_ns"],
        files={name: _parse_entry(name, entry) for name, entry in files.items()},
    )


def _parse_entry(name: str, entry: Any) -> FileSum:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"'{name:.100}' is no file within the checkpoint")
    if not isinstance(entry, dict):
        raise ValueError(f"the entry of '{name:.100}' is {entry!r:.50}")

    num_bytes = entry.get("bytes")
    digest = entry.get("sha256")
    if type(num_bytes) is not int or not isinstance(digest, str):
        raise ValueError(f"the entry of '{name:.100}' must have bytes and sha256")
    return FileSum(num_bytes, digest)


def verify_files(folder: Path, part: str = "") -> None:
    """Raise CheckpointError, with all missing or changed files, unless files match the manifest.

    Args:
        folder: the folder of the checkpoint.
        part: check only files with names that begin so, such as "actor/".
    """
    listed = read_manifest(folder).files
    files = {name: entry for name, entry in listed.items() if name.startswith(part)}
    if not files:
        raise CheckpointError(f"{folder} is damaged: its {MANIFEST} lists no file of {part}.")

    with ThreadPoolExecutor(_NUM_READERS) as pool:
        found = list(pool.map(partial(_fault, folder), files, files.values()))
    faults = [fault for fault in found if fault is not None]
    if faults:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(faults)}.")


def _sum_and_sync(path: Path) -> str:
    sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _fault(folder: Path, name: str, expected: FileSum) -> str | None:
    """Describe the difference of a file from the manifest; None if there is none."""
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != expected.num_bytes:
        kind = "truncated" if size < expected.num_bytes else "too long"
        return f"{name} is {kind} ({size} of {expected.num_bytes} bytes)"
    if _digest(path) != expected.sha256:
        return f"{name} has another checksum than when it was written"
    return None
