"""Errors a user can cause, each with expectation, fact and way out. `assert` is for our own mistakes.

Every class is also the builtin that a caller would catch, and pickles across process borders.
"""


class VerlError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(VerlError, ValueError):
    """A configuration value is unknown, contradicts another one, or cannot be honoured."""


class DataError(VerlError, ValueError):
    """A data file, row or column is not what the loader expects."""


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


class CheckpointError(VerlError, RuntimeError):
    """A checkpoint is missing, incomplete or does not match its checksums."""


class NonFiniteError(VerlError, ArithmeticError):
    """Loss or gradient was not finite more often than the policy allows."""
