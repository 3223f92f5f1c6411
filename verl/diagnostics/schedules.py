"""Step times and idle ratios of every schedule, from measured times of generation and update.

The books decide as in training (`verl.rollout.book`); engines and trainer are clocks:

    a decode step      decode_s + row_s * rows + cached_token_s * tokens in the cache
    going on again     prefill_token_s * tokens of the responses that were frozen
    an update          token_s * tokens of the batch
    a hand-over        sync_s

| schedule | devices |
|---|---|
| sync | all generate, then all learn |
| timeslice | trainer.mode=fully_async on shared devices |
| one_step_off | the best split into generators and trainers |
| fully_async | the best split, generation is interrupted by hand-overs alone |
| lending | fully_async whose trainers generate while they would wait: an estimate, no run does it |

Rows and tokens are spread evenly; communication within the update is not modelled.
"""

import heapq
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from verl.rollout.book import Book, Pace
from verl.rollout.goal import GoalWatch


@dataclass(frozen=True)
class Costs:
    """Measured seconds of one device."""

    decode_s: float
    row_s: float
    cached_token_s: float
    prefill_token_s: float
    token_s: float  # of an update, a token of the batch
    sync_s: float


@dataclass(frozen=True)
class Result:
    """A schedule in its steady state."""

    step_s: float
    trainer_idle: float
    rollout_idle: float
    generators: int  # 0: all devices generate and learn


