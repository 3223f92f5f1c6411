"""Load the reward function that `custom_reward_function.path` and `.name` point to."""

import functools
import inspect
import pickle
from collections.abc import Mapping
from typing import Any

from verl.rewards.origin import is_coroutine_function
from verl.rewards.outcome import RewardFunction
from verl.rewards.processes import ProcessFunction, pack
from verl.utils.errors import ConfigError
from verl.utils.imports import load_extern_type
from verl.utils.signatures import check_keywords, declares, keywords_of, takes_any_keyword

_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
_BATCH_ARGUMENTS = tuple(f"{name}s" for name in _ARGUMENTS)


def load_custom_reward(
    path: str | None,
    name: str = "compute_score",
    reward_kwargs: Mapping[str, Any] | None = None,
    *,
    for_batches: bool = False,
) -> RewardFunction | None:
    """Load the user's reward function; return None if `path` is None or empty.

    It is called as `compute_score(data_source, solution_str, ground_truth, extra_info)`; a function
    without `extra_info` does not get it. A plain function runs in a process of its own, which can
    be killed if a call hangs; a coroutine function runs in this process. Both processes load the
    file, the other one first.

    Args:
        path: a .py file or an importable module.
        name: the function in it, plain or `async`. It returns a float, or a dict with "score".
        reward_kwargs: further keyword arguments for every call.
        for_batches: it takes lists (`data_sources`, ...) and returns a list, for the manager
            `batch`.

    Raises:
        ConfigError: no such file or name, not callable, or it does not take the arguments above.
    """
    if not path:
        return None
    extra = dict(reward_kwargs or {})
    source = {"path": path, "name": name, "extra": extra, "for_batches": for_batches}
    try:
        pack(source)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            "custom_reward_function.reward_kwargs must be values that can be sent to another "
            f"process: {error}."
        ) from error

    in_process = ProcessFunction.of_file(source, name=f"the reward function '{name}' of '{path}'")
    # Load it here as well, after the other process has survived: it may register rules or losses.
    function = load_function(**source)
    return function if in_process.is_async else in_process


def load_function(
    path: str, name: str, extra: Mapping[str, Any], for_batches: bool
) -> RewardFunction:
    """Load a function from a user's file into this process; see `load_custom_reward`."""
    function = load_extern_type(path, name, "custom_reward_function.path")
    if not callable(function):
        raise ConfigError(
            f"custom_reward_function.name='{name}' in '{path}' must be a function, it is "
            f"{type(function).__name__}."
        )
    if isinstance(function, type):
        raise ConfigError(
            f"custom_reward_function.name='{name}' in '{path}' must be a function, it is a class. "
            f"Name an instance of it, which has __call__: compute_score = {name}()."
        )
    check_arguments(function, f"custom_reward_function '{name}' of '{path}'", extra, for_batches)
    if not _takes_extra_info(function, extra, for_batches):
        function = _without_extra_info(function)
    return functools.partial(function, **extra) if extra else function


def check_arguments(
    function: RewardFunction, name: str, extra: Mapping[str, Any], for_batches: bool = False
) -> None:
    """Raise ConfigError for a function that cannot be called with our keywords.

    It may do without `extra_info`, as functions for evaluation in verl 0.5.
    """
    arguments = _BATCH_ARGUMENTS if for_batches else _ARGUMENTS
    if not _takes_extra_info(function, extra, for_batches):
        return
    try:
        check_keywords(function, (*arguments, *extra), name)
    except ConfigError as error:
        others = _ARGUMENTS if for_batches else _BATCH_ARGUMENTS
        if not set(others[:-1]) <= set(keywords_of(function)):
            raise
        manager = "naive" if for_batches else "batch"
        raise ConfigError(
            f"{name} has the parameters of another reward manager, {', '.join(others)}; this one "
            f"gives {', '.join(arguments)}. Set reward_model.reward_manager={manager}."
        ) from error


def _takes_extra_info(
    function: RewardFunction, extra: Mapping[str, Any], for_batches: bool
) -> bool:
    """Return False for a function that takes our keywords, `extra_info` excepted."""
    if for_batches:
        return True
    try:
        inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS[:-1]), **extra)
    except (TypeError, ValueError):
        return True
    return takes_any_keyword(function) or declares(function, _ARGUMENTS[-1])


def _without_extra_info(function: RewardFunction) -> RewardFunction:
    """Return the function with an argument `extra_info` that is not used."""

    @functools.wraps(function)
    def plain(*args: Any, extra_info: Any = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @functools.wraps(function)
    async def awaited(*args: Any, extra_info: Any = None, **kwargs: Any) -> Any:
        return await function(*args, **kwargs)

    return awaited if is_coroutine_function(function) else plain
