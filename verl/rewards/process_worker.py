"""A process that calls a reward function: a line of packed arguments in, a line of result out."""

import asyncio
import inspect
import json
import os
import pickle
import random
import sys
from typing import Any

from verl.rewards.outcome import RewardFunction
from verl.rewards.texts import MAX_TRACEBACK_CHARACTERS, describe_briefly, format_traceback
from verl.utils.children import end_with_parent, take_connection
from verl.utils.errors import RewardError, sendable


def main() -> None:
    """Answer until the parent closes the connection or is killed."""
    connection = take_connection()
    answers = os.fdopen(connection, "w", buffering=1, encoding="utf-8")
    requests = os.fdopen(connection, encoding="utf-8", closefd=False)
    end_with_parent(connection)

    first = json.loads(requests.readline())
    sys.path[:] = first["path"]
    # after the search path is set
    from verl.rewards.origin import is_coroutine_function
    from verl.rewards.processes import pack

    try:
        function = _load(first)
    # Ctrl-C does not reach this process: an interrupt is the file's own. The parent raises it.
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  (a user's code)
        print(json.dumps(["error", pack(_with_traceback(error))]), file=answers)
        return

    facts = {
        "is_async": is_coroutine_function(function),
        "max_concurrent": int(getattr(function, "max_concurrent", 1)),
    }
    print(json.dumps(["ready", facts]), file=answers)

    me = os.getpid()
    loop = asyncio.new_event_loop()
    for line in requests:
        numbers, stop_at_failure, calls = json.loads(line)
        skip = False
        for number, call in zip(numbers, calls):
            kind, answer = ("skipped", None) if skip else _call(function, call, loop)
            if os.getpid() != me:
                os._exit(0)  # this is a fork that the function made and that returned here
            # Write at once: the next call may end this process.
            answers.write(json.dumps([number, kind, answer]) + "\n")
            skip = skip or (stop_at_failure and kind == "error")


def _call(function: RewardFunction, call: str, loop: asyncio.AbstractEventLoop) -> tuple[str, str]:
    """Return "value" or "error", and the packed value, or the packed error and its traceback."""
    from verl.rewards.processes import cannot_be_sent, pack, unpack

    try:
        values, sample = unpack(call)
        value = function(*values, **sample)
        if inspect.isawaitable(value):
            value = loop.run_until_complete(value)  # pyright: ignore[reportArgumentType]

        try:
            return "value", pack(value)
        except Exception as error:  # (a user's class may raise anything)
            raise RewardError(cannot_be_sent(error)) from error
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  (a user's code)
        return "error", pack(_with_traceback(error))


def _load(first: dict[str, Any]) -> RewardFunction:
    """Load the function that the first message of the parent names, and call it to warm up."""
    from verl.rewards.custom import load_function
    from verl.rewards.processes import unpack
    from verl.utils.imports import load_module

    if first["source"] is not None:
        function = load_function(**unpack(first["source"]))
    else:
        for file in first["files"]:
            load_module(file)
        function = unpack(first["function"])

    random.seed(0)  # so that the same run draws the same numbers again
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if warm_up := unpack(first["warm_up"]):
        function(**warm_up)
    return function


def _with_traceback(error: BaseException) -> tuple[BaseException, str]:
    """Return the error and its traceback.

    An error that is too large or cannot be sent is replaced by a RuntimeError with its text.
    """
    sent = sendable(error)
    if sent is None or len(pickle.dumps(sent)) > MAX_TRACEBACK_CHARACTERS:
        sent = RuntimeError(describe_briefly(error))
    return sent, format_traceback(error)
