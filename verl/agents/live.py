"""Episodes that go on while their engine stands still: its weights change, and tools do not notice.

The agents run in an event loop of their own, in a thread that never stops. The engine is stepped by
its owner's thread, which meets the agents between two steps: it gives them the turns that have
ended, and takes those that they ask for. A turn that is frozen is submitted again with its tokens
when generation goes on, under the weights of then.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verl.agents.engine_client import ROUNDS, EngineClient, EngineSteps, Generated, Work, turn_id
from verl.agents.loops import Episode, Tally
from verl.agents.runner import AgentRunner
from verl.rollout.goal import GoalWatch
from verl.rollout.trajectory import Trajectory
from verl.rollout.types import Completion, Continuation, Request
from verl.utils.errors import RolloutError
from verl.utils.threads import LoopThread

# How long a call that may be interrupted waits for agents that wait for their tools.
_PATIENCE_S = 0.02
Ended = list[tuple[int, list[Trajectory]]]  # row and trajectories of episodes


class TakenOut(Protocol):
    """The samples that were in an engine: those that go on later, and those that had ended."""

    frozen: list[Completion]
    finished: list[Completion]


@dataclass
class _Begun:
    """A turn in the engine, and the versions of the weights that drew its tokens."""

    request: Request
    versions: list[int] = field(default_factory=list)


class LiveClient(EngineClient):
    """A client whose turns can be frozen. All methods run in the agents' event loop."""

    def __init__(self, steps: EngineSteps, *, max_model_len: int) -> None:
        super().__init__(steps, max_model_len=max_model_len)
        self.places: dict[int, tuple[int, int]] = {}  # row -> its step and its row in that batch
        self._begun: dict[int, _Begun] = {}

    async def next_work(
        self,
        completions: Sequence[Completion],
        errors: Mapping[int, RolloutError],
        is_over: Callable[[], bool],
        patience_s: float | None,
    ) -> Work | None:
        """Give agents their turns, and return those that they ask for next.

        Args:
            is_over: asked when the agents have had time to go on; True ends the wait.
            patience_s: longest wait for agents that all wait for their tools; None: no limit.

        Returns None if it is over, or nothing was asked for in time.
        """
        self._deliver(completions, errors)
        while True:
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
            if is_over():
                return None
            if self._new or self._abandoned or self.steps.engine.has_work:
                return self._take_work()

            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), patience_s)
            except asyncio.TimeoutError:
                return None

    async def freeze(self, aborted: Sequence[Completion], ended: Sequence[Completion]) -> None:
        """Keep the tokens of turns that were taken out of the engine, and give agents the others.

        Turns that are kept are submitted again with the next work.
        """
        self._deliver(ended, {})

        for completion in aborted:
            sample_id = completion.sample_id
            begun = self._begun[sample_id]
            if sample_id not in self._waiting:
                del self._begun[sample_id]  # its agent has given it up
                continue

            self._add_versions(begun, completion)
            assert begun.request.continuations is not None
            continued = replace(
                begun.request.continuations[0],
                token_ids=tuple(completion.token_ids),
                log_probs=tuple(completion.log_probs),
            )
            self._new[sample_id] = replace(begun.request, continuations=(continued,))

        for sample_id in self._abandoned:
            self._begun.pop(sample_id, None)
        self._abandoned = set()  # nothing is left in the engine

    def _deliver(
        self, completions: Sequence[Completion], errors: Mapping[int, RolloutError]
    ) -> None:
        super()._deliver(completions, errors)
        for sample_id in errors:
            self._begun.pop(sample_id, None)

    def _abandon(self, sample_id: int) -> None:
        if sample_id in self._new:
            self._begun.pop(sample_id, None)  # frozen, or not begun
        super()._abandon(sample_id)

    def note_arrival(self) -> None:
        """End a wait in `next_work`."""
        self._arrived.set()

    def _take_work(self) -> Work:
        for sample_id, request in self._new.items():
            if sample_id in self._begun:
                self._begun[sample_id].request = request
            else:
                self._begun[sample_id] = _Begun(request)
        for sample_id in self._abandoned:
            self._begun.pop(sample_id, None)
        return super()._take_work()

    def _noise(self, row: int, turn: int) -> tuple[Continuation, ...]:
        step, own_row = self.places[row]
        return (Continuation(step=step, number=turn_id(own_row, turn)),)

    def _generated(self, completion: Completion) -> Generated:
        begun = self._begun.pop(completion.sample_id)
        self._add_versions(begun, completion)
        return replace(super()._generated(completion), versions=begun.versions)

    def _add_versions(self, begun: _Begun, completion: Completion) -> None:
        new = len(completion.token_ids) - len(begun.versions)
        begun.versions += [self.version] * new


