"""Notices that a server hangs, for all draws that wait for it.

A server that hangs keeps its connections: its machine froze, it is stopped, or the network is cut.
Its engine may also hang alone, in a process behind the one that answers. A draw may take an hour,
so both are asked now and then for a sign of life.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import urllib3

from verl.utils.errors import RolloutError
from verl.utils.logging import logger
from verl.utils.watched_http import Breakable, exchange_here

# A server that hangs is noticed within 90 s; one that is silent for half a minute is not lost.
_EVERY_S = 20.0
_MISSES = 3  # in a row
# An engine answers between two of its steps, and the first ones may compile kernels for minutes.
_MISSES_OF_ENGINE = 10
_SIGN_S = 10.0  # to wait for a sign of life


class ServerLostError(RolloutError):
    """A server did not answer: it is not running, ended, hangs, or cannot be reached."""


class _Draw:
    """An exchange that ends when its server hangs."""

    def __init__(self) -> None:
        self.fault: ServerLostError | None = None  # that broke it off
        self._connection: Breakable | None = None

    def begin_attempt(self, connection: Breakable) -> None:
        """Implement `Exchange.begin_attempt`."""
        self._connection = connection
        self.check_connected()

    def check_connected(self) -> None:
        """Implement `Exchange.check_connected`."""
        if self.fault is not None:
            raise urllib3.exceptions.ProtocolError(str(self.fault))

    def break_off(self, fault: ServerLostError) -> None:
        """End the wait, in the thread that waits, with an error."""
        self.fault = fault
        if self._connection is not None:
            self._connection.break_off()


class Watch:
    """The watch over one server. Its methods may be called from any number of threads.

    Args:
        name: of the server, in messages.
        ask: asks the server anything that it answers at once. Raises ServerLostError where no
            answer comes within the seconds that it is given.
        ask_engine: asks anything that the engine of the server answers, in the same way.
    """

    def __init__(
        self, name: str, ask: Callable[[float], object], ask_engine: Callable[[float], object]
    ) -> None:
        self.hung_at = -math.inf  # time.monotonic() of the last verdict
        self._name = name
        self._ask = ask
        self._ask_engine = ask_engine
        self._asking = threading.Lock()
        self._misses: Counter[str] = Counter()  # in a row, by the part that was asked
        self._lock = threading.Lock()
        self._draws: set[_Draw] = set()
        self._num_excuses = 0
        self._is_running = False

    @contextmanager
    def over_draw(self) -> Iterator[None]:
        """Raise ServerLostError in the block, which waits for an answer, when the server hangs."""
        draw = _Draw()
        with self._lock:
            self._draws.add(draw)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="verl-watch", daemon=True).start()

        token = exchange_here.set(draw)
        try:
            yield
        except ServerLostError as error:
            if draw.fault is not None:
                raise draw.fault from error
            raise
        finally:
            exchange_here.reset(token)
            with self._lock:
                self._draws.remove(draw)

        # An answer without a length looks complete when it is broken off.
        if draw.fault is not None:
            raise draw.fault

    @contextmanager
    def excused(self) -> Iterator[None]:
        """Let the server be silent in the block, as while it takes weights."""
        with self._lock:
            self._num_excuses += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_excuses -= 1

    def look(self) -> None:
        """Ask the server for a sign of life. Raises ServerLostError if none comes.

        A server that misses several in a row hangs: its draws end, and `hung_at` is now.
        """
        self._look_at("it", self._ask, _MISSES)

    def look_at_engine(self) -> None:
        """Do the same with the engine, which may have to end a step before it answers."""
        self._look_at("its engine", self._ask_engine, _MISSES_OF_ENGINE)

    def _look_at(self, part: str, ask: Callable[[float], object], most_misses: int) -> None:
        with self._asking:
            try:
                ask(_SIGN_S)
            except ServerLostError as error:
                if _is_refused(error) or self._num_excuses:
                    self._misses.clear()  # those of a process that has ended count no more
                else:
                    self._note_miss(part, most_misses)
                raise
            self._misses[part] = 0

    def _note_miss(self, part: str, most_misses: int) -> None:
        """Count a miss. After the last one the server hangs: its draws end."""
        self._misses[part] += 1
        if self._misses[part] < most_misses:
            return
        self._misses[part] = 0
        fault = (
            f"{self._name} hangs: {part} gave no answer within {_SIGN_S:g} s to {most_misses} "
            "questions in a row"
        )
        with self._lock:
            self.hung_at = time.monotonic()
            for draw in self._draws:
                draw.break_off(ServerLostError(fault))

    def _run(self) -> None:
        """Look now and then, as long as draws wait."""
        while True:
            time.sleep(_EVERY_S)
            with self._lock:
                if not self._draws:
                    self._is_running = False
                    return
            try:
                self.look()
                self.look_at_engine()
            except ServerLostError as error:
                logger.debug("%s", error)


def _is_refused(error: ServerLostError) -> bool:
    """Return whether the machine answers, and no server listens: it has ended, or still starts."""
    cause = error.__cause__
    is_new = isinstance(cause, urllib3.exceptions.NewConnectionError)
    return is_new and isinstance(cause.__cause__, ConnectionRefusedError)
