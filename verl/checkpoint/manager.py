"""Checkpoints that are whole or absent: written aside, summed, renamed; read only if their sums hold."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.logging import logger

PREFIX = "global_step_"
TEMPORARY = ".writing-"
MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"


class CheckpointManager:
    """The folder `root` with one `global_step_N` per checkpoint and the number of the newest in a text file.

    Args:
        root: created with the first checkpoint.
        max_to_keep: how many of the newest stay; None keeps all.
    """

    def __init__(self, root: Path, max_to_keep: int | None = None) -> None:
        self.root = Path(root)
        self.max_to_keep = max_to_keep

    def save(self, step: int, writers: Mapping[str, Callable[[Path], None]]) -> Path:
        """Let each writer fill a subfolder of its name, then make the whole appear at once as `global_step_<step>`.

        A process killed in between leaves a hidden folder that the next save removes, and all earlier checkpoints as
        they were. Raises CheckpointError where the disk is full.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        temporary, final = self.root / f"{TEMPORARY}{PREFIX}{step}", self.root / f"{PREFIX}{step}"
        try:
            for name, write in writers.items():
                (temporary / name).mkdir(parents=True)
                write(temporary / name)
            _write_manifest(temporary, step)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno != errno.ENOSPC:
                raise
            free_gib = shutil.disk_usage(self.root).free / 1024**3
            raise CheckpointError(
                f"No space left for the checkpoint of step {step} in {self.root} ({free_gib:.2f} GiB free). Earlier "
                "checkpoints are intact. Free some space or lower trainer.max_actor_ckpt_to_keep."
            ) from error
        if final.exists():  # of an earlier run that was not resumed, or one that failed its sums
            shutil.rmtree(final)
        os.replace(temporary, final)
        _write_durably(self.root / LATEST, str(step))
        _sync_folder(self.root)
        self._prune(keep=final)
        return final

    def steps(self) -> list[int]:
        """Steps of all checkpoints, whole or not, oldest first."""
        if not self.root.is_dir():
            return []
        numbers = (folder.name.removeprefix(PREFIX) for folder in self.root.glob(f"{PREFIX}*") if folder.is_dir())
        return sorted(int(number) for number in numbers if number.isdigit())

    def latest(self) -> Path | None:
        """The newest checkpoint whose sums hold; says why it passed over a newer one.

        Newest is the one saved last: steps beyond it are of an earlier run that was not resumed.
        """
        steps = self.steps()
        last = self._last_saved()
        for step in reversed([step for step in steps if last not in steps or step <= last]):
            folder = self.root / f"{PREFIX}{step}"
            try:
                self.verify(folder)
            except CheckpointError as error:
                logger.warning("Passing over a damaged checkpoint: %s", error)
                continue
            return folder
        return None

    def verify(self, folder: Path) -> None:
        """Raise CheckpointError unless every file is there with the size and sum it was written with."""
        manifest = _read_manifest(folder)
        for name, entry in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"{path} is missing.")
            size = path.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(f"{path} has {size} bytes, it was written with {entry['size']}.")
            if _sha256(path) != entry["sha256"]:
                raise CheckpointError(
                    f"{path} does not match its checksum; its content has changed since it was written."
                )

    def resolve(self, resume_mode: str, resume_from_path: str | None = None) -> Path | None:
        """The folder to resume from: `auto` the newest sound one, `resume_path` the one given, `disable` none.

        Under `auto`, checkpoints none of which is sound raise CheckpointError: to start over in silence loses them.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            folder = self.latest()
            if folder is None and self.steps():
                raise CheckpointError(
                    f"None of the checkpoints in {self.root} is whole. Start over with trainer.resume_mode=disable, or "
                    "move the folder away."
                )
            return folder
        if resume_mode != "resume_path" or not resume_from_path:
            raise ConfigError(
                f"trainer.resume_mode={resume_mode} with resume_from_path={resume_from_path}: give auto, disable, or "
                f"resume_path with the path of a {PREFIX}N folder."
            )
        folder = Path(resume_from_path).expanduser()
        if not folder.is_dir():
            raise CheckpointError(f"trainer.resume_from_path: expected a {PREFIX}N folder at {folder}, found none.")
        self.verify(folder)
        return folder

    def _last_saved(self) -> int:
        path = self.root / LATEST
        text = path.read_text().strip() if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def _prune(self, keep: Path) -> None:
        if self.max_to_keep is None:
            return
        others = [self.root / f"{PREFIX}{step}" for step in self.steps()]
        others = sorted((folder for folder in others if folder != keep), key=lambda folder: folder.stat().st_mtime)
        for folder in others[: max(0, len(others) + 1 - self.max_to_keep)]:
            shutil.rmtree(folder)

    def _remove_leftovers(self) -> None:
        for folder in self.root.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder)


def _write_manifest(folder: Path, step: int) -> None:
    """Sums of all files, each of them on the disk before the manifest is."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            files[str(path.relative_to(folder))] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    _write_durably(folder / MANIFEST, json.dumps({"step": step, "files": files}, indent=1))


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the folder is not a whole checkpoint.") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise CheckpointError(f"{path} is not the manifest of a checkpoint.")
    return manifest


def _write_durably(path: Path, text: str) -> None:
    """Replace a file in one step, after its new content is on the disk."""
    beside = path.with_name(f"{TEMPORARY}{path.name}")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