class LiveEpisodes:
    """Plays episodes over several calls. The engine has no work between `freeze` and `start`.

    Args:
        runner: loops, tools and interactions.
        steps: the calls on the engine.
        max_model_len: most tokens of a prompt and its response together.
        announce: called before every step of the engine with its work, and with None after the last
            one of a call, where other ranks share the engine and must make the same calls.
    """

    def __init__(
        self,
        runner: AgentRunner,
        steps: EngineSteps,
        *,
        max_model_len: int,
        announce: Callable[[Work | None], Any] | None = None,
    ) -> None:
        self.runner = runner.apart()
        self.client = LiveClient(steps, max_model_len=max_model_len)
        self._steps = steps
        self._announce = announce
        self._thread = LoopThread("verl-episodes")
        self._at_once = asyncio.Semaphore(self.runner.most_at_once)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended: Ended = []
        self._error: BaseException | None = None

    @property
    def num_at_work(self) -> int:
        """How many episodes have not ended."""
        return len(self._tasks)

    def start(self, episodes: Sequence[Episode], version: int) -> None:
        """Begin episodes, next to those at work.

        Args:
            version: of the weights that generate from now on.
        """
        self._meet(self._start(episodes, version))

    def advance(self, watch: GoalWatch, most_steps: int | None) -> Ended:
        """Play until `watch` is reached, all have ended, or the engine has taken `most_steps`.

        Returns the episodes that have ended since the last call. With `most_steps` it also returns
        where all agents wait for their tools.
        """
        ended: Ended = []

        def is_over() -> bool:
            news = self._take_ended()
            ended.extend(news)
            watch.note(row for row, _ in news)
            return watch.is_reached or not self._tasks or steps == most_steps

        patience_s = None if most_steps is None else _PATIENCE_S
        completions: list[Completion] = []
        errors: dict[int, RolloutError] = {}
        steps = 0
        try:
            while True:
                work = self._meet(self.client.next_work(completions, errors, is_over, patience_s))
                if work is None:
                    return ended
                if self._announce is not None:
                    self._announce(work)
                completions, errors = self._steps.take(work)
                steps += 1
                if not self._steps.engine.has_work:
                    self.client.count()
        finally:
            if self._announce is not None:
                self._announce(None)

    def freeze(self, take_out: Callable[[], TakenOut]) -> Ended:
        """Take all turns out of the engine. Return the episodes that have ended meanwhile.

        Args:
            take_out: leaves the engine without work.
        """
        had_work = self._steps.engine.has_work
        taken = take_out()
        if had_work:
            self.client.count()
        self._meet(self.client.freeze(taken.frozen, taken.finished))
        return self._take_ended()

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the engine's counters and the agents' metrics since the last call."""
        return self._meet(self._take_metrics())

    def close(self) -> None:
        """End all episodes."""
        self._meet(self._cancel())
        self._thread.close()

    def _take_ended(self) -> Ended:
        """Return the episodes that have ended since the last call, or raise the error of one."""
        if self._error is not None:
            raise self._error
        ended = self._ended
        self._ended = []
        return ended

    # ---------------------------------------------------------------- in the agents' loop

    def _meet(self, work: Any) -> Any:
        """Run a coroutine in the agents' loop, while this thread waits."""
        return self._thread.submit(work).result()

    async def _start(self, episodes: Sequence[Episode], version: int) -> None:
        self.client.version = version
        self.runner.prepare(episodes, self.client)
        for episode in episodes:
            self.client.places[episode.row] = episode.step, episode.own_row
            self._tasks[episode.row] = asyncio.ensure_future(self._play(episode))

    async def _play(self, episode: Episode) -> None:
        try:
            async with self._at_once:
                trajectories = await self.runner.play_one(episode)
            self._ended.append((episode.row, trajectories))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001  (raised by the thread that steps the engine)
            self._error = error
        finally:
            del self._tasks[episode.row]
            del self.client.places[episode.row]
            self.client.note_arrival()

    async def _take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        counters = self.client.counters
        metrics = self.runner.metrics()
        self.client.counters = {}
        self.runner.context.tally = Tally()
        return counters, metrics

    async def _cancel(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
