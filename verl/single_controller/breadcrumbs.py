"""Notes of each rank on its current work, for the error message when it no longer answers."""

import mmap
import os
import struct
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from verl.utils.garbage import not_collecting

_WHERE_METHODS_ARE_CALLED = str(Path(__file__).with_name("host.py"))
_SIZE = 512  # bytes of a note; a longer text is cut
_PROGRESS = struct.Struct("<QQ24s")  # done, total, unit; follows the note


class Progress(NamedTuple):
    """Progress of a method; none where `total` is 0."""

    done: int
    total: int
    unit: str  # plural: mini-batches

    def __str__(self) -> str:
        return f"{self.done} of {self.total} {self.unit}"

    def __add__(self, other: "Progress") -> "Progress":  # pyright: ignore
        """Add the progress of another rank. A rank with another unit does not count."""
        if other.unit != self.unit:
            return self
        return Progress(self.done + other.done, self.total + other.total, self.unit)


class _Notes:
    """The file of this process's notes, mapped: notes outlive it and cost no system call."""

    file: mmap.mmap | None = None
    progress = Progress(0, 0, "")  # of a process alone


def breadcrumb(text: str) -> None:
    """Note the next step of this rank; the driver shows the last note if the rank dies or hangs.

    Costs about a microsecond. A process alone keeps none.
    """
    if _Notes.file is not None:
        note = f"{time.strftime('%H:%M:%S')} {text}".encode()[:_SIZE]
        _Notes.file[:_SIZE] = note.ljust(_SIZE, b"\0")


def note_progress(done: int, total: int, unit: str) -> None:
    """Note the progress of this rank's method, for the driver's reports on long phases.

    Costs about a microsecond.
    """
    if _Notes.file is None:
        _Notes.progress = Progress(done, total, unit)
    else:
        _PROGRESS.pack_into(_Notes.file, _SIZE, done, total, unit.encode())


def own_progress() -> Progress:
    """Return the last note of `note_progress` in a process that keeps no file."""
    return _Notes.progress


def read_progress(folder: Path) -> list[Progress]:
    """Return the progress of the ranks that keep their notes in `folder` of this machine."""
    found = []
    for path in folder.glob("rank-*"):
        try:
            done, total, unit = _PROGRESS.unpack_from(path.read_bytes(), _SIZE)
        except (OSError, struct.error):  # the rank ends, or starts
            continue
        found.append(Progress(done, total, unit.rstrip(b"\0").decode(errors="ignore")))
    return found


def keep_breadcrumbs(folder: Path, rank: int) -> None:
    """Write this process's notes to a file of `folder` from now on."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f"rank-{rank}").open("w+b") as file:
        size = _SIZE + _PROGRESS.size
        file.truncate(size)
        file.flush()
        _Notes.file = mmap.mmap(file.fileno(), size)
    breadcrumb("started")


def read_breadcrumbs(folder: Path) -> dict[int, str]:
    """Return the last note of every rank, dead or alive, that keeps notes in `folder` here."""
    notes = {}
    for path in folder.glob("rank-*"):
        rank = int(path.name.removeprefix("rank-"))
        note = path.read_bytes()[:_SIZE]
        notes[rank] = note.rstrip(b"\0").decode(errors="ignore")
    return notes


def format_stacks() -> str:
    """Return the stack of the thread that runs a worker's method, the innermost call last.

    If no method runs, return the stacks of all threads, except those that only watch for messages.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    in_methods = []
    elsewhere = []
    # Python 3.10 and 3.11 deadlock if garbage is collected while they list the frames.
    with not_collecting():
        frames = sys._current_frames()
    for ident, frame in frames.items():
        name = names.get(ident, str(ident))
        if ident == threading.get_ident() or name.startswith("verl-watch"):
            continue

        calls = traceback.extract_stack(frame)
        place = elsewhere
        method_starts = 0
        for number, call in enumerate(calls):
            if call.filename == _WHERE_METHODS_ARE_CALLED:
                method_starts = number + 1
                place = in_methods
        lines = "".join(traceback.format_list(calls[method_starts:])).rstrip()
        place.append(f"thread {name}:\n{lines}")
    return "\n".join([f"pid {os.getpid()}", *(in_methods or elsewhere)])
