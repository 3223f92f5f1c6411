"""All tools of a run (`ToolSet`), and those of one trajectory (`ToolSession`).

    tools = ToolSet.from_config("tools.yaml", timeout_s=30)
    session = await tools.open("step 3, row 17", row["tools_kwargs"], step=3, row=17)
    try:
        results = await session.call(reply.calls, turn=0)
    finally:
        rewards = await session.finish()

Calls are made in other threads and processes; the caller's event loop only waits. Every call has a
result after its deadline and a few seconds at the latest, whatever the tool does.
"""

import asyncio
import concurrent.futures
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from verl.agents.formats.base import ToolCall
from verl.agents.row_options import plain_row_kwargs
from verl.agents.tools.answers import TextLimit
from verl.agents.tools.config_file import read_tool_config
from verl.agents.tools.episode import CallSettings, EpisodeTools
from verl.agents.tools.homes import Home, make_homes
from verl.agents.tools.processes import NUM_PROCESSES
from verl.agents.tools.replay import CallKey, Recorder, Recording
from verl.agents.tools.results import (
    ToolCounts,
    ToolResult,
    consequence_of,
    heavier,
)
from verl.utils.errors import ConfigError, DataError, RolloutError
from verl.utils.registry import nearest_names
from verl.utils.threads import LoopThread

T = TypeVar("T")


