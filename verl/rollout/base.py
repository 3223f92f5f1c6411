"""The contract of a rollout engine, and the registry of engines."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import RolloutError
from verl.utils.registry import Registry
from verl.weight_sync import WeightTaker


class RolloutEngine(WeightTaker, Protocol):
    """Turns requests into completions. It can be asked at any time.

    The engine owns its KV cache; where its dtype and layout agree with the trainer's, its weights
    alias them, otherwise it owns copies at stable addresses. Between `sleep` and `wake` no page and
    no weight copy stays on the device and `submit` raises EngineAsleepError. Completions come as
    they finish, each sample exactly once.
    """

    @property
    def has_work(self) -> bool:
        """Whether some sample that was submitted has not been given back yet."""
        ...

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """Add requests to those at work.

        The noise of a sample depends on (seed, step, sample id, position) alone. Raises
        RolloutError for a request that cannot be served, and takes none of them then.
        """
        ...

    def step(self) -> list[Completion]:
        """Go on for a while; gives the samples that have ended, often none."""
        ...

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """Give up samples, or all of them.

        Gives each with the tokens drawn so far, maybe none, their log-probs, and the finish reason
        "abort". An id that is not at work is ignored.
        """
        ...

    def sleep(self) -> None:
        """Give the device memory back for training."""
        ...

    def wake(self) -> None:
        """Make `submit` possible again."""
        ...

    def forget_prefixes(self) -> None:
        """Keep nothing of earlier prompts. A resumed run starts without them, and draws what this
        one draws only if this one does, too."""
        ...

    def statistics(self) -> dict[str, float]:
        """Counters since the engine last began to work: prefill_tokens, decode_steps, preemptions,
        peak_pages ..."""
        ...


class Completions(Iterator[Completion]):
    """Steps an engine until it has no work. Closing it early aborts what is left."""

    def __init__(self, engine: RolloutEngine, sample_ids: Iterable[int]) -> None:
        self._engine = engine
        self._unfinished = set(sample_ids)
        self._finished: deque[Completion] = deque()

    def __next__(self) -> Completion:
        while not self._finished:
            if not self._engine.has_work:
                self._unfinished.clear()
                raise StopIteration
            completions = self._engine.step()
            self._finished.extend(completions)
            self._unfinished.difference_update(each.sample_id for each in completions)
        return self._finished.popleft()

    def close(self) -> None:
        """Abort what is left of these samples; an engine may be at others by now."""
        if self._unfinished:
            self._engine.abort(self._unfinished)
            self._unfinished = set()
        self._finished.clear()

    __del__ = close


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    *,
    seed: int,
    step: int,
) -> Completions:
    """Sample every request with an engine that has no other work; gives completions as they finish.

    Raises RolloutError at once for a request that cannot be served.
    """
    if engine.has_work:
        raise RolloutError(
            "A generate() of this engine is not finished; exhaust or close its iterator first."
        )
    engine.submit(requests, params, seed=seed, step=step)
    return Completions(engine, [number for each in requests for number in each.sample_ids])


class GenerateOnly:
    """An engine that has `generate` alone, with the verbs of a `RolloutEngine` on top.

    Requests of one `submit` are one call of `generate`, begun when those before it have ended. What
    has been drawn of an aborted sample is not known, so it comes back empty.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._calls: deque[Iterator[Completion]] = deque()
        self._unfinished: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def has_work(self) -> bool:
        return bool(self._calls)

    def submit(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> None:
        """See `RolloutEngine.submit`."""
        call = self._engine.generate(requests, params, seed=seed, step=step)
        self._calls.append(iter(call))
        for request in requests:
            self._unfinished.update(request.sample_ids)

    def step(self) -> list[Completion]:
        """See `RolloutEngine.step`."""
        while self._calls:
            completion = next(self._calls[0], None)
            if completion is None:
                self._calls.popleft()
            elif completion.sample_id in self._unfinished:
                self._unfinished.discard(completion.sample_id)
                return [completion]
        return []

    def abort(self, sample_ids: Iterable[int] | None = None) -> list[Completion]:
        """See `RolloutEngine.abort`."""
        wanted = self._unfinished if sample_ids is None else self._unfinished & set(sample_ids)
        aborted = []
        for sample_id in sorted(wanted):
            aborted.append(
                Completion(sample_id=sample_id, token_ids=[], log_probs=[], finish_reason="abort")
            )
        self._unfinished = self._unfinished - wanted
        if not self._unfinished:
            self._calls.clear()
        return aborted


# name -> factory(model, tokenizer, rollout config, device) -> engine
rollout_engines: Registry[Callable[..., RolloutEngine]] = Registry(
    "rollout engine (actor_rollout_ref.rollout.name)"
)
