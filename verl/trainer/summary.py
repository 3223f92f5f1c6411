"""The summary at the end of a run: reward before and after, and where the time went."""

from collections.abc import Mapping

_REWARDS = ("critic/score/mean", "actor/distillation_loss", "train/loss")
_VALIDATION = ("val-core/", "val/loss")
_NOT_PHASES = ("step", "testing", "rm")  # rm: a part of reward
_MOST_PHASES = 4
_MOST_SCORES = 3


class RunSummary:
    """Sums up the metrics of the steps of this process."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, float]] = {}
        self._last: dict[str, tuple[int, float]] = {}
        self._seconds: dict[str, float] = {}
        self._num_steps = 0

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a step, or of the validation before the first."""
        for name, value in metrics.items():
            if name in _REWARDS or name.startswith(_VALIDATION):
                self._first.setdefault(name, (step, value))
                self._last[name] = step, value
            if name.startswith("timing_s/"):
                phase = name.removeprefix("timing_s/")
                self._seconds[phase] = self._seconds.get(phase, 0.0) + value
        self._num_steps += "timing_s/step" in metrics

    def lines(self) -> list[str]:
        """Return the lines of the summary; none before the first step."""
        if not self._num_steps:
            return []
        lines = []
        names = [name for name in self._first if name in _REWARDS]
        names += [name for name in self._first if name.startswith(_VALIDATION)][:_MOST_SCORES]
        for name in names:
            (before, first), (after, last) = self._first[name], self._last[name]
            if before != after:
                lines.append(f"{name}: {first:.4f} (step {before}) to {last:.4f} (step {after})")

        total = self._seconds["step"]
        phases = [item for item in self._seconds.items() if item[0] not in _NOT_PHASES]
        phases.sort(key=lambda item: -item[1])
        shares = []
        for phase, seconds in phases[:_MOST_PHASES]:
            shares.append(f"{phase} {seconds / max(total, 1e-9):.0%}")
        steps = "step" if self._num_steps == 1 else "steps"
        time = f"Time: {self._num_steps} {steps} took {total:.1f} s"
        lines.append(f"{time} ({', '.join(shares)})" if shares else time)
        return lines
