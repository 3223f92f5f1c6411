"""Trying a reward on a few rows before anything is trained on it.

Gold answers, rendered as rules and people write them, must score above wrong ones; nothing may be
NaN, of the wrong type, constant, different from call to call, or too slow to train with.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.config.train import TrainConfig
from verl.rewards.calls import Outcome
from verl.rewards.manager import RewardManager, Sample, check_outcome, ground_truth_of
from verl.rewards.processes import ProcessFunction, pack_function
from verl.rewards.rules import check_options, find_rule
from verl.rewards.texts import format_traceback, text_of
from verl.utils.errors import ConfigError, RewardError
from verl.utils.logging import logger
from verl.utils.seeding import restore_rng_state, rng_state

NUM_ROWS = 3
TIMEOUT_S = 60.0  # a call, unless reward_model.timeout_s is shorter
SLOW_S = 1.0
NONSENSE = "I do not know."
# Entries of extra_info that may hold a solution in words.
_SOLUTIONS = ("answer", "solution", "canonical_solution")


class MapDataset(Protocol):
    """Rows by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Mapping[str, Any]: ...


@dataclass(slots=True)
class Probe:
    """One answer that was scored: its place in the data, what it stands for, and what came of
    it."""

    row: int
    kind: str  # "gold", "wrong" or "again" (the first gold answer a second time)
    sample: Sample
    score: float = 0.0
    failure: str | None = None  # None: `score` holds
    outcome: Outcome | None = None  # None: not tried

    def __str__(self) -> str:
        return (
            f"row {self.row} (data_source {self.sample.data_source!r}, ground_truth "
            f"{text_of(self.sample.ground_truth)[:80]!r}), {self.kind} answer "
            f"{self.sample.solution_str[:80]!r}"
        )


@dataclass(slots=True)
class Report:
    """What was tried, and what was found: `faults` make training senseless, `suspicions` are worth
    a look."""

    probes: list[Probe] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    suspicions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds_a_call: float = 0.0


def preflight(config: TrainConfig, dataset: MapDataset, manager: Any) -> None:
    """Stop a run whose reward cannot work; one line of warning where it looks doubtful.

    The rows' data sources must have rules, and rules know `reward_model.rule_kwargs`; the rest is
    tried unless `reward_model.preflight=False`, or the manager is the user's own and not a
    RewardManager.

    Raises:
        RewardError: a fault, with the sample that shows it.
        ConfigError: an option that the rule does not take.
    """
    if not isinstance(manager, RewardManager):
        return
    rows = choose_rows(dataset, NUM_ROWS)
    for _, row in rows if manager.by_rule else ():
        find_rule(row.get(manager.reward_fn_key))
        check_options(row.get(manager.reward_fn_key), config.reward_model.rule_kwargs)

    if not config.reward_model.preflight:
        return
    report = inspect_reward(rows, manager)
    if report.faults:
        raise RewardError(
            "Reward preflight: "
            + "\n".join(report.faults)
            + "\nMend the reward or the data (reward_model.preflight=False "
            "skips this check)."
        )

    if report.suspicions:
        logger.warning("Reward preflight: %s", " ".join(report.suspicions))


def choose_rows(dataset: MapDataset, count: int) -> list[tuple[int, Mapping[str, Any]]]:
    """Up to `count` rows with their numbers, spread evenly over the data: files of several sources
    stand in blocks."""
    numbers = sorted(
        {round(i * (len(dataset) - 1) / max(count - 1, 1)) for i in range(min(count, len(dataset)))}
    )
    return [(number, dataset[number]) for number in numbers]


def inspect_reward(rows: Sequence[tuple[int, Mapping[str, Any]]], manager: RewardManager) -> Report:
    """Score gold and wrong answers of these rows, and say what is odd. The random states stay as
    they are."""
    state = rng_state()
    report = Report(probes=_probes(rows, manager.reward_fn_key))
    # The first alone: it may load something, and if it hangs, so will the others.
    _try(report.probes[:1], manager)
    if any(probe.outcome and probe.outcome.timed_out for probe in report.probes):
        del report.probes[1:]
    began = time.perf_counter()
    _try(report.probes[1:], manager)
    report.seconds_a_call = (time.perf_counter() - began) / max(len(report.probes) - 1, 1)
    restore_rng_state(state)
    for check in (_failures, _gold_above_wrong, _same_again, _speed):
        check(report, manager)
    _sendable(report, manager.compute_score)
    return report


def _try(probes: Sequence[Probe], manager: RewardManager) -> None:
    timeout_s = min(TIMEOUT_S, manager.timeout_s)
    for probe, outcome in zip(
        probes, manager.call([probe.sample for probe in probes], timeout_s=timeout_s)
    ):
        assert outcome is not None, "only a failure under stop_at_failure ends the calls"
        probe.outcome = outcome
        probe.score, _, probe.failure = check_outcome(outcome, timeout_s)


