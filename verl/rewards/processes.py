"""Call a reward function in processes of its own, where a call that hangs can be killed."""

import base64
import copy
import functools
import itertools
import math
import os
import pickle
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from verl.rewards.helper import Helper, HelperDied, HelperPool, HelperTimeout, start_module
from verl.rewards.origin import calls_rules, module_name, modules_of
from verl.rewards.outcome import Outcome, RewardFunction
from verl.rewards.texts import describe_briefly
from verl.utils.children import describe_end
from verl.utils.errors import ConfigError, RemoteTraceback, RewardError
from verl.utils.imports import file_of_user


class ProcessFunction:
    """Call `function` in one of several processes, which start on demand and are reused.

    Args:
        function: plain or async. The process finds it by name, so it, or the class of a callable
            object, must be defined at the top level of a file or module. Each process keeps its own
            state in memory.
        timeout_s: seconds that `__call__` may take; then the process is killed and HelperTimeout
            raised.
        num_processes: largest number of concurrent calls.
        name: name of the function in errors.
        warm_up: arguments of a call that each process makes first.
        environment: variables of the processes.

    Raises:
        ConfigError: the function cannot be found by its name from another process.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout_s: float = math.inf,
        num_processes: int = 1,
        name: str = "the reward function",
        warm_up: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        first = {
            "path": sys.path,
            "source": None,
            "files": _modules_to_load(function),
            "function": pack_function(function),
            "warm_up": pack(warm_up),
        }
        start = functools.partial(_start_worker, name, first, environment)
        self._set(HelperPool(start), timeout_s, num_processes, name)

    @classmethod
    def of_file(cls, source: Mapping[str, Any], *, name: str) -> "ProcessFunction":
        """Load the function of `custom.load_function(**source)` in a process.

        If loading the file hangs or ends the process, only that process is affected. Functions of
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
        assert kind == "ready", "_start_worker raises the error of the process"

        made = cls.__new__(cls)
        made._set(pool, math.inf, facts["max_concurrent"], name)
        made.is_async = facts["is_async"]
        return made

    def limited(self, timeout_s: float, num_processes: int | None = None) -> "ProcessFunction":
        """Return the same function with a deadline of its own, in the same processes."""
        made = copy.copy(self)
        made.timeout_s = timeout_s
        made.max_concurrent = num_processes or self.max_concurrent
        return made

    def _set(self, pool: HelperPool, timeout_s: float, max_concurrent: int, name: str) -> None:
        self.timeout_s = timeout_s
        self.max_concurrent = max_concurrent
        self.name = name
        self.is_async = False
        self._pool = pool
        self._numbers = itertools.count()

    def __call__(self, *values: Any, **sample: Any) -> Any:
        """Return or raise as the function does, with the traceback of the process as the cause."""
        (outcome,) = self.call_each([pack_call(*values, **sample)], self.timeout_s)
        if outcome.timed_out:
            raise HelperTimeout(f"no answer within {self.timeout_s:g} s")
        if outcome.error is not None:
            raise outcome.error
        return outcome.value

    def call_each(
        self, calls: Sequence[str], timeout_s: float, stop_at_failure: bool = False
    ) -> list[Outcome]:
        """Make several calls, one after the other, in one process.

        Returns:
            Outcomes of the first calls, of one at least. A call that is late or ends the process is
            the last of them; with `stop_at_failure`, so is one that raises. Later calls are not
            made.

        Args:
            calls: packed by `pack_call`.
            timeout_s: seconds that each may take.
        """
        numbers = [next(self._numbers) for _ in calls]
        message = [numbers, stop_at_failure, list(calls)]
        outcomes: list[Outcome] = []

        try:
            for _, kind, answer in self._pool.ask_each(message, timeout_s, numbers):
                if kind != "skipped":
                    outcomes.append(_outcome_of(kind, answer))
        except HelperTimeout:
            outcomes.append(Outcome(timed_out=True))
        except HelperDied as error:
            end = describe_end(error.exit_code)
            reason = RewardError(f"the process that called {self.name} {end}")
            outcomes.append(Outcome(error=reason))

        return outcomes


_pools: weakref.WeakValueDictionary[str, HelperPool] = weakref.WeakValueDictionary()


def _version_of(path: str) -> tuple[int, int] | None:
    """Return a version that changes with the file; None for an importable module."""
    try:
        status = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _start_worker(name: str, first: dict[str, Any], environment: dict[str, str]) -> Helper:
    """Start a process, or raise the error that it raised when it loaded the function."""
    helper = start_module("verl.rewards.process_worker", name=name, first=first, **environment)
    kind, answer = helper.greeting
    if kind == "error":
        helper.close()
        error, text = unpack(answer)
        if isinstance(error, KeyboardInterrupt):  # raised here, it would look like Ctrl-C
            error = ConfigError(
                f"Loading {name} raised KeyboardInterrupt. Fix its file; VERL_TRACEBACK=1 shows "
                "the traceback."
            )
        raise error from RemoteTraceback(text)
    return helper


def _outcome_of(kind: str, answer: str) -> Outcome:
    """Unpack the value or the error of a call."""
    if kind == "error":
        error, text = unpack(answer)
        if isinstance(error, HelperTimeout):  # of a process that the function itself uses
            return Outcome(timed_out=True)
        if isinstance(error, KeyboardInterrupt):  # raised here, it would look like Ctrl-C
            error = RewardError("the function raised KeyboardInterrupt")
        error.__cause__ = RemoteTraceback(text)
        return Outcome(error=error)
    try:
        return Outcome(value=unpack(answer))
    except Exception as error:  # noqa: BLE001  (a user's class; the caller raises it)
        reason = RewardError(cannot_be_sent(error))
        reason.__cause__ = error
        return Outcome(error=reason)


def pack_call(*values: Any, **sample: Any) -> str:
    """Pack the arguments of one call, for `ProcessFunction.call_each`."""
    return pack((values, sample))


def pack(value: Any) -> str:
    """Return any picklable value as a text without line breaks."""
    return base64.b64encode(pickle.dumps(value)).decode("ascii")


def unpack(text: str) -> Any:
    """Undo `pack`."""
    return pickle.loads(base64.b64decode(text))


def cannot_be_sent(error: Exception) -> str:
    """Return the message for a value that cannot be sent from its process."""
    return (
        f"it returned a value that cannot be sent from its process ({describe_briefly(error)}). "
        "Return numbers, texts, or lists and dicts of them."
    )


def pack_function(function: RewardFunction) -> str:
    """Pack a reference to a function. Raises ConfigError if another process could not find it."""
    module = module_name(function)
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


def _modules_to_load(function: RewardFunction) -> list[str]:
    """Return files and modules that the process must load by `verl.utils.imports.load_module`.

    They are the user's file with the function, or the files that register rules if it scores by
    rule.
    """
    loaded: list[str] = []
    for name in modules_of(function):
        file = file_of_user(name)
        if file:
            loaded.append(file)
        elif calls_rules(function) and name != "__main__":
            loaded.append(name)
    return loaded
