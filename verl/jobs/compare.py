"""Find the first step, phase, tensor and token in which two recorded runs differ."""

import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl.checkpoint.sharded import MODEL, SHARDED_FOLDER, SavedTensors
from verl.columns import COLUMNS
from verl.tracking.records import Run, StepLine, StepSamples
from verl.utils.errors import ConfigError, DataError
from verl.utils.registry import nearest_names

# Metrics of time, of machines, and of how far a schedule has drawn ahead. Those of a policy that is
# trained next to the actor have its name in front.
_NOT_COMPARED = re.compile(
    r"(policy_[\w-]+/)?"
    r"(timing_s/|timing_per_token_ms/|perf/|rollout/|fully_async/|(trainer|rollouter)/idle_ratio"
    r"|agent_loop/(generate_sequences|tool_calls)/|tools/.*/seconds/)"
)
_IDS = ("prompt_ids", "response_ids", "response_mask", "turn_of_token")
_PHASES = ("data", "generate", "score", "evaluate_policies", "estimate_advantages", "update")
_PHASE_OF = {"prompt_ids": "data", "response_ids": "generate"}
_MOST_KEYS = 8
_MOST_CHARACTERS = 500  # of the names that an error lists


@dataclass(frozen=True)
class Tolerances:
    """How far values may differ: |a - b| <= atol + rtol |b|. Ids and masks must be equal.

    Args:
        by_name: absolute tolerances of single columns, metrics and weights.

    Raises:
        ConfigError: a tolerance is negative, infinite or NaN.
    """

    atol: float = 0.0
    rtol: float = 0.0
    by_name: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"atol": self.atol, "rtol": self.rtol, **self.by_name}
        for name, value in given.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"The tolerance '{name}': expected a finite number >= 0, got {value}."
                )

    def check_names(self, *runs: Run) -> None:
        """Raise ConfigError for a tolerance of a name that no run has recorded.

        Ids, and metrics that are not compared, count as unknown: a tolerance has no effect there.
        """
        known = _names_with_tolerance(runs)
        for name in self.by_name:
            if name not in known:
                nearest = nearest_names(name, sorted(known))
                shown = textwrap.shorten(nearest, _MOST_CHARACTERS, placeholder=" ...")
                raise ConfigError(
                    f"The tolerance '{name}' names no column, metric or weight that is compared "
                    f"within a tolerance. Nearest: {shown}."
                )

    def allows(self, name: str, one: np.ndarray, other: np.ndarray) -> np.ndarray:
        """Mark the values that are near enough; without a tolerance those of equal bits."""
        atol = self.by_name.get(name, self.atol)
        if name in _IDS or (atol == 0 and self.rtol == 0):
            return _same_bits(one, other)
        near = np.abs(one - other) <= atol + self.rtol * np.abs(other)
        return near | _same_bits(one, other)

    @property
    def is_exact(self) -> bool:
        """Whether everything must be equal to the last bit."""
        return self.atol == 0 and self.rtol == 0 and not any(self.by_name.values())


@dataclass(frozen=True)
class Difference:
    """A tensor or metric in which two runs differ.

    `place` locates the first value that differs, with both values, where they are still known.
    """

    step: int
    phase: str
    name: str
    place: str

    def __str__(self) -> str:
        return f"step {self.step}, phase {self.phase}, {self.name}: {self.place}"


@dataclass(frozen=True)
class Comparison:
    """The result: differences of the first step that has any, in the order of the phases.

    Args:
        keys: configuration keys with other values, as texts.
        steps: steps that were compared.
        notes: parts that could not be compared.
        is_exact: whether equal values have equal bits, because there was no tolerance.
    """

    differences: list[Difference]
    keys: list[str]
    steps: list[int]
    notes: list[str]
    is_exact: bool = True

    def __str__(self) -> str:
        equal = "equal to the last bit" if self.is_exact else "equal within the tolerances"
        lines = []
        if self.keys:
            shown = self.keys[:_MOST_KEYS]
            more = len(self.keys) - len(shown)
            keys = "key" if len(self.keys) == 1 else "keys"
            lines.append(f"Configuration, {len(self.keys)} {keys}: {'; '.join(shown)}")
            if more:
                lines[-1] += f"; and {more} more"
        if not self.differences:
            lines.append(f"{_span(self.steps)} {equal}.")
            return "\n".join([*lines, *self.notes])

        first, *others = self.differences
        before = [step for step in self.steps if step < first.step]
        if before:
            lines.append(f"{_span(before)} {equal}.")
        lines.append(f"The first difference: {first}")
        lines += [f"  then {other}" for other in others]
        return "\n".join([*lines, *self.notes])


