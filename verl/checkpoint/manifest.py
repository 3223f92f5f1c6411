"""The list of a checkpoint's files with their sizes and SHA-256 sums, and the checks against it."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import verl
from verl.utils.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2  # 1 had whole tensors, written by one rank
SHARD_METADATA = ".metadata"  # which part of which tensor lies where, see `sharded`
SHARED_FILES = (
    "With several hosts, trainer.default_local_dir must be on a file system that all of them share."
)
_CHUNK_BYTES = 1 << 22
# hashlib releases the lock of the interpreter: several files are read at once.
_NUM_READERS = 4


def write_manifest(folder: Path, step: int) -> None:
    """Sum up every file under `folder`, and bring all of it to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        sums = list(pool.map(_sum_and_sync, files))
    manifest = {
        "format": FORMAT,
        "step": step,
        "version": verl.__version__,
        "saved_at_ns": time.time_ns(),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(files, sums)
        },
    }
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    sync(path)
    for subfolder in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(subfolder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; CheckpointError when there is none or it cannot be read."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is not a complete checkpoint of this package."
        )
    try:
        manifest = json.loads(path.read_bytes())
        return {
            "step": int(manifest["step"]),
            "saved_at_ns": int(manifest["saved_at_ns"]),
            "files": manifest["files"],
        }
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}.") from error


def verify_files(folder: Path, part: str = "") -> None:
    """Compare every file with the manifest, or those whose names begin with `part` ("actor/"):
    CheckpointError names all that are missing, truncated or changed."""
    files = {
        name: entry
        for name, entry in read_manifest(folder)["files"].items()
        if name.startswith(part)
    }
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        faults = [
            fault
            for fault in pool.map(lambda item: _fault(folder / item[0], *item), files.items())
            if fault is not None
        ]
    if faults:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(faults)}.")


def sync(path: Path) -> None:
    """Make what was written at `path` (file or folder) outlive the machine's power."""
    if path.is_dir() and os.name == "nt":
        return  # Windows has no handles of folders to flush
    handle = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sum_and_sync(path: Path) -> str:
    sync(path)
    return _digest(path)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _fault(path: Path, name: str, expected: dict[str, Any]) -> str | None:
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size != expected["bytes"]:
        kind = "truncated" if size < expected["bytes"] else "too long"
        return f"{name} is {kind} ({size} of {expected['bytes']} bytes)"
    if _digest(path) != expected["sha256"]:
        return f"{name} has another checksum than when it was written"
    return None
