"""Find coroutines of a user's that keep their event loop from running others."""

import time
import types
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any

BLOCKING_S = 1.0


@types.coroutine
def watched(answer: Awaitable[Any], report: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await `answer`, and call `report` where it keeps the event loop busy for `BLOCKING_S`.

    The pieces of its code between two waits are timed, never the waits.
    """
    pieces = answer.__await__()
    resume = partial(next, pieces)
    while True:
        began = time.monotonic()
        try:
            waits_for = resume()
        except StopIteration as end:
            return end.value
        finally:
            if time.monotonic() - began > BLOCKING_S:
                report()

        try:
            yield waits_for
            resume = partial(next, pieces)
        except BaseException as error:  # noqa: BLE001  (a cancellation, or a failed wait)
            resume = partial(pieces.throw, error)