class ToolSet:
    """The tools of a run. Sessions may be open in any number at once, in any event loop.

    Make it by `from_config`, and close it.
    """

    def __init__(
        self,
        homes: Mapping[str, Home],
        settings: CallSettings,
        *,
        supervisor: LoopThread | None,
        recording: Recording | None = None,
    ) -> None:
        self.settings = settings
        self.recorder: Recorder | None = None
        self.recording = recording
        self.tool_counts = ToolCounts()
        self._homes = dict(homes)
        self._supervisor = supervisor
        self._open: set[ToolSession] = set()
        self._schemas = {name: home.facts.schema for name, home in homes.items()}
        if recording is not None:
            self._schemas = {schema["function"]["name"]: schema for schema in recording.schemas}

    @classmethod
    def from_config(
        cls,
        tool_config_path: str | Path | None = None,
        function_tool_path: str | None = None,
        tools: Sequence[Any] = (),
        *,
        max_parallel_calls: int = 1,
        max_tool_response_length: int | None = 256,
        tool_response_truncate_side: str = "middle",
        timeout_s: float = 60.0,
        policy: str = "text",
        num_processes: int = NUM_PROCESSES,
        record_path: str | Path | None = None,
        replay_path: str | Path | None = None,
    ) -> "ToolSet":
        """Make the tools of a run.

        Classes of this package and `tools` live in this process; other classes and functions of a
        file live in helper processes, unless their config has `isolation: thread`.

        Args:
            tool_config_path: YAML file of `verl.agents.tools.config_file`.
            function_tool_path: Python file of `verl.agents.tools.functions`.
            tools: further tools, or functions.
            max_parallel_calls: calls of one turn that are made; others are refused with a text.
            max_tool_response_length: characters of an answer; None: no limit.
            tool_response_truncate_side: "left" keeps the beginning, "right" the end, "middle" both.
            timeout_s: deadline of a call with its retries, unless the tool has its own.
            policy: on a tool that fails: "text" gives the model the error, "mask" also keeps the
                turn that made the call out of the loss, "drop" drops the trajectory.
            num_processes: helper processes, at most.
            record_path: file that all results are appended to.
            replay_path: file of such results, which stand for the tools. No tool is made.

        Raises:
            ConfigError: a setting or a tool is wrong.
            DataError: a record cannot be read or written.
            VerlError: a tool raised it when it was made.
        """
        _check_positive("multi_turn.max_parallel_calls", max_parallel_calls)
        _check_positive("the deadline of tool calls, timeout_s,", timeout_s)
        settings = CallSettings(
            max_parallel_calls=max_parallel_calls,
            limit=TextLimit(max_tool_response_length, tool_response_truncate_side),
            timeout_s=timeout_s,
            consequence=consequence_of(policy),
        )
        if replay_path is not None:
            if record_path is not None:
                raise ConfigError(
                    "Tool calls can be recorded or replayed, not both. Unset record_path or "
                    "replay_path."
                )
            return cls({}, settings, supervisor=None, recording=Recording(replay_path))

        entries = [] if tool_config_path is None else read_tool_config(tool_config_path)
        supervisor = LoopThread("verl-tools")
        try:
            homes = make_homes(supervisor, entries, function_tool_path, tools, num_processes)
            made = cls(homes, settings, supervisor=supervisor)
            if record_path is not None:
                made.recorder = Recorder(record_path, made.schemas())
        except BaseException:
            supervisor.close()
            raise
        return made

    @property
    def names(self) -> list[str]:
        """Names of all tools, in the order of `schemas`."""
        return list(self._schemas)

    def schemas(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Return the schemas that a chat template prints, in the order of the configuration.

        Args:
            names: the tools that are offered; None: all.

        Raises:
            ConfigError: no tool has one of the names.
        """
        chosen = set(self._known(names))
        return [schema for name, schema in self._schemas.items() if name in chosen]

    async def open(
        self,
        episode: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        names: Iterable[str] | None = None,
        step: int = 0,
        row: int = 0,
    ) -> "ToolSession":
        """Begin a trajectory, and create the tools that its row has `create_kwargs` for.

        Args:
            episode: for the log.
            kwargs: `tools_kwargs` of the row: {tool: {create_kwargs, execute_kwargs,
                calc_reward_kwargs, release_kwargs}}. None stands for an absent value.
            names: the tools that are offered; calls of others are unknown. None: all.
            step, row: the trajectory's key in a record; `row` counts in the whole batch.

        Raises:
            ConfigError: `names` has a name that no tool has.
            DataError: `kwargs` has one.
        """
        row_kwargs = plain_row_kwargs(kwargs)
        for name in row_kwargs:
            if name not in self._schemas:
                raise DataError(
                    f"{episode}: tools_kwargs names the tool '{name}', which is not configured. "
                    f"Nearest known: {nearest_names(name, self.names)}. Correct the data, or add "
                    "the tool to multi_turn.tool_config_path."
                )

        offered = self._known(names)
        homes = {name: self._homes[name] for name in offered if name in self._homes}
        tools = EpisodeTools(episode, homes, row_kwargs, self.settings, self.tool_counts)
        session = ToolSession(self, tools, step=step, row=row)
        self._open.add(session)

        if self.recording is None:
            try:
                await asyncio.wrap_future(self.submit(tools.begin()))
            except BaseException:
                await session.finish()
                raise
        return session

    def counts(self, *, reset: bool = False) -> dict[str, float]:
        """Return counts and durations of calls since the start, or since the last reset.

        Keys: `tools/TOOL/OUTCOME`, `tools/TOOL/retried`, `tools/TOOL/METHOD_OUTCOME` of failed
        `create`, `calc_reward` and `release`, and `tools/TOOL/seconds/{mean,max}`. Names that no
        tool has are counted as `unknown_tool`.
        """
        return self.tool_counts.metrics(reset=reset)

    async def aclose(self) -> None:
        """Finish open sessions, then end threads and processes."""
        await asyncio.gather(*(session.finish() for session in list(self._open)))
        await asyncio.to_thread(self._shut_down)

    def close(self) -> None:
        """Do as `aclose`, from outside of an event loop."""
        if self._supervisor is not None:
            endings = [session.end() for session in list(self._open)]
            for ending in endings:
                ending.result()
        self._shut_down()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine in the loop of the hosts.

        Raises:
            RolloutError: the tools have been closed.
        """
        if self._supervisor is None:
            coroutine.close()
            raise RolloutError("The tools of this run have been closed. Open sessions before.")
        return self._supervisor.submit(coroutine)

    def forget(self, session: "ToolSession") -> None:
        """Take a finished session out of those that `aclose` finishes."""
        self._open.discard(session)

    def _known(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return self.names
        wanted = list(names)
        for name in wanted:
            if name not in self._schemas:
                raise ConfigError(
                    f"No tool is named '{name}'. Nearest known: {nearest_names(name, self.names)}."
                )
        return wanted

    def _shut_down(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        hosts = {id(home.host): home.host for home in self._homes.values()}
        for host in hosts.values():
            supervisor.call(host.close)
        supervisor.close()


class ToolSession:
    """The tools of one trajectory. `finish` must be called, whatever happens."""

    def __init__(self, tool_set: ToolSet, tools: EpisodeTools, *, step: int, row: int) -> None:
        self.tools = tools
        self._set = tool_set
        self._step = step
        self._row = row
        self._num_calls: dict[int, int] = {}  # by turn
        self._ending: concurrent.futures.Future[dict[str, float]] | None = None

    @property
    def consequence(self) -> str:
        """Return the heaviest consequence of the results so far, for the trajectory."""
        return self.tools.consequence

    async def call(
        self, calls: Sequence[ToolCall], *, turn: int, agent_data: Any = None
    ) -> list[ToolResult]:
        """Make the calls of one turn and return a result for each, in their order.

        When this is cancelled, so are the calls.

        Args:
            turn: number of the turn, the key of its calls in a record.
            agent_data: for tools that take it.

        Raises:
            DataError: a replay has no such call, or a result cannot be recorded.
        """
        first = self._num_calls.get(turn, 0)
        self._num_calls[turn] = first + len(calls)
        numbers = range(first, first + len(calls))
        keys = [CallKey(self._step, self._row, turn, number) for number in numbers]
        recording = self._set.recording
        if recording is not None:
            results = [self._replayed(recording, key, call) for key, call in zip(keys, calls)]
            for key in keys:
                _extra_fields(agent_data).update(recording.extra_fields(key))
            return results

        answers = self._set.submit(self._answer(keys, calls, agent_data))
        return await asyncio.wrap_future(answers)

    async def finish(self) -> dict[str, float]:
        """Return the reward of each tool that was created, and release them.

        A tool that fails at its reward is missing in the result. Goes on when it is cancelled;
        further calls return the same.

        Raises:
            DataError: a replay has no end of this trajectory.
        """
        recording = self._set.recording
        if recording is not None:
            self._set.forget(self)
            rewards, self.tools.consequence = recording.end(self._step, self._row)
            return rewards
        return await asyncio.shield(asyncio.wrap_future(self.end()))

    def end(self) -> "concurrent.futures.Future[dict[str, float]]":
        """Do as `finish`, without waiting."""
        if self._ending is None:
            self._ending = self._set.submit(self._end())
        return self._ending

    async def _answer(
        self, keys: Sequence[CallKey], calls: Sequence[ToolCall], agent_data: Any
    ) -> list[ToolResult]:
        """Answer calls and record the results. Runs in the loop of the hosts."""
        results = await self.tools.answer(calls, agent_data)
        if self._set.recorder is not None:
            for key, call, result in zip(keys, calls, results):
                after = _extra_fields(agent_data) if key == keys[-1] else None
                self._set.recorder.add_call(key, call, result, after)
        return results

    async def _end(self) -> dict[str, float]:
        """End the instances and record the rewards. Runs in the loop of the hosts."""
        rewards = await self.tools.finish()
        self._set.forget(self)
        if self._set.recorder is not None:
            self._set.recorder.add_end(self._step, self._row, rewards, self.consequence)
        return rewards

    def _replayed(self, recording: Recording, key: CallKey, call: ToolCall) -> ToolResult:
        result = recording.result(key, call)
        known = call.name if call.name in self._set.names else None
        self._set.tool_counts.add_call(known, result.failure or result.outcome, result.seconds)
        self.tools.consequence = heavier(self.consequence, result.consequence)
        return result


def _extra_fields(agent_data: Any) -> dict[str, Any]:
    """Return the `extra_fields` of an AgentData; no other object has any."""
    return getattr(agent_data, "extra_fields", {})


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, got {value}.")
