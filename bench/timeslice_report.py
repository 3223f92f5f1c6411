"""Results of `async_timeslice.py`: means of the counted steps, and predictions of the simulator."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rollout_work import draw_limits
from runs import read_metrics
from schedule_sim import costs_of

from verl.diagnostics.proposal import LEAST_STEPS, MeasuredSteps
from verl.diagnostics.schedules import Costs, Result, Work, simulate

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "sync_weights", "step")
# Shares of a step, which a rollout with ranks of its own reports.
IDLE = ("trainer/idle_ratio", "rollouter/idle_ratio")

Line = Mapping[str, float]


@dataclass(frozen=True)
class Measured:
    """Steps of a schedule.

    Args:
        steps: seconds of all steps that ended.
        counted: number of steps that the means are taken over.
        seconds: mean of each phase.
        idle: mean of each ratio that the schedule reports.
        tokens, tokens_of_the_run: trained in the counted steps, and in all steps.
        oldest: age of the oldest token, in versions of the weights.
        peak_gib, engine_gib: allocated at most by rank 0, and by an engine.
    """

    steps: list[float]
    counted: int
    seconds: dict[str, float]
    idle: dict[str, float]
    tokens: float
    tokens_of_the_run: float
    oldest: float
    discarded: float
    peak_gib: float
    engine_gib: float

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens a second in the counted steps."""
        return self.tokens / (self.counted * self.seconds["step"])


def lengths_of_step(given: argparse.Namespace, step: int) -> NDArray[np.int64]:
    """Return the number of tokens of each response to the prompts of a step."""
    rows = given.prompts * given.samples
    return draw_limits(f"tail:{given.new_tokens}", rows, given.seed + step)


def imposed_tokens(given: argparse.Namespace) -> int:
    """Return the tokens of all prompts and responses of a run."""
    steps = range(1, given.steps + 1)
    responses = sum(int(lengths_of_step(given, step).sum()) for step in steps)
    return responses + given.steps * given.prompts * given.samples * given.prompt_tokens


def read_lines(file: Path) -> list[Line]:
    """Return the metrics of the steps that ended."""
    if not file.is_file():
        return []
    return read_metrics(file.parent)


def measured(given: argparse.Namespace, lines: Sequence[Line]) -> Measured | None:
    """Return the means; None where no counted step has ended."""
    counted = lines[given.warm_up : given.warm_up + given.counted]
    if not counted:
        return None

    return Measured(
        steps=[line["timing_s/step"] for line in lines],
        counted=len(counted),
        seconds={phase: _mean(counted, f"timing_s/{phase}") for phase in PHASES},
        idle={name: _mean(counted, name) for name in IDLE if name in counted[0]},
        tokens=sum(line["perf/total_num_tokens"] for line in counted),
        tokens_of_the_run=sum(line["perf/total_num_tokens"] for line in lines),
        oldest=_largest(lines, "fully_async/age/max"),
        discarded=_largest(lines, "fully_async/discarded_tokens"),
        peak_gib=_largest(lines, "perf/max_memory_allocated_gb"),
        engine_gib=_largest(lines, "rollout/memory_gib"),
    )


def table(results: Mapping[str, Measured]) -> Iterator[str]:
    """Yield the lines of a table with a column for each schedule."""
    columns = [_column(result) for result in results.values()]
    yield _row("", list(results))
    yield f"|---|{'---|' * len(results)}"
    for name in columns[0]:
        yield _row(name, [column[name] for column in columns])


def _column(result: Measured) -> dict[str, str]:
    """Return the cells of a schedule by the names of their rows."""
    column = {"steps counted, of those that ended": f"{result.counted}, {len(result.steps)}"}
    for phase in PHASES:
        column[f"{phase}, s a step"] = f"{result.seconds[phase]:.2f}"

    column["tokens/s"] = f"{result.tokens_per_s:,.0f}"
    for name in IDLE:
        column[name] = _percent(result.idle.get(name))

    column["oldest token, versions"] = f"{result.oldest:.0f}"
    column["discarded tokens"] = f"{result.discarded:,.0f}"
    column["tokens of the steps that ended"] = f"{result.tokens_of_the_run:,.0f}"
    column["allocated at most on rank 0, GiB"] = f"{result.peak_gib:.1f}"
    column["an engine, GiB"] = f"{result.engine_gib:.1f}"
    return column


