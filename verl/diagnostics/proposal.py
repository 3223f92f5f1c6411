"""The split of trainer and generator ranks that the measured times of a run propose."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl.diagnostics.schedules import Costs, Result, Work, all_schedules
from verl.tracking.backends import Metrics
from verl.tracking.records import load_run
from verl.utils.errors import DataError

LEAST_STEPS = 3  # that a proposal is made from; the first one is a warm-up
_WORTH = 1.05  # a schedule is proposed where it is faster by more than that
_KEYS = {
    "timeslice": ["trainer.mode=fully_async"],
    "one_step_off": ["trainer.mode=one_step_off"],
    "fully_async": ["trainer.mode=fully_async"],
}
_NAMES = {"timeslice": "fully_async, shared ranks"}


@dataclass
class MeasuredSteps:
    """Times and lengths of synchronous steps.

    Args:
        prompts, samples: of a step, and of a prompt.
        ranks: that all generated and learned.
    """

    prompts: int
    samples: int
    ranks: int
    lengths: list[int] = field(default_factory=list)
    steps: list[Metrics] = field(default_factory=list)

    def add(self, metrics: Metrics, lengths: Sequence[int]) -> None:
        """Note the metrics of a step and the lengths of its responses."""
        self.steps.append(dict(metrics))
        self.lengths += lengths

    def proposal(self, staleness: float) -> "Proposal":
        """Simulate all schedules with these times."""
        counted = self.steps[1:]
        work = Work(
            prompts=self.prompts,
            samples=self.samples,
            prompt_tokens=round(_mean(counted, "prompt_length/mean")),
            lengths=[max(1, length) for length in self.lengths],
        )
        costs = self._costs(counted)
        results = all_schedules(work, costs, self.ranks, staleness)
        return Proposal(self.ranks, results, _mean(counted, "timing_s/step"), len(counted))

    def _costs(self, counted: Sequence[Metrics]) -> Costs:
        """Fit the costs. A decode step has a fixed part and one for each row, both at least 0.

        A prefill is taken for a third of the update's seconds a token, which has a backward.
        """

        def of_steps(name: str) -> np.ndarray:
            return np.array([each[name] for each in counted])

        # The counters are sums over the ranks.
        steps = of_steps("rollout/decode_steps") / self.ranks
        rows = of_steps("rollout/generated_tokens") / self.ranks
        prefills = of_steps("rollout/prefill_tokens") / self.ranks
        gen_s = of_steps("timing_s/gen")
        sync_s = _mean(counted, "timing_s/sync_weights")
        update_s = _mean(counted, "timing_s/step") - float(gen_s.mean()) - sync_s
        tokens = _mean(counted, "perf/total_num_tokens")
        token_s = max(0.0, update_s) * self.ranks / max(1.0, tokens)

        decode_s = np.maximum(gen_s - prefills * token_s / 3, 0.0)
        fixed, per_row = _non_negative_fit(steps, rows, decode_s)
        return Costs(fixed, per_row, 0.0, token_s / 3, token_s, sync_s)


@dataclass(frozen=True)
class Proposal:
    """Simulated schedules.

    Args:
        results: by schedule.
        measured_s: seconds of a measured step, against which the simulated `sync` stands.
        num_steps: that were measured.
    """

    ranks: int
    results: dict[str, Result]
    measured_s: float
    num_steps: int

    @property
    def best(self) -> str:
        """Name of the fastest schedule; "sync" unless another one is clearly faster."""
        sync_s = self.results["sync"].step_s
        name = min(self.results, key=lambda each: self.results[each].step_s)
        is_worth_it = sync_s > _WORTH * self.results[name].step_s
        return name if is_worth_it else "sync"

    @property
    def keys(self) -> list[str]:
        """The keys of the fastest schedule."""
        generators = self.results[self.best].generators
        keys = list(_KEYS.get(self.best, ["trainer.mode=sync"]))
        if generators:
            ranks = ",".join(map(str, range(self.ranks - generators, self.ranks)))
            keys.append(f'"trainer.placement.rollout=[{ranks}]"')
        return keys

    def values(self) -> dict[str, Any]:
        """Return everything for programs."""
        schedules = {name: asdict(result) for name, result in self.results.items()}
        return {
            "ranks": self.ranks,
            "measured_s": self.measured_s,
            "num_steps": self.num_steps,
            "schedules": schedules,
            "best": self.best,
            "keys": self.keys,
        }

    def line(self) -> str:
        """Return the proposal as one line."""
        best = self.results[self.best]
        gain = self.results["sync"].step_s / best.step_s
        times = f"{self.num_steps} measured steps of {self.measured_s:.3g} s"
        if self.best == "sync":
            return f"schedules: after {times} none is expected to be faster than trainer.mode=sync."
        return (
            f"schedules: after {times}, {' '.join(self.keys)} is expected to be {gain:.2f}x as "
            f"fast ({best.step_s:.3g} s a step)."
        )

    def table(self) -> str:
        """Return all schedules as a table, and the proposed keys."""
        sync_s = self.results["sync"].step_s
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        lines = [
            f"Schedules on {ranks}, simulated from {self.num_steps} measured steps of "
            f"{self.measured_s:.3g} s:",
            f"  {'schedule':<27}{'s a step':>9}{'gain':>7}{'trainers':>10}{'generators':>12}"
            f"{'trainer idle':>14}{'rollout idle':>14}",
        ]
        for name, each in self.results.items():
            trainers = str(self.ranks - each.generators) if each.generators else "all"
            lines.append(
                f"  {_NAMES.get(name, name):<27}{each.step_s:>9.3g}{sync_s / each.step_s:>6.2f}x"
                f"{trainers:>10}{each.generators or 'all':>12}{each.trainer_idle:>14.0%}"
                f"{each.rollout_idle:>14.0%}"
            )
        return "\n".join([*lines, f"Proposed: {' '.join(self.keys)}"])


def proposal_of_run(folder: str | Path, staleness: float) -> Proposal:
    """Return the proposal from the record of a synchronous run.

    Raises DataError for a run whose times do not show the costs of generation and update.
    """
    run = load_run(folder)
    mode = run.config["trainer"].get("mode")
    placement = run.config["trainer"].get("placement") or {}
    apart = placement.get("rollout")
    if mode != "sync" or apart:
        found = f"trainer.mode={mode}" if mode else "no trainer.mode, as fine-tuning"
        if apart:
            found += f" and trainer.placement.rollout={apart}"
        raise DataError(
            "A proposal is made from a synchronous run in which all ranks generate and learn, but "
            f"{folder} has {found}. Give a run with trainer.mode=sync; {LEAST_STEPS} steps suffice."
        )

    measured = MeasuredSteps(
        prompts=run.config["data"]["train_batch_size"],
        samples=run.config["actor_rollout_ref"]["rollout"]["n"],
        ranks=run.facts["ranks"],
    )

    for step in sorted(run.steps):
        metrics = run.steps[step].metrics
        if "rollout/decode_steps" not in metrics or "timing_s/gen" not in metrics:
            continue
        measured.add(metrics, _lengths(run, step))

    if len(measured.steps) < LEAST_STEPS or not measured.lengths:
        raise DataError(
            f"A proposal needs {LEAST_STEPS} steps with counters of the rollout "
            "(actor_rollout_ref.rollout.name=embedded), and the samples of one, got "
            f"{len(measured.steps)} in {folder}. Train for longer, "
            "with trainer.record.enable=True."
        )
    return measured.proposal(staleness)


def _lengths(run: Any, step: int) -> list[int]:
    """Return the tokens of each response of a step; none where its samples are not kept."""
    if step not in run.kept_steps:
        return []
    samples = run.samples(step)
    return [len(samples.values("response_ids", row)) for row in range(len(samples))]


def _mean(steps: Sequence[Metrics], name: str) -> float:
    return float(np.mean([each.get(name, 0.0) for each in steps]))


def _non_negative_fit(one: Any, other: Any, total: Any) -> tuple[float, float]:
    """Return a, b >= 0 with the least squares of a * one + b * other - total."""
    factors = np.stack([one, other], 1)
    (a, b), *_ = np.linalg.lstsq(factors, total, rcond=None)
    if a < 0:
        return 0.0, float((other @ total) / (other @ other))
    if b < 0:
        return float((one @ total) / (one @ one)), 0.0
    return float(a), float(b)
