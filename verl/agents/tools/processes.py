"""Tools in helper processes, each of which serves many trajectories.

A trajectory stays with its process, where its instances are. Calls and answers are numbered, so
that many are under way at once. A process that dies, or does not answer in time, is replaced: its
calls end as "crashed", and its trajectories make their instances anew in another one.
"""

import asyncio
import itertools
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

from verl.agents.tools.config_file import ToolEntry
from verl.agents.tools.host import Done, ToolFacts, Work, late_text
from verl.agents.tools.nursery import Child, Nursery, NurseryLostError, kill_helper
from verl.rewards.texts import describe_briefly
from verl.utils.children import START_TIMEOUT_S, describe_end
from verl.utils.errors import VerlError
from verl.utils.garbage import finalize
from verl.utils.logging import logger

# How much longer than its deadline a call may take before its process counts as hanging.
GRACE_S = 5.0
NUM_PROCESSES = 8
EPISODES_PER_PROCESS = 4  # before another process starts
MAX_FRAME_BYTES = 64 * 1024**2
_HEADER = struct.Struct(">QQ")


class ToolProcessError(VerlError, RuntimeError):
    """A helper process of tools did not start."""


class ProcessHost:
    """Tools of a user, in up to `num_processes` processes.

    Args:
        entries: tools by class.
        function_path: file of function tools, or None.

    Raises:
        VerlError: the first process raised it when it made the tools.
        ToolProcessError: it ended, or was late.
    """

    def __init__(
        self,
        entries: Sequence[ToolEntry],
        function_path: str | None,
        *,
        num_processes: int = NUM_PROCESSES,
    ) -> None:
        self._first = {
            "path": sys.path,
            "entries": list(entries),
            "function_path": function_path,
        }
        self._num_processes = num_processes
        self._processes: list[ToolProcess] = []
        self._seats: dict[str, ToolProcess] = {}  # by episode
        self._alive: set[int] = set()  # process ids
        self._nurseries: list[Nursery] = []  # at most one
        self._end = finalize(self, _kill_all, self._alive, self._nurseries)
        self.facts: Sequence[ToolFacts] = ()

    async def start(self) -> None:
        """Start the first process and learn which tools it has."""
        process = self._add_process()
        await process.until_ready()
        self.facts = process.facts

    async def place(self, episode: str) -> "ToolProcess":
        seat = self._seats.get(episode)
        if seat is None or seat.is_over:
            seat = self._choose()
            self._seats[episode] = seat
            seat.episodes += 1
        await seat.until_ready()
        return seat

    async def perform(self, place: "ToolProcess", work: Work) -> Done:
        return await place.perform(work)

    def leave(self, episode: str) -> None:
        seat = self._seats.pop(episode, None)
        if seat is None:
            return
        seat.episodes -= 1
        if seat.is_worn and seat.episodes == 0:
            seat.kill("too many of its threads hang")

    def close(self) -> None:
        for process in list(self._processes):
            process.kill(None)
        self._end()

    def _choose(self) -> "ToolProcess":
        """Return the process for a trajectory, and start one where all have many.

        A process that is ready takes up to twice as many, so that none waits for the replacement of
        one that died.
        """
        fit = [process for process in self._processes if not process.is_worn]
        fewest = min((process.episodes for process in fit), default=EPISODES_PER_PROCESS)
        if fewest >= EPISODES_PER_PROCESS and len(fit) < self._num_processes:
            fit.append(self._add_process())

        most = 2 * EPISODES_PER_PROCESS
        ready = [process for process in fit if process.was_ready and process.episodes < most]
        return min(ready or fit, key=lambda process: process.episodes)

    def _add_process(self) -> "ToolProcess":
        process = ToolProcess(self._first, self._fork, self._replace)
        self._processes.append(process)
        return process

    def _fork(self, connection: socket.socket) -> Child:
        """Start a process that serves a connection."""
        child = None
        while child is None and self._nurseries:
            try:
                child = self._nurseries[0].fork(connection)
            except NurseryLostError:  # killed, by the out-of-memory killer for example
                self._nurseries.pop().close()
        if child is None:
            self._nurseries.append(Nursery())
            child = self._nurseries[0].fork(connection)
        self._alive.add(child.pid)
        return child

    def _replace(self, process: "ToolProcess") -> None:
        """Start another process for one that has ended with trajectories."""
        self._processes.remove(process)
        if process.child is not None:
            self._alive.discard(process.child.pid)
        if process.reason is not None and process.was_ready:
            self._add_process()


