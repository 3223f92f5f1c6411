"""The books of asynchronous training: every trajectory is in exactly one state.

    admitted -> running -> waiting -> consumed
                  |  ^
                  v  |
                 frozen

The book holds no model and no clock. It decides which groups may start, when enough of them are
whole, and which make the next batch. Three rules keep each token within the bound and throw nothing
away:

1. A group that starts under weights v is due at the last step at which v is within the bound.
2. It may start only where the steps until then have room for all groups that have started.
3. A batch takes whole groups, those due first; it waits where the others could not all be in time.

A step that finds nothing to learn from in some groups of its batch takes others instead (`reopen`).
The rules hold then as well: a group that was taken makes room for another one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain, groupby
from typing import Any

from verl.models.pictures import Picture, packed_pictures, unpacked_pictures
from verl.rollout.goal import Goal
from verl.rollout.saved_trajectories import (
    PackedSegment,
    packed_segments,
    packed_trajectory,
    unpacked_segments,
    unpacked_trajectory,
)
from verl.rollout.trajectory import MODEL, Segment, Trajectory


class State(str, Enum):
    """Where a trajectory is."""

    ADMITTED = "admitted"  # its prompt was read; no token is drawn
    RUNNING = "running"  # in an engine
    FROZEN = "frozen"  # out of the engine, with the tokens drawn so far; or a half-played episode
    WAITING = "waiting"  # whole, and not learned from yet
    CONSUMED = "consumed"


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How far generation may run ahead.

    Args:
        groups_per_step: groups (prompts) in a batch.
        max_staleness: most versions between the weights that drew a token and those that learn from
            it.
        steps_per_version: training steps between two hand-overs of weights.
        total_steps: of the run.
        max_started: most groups that have started and are not consumed.
        is_bound: whether batches wait for groups that are due. If not, `max_staleness` is no bound.
        is_partial: whether unfinished samples may be frozen. If not, all that run end first.
        first_version: of step 1. A resumed run with other `steps_per_version` counts on from the
            versions of its checkpoint, so this is the number that step 1 would have.
    """

    groups_per_step: int
    max_staleness: int = 1
    steps_per_version: int = 1
    total_steps: int = 1 << 62
    max_started: int = 1 << 62
    is_bound: bool = True
    is_partial: bool = True
    first_version: int = 0

    def version_of(self, step: int) -> int:
        """Return the version of the weights that step `step`, counted from 1, updates."""
        return self.first_version + (step - 1) // self.steps_per_version

    def last_step(self, version: int) -> int:
        """Return the last step that may learn from a token of `version`."""
        return (version - self.first_version + self.max_staleness + 1) * self.steps_per_version

    @property
    def is_ahead(self) -> bool:
        """Return whether groups may start before the step that learns from them."""
        return not self.is_bound or self.max_staleness > 0 or self.steps_per_version > 1


@dataclass(eq=False, slots=True)
class Sample:
    """One trajectory: its state, and its tokens as one segment for each version of the weights.

    An episode of agents has the drawn segments of all its `trajectories`, once it has ended.
    """

    sample_id: int
    state: State = State.ADMITTED
    segments: list[Segment] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens drawn so far."""
        token_ids: list[int] = []
        for segment in self.segments:
            token_ids += segment.token_ids
        return tuple(token_ids)

    @property
    def log_probs(self) -> tuple[float, ...]:
        """Return the log-prob of each token."""
        log_probs: list[float] = []
        for segment in self.segments:
            log_probs += segment.log_probs or ()
        return tuple(log_probs)

    @property
    def span(self) -> int:
        """Return the versions between its oldest and its newest token."""
        if not self.segments:
            return 0
        oldest = min(segment.version_range[0] for segment in self.segments)
        newest = max(segment.version_range[1] for segment in self.segments)
        return newest - oldest

    @property
    def is_half_played(self) -> bool:
        """Return whether it is an episode that has begun and not ended.

        Its agent has the tokens.
        """
        return self.state is State.FROZEN and not self.segments

    def grow(self, token_ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Take all tokens of the sample; those that are new were drawn by `version`."""
        known = sum(len(segment.token_ids) for segment in self.segments)
        assert len(token_ids) >= known, "tokens that were drawn are kept"
        if len(token_ids) > known:
            new = Segment(
                source=MODEL,
                token_ids=token_ids[known:],
                log_probs=log_probs[known:],
                version=version,
            )
            self.segments.append(new)