def _span(steps: list[int]) -> str:
    """Return steps as the subject of a sentence, with its verb, such as "Steps 0 to 2, 4 are"."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))

    shown = []
    for first, last in ranges:
        shown.append(f"{first}" if first == last else f"{first} to {last}")
    listed = ", ".join(shown)
    return f"Step {listed} is" if len(steps) == 1 else f"Steps {listed} are"


def compare_runs(one: Run, other: Run, tolerances: Tolerances | None = None) -> Comparison:
    """Compare the steps that both runs have recorded.

    Raises DataError if they have none in common, and ConfigError for a tolerance of a name that
    neither has recorded.
    """
    tolerances = tolerances or Tolerances()
    steps = sorted(one.steps.keys() & other.steps.keys())
    if not steps:
        raise DataError(
            f"{one.folder} and {other.folder} have no step in common: "
            f"{sorted(one.steps)[:3]}… and {sorted(other.steps)[:3]}…"
        )

    tolerances.check_names(one, other)

    notes = [*one.damage, *other.damage]
    notes += _parts_alone("first", one, other, steps)
    notes += _parts_alone("second", other, one, steps)
    if not tolerances.is_exact:
        notes.append("Compared with a tolerance: weights by the checkpoints of both runs alone.")

    differences: list[Difference] = []
    for step in steps:
        pair = _Step(one, other, step, tolerances, notes)
        differences = list(pair.differences())
        if differences:
            break
    notes = list(dict.fromkeys(notes))
    keys = changed_keys(one.config, other.config)
    return Comparison(differences, keys, steps, notes, tolerances.is_exact)


def _parts_alone(which: str, run: Run, other: Run, steps: Iterable[int]) -> list[str]:
    """Return notes on steps, and on parts of `steps`, that `run` has recorded and `other` has not.

    Lines without columns do not count: a run begins with one, and so does the replay of a step.
    """
    notes = []
    steps_alone = sorted(run.steps.keys() - other.steps.keys())
    if steps_alone:
        notes.append(f"{_span(steps_alone)} recorded by the {which} run alone.")

    names: dict[str, None] = {}  # keeps the order of the lines
    for step in steps:
        line = run.steps[step]
        peer = other.steps[step]
        if line.columns and peer.columns:
            known = set(_parts(peer))
            for name in _parts(line):
                if name not in known:
                    names[name] = None
    if names:
        shown = textwrap.shorten(", ".join(names), _MOST_CHARACTERS, placeholder=" ...")
        notes.append(f"Recorded by the {which} run alone, and not compared: {shown}.")
    return notes


def _parts(line: StepLine) -> Iterator[str]:
    """Yield the names of everything in a line that is compared."""
    yield from line.columns
    for name in line.metrics:
        if not _NOT_COMPARED.match(name):
            yield f"metric {name}"
    for role in line.weights:
        yield f"weights of the {role}"


def _names_with_tolerance(runs: Iterable[Run]) -> set[str]:
    """Return the recorded columns, metrics and weights to which a tolerance applies."""
    names: set[str] = set()
    for run in runs:
        for line in run.steps.values():
            names.update(line.columns, line.metrics)
        for tensors in run.tensor_names.values():
            names.update(tensors)
    return {name for name in names if name not in _IDS and not _NOT_COMPARED.match(name)}


def changed_keys(one: Any, other: Any, path: str = "") -> list[str]:
    """Return the keys of two configurations that have other values, as texts with both."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = []
        for name in dict.fromkeys([*one, *other]):
            at = f"{path}.{name}" if path else name
            found += changed_keys(one.get(name), other.get(name), at)
        return found
    return [] if one == other else [f"{path} ({one!r:.60}, {other!r:.60})"]


