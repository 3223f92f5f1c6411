"""The books of asynchronous training hold under every schedule, on a fake clock."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.trainer.schedules.fake_engine import FakeEngine
from verl.rollout.book import Book, Pace, State
from verl.rollout.goal import Goal, GoalWatch
from verl.rollout.trajectory import Segment, Trajectory

SCHEDULES = 10_000


class Run:
    """A run of a few steps under drawn settings, with the books checked after every event.

    Args:
        flat: share of the groups that a step leaves out, for others in their place.
        most_rounds: of a step.
    """

    def __init__(
        self, rng: random.Random, flat: float = 0.0, most_rounds: int = 1, **fixed: object
    ) -> None:
        self.rng = rng
        self.flat = flat
        self.most_rounds = most_rounds
        staleness = rng.choice([0, 0, 1, 1, 2, 3])
        per_version = rng.choice([1, 1, 1, 2, 3])
        groups = rng.randint(1, 4)
        least = groups * per_version
        settings = {
            "groups_per_step": groups,
            "max_staleness": staleness,
            "steps_per_version": per_version,
            "total_steps": rng.randint(2, 6),
            "max_started": least + rng.randint(0, 2 * least),
            "is_partial": rng.random() < 0.8,
        }
        self.pace = Pace(**{**settings, **fixed})
        self.steps = self.pace.total_steps
        self.read_at_once = rng.choice([1, groups]) if flat else 1
        self.samples = rng.randint(1, 3)
        self.book = Book(self.pace, self.samples)
        self.longest = rng.choice([2, 5, 12])
        self.lengths: dict[int, int] = {}
        self.engine = FakeEngine(self.book, self.length_of, slots=rng.randint(1, 12))
        self.overlaps = rng.random() < 0.5
        self.consumed: list[int] = []
        self.rounds: list[int] = []

    def length_of(self, sample_id: int) -> int:
        if sample_id not in self.lengths:
            long = self.rng.random() < 0.2
            self.lengths[sample_id] = self.rng.randint(1, self.longest if long else 2)
        return self.lengths[sample_id]

    def admit(self) -> None:
        while self.book.wanted() > 0:
            for _ in range(self.read_at_once):
                self.book.admit(step=1, row=self.book.admitted)

    def play(self) -> None:
        for step in range(1, self.steps + 1):
            missing = groups = self.pace.groups_per_step
            for number in range(1, self.most_rounds + 1):
                missing -= self.play_round(step, groups)
                if missing <= 0 or number == self.most_rounds:
                    break
                groups = self.rng.randint(1, self.pace.groups_per_step)
                self.book.reopen(groups)
            self.rounds.append(number)
            if step % self.pace.steps_per_version == 0:
                self.engine.freeze()
                self.book.hand_over()
            if self.rng.random() < 0.2:
                self.kill_and_resume()

    def play_round(self, step: int, groups: int) -> int:
        """Take so many groups, and return how many of them a step would learn from."""
        self.admit()
        self.engine.start()
        self.engine.run_to_goal()
        if not self.overlaps:
            self.engine.freeze()
        self.check()
        kept = self.take(step, groups)
        self.check()
        if self.overlaps:
            self.generate_during_the_update()
        return kept

    def generate_during_the_update(self) -> None:
        self.admit()
        self.engine.start()
        for _ in range(self.rng.randint(0, 6)):
            self.engine.tick()
            self.check()

    def kill_and_resume(self) -> None:
        """Go on with books from a checkpoint."""
        self.engine.freeze()
        state = self.book.state_dict()
        book = Book(self.pace, self.samples)
        book.load_state_dict(state, [None] * len(state["groups"]))
        assert book.counts() == self.book.counts()
        self.book = self.engine.book = book

    def take(self, step: int, groups: int) -> int:
        batch = self.book.take()
        assert len(batch) == groups
        now = self.pace.version_of(step)
        for group in batch:
            assert group.born is not None
            assert step <= self.pace.last_step(group.born), "no prompt starves"
            for sample in group.samples:
                assert sample.state is State.CONSUMED
                versions = [segment.version for segment in sample.segments]
                assert versions == sorted(versions)
                assert now - versions[0] <= self.pace.max_staleness, "the oldest token"
                first = sample.sample_id * 1000
                length = self.length_of(sample.sample_id)
                assert sample.token_ids == tuple(range(first, first + length))
                self.consumed.append(sample.sample_id)
        return sum(self.rng.random() >= self.flat for _ in batch)

    def check(self) -> None:
        """Every trajectory is in one place, and in one state."""
        kept = [each.sample_id for group in self.book.groups for each in group.samples]
        everyone = Counter(kept + self.consumed)
        assert everyone == Counter(range(self.book.admitted * self.samples))
        counts = self.book.counts()
        assert sum(counts.values()) == self.book.admitted * self.samples
        assert counts["consumed"] == len(self.consumed)
        assert counts["running"] == len(self.engine.drawn)


@pytest.mark.slow
def test_10_000_random_schedules():
    for seed in range(SCHEDULES):
        run = Run(random.Random(seed))
        run.play()
        # All that was generated is learned from, so the lengths are those that were drawn.
        assert sorted(run.consumed) == list(range(run.book.admitted * run.samples))
        assert run.book.admitted == run.steps * run.pace.groups_per_step
        assert run.book.discarded_tokens == 0


@pytest.mark.parametrize(
    "schedules", [300, pytest.param(SCHEDULES, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_schedules_that_leave_groups_out_keep_the_books(schedules):
    """The bound holds, no group starves or is taken twice, and none is drawn in vain."""
    most = 0
    for seed in range(schedules):
        rng = random.Random(seed)
        run = Run(rng, flat=rng.choice([0.2, 0.5, 0.9]), most_rounds=rng.choice([1, 3, 1000]))
        run.play()
        most = max(most, *run.rounds)
        left = run.book.counts()
        assert left["admitted"] < run.read_at_once * run.samples
        assert len(run.consumed) + left["admitted"] == run.book.admitted * run.samples
        assert run.book.discarded_tokens == 0
    assert most > 5


def test_lengths_of_batches_are_those_generated():
    """Kolmogorov-Smirnov: batches in the middle of a run have no bias to short samples."""
    rng = random.Random(1)
    run = Run(
        rng,
        groups_per_step=8,
        max_staleness=2,
        steps_per_version=1,
        max_started=24,
        total_steps=200,
    )
    run.samples, run.longest, run.overlaps = 4, 200, False
    run.book = run.engine.book = Book(run.pace, run.samples)
    run.engine.slots = 64
    run.play()
    middle = run.consumed[len(run.consumed) // 4 : 3 * len(run.consumed) // 4]
    trained = sorted(run.lengths[number] for number in middle)
    generated = sorted(run.lengths.values())
    distance = 0.0
    for length in set(generated):
        share = sum(each <= length for each in trained) / len(trained)
        distance = max(
            distance, abs(share - sum(each <= length for each in generated) / len(generated))
        )
    critical = 1.36 * (1 / len(trained) + 1 / len(generated)) ** 0.5
    assert distance < critical


def test_the_tail_is_trained_on_while_others_run():
    """With one version of slack a batch need not wait for the longest sample."""
    lengths = {0: 100, 1: 3, 2: 3, 3: 3}
    book = Book(Pace(groups_per_step=2, max_staleness=1, max_started=4), samples=1)
    engine = FakeEngine(book, lambda sample_id: lengths.get(sample_id, 4), slots=8)
    for row in range(4):
        book.admit(1, row)
    engine.start()
    engine.run_to_goal()
    engine.freeze()
    assert engine.ticks == 3
    assert [group.serial for group in book.take()] == [1, 2]
    assert book.counts()["frozen"] == 1


def test_staleness_zero_starts_no_group_of_the_next_batch():
    book = Book(Pace(groups_per_step=2, max_staleness=0), samples=1)
    assert book.wanted() == 2
    for row in range(3):
        book.admit(1, row)
    engine = FakeEngine(book, lambda _: 2, slots=8)
    engine.start()
    assert book.counts()["admitted"] == 1
    engine.run_to_goal()
    book.take()
    engine.start()
    assert book.counts()["running"] == 0, "the weights are still the old ones"
    book.hand_over()
    engine.start()
    assert book.counts()["running"] == 1


def test_what_exceeds_the_bound_is_dropped_and_counted():
    lengths = {0: 9}
    pace = Pace(groups_per_step=1, max_staleness=0, max_started=2, is_bound=False)
    book = Book(pace, samples=1)
    engine = FakeEngine(book, lambda sample_id: lengths.get(sample_id, 3), slots=4)
    for row in range(4):
        book.admit(1, row)
    for serials in ([1], [2]):
        engine.start()
        engine.run_to_goal()
        engine.freeze()
        book.discard_stale()
        assert [group.serial for group in book.take()] == serials
        book.hand_over()
    engine.start()
    engine.run_to_goal()
    engine.freeze()
    assert [group.serial for group in book.discard_stale()] == [0]
    assert book.discarded_tokens == 9


def test_books_keep_ended_episodes_and_admit_half_played_ones_again():
    """The agent of a half-played episode cannot be saved."""
    book = Book(Pace(groups_per_step=1, max_staleness=1), samples=2)
    for row in range(2):
        book.admit(1, row)
    book.start()
    segments = [
        Segment(source="model", token_ids=[3, 4], log_probs=[-1.0, -2.0], versions=[0, 1]),
        Segment(source="tool", token_ids=[5]),
    ]
    episode = Trajectory(row=0, prompt_ids=[7], segments=segments, extra={"calls": 2}, reward=0.5)
    book.finish_episode(0, [episode])
    for sample_id in (1, 2, 3):
        book.suspend(sample_id)
    assert book.counts()["frozen"] == 3

    again = Book(book.pace, samples=2)
    again.load_state_dict(book.state_dict(), payloads=[None, None])
    assert again.counts() == book.counts() | {"frozen": 0, "admitted": 3}
    assert again.replayed_episodes == 3
    first, second = again.groups
    assert first.born == 0
    assert second.born is None, "nothing of it is left"
    (restored,) = first.samples[0].trajectories
    assert restored == episode
    assert first.samples[0].token_ids == (3, 4)
    assert first.samples[0].span == 1


def books_of_a_step(pace: Pace) -> Book:
    """Return books after step 1, with the waiting groups of steps 2, 3 and 4."""
    book = Book(pace, samples=1)
    for row in range(4):
        book.admit(step=row + 1, row=0)
    book.start()
    for sample_id in range(4):
        book.finish(sample_id, [1], [-1.0])
    book.take()
    book.hand_over()
    return book


AHEAD = Pace(groups_per_step=1, max_staleness=3)


def resumed(book: Book, **changed: Any) -> Book:
    """Return the books as a run with another pace reads them."""
    again = Book(replace(AHEAD, **changed), samples=1)
    again.load_state_dict(book.state_dict(), [None] * len(book.groups))
    return again


def test_ages_survive_a_resume_with_fewer_hand_overs():
    """The bound would be kept against other versions than those of the tokens."""
    book = books_of_a_step(AHEAD)
    book.take()
    book.hand_over()  # version 2 learns in step 3

    again = resumed(book, steps_per_version=2)
    assert again.version == again.pace.version_of(3) == again.pace.version_of(4) == 2
    assert again.pace.version_of(5) == 3
    assert again.pace.last_step(0) == 6, "the last one of version 3"
    assert resumed(again, steps_per_version=2).pace == again.pace


def test_prompts_that_a_lower_bound_leaves_no_step_are_counted():
    book = books_of_a_step(AHEAD)
    assert book.num_late() == 0
    assert resumed(book).num_late() == 0
    assert resumed(book, max_staleness=2).num_late() == 1
    assert resumed(book, max_staleness=0).num_late() == 3


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_goals_of_engines_together_are_the_goal(shares):
    rng = random.Random(shares)
    for _ in range(300):
        groups = tuple((number,) for number in range(rng.randint(1, 9)))
        needs = []
        for _ in range(rng.randint(0, 3)):
            among = rng.randint(1, len(groups))
            needs.append((among, rng.randint(1, among)))
        whole = GoalWatch(Goal(groups, tuple(needs)))
        parts = [GoalWatch(part) for part in Goal(groups, tuple(needs)).shares(shares)]
        order = rng.sample(range(len(groups)), len(groups))
        for number in order:
            for watch in (whole, *parts):
                watch.note([number])
            if all(part.is_reached for part in parts):
                assert whole.is_reached
        assert all(part.is_reached for part in parts)