@dataclass(frozen=True)
class Work:
    """The load of a training: prompts and samples of a step, and lengths that responses have.

    Args:
        lengths: of samples in the order of their ids; they begin again after the last.
        steps: that are simulated.
        warm_up: steps at both ends that do not count.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    lengths: Sequence[int]
    steps: int = 12
    warm_up: int = 3

    def length_of(self, sample_id: int) -> int:
        """Return the tokens of a response."""
        return self.lengths[sample_id % len(self.lengths)]


@dataclass(eq=False)
class Engines:
    """Engines of equal load on a common clock, which run the samples of a book."""

    book: Book
    costs: Costs
    devices: int
    work: Work
    # (decode step at which it ends, sample id)
    ends: list[tuple[int, int]] = field(default_factory=list)
    # sample id -> decode step at which it would have begun
    begun: dict[int, int] = field(default_factory=dict)
    step: int = 0
    busy_s: float = 0.0

    def start(self) -> float:
        """Submit the samples that the book lets start; return the seconds of their prefill."""
        tokens = 0
        prompt = self.work.prompt_tokens
        for group in self.book.start():
            tokens += prompt
            for sample in group.samples:
                if sample.state != "running" or sample.sample_id in self.begun:
                    continue

                drawn = len(sample.token_ids)
                tokens += drawn and drawn + prompt
                self.begun[sample.sample_id] = self.step - drawn
                end = self.step - drawn + self.work.length_of(sample.sample_id)
                heapq.heappush(self.ends, (end, sample.sample_id))

        seconds = tokens * self.costs.prefill_token_s / self.devices
        self.busy_s += seconds
        return seconds

    def run(self, watch: GoalWatch | None, limit_s: float) -> float:
        """Decode until the goal is reached, or for `limit_s` seconds; return the seconds used."""
        used = 0.0
        while self.ends and used < limit_s and not (watch and watch.is_reached):
            end, sample_id = self.ends[0]
            rows = len(self.ends)
            step_s = self._step_s(rows)
            steps = end - self.step
            if used + steps * step_s > limit_s:
                steps = max(1, int((limit_s - used) / step_s))

            self.step += steps
            used += steps * step_s

            while self.ends and self.ends[0][0] <= self.step:
                _, sample_id = heapq.heappop(self.ends)
                self._report(sample_id, self.book.finish)
                if watch is not None:
                    watch.note([sample_id])
        self.busy_s += used
        return used

    def spread(self, devices: int) -> float:
        """Go on with more or fewer devices; return the seconds of the prefill of moved samples."""
        moved = abs(devices - self.devices) / max(devices, self.devices)
        self.devices = devices
        tokens = 0
        for _, sample_id in self.ends:
            tokens += self.work.prompt_tokens + self.step - self.begun[sample_id]
        seconds = moved * tokens * self.costs.prefill_token_s / devices
        self.busy_s += seconds
        return seconds

    def freeze(self) -> None:
        """Take all samples out."""
        for _, sample_id in self.ends:
            self._report(sample_id, self.book.freeze)
        self.ends = []

    def _step_s(self, rows: int) -> float:
        """Return the seconds of a decode step, from the mean length of running samples."""
        oldest = sum(self.step - self.begun[sample_id] for _, sample_id in self.ends[:64])
        cached = self.work.prompt_tokens + oldest / min(rows, 64)
        costs = self.costs
        share = rows / self.devices
        return costs.decode_s + share * (costs.row_s + cached * costs.cached_token_s)

    def _report(self, sample_id: int, record: Callable[..., None]) -> None:
        drawn = range(self.step - self.begun.pop(sample_id))
        record(sample_id, drawn, drawn)


def simulate(
    work: Work, costs: Costs, trainers: int, generators: int, schedule: str, staleness: float
) -> Result:
    """Run a schedule on a clock, and return the means after the warm-up.

    Args:
        generators: devices that only generate; 0: those of the trainer generate.
        staleness: `async_training.staleness_threshold` of the asynchronous schedules.
    """
    ahead = {"sync": 0.0, "one_step_off": 1.0}.get(schedule, staleness)
    pace = Pace(
        groups_per_step=work.prompts,
        max_staleness=math.ceil(ahead),
        max_started=int((1 + ahead) * work.prompts),
        is_partial=schedule != "one_step_off",
    )
    book = Book(pace, work.samples)
    engines = Engines(book, costs, generators or trainers, work)

    clocks = []  # seconds, waiting of the trainer, work of the engines of every step
    for _ in range(work.steps):
        busy = engines.busy_s
        lends = schedule == "lending" and not book.can_take()
        generation_s = engines.spread(trainers + generators) if lends else 0.0
        generation_s += _generate(engines, work)
        if lends:
            generation_s += engines.spread(generators)
        if not generators:
            engines.freeze()
        batch = book.take()
        tokens = work.prompts * work.samples * work.prompt_tokens
        for group in batch:
            tokens += sum(work.length_of(each.sample_id) for each in group.samples)
        update_s = tokens * costs.token_s / trainers
        if generators:
            _admit(book, work)
            begun_s = engines.start()
            engines.run(None, max(0.0, update_s - begun_s))
            engines.freeze()
        book.hand_over()
        step_s = generation_s + update_s + costs.sync_s
        clocks.append((step_s, generation_s, engines.busy_s - busy))

    counted = clocks[work.warm_up : work.steps - work.warm_up]
    step_s = statistics.mean(clock[0] for clock in counted)
    waiting = statistics.mean(clock[1] for clock in counted)
    worked = statistics.mean(clock[2] for clock in counted)
    waits = generators and schedule != "lending"
    trainer_idle = waiting / step_s if waits else 0.0
    return Result(step_s, trainer_idle, max(0.0, 1 - worked / step_s), generators)


def _generate(engines: Engines, work: Work) -> float:
    """Generate until a batch is whole; return the seconds."""
    book = engines.book
    seconds = 0.0
    while not book.can_take():
        _admit(book, work)
        seconds += engines.start()
        seconds += engines.run(GoalWatch(book.goal()), float("inf"))
    return seconds


def _admit(book: Book, work: Work) -> None:
    left = work.steps * work.prompts - book.admitted
    for _ in range(min(left, book.wanted())):
        book.admit(book.admitted // work.prompts + 1, book.admitted % work.prompts)


def best_split(
    work: Work, costs: Costs, devices: int, schedule: str, staleness: float
) -> Result | None:
    """Return the split with the shortest step; None where there is nothing to split."""
    candidates = {round(devices * share / 16) for share in range(1, 16)}
    results = []
    for generators in sorted(candidates & set(range(1, devices))):
        trainers = devices - generators
        results.append(simulate(work, costs, trainers, generators, schedule, staleness))
    return min(results, key=lambda result: result.step_s, default=None)


def all_schedules(work: Work, costs: Costs, devices: int, staleness: float) -> dict[str, Result]:
    """Return the result of every schedule that so many devices can run, by its name."""
    results: dict[str, Result | None] = {
        "sync": simulate(work, costs, devices, 0, "sync", 0.0),
        "timeslice": simulate(work, costs, devices, 0, "timeslice", staleness),
        "one_step_off": best_split(work, costs, devices, "one_step_off", 1.0),
        "fully_async": best_split(work, costs, devices, "fully_async", staleness),
    }
    return {name: result for name, result in results.items() if result is not None}
