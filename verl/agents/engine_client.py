"""The engine as agents see it: `await generate(...)`, many at a time, in one asyncio loop."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.models.pictures import Pictures
from verl.rollout.base import RolloutEngine
from verl.rollout.checks import checked_ids
from verl.rollout.trajectory import MODEL, Segment
from verl.rollout.types import Completion, Continuation, Request, SamplingParams
from verl.utils.errors import DataError, RolloutError

# Rows of a batch are below this, so that a sample id holds row and turn side by side.
_ROWS = 1 << 32
_TURNS = 1 << 20
# Rounds of the event loop between two steps of the engine. Agents that a completion wakes come to
# their next request within a few rounds, and requests that come together are prefilled together.
ROUNDS = 4
# Between two looks at the device, much less than a step. Tools have threads of their own, which run
# Python only while this one sleeps.
_POLL_S = 0.0003


@dataclass(frozen=True)
class Work:
    """The calls before one step of an engine: requests to submit, samples to abort."""

    requests: list[Request]
    abandoned: set[int]


@dataclass(frozen=True)
class EngineSteps:
    """Makes the calls of `Work` on an engine: alike on every rank that shares it.

    Args:
        engine: with weights.
        params: of all turns. A turn's own limit may be lower than `max_new_tokens`.
        seed: of the run.
        step: of the training.
        vocabulary: number of tokens that the model embeds; None: unknown.
    """

    engine: RolloutEngine
    params: SamplingParams
    seed: int
    step: int
    vocabulary: int | None = None

    def take(self, work: Work) -> tuple[list[Completion], dict[int, RolloutError]]:
        """Take one step. Return the finished samples, and the errors of refused ones by id."""
        if work.abandoned:
            self.engine.abort(work.abandoned)
        errors: dict[int, RolloutError] = {}
        if work.requests:
            self._submit(work.requests, errors)
        # Nothing may be left after an abort, and a user's engine steps only with work.
        completions = self.engine.step() if self.engine.has_work else []
        return completions, errors

    def _submit(self, requests: list[Request], errors: dict[int, RolloutError]) -> None:
        """Submit all requests, or each by itself where the engine refuses one of them."""
        try:
            self.engine.submit(requests, self.params, seed=self.seed, step=self.step)
        except RolloutError as error:
            if len(requests) == 1:
                errors.update(dict.fromkeys(requests[0].sample_ids, error))
                return
            for request in requests:
                self._submit([request], errors)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The tokens that the engine drew in one turn.

    Args:
        token_ids: the tokens, the end-of-turn token included where one was drawn.
        log_probs: one for each token.
        finish_reason: "stop", "length" or "abort".
        version: number of the weights that drew them.
        versions: one for each token, where several weights drew them.
        routed_experts: see `Completion.routed_experts`.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    version: int = 0
    versions: list[int] | None = None
    routed_experts: NDArray[np.integer] | None = None

    def first(self, count: int) -> "Generated":
        """Return the first `count` tokens alone."""
        versions = self.versions
        experts = self.routed_experts
        return replace(
            self,
            token_ids=self.token_ids[:count],
            log_probs=self.log_probs[:count],
            versions=None if versions is None else versions[:count],
            routed_experts=None if experts is None else experts[:count],
        )

    def segment(self, turn: int) -> Segment:
        """Return the tokens as those of a turn of a trajectory."""
        return Segment(
            source=MODEL,
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            version=self.version,
            versions=self.versions,
            turn=turn,
            routed_experts=self.routed_experts,
        )


def merged(requests: Sequence[Request]) -> list[Request]:
    """Join requests for one sample each that have the same prompt, which is then computed once."""
    if len(requests) == 1:
        return list(requests)  # a hash reads the whole prompt
    together: dict[tuple[Any, ...], list[Request]] = {}
    for request in requests:
        seen = tuple(picture.key for picture in request.pictures)
        together.setdefault((request.prompt_ids, seen), []).append(request)

    joined = []
    for same in together.values():
        sample_ids = tuple(request.sample_ids[0] for request in same)
        limits = tuple(request.limits[0] for request in same if request.limits)
        assert len(limits) == len(same), "every turn has a limit"
        begun = []
        for request in same:
            begun += request.continuations or ()
        continuations = tuple(begun) or None
        joined.append(
            replace(same[0], sample_ids=sample_ids, limits=limits, continuations=continuations)
        )
    return joined


def turn_id(row: int, turn: int) -> int:
    """Return the sample id of a turn, which fixes its noise. That of turn 0 is `row` itself."""
    assert 0 <= row < _ROWS
    assert 0 <= turn < _TURNS
    return turn * _ROWS + row


class EngineClient:
    """Submits turns to an engine and steps it while any agent waits for tokens.

    The noise of a turn is a function of (seed, step, row, turn, position), so the order in which
    agents or their tools come back changes no draw.

    Args:
        steps: the calls on an idle engine, which has weights.
        max_model_len: most tokens of a prompt and its response together.
        version: number of the weights.
        announce: called before every step of the engine with its work, where other ranks share the
            engine and must make the same calls.
    """

    def __init__(
        self,
        steps: EngineSteps,
        *,
        max_model_len: int,
        version: int = 0,
        announce: Callable[[Work], Any] | None = None,
    ) -> None:
        if steps.engine.has_work:
            raise RolloutError("The engine is busy; agents need one that has no work.")
        self.steps = steps
        self.max_model_len = max_model_len
        self.version = version
        self.counters: dict[str, float] = {}
        self._announce = announce
        self._new: dict[int, Request] = {}
        self._waiting: dict[int, asyncio.Future[Generated]] = {}
        self._abandoned: set[int] = set()
        self._arrived = asyncio.Event()
        self._is_over = False

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of all turns."""
        return self.steps.params

    def room_after(self, prompt_ids: Sequence[int], title: str) -> int:
        """Return the most tokens that fit after a prompt. Raises DataError where none fits.

        Args:
            title: of the turn that draws, for the message.
        """
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise DataError(
                f"{title} has a prompt of {len(prompt_ids)} tokens, which leaves no room in "
                f"{self.max_model_len}. End the episode before, raise "
                "actor_rollout_ref.rollout.max_model_len, or drop such episodes: "
                "actor_rollout_ref.rollout.agent.on_error=drop."
            )
        return room

    async def generate(
        self,
        *,
        prompt_ids: Sequence[int],
        row: int,
        turn: int = 0,
        limit: int | None = None,
        pictures: Pictures = (),
    ) -> Generated:
        """Draw one turn after `prompt_ids`. A caller that is cancelled aborts it.

        Args:
            row: number of the sample in the whole batch.
            turn: number of the model's turn in the episode.
            limit: most tokens; None: those of the sampling parameters.
            pictures: of the prompt, in the order of their tokens.

        Raises RolloutError for a prompt that the engine cannot continue, and after `serve`, when
        nothing would answer.
        """
        if self._is_over:
            raise RolloutError("The episodes of this batch are over; no turn can be drawn.")
        sample_id = turn_id(row, turn)
        if sample_id in self._waiting:
            raise RolloutError(
                f"Turn {turn} of sample {row} is being generated already. Give each request of an "
                "episode a turn of its own."
            )
        most = self.params.max_new_tokens
        limits = (most if limit is None else min(limit, most),)
        request = Request(
            prompt_ids=tuple(prompt_ids),
            sample_ids=(sample_id,),
            limits=limits,
            continuations=self._noise(row, turn),
            pictures=pictures,
        )

        answer = asyncio.get_running_loop().create_future()
        self._waiting[sample_id] = answer
        self._new[sample_id] = request
        self._arrived.set()
        try:
            return await answer
        except asyncio.CancelledError:
            self._abandon(sample_id)
            raise

    async def serve(self, work: Awaitable[Any]) -> Any:
        """Step the engine until `work` is done. Return its result.

        An error of the engine ends the work, and the other way round; nothing stays in the engine.
        """
        worker = asyncio.ensure_future(work)
        stepper = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({worker, stepper}, return_when=asyncio.FIRST_COMPLETED)
            if stepper.done():
                stepper.result()  # it ends by an error alone
            return await worker
        finally:
            self._is_over = True
            for task in (worker, stepper):
                task.cancel()
            await asyncio.gather(worker, stepper, return_exceptions=True)
            self.steps.engine.abort()

    async def _run(self) -> None:
        while True:
            await self._let_agents_go_on()
            if self._new or self.steps.engine.has_work:
                self._step()
                continue
            self._arrived.clear()
            await self._arrived.wait()

    async def _let_agents_go_on(self) -> None:
        """Run the agents for some rounds, and as long as the device computes."""
        engine = self.steps.engine
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        # A user's engine may not know.
        while not getattr(engine, "is_ready", True):
            # asyncio's own sleep rounds up to a millisecond, a third of a step.
            time.sleep(_POLL_S)
            await asyncio.sleep(0)

    def _step(self) -> None:
        """Submit the turns that have come, and take one step of the engine."""
        work = self._take_work()
        if self._announce is not None:
            self._announce(work)
        self._deliver(*self.steps.take(work))
        if not self.steps.engine.has_work:
            self.count()

    def _take_work(self) -> Work:
        """Return the turns that have come and those that were given up since the last call."""
        # By id, so that the order of arrival within a round has no effect.
        requests = merged([self._new[sample_id] for sample_id in sorted(self._new)])
        work = Work(requests, self._abandoned)
        self._new = {}
        self._abandoned = set()
        return work

    def _deliver(
        self, completions: Sequence[Completion], errors: Mapping[int, RolloutError]
    ) -> None:
        """Give the agents the turns that have ended, and the errors of refused ones by id."""
        for sample_id, error in errors.items():
            answer = self._waiting.pop(sample_id, None)
            if answer is not None and not answer.done():
                answer.set_exception(error)
        for completion in completions:
            answer = self._waiting.pop(completion.sample_id, None)
            if answer is not None and not answer.done():
                answer.set_result(self._generated(completion))

    def _noise(self, row: int, turn: int) -> tuple[Continuation, ...] | None:
        """Return the noise of a turn, if it is not that of (`steps.step`, row, turn)."""
        return None

    def _generated(self, completion: Completion) -> Generated:
        # Agents decode the tokens, which fails without a name of the sample for an id below 0.
        row = completion.sample_id % _ROWS
        checked_ids(completion.token_ids, row, self.steps.vocabulary)
        return Generated(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            finish_reason=completion.finish_reason,
            version=self.version,
            routed_experts=completion.routed_experts,
        )

    def _abandon(self, sample_id: int) -> None:
        self._waiting.pop(sample_id, None)
        if self._new.pop(sample_id, None) is None:
            self._abandoned.add(sample_id)
            self._arrived.set()

    def count(self) -> None:
        """Add the counters of the run of the engine that has just ended."""
        for name, value in self.steps.engine.statistics().items():
            if name.startswith(("peak_", "num_", "memory_", "capture_", "update_")):
                self.counters[name] = max(value, self.counters.get(name, 0.0))
            elif name != "tokens_per_s":
                self.counters[name] = self.counters.get(name, 0.0) + value
        seconds = self.counters.get("generate_s", 0.0)
        if seconds and "generated_tokens" in self.counters:
            self.counters["tokens_per_s"] = self.counters["generated_tokens"] / seconds
