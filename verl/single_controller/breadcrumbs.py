"""What a rank was at, for the error message when it does not answer any more."""

import mmap
import os
import sys
import threading
import time
import traceback
from pathlib import Path

_WHERE_METHODS_ARE_CALLED = str(Path(__file__).with_name("host.py"))
_SIZE = 512  # bytes of a note; a longer text is cut


class _Notes:
    """The file that this process writes its notes to: mapped, so that they outlive it and cost no
    system call."""

    file: mmap.mmap | None = None


def breadcrumb(text: str) -> None:
    """Note what this rank is about to do. Only the last note is kept; the driver shows it if the
    rank dies or hangs.

    Costs about a microsecond. A process alone keeps none.
    """
    if _Notes.file is not None:
        note = f"{time.strftime('%H:%M:%S')} {text}".encode()[:_SIZE]
        _Notes.file[:_SIZE] = note.ljust(_SIZE, b"\0")


def keep_breadcrumbs(folder: Path, rank: int) -> None:
    """Write this process's notes to a file of `folder` from now on."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / f"rank-{rank}").open("w+b") as file:
        file.truncate(_SIZE)
        file.flush()
        _Notes.file = mmap.mmap(file.fileno(), _SIZE)
    breadcrumb("started")


def read_breadcrumbs(folder: Path) -> dict[int, str]:
    """The last note of every rank that keeps its notes in `folder` of this machine, dead or
    alive."""
    notes = {
        int(path.name.removeprefix("rank-")): path.read_bytes() for path in folder.glob("rank-*")
    }
    return {rank: note.rstrip(b"\0").decode(errors="ignore") for rank, note in notes.items()}


def format_stacks() -> str:
    """Where the thread is that runs a worker's method, from there on, the innermost call last.

    If there is none, where every thread is, except those that only watch for messages.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    in_methods, elsewhere = [], []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident() and not names.get(ident, "").startswith("verl-watch"):
            calls, place = traceback.extract_stack(frame), elsewhere
            ours = [
                number
                for number, call in enumerate(calls)
                if call.filename == _WHERE_METHODS_ARE_CALLED
            ]
            if ours:
                calls, place = calls[ours[-1] + 1 :], in_methods
            place.append(
                "thread "
                f"{names.get(ident, ident)}:\n{''.join(traceback.format_list(calls)).rstrip()}"
            )
    return "\n".join([f"pid {os.getpid()}", *(in_methods or elsewhere)])
