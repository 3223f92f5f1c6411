"""Generate over several calls, as asynchronous training does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from verl import agents
from verl.distributed.collectives import Axis, gather_objects
from verl.protocol import DataProto
from verl.rollout import Completion, Request, RolloutEngine, SamplingParams
from verl.rollout.goal import Goal, GoalWatch
from verl.rollout.trajectory import Trajectory
from verl.rollout.types import Room

if TYPE_CHECKING:
    from verl.rollout.embedded.engine import EmbeddedEngine


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Samples for one engine to go on with."""

    requests: Sequence[Request]
    params: SamplingParams
    seed: int


@dataclass(frozen=True, kw_only=True)
class GroupOrder:
    """Episodes of one prompt to begin.

    Args:
        prompt: one row, with the columns that agent loops read.
        step: of the batch that the prompt belongs to.
        first_id: id of the prompt's first episode among all at work.
        samples: the episodes to begin, by their numbers among those of the prompt.
    """

    prompt: DataProto
    step: int
    first_id: int
    samples: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class EpisodeOrders:
    """Episodes for one engine to begin, next to those at work.

    Args:
        n: episodes of a prompt.
        version: of the weights that generate from now on.
        num_at_work: episodes at work with these.
    """

    groups: Sequence[GroupOrder]
    n: int
    params: SamplingParams
    seed: int
    version: int
    num_at_work: int


@dataclass(kw_only=True)
class Progressed:
    """The news of one engine: samples that have ended, and samples that were frozen.

    Of agents these are `episodes`, by their ids; those at work keep their turns themselves.
    """

    finished: list[Completion] = field(default_factory=list)
    frozen: list[Completion] = field(default_factory=list)
    episodes: list[tuple[int, list[Trajectory]]] = field(default_factory=list)
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


def freeze(engine: RolloutEngine, *, keep: bool) -> Progressed:
    """Take all samples out of an engine. Some may have ended since its last step.

    `keep` holds their keys and values, see `EmbeddedEngine.freeze`.
    """
    frozen = cast("EmbeddedEngine", engine).freeze() if keep else engine.abort()
    finished: list[Completion] = []
    while engine.has_work:
        finished += engine.step()
    return Progressed(finished=finished, frozen=frozen)


class EpisodeStream:
    """Episodes on one engine. Ranks that share it make the engine's calls as the first one does.

    Args:
        runner: plays the episodes of this rank.
        engine: with weights.
        sharing: the ranks that share the engine.
        longest: most tokens of a prompt and its response together.
        vocabulary: number of tokens that the model embeds.
    """

    def __init__(
        self,
        runner: "agents.AgentRunner",
        engine: RolloutEngine,
        sharing: Axis,
        longest: int,
        vocabulary: int,
    ) -> None:
        self._runner = runner
        self._engine = engine
        self._sharing = sharing
        self._longest = longest
        self._vocabulary = vocabulary
        self._steps: agents.EngineSteps | None = None
        self._live: agents.LiveEpisodes | None = None  # on the rank that plays them
        self._is_frozen = True

    def start(self, orders: EpisodeOrders) -> None:
        """Begin episodes, next to those at work, which go on."""
        if self._is_frozen:
            self._engine.forget_prefixes()
            self._engine.reserve(Room(sequences=orders.num_at_work, tokens=self._longest))
            self._is_frozen = False

        if self._steps is None:
            # Each turn has the step of its own episode.
            self._steps = agents.EngineSteps(
                self._engine, orders.params, orders.seed, step=0, vocabulary=self._vocabulary
            )
            if self._sharing.rank == 0:
                self._live = agents.LiveEpisodes(
                    self._runner,
                    self._steps,
                    max_model_len=self._longest,
                    announce=partial(gather_objects, axis=self._sharing),
                )

        if self._live is not None:
            self._live.start(episodes_to_begin(orders), orders.version)

    def advance(self, goal: Goal, most_steps: int | None) -> list[tuple[int, list[Trajectory]]]:
        """Play until `goal` is reached; see `LiveEpisodes.advance`."""
        assert self._steps is not None, "start comes first"
        if self._live is not None:
            return self._live.advance(GoalWatch(goal), most_steps)
        follow(self._steps, self._sharing)
        return []

    def freeze(self, *, keep: bool) -> list[tuple[int, list[Trajectory]]]:
        """Take all turns out of the engine; see `freeze`. The agents keep their tokens."""
        self._is_frozen = True
        take_out = partial(freeze, self._engine, keep=keep)
        if self._live is not None:
            return self._live.freeze(take_out)
        take_out()
        return []

    def take_metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the engine's counters and the agents' metrics since the last call."""
        if self._live is None:
            return {}, {}
        return self._live.take_metrics()

    def close(self) -> None:
        """End all episodes."""
        if self._live is not None:
            self._live.close()


def episodes_to_begin(orders: EpisodeOrders) -> list["agents.Episode"]:
    """Return the episodes of all groups, with their ids as rows."""
    begun = []
    for group in orders.groups:
        columns = group.prompt.non_tensor_batch
        own = agents.episodes_of(columns, orders.n, step=group.step, record_step=group.step)
        for sample in group.samples:
            episode = own[sample]
            begun.append(replace(episode, row=group.first_id + sample, row_in_batch=episode.row))
    return begun


def follow(steps: "agents.EngineSteps", sharing: Axis) -> Any:
    """Make the engine's calls as the first of its ranks does. Return the message that ends them."""
    while True:
        message = gather_objects(None, sharing)[0]
        if not isinstance(message, agents.Work):
            return message
        steps.take(message)
