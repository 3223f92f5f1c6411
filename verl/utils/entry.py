"""Exit codes and error messages of entry points."""

import errno
import faulthandler
import os
import select
import sys
from collections.abc import Callable

from verl.utils.errors import MissingDependencyError, VerlError, WorkerError, describe_error
from verl.utils.imports import missing_package
from verl.utils.secrets import masked
from verl.utils.sigterm import TERMINATED, exit_at_next_interrupt, sigterm_as_exit
from verl.utils.streams import reopen_streams, show_every_character

MAX_CHARACTERS = 8000  # of a message on stderr
INTERRUPTED = 130  # a shell's exit code for a command that Ctrl-C ended
READER_GONE = 141  # a shell's exit code for a command that SIGPIPE ended
# The disk is full or read-only, or a file grew too large. Some libraries leave `filename` unset.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS)
_TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
_WRONG_PATH = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


def exit_code(job: Callable[[], int | None]) -> int:
    """Run `job` and return its exit code; None counts as 0.

    An error that a user can cause gives exit code 1 and one line on stderr. With VERL_TRACEBACK=1
    it is raised instead. If the reader of stdout has exited, the command ends silently. A crash in
    compiled code prints the Python stack of every thread.
    """
    show_every_character()
    if sys.stderr is not None and not faulthandler.is_enabled():
        faulthandler.enable()
    try:
        os.getcwd()  # MKL ends the process where the working directory was removed
        with sigterm_as_exit():
            code = job() or 0
            reopen_streams()
            # Flush inside the try block: a reader that has exited is no error.
            if sys.stdout is not None:  # None: the shell has closed it
                sys.stdout.flush()
            return code

    except VerlError as error:
        return _report(describe_error(_of_user(error)), error)

    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        return _report(describe_error(MissingDependencyError(missing)), error)

    except OSError as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return READER_GONE
        if not is_about_files(error):
            raise
        where = "VERL_TRACEBACK=1 shows where the file was needed."
        return _report(f"{describe_error(error)}. {_way_out(error)}. {where}", error)

    except KeyboardInterrupt as error:
        exit_at_next_interrupt()
        return _report("Interrupted.", error, INTERRUPTED)

    except SystemExit as error:
        if error.code == TERMINATED:
            return _report("Ended by SIGTERM.", error, TERMINATED)
        # argparse prints its help and exits, without a flush.
        if _reader_is_gone() and not error.code:
            return READER_GONE
        raise


def is_about_files(error: BaseException) -> bool:
    """Return whether an error names a file, or says that the system refuses to write."""
    if not isinstance(error, OSError):
        return False
    if error.errno in _NOT_WRITTEN or error.errno in _TOO_MANY_FILES:
        return True
    return error.filename is not None or _is_nowhere(error)


def _is_nowhere(error: OSError) -> bool:
    """Return whether an error came because the working directory was removed."""
    if not isinstance(error, FileNotFoundError):
        return False
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _way_out(error: OSError) -> str:
    if error.errno in _TOO_MANY_FILES:
        return "Raise the limit on open files (ulimit -n)"
    if _is_nowhere(error):
        return "The working directory was removed; change to one that exists"
    if isinstance(error, _WRONG_PATH):
        return "Correct the path"
    if error.errno == errno.EFBIG:
        return "Raise the limit on the size of a file (ulimit -f)"
    return "Free some space, or choose another folder"


def _of_user(error: VerlError) -> VerlError:
    """Return the user's error behind a WorkerError, else the error itself.

    A WorkerError adds the rank and its traceback. A user who has to fix an input needs neither.
    """
    if isinstance(error, WorkerError) and isinstance(error.__cause__, VerlError):
        return error.__cause__
    return error


def _reader_is_gone() -> bool:
    """Return whether the reader of our standard output (`head`, say) has exited.

    If so, discard all further output.
    """
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout, 0)
        is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        is_gone = True
    except (OSError, ValueError):  # stdout is closed, or is no file
        return False

    if is_gone:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def _report(text: str, error: BaseException, code: int = 1) -> int:
    reopen_streams()
    _reader_is_gone()  # if so, it discards the output that Python would flush at exit
    if os.environ.get("VERL_TRACEBACK"):
        raise error  # Python prints the traceback, which ends with the message
    print(_shortened(masked(text)), file=sys.stderr, flush=True)
    return code


def _shortened(text: str) -> str:
    """Cut the middle out of a long text: it begins with the facts and ends with the way out."""
    if len(text) <= MAX_CHARACTERS:
        return text
    half = MAX_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return (
        f"{text[:half]} [... {left_out} characters left out; VERL_TRACEBACK=1 shows all ...] "
        f"{text[-half:]}"
    )