def comparison(ours: Measured, sync: Measured) -> str:
    """Return the ratio of the speeds in one line."""
    ratio = ours.tokens_per_s / sync.tokens_per_s
    return (
        f"fully_async trains {ratio:.2f}x the tokens a second ({ours.counted} and {sync.counted} "
        "steps counted)"
    )


# ---------------------------------------------------------------- the simulator


def predictions(
    given: argparse.Namespace, sync_lines: Sequence[Line], sync: Measured, ours: Measured
) -> Iterator[str]:
    """Yield a table with the simulator's step of `fully_async` next to the measured one.

    The simulator sees only steps of the synchronous schedule. Its costs come from them in two ways:
    those of `schedule_sim.py` at the measured speed of generation and update, and the fit of
    `verl plan --run`.
    """
    step_s = ours.seconds["step"]
    yield "| fully_async | s a step | error | trainer idle | rollout idle |"
    yield "|---|---|---|---|---|"
    idle = [_percent(ours.idle.get(name)) for name in IDLE]
    yield _row("measured", [f"{step_s:.2f}", "", *idle])

    generators = given.generators if given.ranks > 1 else 0
    name = "fully_async" if generators else "timeslice"
    work = _work(given)
    costs = _costs(given, work, sync)
    result = simulate(work, costs, given.ranks - generators, generators, name, given.staleness)
    yield _simulated("costs of schedule_sim.py at the speed of sync", result, step_s)

    steps = MeasuredSteps(given.prompts, given.samples, given.ranks)
    for number, line in enumerate(sync_lines, 1):
        if number >= given.warm_up:  # the fit leaves out the first one
            steps.add(line, lengths_of_step(given, number).tolist())
    if len(steps.steps) < LEAST_STEPS:
        return

    result = steps.proposal(given.staleness).results[name]
    if result.generators == generators:
        name = f"fit of `verl plan` to {len(steps.steps) - 1} steps"
        yield _simulated(name, result, step_s)


def _work(given: argparse.Namespace) -> Work:
    """Return the load of the run; as many steps count as have others around them."""
    lengths: list[int] = []
    for step in range(1, given.steps + 1):
        lengths += lengths_of_step(given, step).tolist()
    return Work(
        prompts=given.prompts,
        samples=given.samples,
        prompt_tokens=given.prompt_tokens,
        lengths=lengths,
        steps=given.steps,
        warm_up=min(max(given.warm_up, given.drained), (given.steps - 1) // 2),
    )


def _costs(given: argparse.Namespace, work: Work, sync: Measured) -> Costs:
    """Return the costs of the options at the speed that the synchronous schedule has."""
    sync_s = sync.seconds["sync_weights"]
    update_s = sync.seconds["step"] - sync.seconds["gen"] - sync_s
    token_s = update_s * given.ranks * sync.counted / sync.tokens

    # Of a step without update and hand-over, all is generation, in proportion to its costs.
    costs = replace(costs_of(given), token_s=0.0, sync_s=0.0)
    speed = sync.seconds["gen"] / simulate(work, costs, given.ranks, 0, "sync", 0.0).step_s
    scaled = {name: value * speed for name, value in asdict(costs).items()}
    return replace(Costs(**scaled), token_s=token_s, sync_s=sync_s)


# ---------------------------------------------------------------- helpers


def _mean(lines: Sequence[Line], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


def _largest(lines: Sequence[Line], name: str) -> float:
    return max(line.get(name, 0.0) for line in lines)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _simulated(name: str, result: Result, measured_s: float) -> str:
    """Return the row of a simulated step. Ranks that generate and learn report no idle ratios."""
    cells = [f"{result.step_s:.2f}", f"{result.step_s / measured_s - 1:+.0%}"]
    if result.generators:
        cells += [_percent(result.trainer_idle), _percent(result.rollout_idle)]
    else:
        cells += ["", ""]
    return _row(f"simulated, {name}", cells)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
