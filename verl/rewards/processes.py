"""Calling a reward function in processes of its own, where a call that hangs can be killed."""

import base64
import functools
import inspect
import itertools
import math
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from verl.rewards.helper import Helper, HelperDied, HelperPool, start_module
from verl.rewards.texts import describe_error
from verl.utils.errors import ConfigError, RewardError


class RemoteTraceback(Exception):
    """The traceback of another process, as the cause of an error that came from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class ProcessFunction:
    """`function`, called in one of several processes that start when they are needed and are used
    again.

    Args:
        function: plain or async. It reaches the process by its name, so it must stand at the top
            level of a file or module, as must the class of a callable object. What it keeps in
            memory it keeps for each process.
        timeout_s: seconds a call may take; then the process is killed and HelperTimeout raised.
        num_processes: how many calls there may be at once.
        name: how errors call it.
        warm_up: arguments of a call that each process makes before it is given any.
        environment: variables of the processes.

    Raises:
        ConfigError: the function cannot be found by its name from another process.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout_s: float,
        num_processes: int = 1,
        name: str = "the reward function",
        warm_up: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        first = {
            "path": sys.path,
            "source": None,
            "files": _user_files(function),
            "function": pack_function(function),
            "warm_up": pack(warm_up),
        }
        start = functools.partial(_start_worker, name, first, environment)
        self._set(HelperPool(start), timeout_s, num_processes, name)

    @classmethod
    def of_file(cls, source: Mapping[str, Any], *, name: str) -> "ProcessFunction":
        """Make the function that `custom.load_function(**source)` loads, in a process.

        A file that hangs or ends its process as it is loaded does so there. Functions of
        one file and the same arguments share their processes.

        Raises:
            VerlError: the process raised it when it loaded the file.
            RewardError: the process ended, or was late.
        """
        key = f"{sorted(source.items())} {_version_of(source['path'])}"
        pool = _pools.get(key)
        if pool is None:
            first = {"path": sys.path, "source": pack(dict(source)), "warm_up": pack(None)}
            pool = _pools[key] = HelperPool(functools.partial(_start_worker, name, first, {}))
        kind, facts = pool.start()
        assert kind == "ready", "_start_worker raises what the process raised"

        made = cls.__new__(cls)
        made._set(pool, math.inf, facts["max_concurrent"], name)
        made.is_async = facts["is_async"]
        return made

    def limited(self, timeout_s: float, num_processes: int | None = None) -> "ProcessFunction":
        """Return the same function with a deadline of its own, in the same processes."""
        made = type(self).__new__(type(self))
        made._set(self._pool, timeout_s, num_processes or self.max_concurrent, self.name)
        return made

    def _set(self, pool: HelperPool, timeout_s: float, max_concurrent: int, name: str) -> None:
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent
        self.name = name
        self.is_async = False
        self._pool = pool
        self._numbers = itertools.count()

    def __call__(self, *given: Any, **sample: Any) -> Any:
        """Call the function in a process.

        Positional arguments are those of a reward function. An error of the function is raised
        with the traceback of the process as the cause.
        """
        if len(given) > len(_PARAMETERS):
            raise TypeError(
                f"{self.name} takes up to {len(_PARAMETERS)} positional arguments "
                f"({', '.join(_PARAMETERS)}), got {len(given)}. Pass the others by name."
            )
        sample = {**dict(zip(_PARAMETERS, given)), **sample}
        try:
            number = next(self._numbers)
            _, kind, answer = self._pool.ask([number, pack(sample)], self.timeout_s, number)
        except HelperDied as error:
            raise RewardError(
                f"the process that called {self.name} ended with exit code {error.exit_code} "
                "(negative: a signal; -9 may be the kernel's, for want of memory)"
            ) from None
        if kind == "error":
            error, text = unpack(answer)
            raise error from RemoteTraceback(text)
        try:
            return unpack(answer)
        except Exception as error:
            raise RewardError(cannot_be_sent(error)) from error


# Parameters of a reward function, in verl's order.
_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_pools: weakref.WeakValueDictionary[str, HelperPool] = weakref.WeakValueDictionary()


def _version_of(path: str) -> tuple[int, int] | None:
    """Return a mark that changes with the file; None for an importable module."""
    try:
        status = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _start_worker(name: str, first: dict[str, Any], environment: dict[str, str]) -> Helper:
    """Start a process, or raise the error that it met when it loaded the function."""
    helper = start_module("verl.rewards.process_worker", name=name, first=first, **environment)
    kind, answer = helper.greeting
    if kind == "error":
        helper.close()
        error, text = unpack(answer)
        raise error from RemoteTraceback(text)
    return helper


def pack(value: Any) -> str:
    """Any picklable value as a text without line breaks."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack(text: str) -> Any:
    """The reverse of `pack`."""
    return pickle.loads(base64.b64decode(text))


def cannot_be_sent(error: Exception) -> str:
    """Return the message about a value that does not survive the way from its process."""
    return (
        f"it returned a value that cannot be sent from its process ({describe_error(error)}). "
        "Return numbers, texts, or lists and dicts of them."
    )


def pack_function(function: Callable[..., Any]) -> str:
    """A reference to a function, or a ConfigError that says why another process could not find
    it."""
    module = _module_of(function)
    try:
        if module == "__main__":
            raise pickle.PicklingError(
                "it is defined in the script that was started, which a process cannot import"
            )
        return pack(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"The reward function {function!r} cannot be sent to another process: {error}. Define "
            "it with `def` at the top level of a file of its own (custom_reward_function.path), or "
            "set reward_model.reward_manager=naive."
        ) from error


def _module_of(function: Any) -> str:
    target = inspect.unwrap(getattr(function, "func", function))
    return getattr(target, "__module__", None) or type(target).__module__


def _user_files(function: Callable[..., Any]) -> list[str]:
    """Files that the process must load before it knows the function's module
    (`verl.utils.imports.load_module`)."""
    module = sys.modules.get(_module_of(function))
    path = getattr(module, "__file__", None)
    return (
        [path] if module is not None and module.__name__.startswith("verl_user_") and path else []
    )
