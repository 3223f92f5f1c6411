"""Errors a user can cause, each with expectation, fact and way out. `assert` is for our own
mistakes.

Every class is also the builtin that a caller would catch, and pickles across process borders.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import extract_tb
from types import MappingProxyType

from verl.utils.secrets import masked


class VerlError(Exception):
    """Root of all errors raised on purpose by this package. Its text has no secrets."""

    def __str__(self) -> str:
        return masked(super().__str__())


class ConfigError(VerlError, ValueError):
    """A configuration value is unknown, contradicts another one, or cannot be honoured."""


class BatchError(VerlError, ValueError, AssertionError):
    """Columns, rows or arguments of a DataProto do not fit. Also an AssertionError, which callers
    of verl 0.5 catch."""


class DataError(VerlError, ValueError):
    """A data file, row or column is not what the loader expects."""


class BoundaryError(VerlError, ValueError):
    """A chat template offers no exact continuation of the tokens that a model drew."""


class ModelError(VerlError, ValueError):
    """A model or tokenizer cannot be loaded, or its family cannot be run packed."""


class MissingDependencyError(VerlError, ImportError):
    """An optional package that was asked for is not installed."""


class RolloutError(VerlError, RuntimeError):
    """Generation failed or returned something other than what was asked."""


class EngineAsleepError(RolloutError):
    """`generate` was called between `sleep` and `wake`."""


class RewardError(VerlError, RuntimeError):
    """A reward function raised, timed out or returned something that is not a finite score."""


class AlgorithmError(VerlError, RuntimeError):
    """A user's advantage estimator or loss raised, or returned something else than asked."""


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint is missing, incomplete or does not match its checksums."""


class OutOfMemoryError(VerlError, MemoryError):
    """Device or host memory ran out, and smaller passes did not help or could not be made.

    `lowered` is what another start should begin with: {key of the size of passes: tokens or rows}.
    """

    lowered: Mapping[str, int] = MappingProxyType({})


class WorkerError(VerlError, RuntimeError):
    """A method of a worker raised on one rank or on several; the message has ranks, role, method
    and traceback."""


class WorkerLostError(VerlError, RuntimeError):
    """The process of a rank ended, or was ended, while the driver needed it."""


class DeadlineError(VerlError, TimeoutError):
    """A call on a group was not done in time; the message has the ranks that were not, and what
    they were at."""


class NonFiniteError(VerlError, ArithmeticError):
    """Loss or gradient was not finite more often than the policy allows."""


def sendable(error: BaseException) -> BaseException | None:
    """The error, or None where it does not survive the way to another process, so that only its
    text can go."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a user's class holds or does
        return None
    return error


def line_in(error: BaseException, file: str | None) -> int | None:
    """The line of a user's file that the error came through last; None where it did not."""
    lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None


@contextmanager
def retold(in_words_here: Callable[[str], str]) -> Iterator[None]:
    """Our errors from within, their messages put into the words of who called: other names of keys,
    say."""
    try:
        yield
    except VerlError as error:
        for told in (error, error.__cause__):
            if isinstance(told, VerlError):
                told.args = (in_words_here(str(told)),)
        raise
