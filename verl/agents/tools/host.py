"""Where tools live and their methods run: in this process (`LocalHost`) or in helper processes
(`verl.agents.tools.processes`), where the same LocalHost does the work.

A host is used from one event loop, which runs code of this package alone. Coroutines of tools run
in a loop of their own, in another thread; plain methods run in a thread for each call.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from verl.agents.shared_state import overwritten
from verl.agents.tools.answers import TextLimit, describe_failure, finite, read_answer
from verl.agents.tools.base import (
    CALL_SETTINGS,
    BaseTool,
    ToolArgumentError,
    ToolTimeoutError,
    create_arguments,
    created_id,
    declared_keys,
    keeps_instances,
    shut_down,
)
from verl.agents.tools.threads import WatchedLoop, count_left_behind, run_in_thread
from verl.rewards.texts import format_traceback
from verl.utils.deadline import call_ends
from verl.utils.signatures import misspelled_settings
from verl.utils.threads import LateCall

# Loops that coroutines may block at one time. Each keeps a thread until its coroutine returns.
MAX_LOOPS = 8
# Threads that late calls may keep before their process gets no more trajectories.
MAX_LEFT_BEHIND = 16
CHECK_S = 0.1


@dataclass
class ToolFacts:
    """Facts that callers need about a tool, wherever it lives.

    Attributes:
        order: its place among all tools of the run.
        keeps_instances: `create`, `calc_reward` and `release` are called.
        parallel: an instance takes several calls at once.
        isolation: where it asks to live; None: the default.
        timeout_s: deadline of a call; None: that of the run.
        retries: further attempts after an error or a crash.
        retry_delay_s: wait before the first of them.
        misspelled: {key of `config`: the setting of calls that it seems to mean}.
    """

    name: str
    order: tuple[int, int]
    schema: dict[str, Any]
    keeps_instances: bool
    parallel: bool
    takes_agent_data: bool
    isolation: str | None
    timeout_s: float | None
    retries: int
    retry_delay_s: float
    misspelled: dict[str, str]


class Work(NamedTuple):
    """One call of a method of a tool.

    `arguments`: keywords of the row for the method; for `execute` with `parameters` of the model
    next to them, and `agent_data` where the tool takes it.
    """

    method: str  # "create", "execute", "calc_reward" or "release"
    tool: str
    instance_id: str
    arguments: dict[str, Any]
    timeout_s: float
    limit: TextLimit = TextLimit()
    parameters: dict[str, Any] | None = None
    agent_data: Any = None


@dataclass
class Done:
    """How it ended: "ok", "error", "malformed", "timeout" or "crashed".

    `value`: the identifier, the ToolAnswer, the reward or None. `text`: the error, as the model
    reads it. `details`: the traceback, for the log. `overwritten`: an attribute that the call set
    anew on the object that all trajectories share, or "".
    """

    kind: str
    value: Any = None
    text: str = ""
    details: str = ""
    overwritten: str = ""


class Host(Protocol):
    """Makes calls on tools. Whatever a tool does is a Done, and comes within its deadline."""

    @property
    def facts(self) -> Sequence[ToolFacts]:
        """The tools that live here."""
        ...

    async def place(self, episode: str) -> Any:
        """Return the object that holds the instances of an episode; another one, if that is lost.

        Raises:
            ToolProcessError: no process can be started.
        """
        ...

    async def perform(self, place: Any, work: Work) -> Done:
        """Make a call in the place of its episode."""
        ...

    def leave(self, episode: str) -> None:
        """Forget an episode."""
        ...

    def close(self) -> None:
        """End threads and processes."""
        ...


def facts_of(tool: BaseTool, order: tuple[int, int], *, in_process: bool) -> ToolFacts:
    """Describe a tool.

    Args:
        order: its place among all tools of the run.
        in_process: it lives in another process.
    """
    config = dict(tool.config or {})
    keeps = keeps_instances(tool)
    declared = declared_keys(type(tool))
    undeclared = [key for key in config if key not in declared]
    return ToolFacts(
        name=tool.name,
        order=order,
        schema=tool.tool_schema.for_prompt(),
        keeps_instances=keeps,
        parallel=bool(config.get("parallel", not keeps)),
        takes_agent_data=tool.takes_agent_data(is_copied=in_process),
        isolation=config.get("isolation"),
        timeout_s=config.get("timeout_s"),
        retries=int(config.get("retries") or 0),
        retry_delay_s=float(config.get("retry_delay_s", 0.5)),
        misspelled=misspelled_settings(undeclared, CALL_SETTINGS, type(tool), BaseTool),
    )


class LocalHost:
    """Tools in this process, each with its place among all tools of the run.

    A coroutine that blocks its loop is interrupted at its deadline, and new calls go to another
    loop until it answers again. Calls that wait in the blocked loop may be late because of that.
    """

    def __init__(
        self, tools: Sequence[tuple[tuple[int, int], BaseTool]], *, in_process: bool = False
    ) -> None:
        self._tools = {tool.name: tool for _, tool in tools}
        self.facts = [facts_of(tool, order, in_process=in_process) for order, tool in tools]
        self._loops: list[WatchedLoop] = []
        self._under_way = 0
        self._watch: asyncio.Task[None] | None = None

    async def place(self, episode: str) -> "LocalHost":
        return self

    def leave(self, episode: str) -> None:
        """Do nothing: `release` has dropped the instances."""

    def close(self) -> None:
        for tool in self._tools.values():
            shut_down(tool)
        for loop in self._loops:
            loop.close()
        self._loops.clear()

    @property
    def is_worn(self) -> bool:
        """Whether late calls keep so many threads that another process should take over."""
        num_blocked = sum(1 for loop in self._loops if loop.is_blocked)
        return count_left_behind() >= MAX_LEFT_BEHIND or num_blocked >= MAX_LOOPS // 2

    async def perform(self, place: Any, work: Work) -> Done:
        ends = time.monotonic() + work.timeout_s
        tool = self._tools[work.tool]
        self._under_way += 1
        if self._watch is None or self._watch.done():
            self._watch = asyncio.ensure_future(self._watch_loops())
        token = call_ends.set(ends)  # clients of services read it
        shared = getattr(tool, "__dict__", {})
        before = dict(shared)
        try:
            done = _blame(tool, work, await self._perform(tool, work, ends))
            done.overwritten = overwritten(before, shared)
            return done
        finally:
            call_ends.reset(token)
            self._under_way -= 1

    async def _perform(self, tool: BaseTool, work: Work, ends: float) -> Done:
        method = getattr(tool, work.method)
        if inspect.iscoroutinefunction(method):
            return await self._run_in_loop(_run_coroutine(method, work), work, ends)

        waiting = asyncio.ensure_future(run_in_thread(_run_plain, method, work))
        done = await _wait(waiting, work, ends)
        returned = done.value
        if inspect.isawaitable(returned):  # a plain method that returned a coroutine
            follow_up = _run_coroutine(lambda *_, **__: returned, work)
            done = await self._run_in_loop(follow_up, work, ends)
        return done

    async def _run_in_loop(
        self, coroutine: Coroutine[Any, Any, Done], work: Work, ends: float
    ) -> Done:
        loop = self._free_loop()
        if loop is None:
            coroutine.close()
            text = (
                f"Error: tools block all {MAX_LOOPS} event loops; set isolation: process in their "
                "config, so that they can be ended"
            )
            return Done("crashed", text=work.limit.cut(text))

        done = await _wait(asyncio.wrap_future(loop.start(coroutine, ends)), work, ends)
        if done.kind == "timeout":
            await loop.doubt()
        return done

    def _free_loop(self) -> WatchedLoop | None:
        """Return a loop that answers; None where tools block as many as there may be."""
        for loop in self._loops:
            if not loop.is_blocked:
                return loop
        if len(self._loops) >= MAX_LOOPS:
            return None
        self._loops.append(WatchedLoop(f"verl-tool-loop-{len(self._loops)}"))
        return self._loops[-1]

    async def _watch_loops(self) -> None:
        while self._under_way > 0:
            for loop in self._loops:
                loop.check()
            await asyncio.sleep(CHECK_S)


def _blame(tool: BaseTool, work: Work, done: Done) -> Done:
    """Return the outcome of a call, "malformed" where it failed on arguments that do not fit."""
    if done.kind != "error" or work.method != "execute":
        return done
    problems = tool.tool_schema.function.parameters.problems_of(work.parameters or {})
    if not problems:
        return done
    cause = done.text.removeprefix("Error: ")
    text = f"Error: the arguments of '{work.tool}' do not fit: {'; '.join(problems[:5])} ({cause})"
    return Done("malformed", text=work.limit.cut(text))


async def _wait(waiting: "asyncio.Future[Done]", work: Work, ends: float) -> Done:
    """Wait for a call until its deadline. Cancels it then, and when this task is cancelled."""
    try:
        await asyncio.wait({waiting}, timeout=max(ends - time.monotonic(), 0))
        if not waiting.done():
            return Done("timeout", text=late_text(work))
        if waiting.cancelled():
            return Done("error", text="Error: the tool cancelled its own call")
        error = waiting.exception()
        return waiting.result() if error is None else _failure(error, work)
    finally:
        waiting.cancel()


def late_text(work: Work) -> str:
    """Return the answer to a call that was given up."""
    return f"Error: the tool '{work.tool}' did not answer in time"


async def _run_coroutine(method: Callable[..., Any], work: Work) -> Done:
    """Make a call of a coroutine method. Runs in a loop for tools."""
    owner = os.getpid()
    try:
        return _read(work, await _call(method, work))
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # noqa: BLE001  (a user's code, which may raise SystemExit)
        return _failure(error, work)
    finally:
        _end_a_fork(owner)


def _run_plain(method: Callable[..., Any], work: Work) -> Done:
    """Make a call of a plain method. Runs in a thread."""
    owner = os.getpid()
    try:
        value = _call(method, work)
        if inspect.isawaitable(value):
            return Done("ok", value)
        return _read(work, value)
    except LateCall:
        raise
    except BaseException as error:  # noqa: BLE001  (as above)
        return _failure(error, work)
    finally:
        _end_a_fork(owner)


def _end_a_fork(owner: int) -> None:
    """End a process that the tool forked and that came back here."""
    if os.getpid() != owner:
        os._exit(0)


def _call(method: Callable[..., Any], work: Work) -> Any:
    if work.method == "create":
        return method(work.instance_id, **create_arguments(method, work.arguments))
    if work.method != "execute":
        return method(work.instance_id, **work.arguments)

    keywords: Mapping[str, Any] = work.arguments
    if work.agent_data is not None:
        keywords = {**keywords, "agent_data": work.agent_data}
    return method(work.instance_id, work.parameters, **keywords)


def _read(work: Work, value: Any) -> Done:
    """Return the value of a method in its plain form; raises where it has none."""
    if work.method == "create":
        return Done("ok", created_id(value, work.instance_id))
    if work.method == "execute":
        return Done("ok", read_answer(value, work.limit))
    if work.method == "calc_reward":
        return Done("ok", 0.0 if value is None else finite(value, "the reward of calc_reward"))
    return Done("ok")


def _failure(error: BaseException, work: Work) -> Done:
    if isinstance(error, LateCall):
        return Done("timeout", text=late_text(work))
    for kind, own in (("malformed", ToolArgumentError), ("timeout", ToolTimeoutError)):
        if isinstance(error, own):
            text = describe_failure(error, work.limit)
            return Done(kind, text=text.replace(f"{own.__name__}: ", "", 1))
    return Done("error", text=describe_failure(error, work.limit), details=format_traceback(error))
