"""The tools of one trajectory: instances, deadlines and retries, and how every call is answered.

Runs in the loop that the hosts are used from, never in that of the engine.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from verl.agents.formats.base import ToolCall
from verl.agents.shared_state import describe_overwriting
from verl.agents.tools.answers import TextLimit, ToolAnswer, describe_failure
from verl.agents.tools.homes import Home
from verl.agents.tools.host import Done, Work
from verl.agents.tools.results import FAILURES, ToolCounts, ToolResult, heavier
from verl.utils.logging import logger

# Failures of one tool and kind that are logged; all are counted.
LOGGED_FAILURES = 3
RETRIED = ("error", "crashed")
RowKwargs = Mapping[str, Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True)
class CallSettings:
    """How calls of a run are made.

    `consequence`: of a failure, for its trajectory: "continue", "mask" or "drop".
    """

    max_parallel_calls: int
    limit: TextLimit
    timeout_s: float
    consequence: str


@dataclass
class _Instance:
    """An instance of a tool. It is lost when the place of its episode becomes another one."""

    identifier: str
    place: Any


class EpisodeTools:
    """Answers the calls of one trajectory.

    Args:
        name: for the log.
        homes: the tools that this trajectory may call.
        kwargs: {tool: {section: keywords}}, of the row.
    """

    def __init__(
        self,
        name: str,
        homes: Mapping[str, Home],
        kwargs: RowKwargs,
        settings: CallSettings,
        counts: ToolCounts,
    ) -> None:
        self.consequence = "continue"
        self._name = name
        self._key = uuid4().hex
        self._homes = homes
        self._kwargs = kwargs
        self._settings = settings
        self._counts = counts
        self._instances: dict[str, _Instance] = {}
        # A tool that is not parallel has one lock for its calls, each tool one for `create`.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._creations: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def begin(self) -> None:
        """Create the tools that the row has arguments for. A failed one is tried again when it is
        called."""
        names = [name for name in self._homes if self._keywords(name, "create")]
        await asyncio.gather(*(self._create_early(self._homes[name]) for name in names))

    async def answer(self, calls: Sequence[ToolCall], agent_data: Any) -> list[ToolResult]:
        """Return a result for each call, in their order."""
        answers = [
            self._answer_one(position, call, agent_data) for position, call in enumerate(calls)
        ]
        return await asyncio.gather(*answers)

    async def finish(self) -> dict[str, float]:
        """Return the reward of each tool that was created, and release them all.

        A tool that fails at its reward has none in the result.
        """
        instances, self._instances = self._instances, {}
        ends = [self._end_instance(name, instance) for name, instance in instances.items()]
        rewards = await asyncio.gather(*ends)
        for home in self._homes.values():
            home.host.leave(self._key)

        pairs = zip(instances, rewards)
        return {name: reward for name, reward in pairs if reward is not None}

    async def _answer_one(self, position: int, call: ToolCall, agent_data: Any) -> ToolResult:
        began = time.monotonic()
        tool = call.name if call.name in self._homes else None
        result = self._refuse(position, call)
        try:
            if result is None:
                done = await self._call(self._homes[call.name], call.arguments or {}, agent_data)
                result = self._result_of(call.name, done)
        except asyncio.CancelledError:
            self._counts.add_call(tool, "cancelled", time.monotonic() - began)
            raise

        result.seconds = time.monotonic() - began
        self._counts.add_call(tool, result.failure or result.outcome, result.seconds)
        return result

    def _refuse(self, position: int, call: ToolCall) -> ToolResult | None:
        """Return the answer to a call that is not made; None if it is."""
        cut = self._settings.limit.cut
        most = self._settings.max_parallel_calls
        if position >= most:
            text = (
                f"Error: this call was not made, because at most {most} tool "
                f"{'call is' if most == 1 else 'calls are'} allowed in one turn. Make it again in "
                "the next turn."
            )
            return ToolResult(cut(text), "over_cap")

        if call.arguments is None:
            text = call.error or "the call could not be read; expected a name and JSON arguments"
            return ToolResult(cut(f"Error: {text}"), "malformed")
        if call.name not in self._homes:
            names = ", ".join(self._homes) or "none"
            text = f"Error: there is no tool '{call.name[:100]}'. Tools: {names}."
            return ToolResult(cut(text), "unknown")
        return None

    def _result_of(self, tool: str, done: Done) -> ToolResult:
        if done.kind == "ok":
            answer: ToolAnswer = done.value
            self._warn_of_emptiness(tool, answer)
            return ToolResult(
                answer.text,
                "ok",
                reward=answer.reward,
                metrics=answer.metrics,
                images=answer.images,
                videos=answer.videos,
            )

        result = ToolResult(self._settings.limit.cut(done.text), done.kind)
        if done.kind in FAILURES:
            result.failure = done.kind
            result.consequence = self._note_failure(tool, done)
            if result.consequence == "drop":
                result.outcome = "dropped"
        return result

    def _warn_of_emptiness(self, tool: str, answer: ToolAnswer) -> None:
        """Warn once of a tool that answers nothing: mostly, its `return` is missing."""
        is_empty = not (answer.text or answer.images or answer.videos)
        if is_empty and self._counts.note(tool, "empty") == 1:
            logger.warning(
                "The tool '%s' gave an empty answer in %s, so the model reads nothing. Expected a "
                "text or an image; is a return statement missing?",
                tool,
                self._name,
            )

    def _note_failure(self, tool: str, done: Done, method: str = "") -> str:
        """Return the consequence of a failure, which the trajectory has from now on."""
        self._log_failure(tool, done, method)
        consequence = self._settings.consequence
        self.consequence = heavier(self.consequence, consequence)
        return consequence

    def _log_failure(self, tool: str, done: Done, method: str) -> None:
        kind = f"{method} {done.kind}".strip()
        if self._counts.note(tool, kind) > LOGGED_FAILURES:
            return
        details = f"\n{done.details}" if done.details else ""
        logger.warning(
            "The tool '%s' failed in %s (%s): %s%s", tool, self._name, kind, done.text, details
        )

    async def _call(self, home: Home, parameters: dict[str, Any], agent_data: Any) -> Done:
        if home.facts.parallel:
            return await self._try(home, parameters, agent_data)
        async with self._turns[home.facts.name]:
            return await self._try(home, parameters, agent_data)

    async def _try(self, home: Home, parameters: dict[str, Any], agent_data: Any) -> Done:
        """Make attempts until one succeeds, the retries are used up, or the time is over."""
        timeout_s = self._timeout_s(home)
        deadline = _Deadline(timeout_s)
        delay_s = home.facts.retry_delay_s

        for attempt in itertools.count():
            done = await self._attempt(home, parameters, agent_data, deadline)
            # A tool that gave up on its service before that says so itself.
            if done.kind == "timeout" and deadline.left_s <= 0:
                name = home.facts.name
                done.text = f"Error: the tool '{name}' did not answer within {timeout_s:g} s"
            is_last = attempt >= home.facts.retries or delay_s >= deadline.left_s
            if done.kind not in RETRIED or is_last:
                return done

            self._counts.add(home.facts.name, "retried")
            await asyncio.sleep(delay_s)
            delay_s *= 2
        raise AssertionError("the loop above has no end")

    async def _attempt(
        self, home: Home, parameters: dict[str, Any], agent_data: Any, deadline: "_Deadline"
    ) -> Done:
        created = await self._create(home, deadline)
        if isinstance(created, Done):
            return created
        work = self._work(home, "execute", created.identifier, deadline.left_s)
        work = work._replace(parameters=parameters)
        if home.facts.takes_agent_data:
            work = work._replace(agent_data=agent_data)
        return await self._perform(home, created.place, work)

    async def _perform(self, home: Home, place: Any, work: Work) -> Done:
        """Make a call, and warn once of a tool that keeps state where trajectories share it."""
        done = await home.host.perform(place, work)
        name = done.overwritten
        if name and self._counts.note(work.tool, "overwritten") == 1:
            logger.warning("%s", describe_overwriting(f"The tool '{work.tool}'", name))
        return done

    async def _create(self, home: Home, deadline: "_Deadline") -> "_Instance | Done":
        """Return the instance of this trajectory, made anew where it is lost."""
        name = home.facts.name
        async with self._creations[name]:
            began = time.monotonic()
            try:
                place = await home.host.place(self._key)
            except Exception as error:  # noqa: BLE001  (whatever making the tools raises)
                return Done("crashed", text=describe_failure(error, self._settings.limit))
            # The start of a process is not the call's own time.
            deadline.extend(time.monotonic() - began)

            if not home.facts.keeps_instances:
                return _Instance(self._key, place)
            instance = self._instances.get(name)
            if instance is not None and instance.place is place:
                return instance
            done = await self._perform(
                home, place, self._work(home, "create", self._key, deadline.left_s)
            )
            if done.kind != "ok":
                return done
            self._instances[name] = _Instance(done.value, place)
            return self._instances[name]

    async def _create_early(self, home: Home) -> None:
        deadline = _Deadline(self._timeout_s(home))
        created = await self._create(home, deadline)
        if isinstance(created, Done):
            self._counts.add(home.facts.name, f"create_{created.kind}")
            self._log_failure(home.facts.name, created, "create")

    async def _end_instance(self, tool: str, instance: _Instance) -> float | None:
        """Return the reward of an instance, or None where that fails, and release it."""
        home = self._homes[tool]
        timeout_s = self._timeout_s(home)
        reward = None
        for method in ("calc_reward", "release"):
            work = self._work(home, method, instance.identifier, timeout_s)
            done = await home.host.perform(instance.place, work)

            if done.kind != "ok":
                self._counts.add(tool, f"{method}_{done.kind}")
                if method == "calc_reward":
                    self._note_failure(tool, done, method)
            elif method == "calc_reward":
                reward = done.value
        return reward

    def _timeout_s(self, home: Home) -> float:
        return home.facts.timeout_s or self._settings.timeout_s

    def _work(self, home: Home, method: str, identifier: str, timeout_s: float) -> Work:
        return Work(
            method,
            home.facts.name,
            identifier,
            dict(self._keywords(home.facts.name, method)),
            timeout_s=max(timeout_s, 0.001),
            limit=self._settings.limit,
        )

    def _keywords(self, tool: str, method: str) -> Mapping[str, Any]:
        return self._kwargs.get(tool, {}).get(f"{method}_kwargs", {})


class _Deadline:
    """When a call must have ended."""

    def __init__(self, timeout_s: float) -> None:
        self._ends = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def extend(self, seconds: float) -> None:
        """Allow for a wait that is not the call's own."""
        self._ends += seconds
