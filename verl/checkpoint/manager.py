"""Manage the folder of a run's checkpoints: save, find the newest sound one, remove old ones.

- root/global_step_20/{actor,critic,trainer,...}/: one checkpoint, with its manifest.json
- root/latest_checkpointed_iteration.txt: step of the last written one, for other tools
- root/.tmp-global_step_N-<pid>: one that is being written or removed; it is never read
- root/.old-global_step_N-<pid>: one that is being replaced by a new one of the same step
- root/.in_use: locked by the run that writes here
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verl.checkpoint.background import Background
from verl.checkpoint.claim import Claim
from verl.checkpoint.folders import (
    NAME,
    check_files_of_all_hosts,
    refuse_file,
    refuse_folder_of_several,
    step_of,
)
from verl.checkpoint.manifest import read_manifest, verify_files, write_manifest
from verl.utils.errors import CheckpointError, causes
from verl.utils.limits import grown_too_large, make_writable
from verl.utils.logging import logger
from verl.utils.sigterm import interrupts_wait
from verl.utils.whole_file import sync, whole_file

Writer = Callable[[Path], object]
# Returns whether the writers are done, and raises their error; with True it waits for them.
IsWritten = Callable[[bool], bool]

LATEST_FILE = "latest_checkpointed_iteration.txt"
_NO_SPACE = re.compile("no space|No space left|os error 28")
_NO_QUOTA = re.compile("[Qq]uota exceeded|os error 122")
_LEFTOVER = re.compile(r"\.(tmp|old)-(global_step_\d+)-\d+")
# A write that fails with less free space than this is treated as a full disk, because torch.save
# reports no reason.
_FULL_DISK_BYTES = 1 << 20


@dataclass
class _Pending:
    """A checkpoint that is written in the background, and then `published` (summed and named)."""

    final: Path
    is_written: IsWritten
    published: Background | None = None


class CheckpointManager:
    """Write checkpoints that are complete or invisible, and never read a damaged one.

    "Newest" means written last, which may not be the highest step: a run that starts again in the
    same folder counts from the beginning. The order is a count in the manifests, not a clock, which
    may be set back.

    Args:
        root: the run's folder; created when the first checkpoint is saved.
        max_to_keep: number of checkpoints to keep, at least 1; None keeps all. It applies to all
            parts, because a run cannot resume without one of them.
    """

    def __init__(self, root: Path | str, max_to_keep: int | None = None) -> None:
        self.root = Path(root).expanduser().absolute()  # workers may have another working directory
        self.max_to_keep = max_to_keep
        self._claim = Claim(self.root)
        self._cleaned = False
        self._resumed: Path | None = None  # the one that `resolve` found, until the next save
        self._damaged: set[Path] = set()  # those that `latest` skipped
        self._pending: _Pending | None = None

    def save(
        self, step: int, writers: Mapping[str, Writer], is_written: IsWritten | None = None
    ) -> Path:
        """Write one checkpoint and return its folder `root/global_step_<step>`.

        Each writer gets an empty folder of its name. All files are synced to disk before the folder
        gets its final name. Older checkpoints beyond `max_to_keep` are removed only after that,
        except that the first save of a resumed run begins with those of a higher `max_to_keep`. An
        error of a writer leaves earlier checkpoints intact and no trace of this one. Ctrl-C and
        SIGTERM wait until the checkpoint is complete.

        With `is_written`, writers only begin their work. The folder gets its name during a later
        call: `advance` never waits, `finish` and the next `save` do.

        Args:
            step: step of the run.
            writers: {name of the part: its writer}.
            is_written: reports whether writers in the background are done.

        Raises:
            CheckpointError: the disk is full or not writable, now or for the previous checkpoint,
                or the name of the folder is that of a file.
        """
        self.finish()
        self._return_to_removed_folder()
        final = self.root / f"global_step_{step}"
        refuse_file(final)
        with interrupts_wait(f"checkpoint {final}"):
            self._save(final, writers, is_written)
        return final

    def _save(
        self, final: Path, writers: Mapping[str, Writer], is_written: IsWritten | None
    ) -> None:
        temporary = self._temporary(final)
        with self._all_or_nothing(final):
            self.clean()
            if self._resumed is not None:
                # More are there if `max_to_keep` was lowered, perhaps because the disk is full.
                self._prune(keep=self._resumed)
                self._resumed = None
            temporary.mkdir(parents=True)
            for name, write in writers.items():
                (temporary / name).mkdir()
                write(temporary / name)
        if is_written is None:
            self._complete(final)
        else:
            self._pending = _Pending(final, is_written)

    def require_writable(self) -> None:
        """Create the folder.

        Raises CheckpointError if it is not writable, or holds a file with a checkpoint's name.
        """
        try:
            make_writable(self.root)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints cannot be written into {self.root}: {error.strerror}. Set "
                "trainer.default_local_dir to a writable folder, or trainer.save_freq=-1 for no "
                "checkpoints."
            ) from error
        for path in self._named():
            refuse_file(path)

    @property
    def is_claimed(self) -> bool:
        """Return whether this process has locked the folder."""
        return self._claim.is_held

    def claim(self) -> None:
        """Lock the folder, which must exist, until `release`.

        Raises CheckpointError if another process has it.
        """
        holder = self._claim.take()
        if holder is not None:
            raise CheckpointError(
                f"Another run ({holder}) writes into {self.root}. Wait until it ends, or give this "
                "one a folder of its own: set trainer.experiment_name or trainer.default_local_dir."
            )

    def refuse_others(self) -> None:
        """Raise CheckpointError if another process has claimed the folder."""
        if self.root.is_dir() and not self.is_claimed:
            self.claim()
            self.release()

    def release(self) -> None:
        """Undo `claim`."""
        self._claim.give_back()

    def _return_to_removed_folder(self) -> None:
        """Create and lock the folder again, with a warning, if it was removed during the run."""
        if not self._claim.is_removed:
            return
        logger.warning(
            "%s was removed while this run wrote there. Earlier checkpoints are gone; the folder "
            "is created again.",
            self.root,
        )
        self.release()
        self.require_writable()
        self.claim()

    def newest_name(self) -> str | None:
        """Return the name of the last written checkpoint, sound or not; None if there is none."""
        readable, unreadable = self._newest_first()
        newest = [*readable, *unreadable]
        return newest[0].name if newest else None

    def newest_readable(self) -> Path | None:
        """Return the newest checkpoint with a manifest. Its files are not verified here."""
        readable, _ = self._newest_first()
        return readable[0] if readable else None

    def advance(self, *, wait: bool = False) -> None:
        """Complete, in the background, a checkpoint that `save` began and that is now written.

        Call it often; it costs nothing without such a checkpoint. Raises the same errors as `save`.
        """
        pending = self._pending
        if pending is None:
            return

        try:
            if pending.published is None:
                with self._all_or_nothing(pending.final):
                    if not pending.is_written(wait):
                        return
                pending.published = Background()
                pending.published.start(partial(self._complete, pending.final))

            if pending.published.is_done(wait=wait):
                self._pending = None
        except Exception:  # not after Ctrl-C: writing continues, and `rescue` waits for it
            self._pending = None
            raise

    def finish(self) -> None:
        """Wait until a checkpoint that `save` began is complete."""
        self.advance(wait=True)

    def rescue(self) -> None:
        """Call `finish` after an error that ends the run. A second error is only a warning."""
        try:
            self.finish()
        except Exception as error:  # noqa: BLE001 - logged, while the first error propagates
            logger.warning("The checkpoint that was being written is lost: %s", error)

    def latest(self) -> Path | None:
        """Return the newest checkpoint with intact files.

        Damaged newer ones, and those without a readable manifest, are logged as warnings.
        """
        readable, unreadable = self._newest_first()
        for folder in (*unreadable, *readable):
            try:
                self.verify(folder)
            except CheckpointError as error:
                logger.warning("Checkpoint skipped: %s", error)
                self._damaged.add(folder)
            else:
                return folder
        return None

    def verify(self, folder: Path | str) -> None:
        """Raise CheckpointError unless the files of `folder` match its manifest."""
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"Expected a checkpoint folder at {folder}, found none.")
        verify_files(folder)

    def resolve(self, resume_mode: str, resume_from_path: Path | str | None = None) -> Path | None:
        """Return the checkpoint from which a run starts; None means the beginning.

        It calls `clean` first.

        Args:
            resume_mode: "auto": the newest sound one, if any; "disable": none; "resume_path": that
                of `resume_from_path`.
            resume_from_path: a `global_step_N` folder, for "resume_path".

        Raises:
            CheckpointError: the given one is missing or damaged, or none of several is sound.
        """
        if resume_mode == "resume_path":
            folder = _given_folder(resume_from_path)
            self.clean()
            self.verify(folder)
            return folder

        self.clean()
        if resume_mode == "disable":
            return None

        newest = self.latest()
        if newest is None and (damaged := self._folders()):
            raise CheckpointError(
                f"None of the {len(damaged)} checkpoints in {self.root} is sound (see the warnings "
                "above). Move them away, or start from the beginning with "
                "trainer.resume_mode=disable."
            )
        self._resumed = newest
        return newest

    def require_named(self, resume_mode: str, resume_from_path: Path | str | None) -> None:
        """Raise CheckpointError if `resume_from_path` is asked for and is not one checkpoint.

        Reads its manifest alone, so it fails before any model loads; `resolve` checks the files.
        """
        if resume_mode != "resume_path":
            return
        folder = _given_folder(resume_from_path)
        try:
            read_manifest(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"trainer.resume_from_path must be a whole checkpoint, a folder global_step_N: "
                f"{error}"
            ) from error

    def clean(self) -> None:
        """Remove leftovers of a killed process, once: before the first save or by `resolve`.

        Nothing is removed if another run has claimed the folder, because its unfinished checkpoint
        looks the same.
        """
        if self._cleaned or not self.root.is_dir():
            return

        leftovers = []
        for path in sorted(self.root.iterdir()):
            found = _LEFTOVER.fullmatch(path.name)
            if found is not None:
                leftovers.append((path, found))
        pointers = list(self.root.glob(f".{LATEST_FILE}.tmp-*"))
        was_held = self._claim.is_held
        if (leftovers or pointers) and self._claim.take() is not None:
            return

        for path in pointers:
            path.unlink()
        for path, leftover in leftovers:
            kind, name = leftover.groups()
            if path.is_symlink() or not path.is_dir():
                logger.warning("%s is not a folder of a checkpoint and is left as it is.", path)
            elif kind == "old" and not (self.root / name).exists():
                # The process was killed between the two renames of `_publish`.
                os.replace(path, self.root / name)
                logger.warning(
                    "Checkpoint %s is restored: its replacement was not completed.",
                    self.root / name,
                )
            else:
                shutil.rmtree(path)
                logger.info("Removed %s, which an interrupted run left behind.", path)

        if not was_held:
            self.release()
        self._cleaned = True

    def _temporary(self, final: Path) -> Path:
        """Return the folder in which a checkpoint is written, and later removed."""
        return self.root / f".tmp-{final.name}-{os.getpid()}"

    @contextmanager
    def _all_or_nothing(self, final: Path) -> Iterator[None]:
        """Remove the temporary folder after an error.

        A fault of the disk becomes a CheckpointError.
        """
        try:
            yield
        except Exception as error:
            temporary = self._temporary(final)
            reason = grown_too_large(temporary, error) or self._why_unwritten(error)
            shutil.rmtree(temporary, ignore_errors=True)
            if reason is None:
                raise
            raise CheckpointError(
                f"Checkpoint {final} was not written: {reason} Earlier ones are intact."
            ) from error

    def _complete(self, final: Path) -> None:
        """Write the manifest, give the folder its name, and remove older checkpoints."""
        temporary = self._temporary(final)
        with self._all_or_nothing(final):
            check_files_of_all_hosts(temporary)
            newest = self.newest_readable()
            sequence = 1 if newest is None else read_manifest(newest).sequence + 1
            write_manifest(temporary, step_of(final), sequence)
            self._publish(final)
        self._damaged.discard(final)
        logger.info("Saved %s", final)
        self._prune(keep=final)

    def _publish(self, final: Path) -> None:
        replaced = self.root / f".old-{final.name}-{os.getpid()}"
        if final.exists():
            os.replace(final, replaced)
        os.replace(self._temporary(final), final)
        sync(self.root)
        with whole_file(self.root / LATEST_FILE, flush=True) as latest:
            latest.write_text(final.name.removeprefix("global_step_"))
        if replaced.exists():
            shutil.rmtree(replaced)

    def _prune(self, keep: Path) -> None:
        """Remove checkpoints beyond `max_to_keep`, damaged ones and then the oldest; not `keep`."""
        if self.max_to_keep is None:
            return
        readable, unreadable = self._newest_first()
        others = [folder for folder in (*readable, *unreadable) if folder != keep]
        others.sort(key=lambda folder: folder in self._damaged)  # stable: else newest first
        for folder in others[self.max_to_keep - 1 :]:
            # Rename it first, so that a partly removed checkpoint is not found under its name.
            doomed = self._temporary(folder)
            os.replace(folder, doomed)
            shutil.rmtree(doomed)

    def _folders(self) -> list[Path]:
        return [path for path in self._named() if path.is_dir()]

    def _named(self) -> list[Path]:
        """Return everything in the folder that has the name of a checkpoint."""
        if not self.root.is_dir():
            return []
        return [path for path in self.root.iterdir() if NAME.fullmatch(path.name)]

    def _newest_first(self) -> tuple[list[Path], list[Path]]:
        """Return folders by the order in which they were written, newest first.

        The second list has the folders without a readable manifest, by step.
        """
        place: dict[Path, tuple[int, bool]] = {}  # count, whether LATEST_FILE names it
        unreadable: list[Path] = []
        latest = self._latest_step()

        for folder in sorted(self._folders(), key=step_of, reverse=True):
            try:
                sequence = read_manifest(folder).sequence
            except CheckpointError:
                unreadable.append(folder)
            else:
                # An earlier version had no count, but named the last one in LATEST_FILE.
                place[folder] = (sequence, sequence == 0 and step_of(folder) == latest)

        # The sort is stable: of two equal places the higher step stays first.
        return sorted(place, key=place.__getitem__, reverse=True), unreadable

    def _latest_step(self) -> int | None:
        """Return the step that LATEST_FILE names; None if it is missing or unreadable."""
        try:
            text = (self.root / LATEST_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
        return int(text) if re.fullmatch(r"\d{1,18}", text.strip()) else None

    def _why_unwritten(self, error: BaseException) -> str | None:
        """Describe a fault of the disk; None if the fault is the writer's own."""
        way_out = (
            "Free some, lower trainer.max_actor_ckpt_to_keep, or set trainer.default_local_dir to "
            "another disk."
        )
        if _is_caused_by(error, errno.EDQUOT, _NO_QUOTA):
            return f"the disk quota for {self.root} is used up ({error}). {way_out}"

        free = shutil.disk_usage(self.root if self.root.is_dir() else Path.cwd()).free
        if _is_caused_by(error, errno.ENOSPC, _NO_SPACE) or free < _FULL_DISK_BYTES:
            return (
                f"no space left on the disk of {self.root}, {free / 2**20:.1f} MiB free ({error}). "
                f"{way_out}"
            )
        if not isinstance(error, OSError):
            return None
        if error.errno == errno.EMFILE:
            return f"{error}. Raise the limit on open files (ulimit -n)."
        return f"{error}."


def _is_caused_by(error: BaseException, number: int, text: re.Pattern[str]) -> bool:
    """Return whether a cause is the system's error of this number, or an error with its text."""
    for cause in causes(error):
        is_number = isinstance(cause, OSError) and cause.errno == number
        if is_number or text.search(str(cause)):
            return True
    return False


def _given_folder(resume_from_path: Path | str | None) -> Path:
    """Return the folder of one checkpoint. Raises CheckpointError for a folder of several."""
    assert resume_from_path, "the configuration was checked"
    folder = Path(resume_from_path).expanduser().absolute()
    refuse_folder_of_several(folder)
    return folder
