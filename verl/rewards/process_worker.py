"""A process that calls a reward function: packed arguments in, packed result or error out, a line
each."""

import asyncio
import inspect
import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import TextIO

from verl.utils.errors import sendable


def main() -> None:
    """Answer until the parent closes the pipe, also by being killed."""
    # A print of the user's function must not end up between our answers. Nor does it share our
    # standard input: a child that multiprocessing forks closes that, for which it would wait for
    # the lock that `_listen` holds while it reads.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(lines, requests), daemon=True).start()
    first = json.loads(requests.get())
    sys.path[:] = first["path"]
    from verl.rewards.processes import pack, unpack
    from verl.utils.imports import load_module

    for file in first["files"]:
        load_module(file)
    function = unpack(first["function"])
    if warm_up := unpack(first["warm_up"]):
        function(**warm_up)
    loop = asyncio.new_event_loop()
    print(json.dumps("ready"), file=answers)
    while True:
        line = requests.get()
        try:
            value = function(**unpack(json.loads(line)))
            if inspect.isawaitable(value):
                value = loop.run_until_complete(value)  # pyright: ignore[reportArgumentType]
            answer = ["value", pack(value)]
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a user's code; told to the caller)
            answer = ["error", pack(_told(error))]
        print(json.dumps(answer), file=answers)


def _listen(lines: TextIO, requests: queue.SimpleQueue[str]) -> None:
    """Hand requests on until the parent is gone; then end this process and what its function has
    started, also in the middle of a call, which may hang for ever."""
    for line in lines:
        requests.put(line)
    os.killpg(0, signal.SIGKILL)  # the helper leads a session of its own


def _told(error: BaseException) -> tuple[BaseException, str]:
    """The error, or its text where it does not survive the way, and its traceback."""
    text = "".join(traceback.format_exception(error))
    sent = sendable(error)
    return RuntimeError(f"{type(error).__name__}: {error}") if sent is None else sent, text


if __name__ == "__main__":
    main()
