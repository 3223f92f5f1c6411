"""Errors that a user can cause. Each message states the expectation, the fact and the way out.

Every class is also the builtin that a caller would catch, and pickles across process borders.
`assert` is for our own mistakes.
"""

import errno
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import FrameSummary, extract_tb
from types import MappingProxyType
from typing import Any

from verl.utils.secrets import masked

_PACKAGE = f"{Path(__file__).parents[1]}/"
_SHORTAGE_SIGNS = ("can't allocate memory", "Cannot allocate memory")  # of torch's allocator


class VerlError(Exception):
    """Root of all errors raised on purpose by this package. Its text has no secrets."""

    def __str__(self) -> str:
        return masked(super().__str__())


class ConfigError(VerlError, ValueError):
    """A configuration value is unknown, contradicts another one, or is not supported."""


class BatchError(VerlError, ValueError, AssertionError):
    """Columns, rows or arguments of a DataProto do not match.

    It is an AssertionError as well, because callers of verl 0.5 catch that.
    """


class DataError(VerlError, ValueError):
    """A data file, row or column does not have the form that the loader expects."""


class BoundaryError(VerlError, ValueError):
    """A chat template offers no exact continuation of the tokens that a model drew."""


class ModelError(VerlError, ValueError):
    """A model or tokenizer cannot be loaded, or its family cannot be run packed."""


class MissingDependencyError(VerlError, ImportError):
    """An optional package that the configuration requires is not installed."""


class RolloutError(VerlError, RuntimeError):
    """Generation failed or returned an unexpected result."""


class EngineAsleepError(RolloutError):
    """`generate` was called between `sleep` and `wake`."""


class RewardError(VerlError, RuntimeError):
    """A reward function raised, timed out or returned no finite score."""


class AlgorithmError(VerlError, RuntimeError):
    """A user's advantage estimator or loss raised, or returned a result of the wrong form."""


class TrackerError(VerlError, RuntimeError):
    """A tracker (`trainer.logger`) raised while it recorded a run."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint is missing, incomplete or does not match its checksums."""


class OutOfMemoryError(VerlError, MemoryError):
    """Device or host memory ran out, and smaller passes did not help or were not possible.

    `lowered` holds settings for another start: {configuration key: tokens or rows of a pass}.
    """

    lowered: Mapping[str, int] = MappingProxyType({})


class WorkerError(VerlError, RuntimeError):
    """A method of a worker raised on one or more ranks.

    The message has the ranks, the role, the method and the traceback.
    """


class WorkerLostError(VerlError, RuntimeError):
    """The process of a rank, or one that reads rows, exited while the driver needed it."""


class DeadlineError(VerlError, TimeoutError):
    """A call on a group exceeded its deadline. The message lists the late ranks and their work."""


class NonFiniteError(VerlError, ArithmeticError):
    """Loss or gradient was not finite more often than the policy allows."""


class RemoteTraceback(Exception):
    """The traceback of another process, as the cause of an error that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def sendable(error: BaseException) -> BaseException | None:
    """Return the error, or None if it cannot be pickled, so that only its text can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return None
    return error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the one that caused it, and so on to the first."""
    seen = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def line_in(error: BaseException, file: str | None) -> int | None:
    """Return the last line of `file` in the traceback of an error; None if it has none."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


def frame_of(error: BaseException, file: str | None) -> FrameSummary | None:
    """Return the frame of a user's error that its author looks for, or None.

    It is the last one in `file`, which holds the part that failed, or else the last one of all,
    unless that is in this package. An assertion always has its own, in whichever file it is.
    """
    frames = extract_tb(error.__traceback__)
    if not frames or isinstance(error, AssertionError):
        return frames[-1] if frames else None

    own = [frame for frame in frames if frame.filename == file]
    if own:
        return own[-1]
    return None if frames[-1].filename.startswith(_PACKAGE) else frames[-1]


def text_or_source(error: BaseException, frame: FrameSummary | None) -> str:
    """Return the text of an error; where it has none, as a plain `assert`, its line of code.

    A period at its end is left out, because the caller's sentence goes on.
    """
    text = str(error).rstrip(".")
    if text or frame is None:
        return text
    return frame.line or ""


def text_of(value: Any) -> str:
    """Return `str(value)`, or a note if the class of the value raises."""
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001  (a user's __str__, in a message about another fault)
        return f"<{type(value).__name__}, which __str__ cannot write: {type(error).__name__}>"


def describe_error(error: BaseException) -> str:
    """Return the class of an error, and its text if it has any."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")


def lacks_host_memory(error: BaseException) -> bool:
    """Return whether an error of Python, Arrow, torch or the system is a lack of host memory."""
    if isinstance(error, RuntimeError):
        return any(sign in str(error) for sign in _SHORTAGE_SIGNS)
    is_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return is_system or isinstance(error, MemoryError)


@contextmanager
def shortage_while_reading(file: Path | str) -> Iterator[None]:
    """Raise OutOfMemoryError with the file if the host's memory runs out in the block.

    Readers of files raise such an error as one of a damaged file.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, VerlError) or not lacks_host_memory(error):
            raise
        raise OutOfMemoryError(
            f"The memory of the host ran out while '{file}' was read ({error}). Free some, or use "
            "a host with more."
        ) from error


@contextmanager
def restated(translate: Callable[[str], str]) -> Iterator[None]:
    """Translate the messages of our errors for the caller, who may use other names for keys."""
    try:
        yield
    except VerlError as error:
        for translated in (error, error.__cause__):
            if isinstance(translated, VerlError):
                translated.args = (translate(str(translated)),)
        raise
