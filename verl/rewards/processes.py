"""Calling a reward function in processes of its own, where a call that hangs can be killed."""

import base64
import inspect
import pickle
import sys
from collections.abc import Callable
from typing import Any

from verl.rewards.helper import HelperDied, HelperPool, start_module
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
        self.timeout_s = timeout_s
        self.max_concurrent = num_processes
        self.name = name
        first = {
            "path": sys.path,
            "files": _user_files(function),
            "function": pack_function(function),
        }
        first["warm_up"] = pack(warm_up)
        module = "verl.rewards.process_worker"
        self._pool = HelperPool(lambda: start_module(module, name=name, first=first, **environment))

    def __call__(self, **sample: Any) -> Any:
        """What the function returns or raises, with the traceback of the process as the cause."""
        try:
            kind, answer = self._pool.ask(pack(sample), self.timeout_s)
        except HelperDied as error:
            raise RewardError(
                f"the process that called {self.name} ended with exit code {error.exit_code} "
                "(negative: a signal; -9 may be the kernel's, for want of memory)"
            ) from None
        if kind == "error":
            error, text = unpack(answer)
            raise error from RemoteTraceback(text)
        return unpack(answer)


def pack(value: Any) -> str:
    """Any picklable value as a text without line breaks."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack(text: str) -> Any:
    """The reverse of `pack`."""
    return pickle.loads(base64.b64decode(text))


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