class ToolProcess:
    """One process, and the calls that it has under way."""

    def __init__(
        self,
        first: dict[str, Any],
        fork: Callable[[socket.socket], Child],
        on_end: "Callable[[ToolProcess], None]",
    ) -> None:
        self.child: Child | None = None
        self.episodes = 0
        self.facts: Sequence[ToolFacts] = ()
        self.is_over = False
        self.was_ready = False
        self.is_worn = False  # no new trajectories
        self.reason: str | None = None

        self._on_end = on_end
        self._fork = fork
        self._pending: dict[int, asyncio.Future[Done]] = {}
        self._numbers = itertools.count(1)  # 0 is the start
        self._writer: asyncio.StreamWriter | None = None
        self._serving = asyncio.ensure_future(self._serve(first))
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until_ready(self) -> None:
        """Wait until it has made its tools.

        Raises:
            VerlError: it raised that instead.
            ToolProcessError: it ended, or was late.
        """
        await asyncio.wait({self._started})
        self._started.result()

    async def perform(self, work: Work) -> Done:
        """Make a call and wait for its answer. A process that does not answer is ended."""
        if self.is_over or self._writer is None or self._writer.is_closing():
            text = f"Error: the tool '{work.tool}' stopped unexpectedly"
            return Done("crashed", text=text)
        number = next(self._numbers)
        try:
            frame = pack_frame(number, work)
        except Exception as error:  # noqa: BLE001  (whatever the row or the agent's data hold)
            text = f"Error: the arguments cannot be sent to a process: {describe_briefly(error)}"
            return Done("error", text=text)

        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        self._writer.write(frame)
        try:
            await asyncio.wait({answer}, timeout=work.timeout_s + GRACE_S)
            if answer.done():
                return answer.result()
            self._pending.pop(number, None)
            self.kill(f"it did not answer a call of '{work.tool}'")
            return Done("timeout", text=late_text(work))
        except asyncio.CancelledError:
            if not self.is_over:
                self._writer.write(pack_frame(number, None))
            raise
        finally:
            self._pending.pop(number, None)

    def kill(self, reason: str | None) -> None:
        """End the process and all that it has started. Its calls end as crashed."""
        if self.is_over:
            return
        self.is_over = True
        self.reason = reason
        if self.child is not None:
            self.child.kill()
        if self._writer is not None:
            self._writer.close()

        lost, self._pending = self._pending, {}
        for answer in lost.values():
            if not answer.done():
                answer.set_result(Done("crashed", text="Error: the tool stopped unexpectedly"))
        if reason is not None and self.was_ready:
            logger.warning(
                "A process of tools was replaced: %s. Calls lost: %d; trajectories with instances "
                "in it: %d.",
                reason,
                len(lost),
                self.episodes,
            )
        self._serving.cancel()
        self._on_end(self)
        self._fail_start(ToolProcessError(f"A process of tools was ended: {reason or 'closed'}."))

    async def _serve(self, first: dict[str, Any]) -> None:
        """Start the process, then take its answers until it ends."""
        try:
            reader = await self._open(first)
            _, greeting = await asyncio.wait_for(read_frame(reader), START_TIMEOUT_S)
            self._greet(pickle.loads(greeting))

            while not self.is_over:
                self._take_answer(*await read_frame(reader))
        except asyncio.TimeoutError:
            self.kill(f"it did not start within {START_TIMEOUT_S:g} s")
        except Exception as error:  # noqa: BLE001  (`until_ready` and the log report it)
            self.kill(self._cause_of_death(error))
        finally:
            if self.child is not None:
                self.child.kill()

    def _greet(self, greeting: Any) -> None:
        """Take the facts about the tools, or the error that making them raised."""
        if isinstance(greeting, BaseException):
            self._fail_start(greeting)
            self.kill("its tools cannot be made")
            return
        self.facts = greeting
        self.was_ready = True
        self._started.set_result(None)

    def _take_answer(self, number: int, body: bytes) -> None:
        answer = self._pending.pop(number, None)
        if answer is None or answer.done():
            return

        try:
            done, is_worn = pickle.loads(body)
        except Exception as error:  # noqa: BLE001  (images of a user's class)
            text = f"Error: the answer cannot be read here: {describe_briefly(error)}"
            answer.set_result(Done("error", text=text))
            return
        self.is_worn = self.is_worn or is_worn
        answer.set_result(done)
        if done.kind == "crashed":  # the process lives, but can run no coroutine any more
            self.kill("calls block all its event loops")

    async def _open(self, first: dict[str, Any]) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        with theirs:
            self.child = self._fork(theirs)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._writer.write(pack_frame(0, first))
        return reader

    def _cause_of_death(self, error: Exception) -> str:
        if self.child is None or not isinstance(error, (EOFError, ConnectionError)):
            return describe_briefly(error)
        self.child.kill()
        return f"it {describe_end(self.child.exit_code)}"

    def _fail_start(self, error: BaseException) -> None:
        if not self._started.done():
            self._started.set_exception(error)
            self._started.exception()  # seen, also where no trajectory waits for it


def pack_frame(number: int, value: Any) -> bytes:
    """Return a pickled value with its length and a number in front.

    Raises:
        ValueError: more than MAX_FRAME_BYTES.
    """
    body = pickle.dumps(value)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"{len(body) / 1024**2:.0f} MiB, at most {MAX_FRAME_BYTES // 1024**2} can be sent"
        )
    return _HEADER.pack(len(body), number) + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return number and pickled value of the next frame.

    Raises:
        EOFError: the other side is gone.
    """
    length, number = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return number, await reader.readexactly(length)


def _kill_all(alive: set[int], nurseries: list[Nursery]) -> None:
    for pid in list(alive):
        kill_helper(pid)
    for nursery in nurseries:
        nursery.close()
    nurseries.clear()
