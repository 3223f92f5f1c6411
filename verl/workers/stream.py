"""Generation that goes on over several calls: the samples of asynchronous training."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from verl.rollout import Completion, Request, RolloutEngine, SamplingParams
from verl.rollout.goal import Goal, GoalWatch


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Samples for one engine to go on with."""

    requests: Sequence[Request]
    params: SamplingParams
    seed: int


@dataclass(kw_only=True)
class Progressed:
    """The news of one engine: samples that have ended, and samples that were frozen."""

    finished: list[Completion] = field(default_factory=list)
    frozen: list[Completion] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # in which the engine worked


def advance(engine: RolloutEngine, goal: Goal, most_steps: int | None) -> list[Completion]:
    """Step an engine until `goal` is reached, or `most_steps` are taken, or its work is done.

    Counts steps and not seconds, so that ranks which share an engine take as many.
    """
    watch = GoalWatch(goal)
    finished: list[Completion] = []
    steps = 0
    while engine.has_work and not watch.is_reached and steps != most_steps:
        ended = engine.step()
        steps += 1
        watch.note(completion.sample_id for completion in ended)
        finished += ended
    return finished


def freeze(engine: RolloutEngine) -> Progressed:
    """Take all samples out of an engine. Some may have ended since its last step."""
    frozen = engine.abort()
    finished: list[Completion] = []
    while engine.has_work:
        finished += engine.step()
    return Progressed(finished=finished, frozen=frozen)