@dataclass(eq=False, slots=True)
class Group:
    """The samples of one prompt, which are learned from together.

    Args:
        serial: its place in the order of admission, from 0.
        step, row: number of its batch of prompts and its row there, which fix the noise.
        born: version of its oldest token; while none is drawn, of the weights it was started with.
    """

    serial: int
    step: int
    row: int
    samples: list[Sample]
    payload: Any = None
    born: int | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether all samples have ended."""
        return all(sample.state is State.WAITING for sample in self.samples)

    @property
    def running(self) -> list[Sample]:
        """Return the samples that engines draw."""
        return [sample for sample in self.samples if sample.state is State.RUNNING]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens drawn so far."""
        return sum(len(sample.token_ids) for sample in self.samples)

    def age_order(self) -> tuple[int, int]:
        """Return a sort key: oldest first."""
        assert self.born is not None
        return self.born, self.serial


# Attributes of the books that a checkpoint has as they are.
_COUNTERS = (
    *("version", "next_step", "admitted", "last_batch"),
    *("discarded_groups", "discarded_tokens", "replayed_episodes"),
)


class Book:
    """The groups of a run, from admission to consumption.

    Args:
        pace: how far generation may run ahead.
        samples: of a prompt.
    """

    def __init__(self, pace: Pace, samples: int) -> None:
        self.pace = pace
        self.num_samples = samples
        self.version = 0  # of the weights that generate
        self.next_step = 1  # the step whose batch is taken next
        self.missing = pace.groups_per_step  # groups of that batch
        self.admitted = 0  # groups so far
        self.last_batch = 0  # of prompts, that was admitted
        self.discarded_groups = 0
        self.discarded_tokens = 0
        self.replayed_episodes = 0  # half-played ones that a resume began anew
        self.groups: list[Group] = []  # not consumed, in the order of admission
        self._by_id: dict[int, tuple[Group, Sample]] = {}

    # ---------------------------------------------------------------- admission

    def admit(self, step: int, row: int, payload: Any = None) -> Group:
        """Add the prompt at `row` of batch `step`. No two prompts have the same place."""
        first = self.admitted * self.num_samples
        samples = [Sample(first + number) for number in range(self.num_samples)]
        group = Group(self.admitted, step, row, samples, payload)
        self.admitted += 1
        self.last_batch = max(self.last_batch, step)
        self._add(group)
        return group

    def room(self) -> int:
        """Return how many groups may start now."""
        pace = self.pace
        most = min(pace.max_started, self._groups_until(pace.total_steps))
        if pace.is_bound:
            most = min(most, self._groups_until(pace.last_step(self.version)))
        return max(0, most - len(self._started()))

    def wanted(self) -> int:
        """Return how many groups must be admitted so that all that may start can."""
        unstarted = len(self.groups) - len(self._started())
        return max(0, self.room() - unstarted)

    # ---------------------------------------------------------------- generation

    def start(self) -> list[Group]:
        """Return the groups with samples to submit, oldest first; they run afterwards.

        These are the frozen ones, and as many new ones as may start.
        """
        room = self.room()
        started = []
        for group in self.groups:
            if group.born is None and room > 0:
                room -= 1
                group.born = self.version
            if group.born is None:
                continue

            has_idle = False
            for sample in group.samples:
                if sample.state in (State.ADMITTED, State.FROZEN):
                    sample.state = State.RUNNING
                    has_idle = True
            if has_idle:
                started.append(group)
        return sorted(started, key=Group.age_order)

    def goal(self) -> Goal:
        """Return the groups that generation has to finish before the next batch can be taken."""
        pace = self.pace
        started = sorted(self._started(), key=Group.age_order)
        unfinished = [group for group in started if not group.is_whole]
        num_whole = len(started) - len(unfinished)

        needs = [(len(unfinished), self.missing - num_whole)]
        if not pace.is_partial:
            needs.append((len(unfinished), len(unfinished)))
        if pace.is_bound:
            needs += self._needs_of_those_due(started)

        running = []
        for group in unfinished:
            running.append(tuple(sample.sample_id for sample in group.running))
        open_needs = [need for need in needs if need[1] > 0]
        return Goal(tuple(running), tuple(open_needs))

    def _needs_of_those_due(self, started: Sequence[Group]) -> list[tuple[int, int]]:
        """Return, for each due step, how many groups must be whole so that all can be in time."""
        pace = self.pace
        needs = []
        num_due = 0
        num_whole = 0
        for due, groups in groupby(started, key=lambda group: pace.last_step(group.born or 0)):
            for group in groups:
                num_due += 1
                num_whole += group.is_whole
            later = max(0, due - self.next_step) * pace.groups_per_step
            needs.append((num_due - num_whole, num_due - later - num_whole))
        return needs

    def finish(self, sample_id: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Record a sample that has ended, with all of its tokens."""
        _, sample = self._running(sample_id)
        sample.grow(token_ids, log_probs, self.version)
        sample.state = State.WAITING

    def freeze(self, sample_id: int, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Record a sample that was aborted, with the tokens drawn so far."""
        group, sample = self._running(sample_id)
        sample.grow(token_ids, log_probs, self.version)
        sample.state = State.FROZEN if sample.segments else State.ADMITTED
        if all(each.state is State.ADMITTED for each in group.samples):
            group.born = None

    def finish_episode(self, sample_id: int, trajectories: Sequence[Trajectory]) -> None:
        """Record an episode of agents that has ended."""
        _, sample = self._running(sample_id)
        sample.trajectories = list(trajectories)
        for trajectory in trajectories:
            sample.segments += [segment for segment in trajectory.segments if segment.is_model]
        sample.state = State.WAITING

    def suspend(self, sample_id: int) -> None:
        """Record an episode whose turns are out of the engine. Its agent keeps their tokens."""
        _, sample = self._running(sample_id)
        sample.state = State.FROZEN

    def hand_over(self) -> None:
        """Record that the engines have new weights. No sample runs meanwhile."""
        for group in self.groups:
            assert not group.running
        self.version += 1

    # ---------------------------------------------------------------- consumption

    def can_take(self) -> bool:
        """Return whether the next batch is there."""
        return not self.goal().needs

    def take(self) -> list[Group]:
        """Return the groups of the next batch in the order of admission. They are consumed."""
        assert self.can_take(), "generation stops at its goal"
        whole = [group for group in self.groups if group.is_whole]
        whole.sort(key=Group.age_order)
        batch = whole[: self.missing]
        self._remove(batch)
        self.next_step += 1
        self.missing = self.pace.groups_per_step
        return sorted(batch, key=lambda group: group.serial)

    def reopen(self, missing: int) -> None:
        """Let the step whose batch was taken last take `missing` further groups, at most a
        batch."""
        self.next_step -= 1
        self.missing = missing

    def discard_stale(self) -> list[Group]:
        """Drop whole groups with a token beyond the bound, count their tokens, and return them."""
        now = self.pace.version_of(self.next_step)
        stale = []
        for group in self.groups:
            assert group.born is None or group.born <= now
            is_old = group.born is not None and now - group.born > self.pace.max_staleness
            if is_old and group.is_whole:
                stale.append(group)
                self.discarded_groups += 1
                self.discarded_tokens += group.num_tokens
        self._remove(stale)
        return stale

    # ---------------------------------------------------------------- the books themselves

    def begin_after(self, step: int) -> None:
        """Open empty books for a run that took its first steps in another schedule."""
        assert not self.groups
        self.next_step = step + 1
        self.admitted = step * self.pace.groups_per_step
        self.last_batch = step
        self.pace = replace(self.pace, first_version=0)
        self.version = self.pace.version_of(step + 1)

    def num_late(self) -> int:
        """Return how many groups that have started cannot be learned from within the bound.

        None, unless a resumed run has a lower bound or smaller batches than its checkpoint.
        """
        num_late = 0
        started = sorted(self._started(), key=Group.age_order)
        for num_due, group in enumerate(started, start=1):
            in_time = self._groups_until(self.pace.last_step(group.born or 0))
            num_late = max(num_late, num_due - in_time)
        return num_late

    def counts(self) -> dict[str, int]:
        """Return the number of trajectories in each state; consumed ones are those that left."""
        counts = dict.fromkeys((state.value for state in State), 0)
        for group in self.groups:
            for sample in group.samples:
                counts[sample.state.value] += 1
        counts[State.CONSUMED.value] = (self.admitted - len(self.groups)) * self.num_samples
        return counts

    def state_dict(self) -> dict[str, Any]:
        """Return the books in plain values, without payloads. No sample may run.

        The agents of half-played episodes cannot be saved, so these are admitted once more.
        """
        groups = []
        pictures: list[Picture] = []
        half_played = 0
        for group in self.groups:
            for sample in group.samples:
                half_played += sample.is_half_played
                pictures += chain.from_iterable(each.pictures for each in sample.trajectories)

            samples = [_packed_sample(sample) for sample in group.samples]
            is_new = all(state == State.ADMITTED for state, _, _ in samples)
            groups.append(
                {
                    "serial": group.serial,
                    "step": group.step,
                    "row": group.row,
                    "born": None if is_new else group.born,
                    "samples": samples,
                }
            )

        state = {name: getattr(self, name) for name in _COUNTERS}
        state["replayed_episodes"] += half_played
        return {**state, "groups": groups, "pictures": packed_pictures(pictures)}

    def load_state_dict(self, state: dict[str, Any], payloads: Sequence[Any]) -> None:
        """Undo `state_dict`; `payloads` has one entry for each of its groups."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        plain = replace(self.pace, first_version=0)
        first_version = self.version - plain.version_of(self.next_step)
        self.pace = replace(plain, first_version=first_version)

        self.groups = []
        self._by_id = {}
        pictures = unpacked_pictures(state["pictures"])
        for saved, payload in zip(state["groups"], payloads, strict=True):
            samples = []
            for number, (of_sample, segments, trajectories) in enumerate(saved["samples"]):
                sample_id = saved["serial"] * self.num_samples + number
                sample = Sample(sample_id, State(of_sample), unpacked_segments(segments))

                own = [unpacked_trajectory(each, pictures) for each in trajectories]
                for trajectory in own:
                    sample.segments += [each for each in trajectory.segments if each.is_model]
                sample.trajectories = own
                samples.append(sample)

            place = (saved["serial"], saved["step"], saved["row"])
            self._add(Group(*place, samples, payload, saved["born"]))

    def _groups_until(self, step: int) -> int:
        """Return how many groups the steps from the next one to `step` take."""
        later = (step - self.next_step) * self.pace.groups_per_step
        return max(0, later + self.missing)

    def _started(self) -> list[Group]:
        return [group for group in self.groups if group.born is not None]

    def _add(self, group: Group) -> None:
        self.groups.append(group)
        for sample in group.samples:
            self._by_id[sample.sample_id] = group, sample

    def _remove(self, groups: Iterable[Group]) -> None:
        leaving = set(groups)
        self.groups = [group for group in self.groups if group not in leaving]
        for group in groups:
            for sample in group.samples:
                sample.state = State.CONSUMED
                del self._by_id[sample.sample_id]

    def _running(self, sample_id: int) -> tuple[Group, Sample]:
        group, sample = self._by_id[sample_id]
        assert sample.state is State.RUNNING, f"sample {sample_id} is {sample.state.value}"
        return group, sample


def _packed_sample(sample: Sample) -> tuple[str, list[PackedSegment], list[dict[str, Any]]]:
    """Return state, segments and trajectories in plain values. Trajectories have their segments."""
    assert sample.state is not State.RUNNING
    state = sample.state
    if sample.is_half_played:
        state = State.ADMITTED

    if sample.trajectories:
        return state.value, [], [packed_trajectory(each) for each in sample.trajectories]
    return state.value, packed_segments(sample.segments), []
