"""How an entry point ends."""

import errno
import os
import select
import sys
from collections.abc import Callable

from verl.utils.errors import MissingDependencyError, VerlError, WorkerError
from verl.utils.imports import missing_package
from verl.utils.secrets import masked
from verl.utils.sigterm import TERMINATED, sigterm_as_exit

MAX_CHARACTERS = 8000  # of a message on stderr
INTERRUPTED = 130  # the exit code of a shell's command that Ctrl-C has ended
READER_GONE = 141  # the exit code of a shell's command that SIGPIPE has ended
# A disk that is full or may not be written, a file that grew too large: not every library names the
# file in `filename`.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)


def exit_code(job: Callable[[], int | None]) -> int:
    """What `job` gives, None being 0. What a user can cause is 1 and a line on stderr;
    VERL_TRACEBACK=1 raises it."""
    try:
        with sigterm_as_exit():
            code = job() or 0
            sys.stdout.flush()  # here, where a reader that is gone is no error
            return code
    except VerlError as error:
        # What a rank raised comes with its place and traceback; where it is a user's to mend, the
        # one line will do.
        of_rank = error.__cause__ if isinstance(error, WorkerError) else None
        return _told(_named(of_rank if isinstance(of_rank, VerlError) else error), error)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        return _told(_named(MissingDependencyError(missing)), error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return READER_GONE
        if error.filename is None and error.errno not in _NOT_WRITTEN:
            raise
        way_out = (
            "Make room, or name another folder. VERL_TRACEBACK=1 shows what it was wanted for."
        )
        return _told(f"{_named(error)}. {way_out}", error)
    except KeyboardInterrupt as error:
        return _told("Interrupted.", error, INTERRUPTED)
    except SystemExit as error:
        if error.code != TERMINATED:
            raise
        return _told("Ended by SIGTERM.", error, TERMINATED)


def _reader_is_gone() -> bool:
    """Whether whoever read our standard output, `head` say, has ended; if so, drop the rest."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout, 0)
        is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        is_gone = True
    except (OSError, ValueError):  # closed, or no file
        return False

    if is_gone:
        # Python flushes once more as it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _told(text: str, error: BaseException, code: int = 1) -> int:
    if os.environ.get("VERL_TRACEBACK"):
        raise error  # Python prints the traceback, whose last line is the message
    print(_shortened(masked(text)), file=sys.stderr, flush=True)
    return code


def _shortened(text: str) -> str:
    """Cut the middle out of a long text: facts stand at its begin, the way out at its end."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return (
        f"{text[:half]} [... {left_out} characters left out; VERL_TRACEBACK=1 shows all ...] "
        f"{text[-half:]}"
    )