class _Step:
    """One step of two runs."""

    def __init__(
        self, one: Run, other: Run, step: int, tolerances: Tolerances, notes: list[str]
    ) -> None:
        self.runs = (one, other)
        self.step = step
        self.tolerances = tolerances
        self.notes = notes
        self.lines: tuple[StepLine, StepLine] = (one.steps[step], other.steps[step])

    def differences(self) -> Iterator[Difference]:
        """Yield the columns, metrics and weights that differ, in the order of the phases."""
        yield from self._columns()
        yield from self._metrics()
        for role in self.lines[0].weights.keys() & self.lines[1].weights.keys():
            yield from self._weights(role)

    def _columns(self) -> Iterator[Difference]:
        one = self.lines[0].columns
        other = self.lines[1].columns
        names = sorted(one.keys() & other.keys(), key=_order)
        unequal = [name for name in names if one[name] != other[name]]
        if not unequal:
            return
        samples = self._samples()
        for name in unequal:
            place = "values differ; its samples are no longer kept by both runs"
            if samples is not None:
                place = self._first_value(name, *samples)
            if place is not None:
                yield Difference(self.step, phase_of(name), name, place)

    def _samples(self) -> tuple[StepSamples, StepSamples] | None:
        one, other = self.runs
        if self.step in one.kept_steps and self.step in other.kept_steps:
            return one.samples(self.step), other.samples(self.step)
        return None

    def _first_value(self, name: str, one: StepSamples, other: StepSamples) -> str | None:
        """Locate the first value that differs; None if all are within the tolerance."""
        if len(one) != len(other):
            return f"{len(one)} and {len(other)} samples"

        num_differing = 0
        largest = 0.0
        first = None
        for row in range(len(one)):
            left = one.values(name, row)
            right = other.values(name, row)
            if len(left) != len(right):
                first = first or f"row {row}: {len(left)} and {len(right)} tokens"
                num_differing += 1
                continue

            wrong = ~self.tolerances.allows(name, left, right)
            if wrong.any():
                token = int(wrong.argmax())
                first = first or f"row {row}, token {token}: {left[token]!s} and {right[token]!s}"
                num_differing += int(wrong.sum())
                largest = max(largest, _largest_gap(left[wrong], right[wrong]))

        if first is None:
            return None
        return f"{first}; {num_differing} values differ, by at most {largest:.3g}"

    def _metrics(self) -> Iterator[Difference]:
        one = self.lines[0].metrics
        other = self.lines[1].metrics
        for name in one:
            if _NOT_COMPARED.match(name) or name not in other:
                continue
            left = np.array(one[name], dtype=float)
            right = np.array(other[name], dtype=float)
            if not self.tolerances.allows(name, left, right).all():
                place = f"{one[name]!r} and {other[name]!r}"
                phase = "validation" if name.startswith("val") else "update"
                yield Difference(self.step, phase, f"metric {name}", place)

    def _weights(self, role: str) -> Iterator[Difference]:
        one = self.lines[0].weights[role]
        other = self.lines[1].weights[role]
        if one == other:
            return

        names = self.runs[0].tensor_names[role]
        if names != self.runs[1].tensor_names[role]:
            yield Difference(self.step, "update", f"weights of the {role}", "other tensors")
            return

        unequal = [name for name, left, right in zip(names, one, other) if left != right]
        saved = self._saved(role)
        if saved is None:
            if self.tolerances.is_exact:
                place = f"other bits; {len(unequal)} of {len(names)} tensors differ"
                yield Difference(self.step, "update", f"weight {unequal[0]} ({role})", place)
            else:
                self.notes.append(f"The {role}'s weights after step {self.step} have other bits.")
            return

        for name in unequal:
            place = self._first_element(name, *saved)
            if place is not None:
                place += f"; {len(unequal)} of {len(names)} tensors differ"
                yield Difference(self.step, "update", f"weight {name} ({role})", place)
                return

    def _saved(self, role: str) -> tuple[SavedTensors, SavedTensors] | None:
        folders = []
        for run in self.runs:
            folder = run.folder / f"global_step_{self.step}" / role / SHARDED_FOLDER
            if not folder.is_dir():
                return None
            folders.append(folder)
        return SavedTensors(folders[0]), SavedTensors(folders[1])

    def _first_element(self, name: str, one: SavedTensors, other: SavedTensors) -> str | None:
        key = MODEL + name
        left = one.read_whole([key])[key]
        right = other.read_whole([key])[key]
        shape = tuple(left.shape)
        flat_left = left.float().numpy().reshape(-1)
        flat_right = right.float().numpy().reshape(-1)

        wrong = ~self.tolerances.allows(name, flat_left, flat_right)
        if not wrong.any():
            if self.tolerances.is_exact:
                return "the recorded digests differ, and the checkpoints of the step are equal"
            return None

        first = int(wrong.argmax())
        index = ", ".join(map(str, np.unravel_index(first, shape)))
        gap = _largest_gap(flat_left[wrong], flat_right[wrong])
        return (
            f"element [{index}] of {list(shape)}: {flat_left[first]!s} and {flat_right[first]!s}; "
            f"{int(wrong.sum())} elements differ, by at most {gap:.3g}"
        )


def _largest_gap(left: np.ndarray, right: np.ndarray) -> float:
    gaps = np.abs(left.astype(float) - right.astype(float))
    return float(gaps.max())


def phase_of(column: str) -> str:
    """Return the phase that writes a column."""
    if column in _PHASE_OF:
        return _PHASE_OF[column]
    if column not in COLUMNS:
        return "score"  # columns of a reward or of a user's own
    return COLUMNS[column].written_by.partition(",")[0]


def _order(column: str) -> tuple[int, int, str]:
    phase = phase_of(column)
    place = _PHASES.index(phase) if phase in _PHASES else 1
    known = list(COLUMNS)
    place_in_table = known.index(column) if column in known else -1
    return place, place_in_table, column


def _same_bits(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    if one.dtype != other.dtype or one.dtype.kind != "f":
        return one == other
    bits = f"u{one.dtype.itemsize}"
    return one.view(bits) == other.view(bits)
