"""Step times and idle ratios of every schedule, from measured times of generation and update.

The books decide as in training (`verl.trainer.schedules.book`); engines and trainer are clocks:

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

Rows and tokens are spread evenly; communication within the update is not modelled. The defaults
are near one H200 with Qwen2.5-1.5B: 68,900 tok/s at 1,024 rows of 600 tokens and 24,700 tok/s at
256 rows of 2,650, where 80,300 and 26,600 were measured; replace them by measured times.

    python bench/schedule_sim.py --prompts 64 --samples 16 --new-tokens 8192 --devices 1,2,8,64
"""

import argparse
import heapq
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from rollout_work import draw_limits

from verl.rollout.goal import GoalWatch
from verl.trainer.schedules.book import Book, Pace


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
    generators: int


class Engines:
    """Engines of equal load on a common clock, which run the samples of a book."""

    def __init__(
        self, book: Book, costs: Costs, devices: int, length_of: Callable[[int], int], prompt: int
    ) -> None:
        self.book = book
        self.costs = costs
        self.devices = devices
        self.length_of = length_of
        self.prompt = prompt
        self.ends: list[tuple[int, int]] = []  # (decode step at which it ends, sample id)
        self.begun: dict[int, int] = {}  # sample id -> decode step at which it would have begun
        self.step = 0
        self.busy_s = 0.0

    def start(self) -> float:
        """Submit what the book lets start; return the seconds of its prefill."""
        tokens = 0
        for group in self.book.start():
            tokens += self.prompt
            for sample in group.samples:
                if sample.state != "running" or sample.sample_id in self.begun:
                    continue
                drawn = len(sample.token_ids)
                tokens += drawn and drawn + self.prompt
                self.begun[sample.sample_id] = self.step - drawn
                end = self.step - drawn + self.length_of(sample.sample_id)
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

    def _step_s(self, rows: int) -> float:
        """Return the seconds of a decode step, from the mean length of what runs."""
        oldest = sum(self.step - self.begun[sample_id] for _, sample_id in self.ends[:64])
        cached = self.prompt + oldest / min(rows, 64)
        costs = self.costs
        share = rows / self.devices
        return costs.decode_s + share * (costs.row_s + cached * costs.cached_token_s)

    def freeze(self) -> None:
        """Take all samples out."""
        for _, sample_id in self.ends:
            self._report(sample_id, self.book.freeze)
        self.ends = []

    def _report(self, sample_id: int, record: Callable[..., None]) -> None:
        drawn = range(self.step - self.begun.pop(sample_id))
        record(sample_id, drawn, drawn)


@dataclass(frozen=True)
class Work:
    """What is trained: prompts and samples of a step, and the lengths of responses."""

    prompts: int
    samples: int
    prompt_tokens: int
    lengths: str
    steps: int
    warm_up: int
    seed: int


def simulate(
    work: Work, costs: Costs, trainers: int, generators: int, schedule: str, staleness: float
) -> Result:
    """Run a schedule on a clock, and return the means after the warm-up.

    Args:
        generators: devices that only generate; 0: those of the trainer generate.
    """
    ahead = {"sync": 0.0, "one_step_off": 1.0}.get(schedule, staleness)
    bound = -(-ahead // 1)
    pace = Pace(
        groups_per_step=work.prompts,
        max_staleness=int(bound),
        max_started=int((1 + ahead) * work.prompts),
        is_partial=schedule != "one_step_off",
    )
    book = Book(pace, work.samples)
    rows = work.steps * work.prompts * work.samples
    lengths = draw_limits(work.lengths, rows, work.seed).tolist()
    devices = generators or trainers
    engines = Engines(book, costs, devices, lengths.__getitem__, work.prompt_tokens)

    clocks = []  # seconds, waiting of the trainer, work of the engines of every step
    for _ in range(work.steps):
        busy = engines.busy_s
        generation_s = _generate(engines, work)
        if not generators:
            engines.freeze()
        batch = book.take()
        tokens = sum(lengths[each.sample_id] for group in batch for each in group.samples)
        tokens += work.prompts * work.samples * work.prompt_tokens
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
    trainer_idle = waiting / step_s if generators else 0.0
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


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=8192, help="of the longest response")
    parser.add_argument("--devices", default="1,2,4,8,64,512", help="by commas")
    parser.add_argument("--staleness", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decode-s", type=float, default=3.4e-3, help="a step without rows")
    parser.add_argument("--row-s", type=float, default=6.5e-6, help="a row of a step")
    parser.add_argument("--cached-token-s", type=float, default=7.8e-9, help="a token in the cache")
    parser.add_argument("--prefill-token-s", type=float, default=8e-6)
    parser.add_argument("--token-s", type=float, default=2.0e-5, help="a token of an update")
    parser.add_argument("--sync-s", type=float, default=0.02, help="a hand-over")
    return parser.parse_args()


def main() -> None:
    given = parse_arguments()
    costs = Costs(
        given.decode_s,
        given.row_s,
        given.cached_token_s,
        given.prefill_token_s,
        given.token_s,
        given.sync_s,
    )
    work = Work(
        given.prompts,
        given.samples,
        given.prompt_tokens,
        f"tail:{given.new_tokens}",
        given.steps,
        min(3, given.steps // 4),
        given.seed,
    )
    print(
        "| devices | schedule | s a step | times sync | generators | trainer idle | rollout idle |"
    )
    print("|---|---|---|---|---|---|---|")
    for devices in map(int, given.devices.split(",")):
        sync = simulate(work, costs, devices, 0, "sync", 0.0)
        results = {
            "sync": sync,
            "timeslice": simulate(work, costs, devices, 0, "timeslice", given.staleness),
            "one_step_off": best_split(work, costs, devices, "one_step_off", 1.0),
            "fully_async": best_split(work, costs, devices, "fully_async", given.staleness),
        }
        for name, result in results.items():
            if result is not None:
                print(
                    f"| {devices} | {name} | {result.step_s:.1f} | "
                    f"{sync.step_s / result.step_s:.2f} | {result.generators or 'all'} | "
                    f"{result.trainer_idle:.0%} | {result.rollout_idle:.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