def _probes(rows: Sequence[tuple[int, Mapping[str, Any]]], source_key: str) -> list[Probe]:
    golds = {number: gold_answers(row) for number, row in rows}
    probes = []
    for number, row in rows:
        others = [
            text
            for other in golds
            if other != number
            for text in golds[other]
            if text not in golds[number]
        ]
        texts = [("gold", text) for text in golds[number]] + [
            ("wrong", text) for text in (*others[-1:], NONSENSE)
        ]
        probes += [Probe(number, kind, _sample(row, text, source_key)) for kind, text in texts]

    if probes:
        probes.append(Probe(probes[0].row, "again", probes[0].sample))
    return probes


def _sample(row: Mapping[str, Any], text: str, source_key: str) -> Sample:
    return Sample(
        row=0,
        data_source=row.get(source_key),
        solution_str=text,
        ground_truth=ground_truth_of(row.get("reward_model")),
        extra_info=row.get("extra_info"),
        last_token=0,
    )


def gold_answers(row: Mapping[str, Any]) -> list[str]:
    """Responses of which one should score as gold: the solution that comes with the row, the ground
    truth alone, and the ground truth in every usual mark-up. None where the ground truth is a task
    instead of an answer."""
    truth: Any = ground_truth_of(row.get("reward_model"))
    extra: Any = row.get("extra_info")
    texts = []

    for name in _SOLUTIONS if isinstance(extra, Mapping) else ():
        if isinstance(extra.get(name), str) and extra[name].strip():
            texts += [extra[name], f"<answer>{extra[name]}</answer>"]

    if isinstance(truth, Mapping):
        truth = truth.get("target") if "numbers" not in truth and "nums" not in truth else None
    if hasattr(truth, "__len__") and not isinstance(truth, (str, Mapping)):
        truth = truth[0] if len(truth) else None
    if isinstance(truth, (str, int, float)) and str(truth).strip():
        texts += [
            str(truth),
            f"The answer is {truth}\n<answer>{truth}</answer>\n\\boxed{{{truth}}}\n#### {truth}",
        ]

    return list(dict.fromkeys(texts))


def _failures(report: Report, manager: RewardManager) -> None:
    """A fault where the run would stop at its first step; under another policy it is what the user
    asked for."""
    failed = [probe for probe in report.probes if probe.failure is not None]
    if not failed:
        return
    # A value that is no score comes from the function itself; an error may come from our answer,
    # which no model gives.
    values = [probe for probe in failed if probe.outcome and not probe.outcome.failed]
    first = values[0] if values else failed[0]
    text = (
        f"the reward function failed on {len(failed)} of {len(report.probes)} answers tried. "
        f"{first}: {first.failure}"
    )

    is_certain = bool(values) or len(failed) == len(report.probes)
    if manager.on_error != "stop" or not is_certain:
        report.suspicions.append(text)
        return

    assert first.outcome is not None, "it was tried"
    if first.outcome.error is not None:
        text += "\n" + format_traceback(first.outcome.error)
    if first.outcome.timed_out:
        text += " reward_model.timeout_s sets how long a call may take."
    report.faults.append(text)


def _gold_above_wrong(report: Report, manager: RewardManager) -> None:
    sound = [probe for probe in report.probes if probe.failure is None]
    scores = {probe.score for probe in sound}
    has_gold = any(probe.kind == "gold" for probe in sound)

    if has_gold and len(scores) == 1:
        report.suspicions.append(
            f"all {len(sound)} answers tried, gold and wrong, score {scores.pop():g}."
        )
        return

    unsure = []
    for row in dict.fromkeys(probe.row for probe in sound):
        of_row = [probe for probe in sound if probe.row == row]
        gold = max(
            (probe for probe in of_row if probe.kind == "gold"),
            key=lambda probe: probe.score,
            default=None,
        )
        wrong = max(
            (probe for probe in of_row if probe.kind == "wrong"),
            key=lambda probe: probe.score,
            default=None,
        )
        if gold is not None and wrong is not None and gold.score <= wrong.score:
            unsure.append(
                f"{gold} scores {gold.score:g}, the wrong {wrong.sample.solution_str[:40]!r} "
                f"{wrong.score:g}"
            )

    if unsure:
        report.suspicions.append(
            f"on {len(unsure)} of {len({probe.row for probe in sound})} rows no gold answer scores "
            f"above a wrong one. The first: {unsure[0]}."
        )


def _same_again(report: Report, manager: RewardManager) -> None:
    if not report.probes:
        return
    first = report.probes[0]
    again = report.probes[-1]
    if first.failure is None and again.failure is None and first.score != again.score:
        report.suspicions.append(
            f"two calls for one answer differ, {first.score:g} and {again.score:g}: {first}."
        )


def _speed(report: Report, manager: RewardManager) -> None:
    if report.seconds_a_call > SLOW_S:
        report.suspicions.append(
            f"a call takes {report.seconds_a_call:.1f} s; 1,000 responses of a step take "
            f"{report.seconds_a_call * 1000 / 60:.0f} minutes. An async function or "
            "reward_model.reward_manager=prime makes calls side by side."
        )


def _sendable(report: Report, function: Callable[..., Any]) -> None:
    if isinstance(function, ProcessFunction):
        return
    try:
        pack_function(function)
    except ConfigError as error:
        report.notes.append(str(error))
