"""Try a reward on a few rows before training starts.

Gold answers, in the usual formats, must score above wrong ones. Scores must not be NaN, of the
wrong type, constant, different from call to call, or too slow.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.config.algorithm import SCORE_METRICS
from verl.config.train import TrainConfig
from verl.rewards.manager import RewardManager
from verl.rewards.outcome import Outcome, RewardFunction
from verl.rewards.processes import ProcessFunction, pack_function
from verl.rewards.results import check_outcome, ground_truth_of, no_such_field
from verl.rewards.rules import check_options, require_rules
from verl.rewards.sample import Sample, fields_of_plain_episode, with_images
from verl.rewards.texts import traceback_below
from verl.utils.errors import ConfigError, RewardError, text_of
from verl.utils.logging import logger
from verl.utils.seeding import restore_rng_state, rng_state
from verl.utils.user_parts import read_row

NUM_ROWS = 3
TIMEOUT_S = 60.0  # of a call, unless reward_model.timeout_s is shorter
SLOW_S = 1.0
NONSENSE = "I do not know."
# Entries of extra_info that may hold a solution in words.
_SOLUTIONS = ("answer", "solution", "canonical_solution")

Row = Mapping[str, Any]
Rows = Sequence[tuple[int, Row]]  # with their numbers in the dataset


class MapDataset(Protocol):
    """Rows by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Row: ...


@dataclass(slots=True)
class Probe:
    """One tried answer: its row, its kind, and its result."""

    row: int
    kind: str  # "gold", "wrong" or "again" (the first gold answer a second time)
    sample: Sample
    score: float = 0.0
    fields: Sequence[str] = ()  # further ones that it returned
    failure: str | None = None  # None: `score` is valid
    outcome: Outcome = field(default_factory=Outcome)  # empty until it was tried

    def __str__(self) -> str:
        return (
            f"row {self.row} (data_source {self.sample.data_source!r}, ground_truth "
            f"{text_of(self.sample.ground_truth)[:80]!r}), {self.kind} answer "
            f"{self.sample.solution_str[:80]!r}"
        )


@dataclass(slots=True)
class Report:
    """The tried answers and the findings. `faults` prevent training, `suspicions` only warn."""

    probes: list[Probe] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    suspicions: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds_a_call: float = 0.0

    @property
    def sound(self) -> list[Probe]:
        """Return the answers that have a score."""
        return [probe for probe in self.probes if probe.failure is None]


def preflight(config: TrainConfig, dataset: MapDataset, manager: Any) -> None:
    """Raise for a reward that cannot work, and log a warning for one that looks doubtful.

    This always checks that the rows' data sources have rules, and that these accept
    `reward_model.rule_kwargs`. Answers are tried unless `reward_model.preflight=False`. A user's
    manager that is no RewardManager is not checked.

    Raises:
        RewardError: the reward cannot work; the message has the sample that shows it.
        ConfigError: a rule does not accept an option, or the reward lacks the field that dynamic
            sampling reads.
    """
    if not isinstance(manager, RewardManager):
        return

    rows = choose_rows(dataset, NUM_ROWS)
    if manager.by_rule:
        key = manager.reward_fn_key
        name = type(dataset).__name__
        require_rules((f"Row {number} of {name}", row.get(key)) for number, row in rows)
        for _, row in rows:
            check_options(row.get(key), config.reward_model.rule_kwargs)

    if not config.reward_model.preflight:
        return
    rollout = config.actor_rollout_ref.rollout
    report = inspect_reward(rows, manager, plays_episodes=rollout.uses_agents)
    _check_filter_metric(config, report, manager)
    if report.faults:
        faults = "\n".join(report.faults)
        raise RewardError(
            f"Reward preflight: {faults}\n"
            "Fix the reward or the data (reward_model.preflight=False skips this check)."
        )

    if report.suspicions:
        logger.warning("Reward preflight: %s", " ".join(report.suspicions))


def _check_filter_metric(config: TrainConfig, report: Report, manager: RewardManager) -> None:
    """Raise ConfigError where dynamic sampling reads a field that no tried answer returned.

    Managers of a user's own and agent loops may add fields, and are not checked.
    """
    options = config.algorithm.filter_groups
    is_ours = type(manager).__module__.startswith("verl.")
    may_add = config.actor_rollout_ref.rollout.uses_agents or not is_ours
    if not options.enable or may_add or options.metric in SCORE_METRICS:
        return

    returned = dict.fromkeys(["score", *manager.ADDED_FIELDS])
    for probe in report.sound:
        returned |= dict.fromkeys(probe.fields)
    if report.sound and options.metric not in returned:
        raise no_such_field(options.metric, returned)


def choose_rows(dataset: MapDataset, count: int) -> Rows:
    """Return up to `count` rows with their numbers, spread evenly over the data.

    Rows of one source are usually neighbors, so the first rows would not show all sources.
    """
    last = len(dataset) - 1
    count = min(count, len(dataset))
    numbers: set[int] = set()
    for place in range(count):
        numbers.add(round(place * last / max(count - 1, 1)))
    return [(number, read_row(dataset, number)) for number in sorted(numbers)]


def inspect_reward(
    rows: Rows,
    manager: RewardManager,
    *,
    plays_episodes: bool = False,
) -> Report:
    """Score gold and wrong answers of these rows and report findings. Keeps the random states.

    Args:
        plays_episodes: agents play the rows. `extra_info` then has the entries of an episode, and a
            missing key is no fault: tools and loops may add keys of their own.
    """
    state = rng_state()
    if manager.images:
        rows = [(number, _row_with_images(row)) for number, row in rows]
    report = Report(probes=_probes(rows, manager.reward_fn_key))
    if plays_episodes:
        row_of = dict(rows)
        for probe in report.probes[:-1]:  # the last one shares the sample of the first
            probe.sample.extra_info = _info_of_episode(probe.sample, row_of[probe.row])

    # Try the first one alone: it may load something, and if it hangs, the others hang too.
    _try(report.probes[:1], manager)
    if any(probe.outcome.timed_out for probe in report.probes[:1]):
        del report.probes[1:]

    began = time.perf_counter()
    _try(report.probes[1:], manager)
    report.seconds_a_call = (time.perf_counter() - began) / max(len(report.probes) - 1, 1)
    restore_rng_state(state)

    _failures(report, manager, keys_may_come=plays_episodes)
    _gold_above_wrong(report)
    _same_again(report)
    _speed(report)
    _sendable(report, manager.compute_score)
    return report


def _try(probes: Sequence[Probe], manager: RewardManager) -> None:
    timeout_s = min(TIMEOUT_S, manager.timeout_s)
    outcomes = manager.call([probe.sample for probe in probes], timeout_s=timeout_s)
    for probe, outcome in zip(probes, outcomes):
        assert outcome is not None, "only a failure under stop_at_failure ends the calls"
        probe.outcome = outcome
        probe.score, fields, probe.failure = check_outcome(outcome, timeout_s)
        probe.fields = list(fields)


def _probes(rows: Rows, source_key: str) -> list[Probe]:
    golds = {number: gold_answers(row) for number, row in rows}
    probes: list[Probe] = []

    for number, row in rows:
        for text in golds[number]:
            probes.append(Probe(number, "gold", _sample(row, text, source_key)))

        # A gold answer of another row is wrong here, unless this row has it as well.
        wrong: list[str] = []
        for other, texts in golds.items():
            if other != number:
                wrong += [text for text in texts if text not in golds[number]]
        for text in (*wrong[-1:], NONSENSE):
            probes.append(Probe(number, "wrong", _sample(row, text, source_key)))

    if probes:
        probes.append(Probe(probes[0].row, "again", probes[0].sample))
    return probes


def _sample(row: Row, text: str, source_key: str) -> Sample:
    return Sample(
        row=0,
        data_source=row.get(source_key),
        solution_str=text,
        ground_truth=ground_truth_of(row.get("reward_model")),
        extra_info=row.get("extra_info"),
        last_token=0,
    )


def _row_with_images(row: Row) -> Row:
    info = with_images(row.get("extra_info"), row.get("prepared_pictures"))
    return {**row, "extra_info": info}


def _info_of_episode(sample: Sample, row: Row) -> dict[str, Any]:
    """Return `extra_info` as after an episode of one turn that gave this answer."""
    prompt = row.get("raw_prompt")
    messages = [] if prompt is None else list(prompt)
    reply = {"role": "assistant", "content": sample.solution_str}
    return {
        **(sample.extra_info or {}),
        **fields_of_plain_episode(),
        "messages": [*messages, reply],
        "num_tool_calls": 0,
        "ended_by": "answer",
        "num_turns": 2,
    }


def gold_answers(row: Row) -> list[str]:
    """Return responses to a row, one of which at least should score as gold.

    They are the solution in the row, the ground truth alone, and the ground truth in the usual
    formats. If the ground truth is a task instead of an answer, only the solution remains.
    """
    truth: Any = ground_truth_of(row.get("reward_model"))
    extra: Any = row.get("extra_info")
    texts = []

    if isinstance(extra, Mapping):
        for name in _SOLUTIONS:
            if isinstance(extra.get(name), str) and extra[name].strip():
                texts += [extra[name], f"<answer>{extra[name]}</answer>"]

    if isinstance(truth, Mapping):
        is_task = "numbers" in truth or "nums" in truth
        truth = None if is_task else truth.get("target")
    if hasattr(truth, "__len__") and not isinstance(truth, (str, Mapping)):
        truth = truth[0] if len(truth) else None
    if isinstance(truth, (str, int, float)) and str(truth).strip():
        texts += [
            str(truth),
            f"The answer is {truth}\n<answer>{truth}</answer>\n\\boxed{{{truth}}}\n#### {truth}",
        ]

    return list(dict.fromkeys(texts))


def _failures(report: Report, manager: RewardManager, *, keys_may_come: bool) -> None:
    """Report failed calls: as a fault if the run would stop at its first step, else as a suspicion.

    Under a policy other than "stop" the user has accepted failures.

    Args:
        keys_may_come: tools and agent loops may add the keys that are missing.
    """
    failed = [probe for probe in report.probes if probe.failure is not None]
    if not failed:
        return

    # A value that is no score is the function's own fault. An error may be due to our answer, which
    # no model would give.
    values = [probe for probe in failed if not probe.outcome.failed]
    first = values[0] if values else failed[0]
    text = (
        f"the reward function failed on {len(failed)} of {len(report.probes)} answers tried. "
        f"{first}: {first.failure}"
    )

    lacks_key = all(isinstance(probe.outcome.error, KeyError) for probe in failed)
    may_succeed = keys_may_come and lacks_key
    is_certain = bool(values) or (len(failed) == len(report.probes) and not may_succeed)
    if manager.on_error != "stop" or not is_certain:
        report.suspicions.append(text.rstrip(".") + ".")
        return

    text += traceback_below(first.outcome.error)
    if first.outcome.timed_out:
        text += " reward_model.timeout_s sets the time limit of a call."
    report.faults.append(text)


def _gold_above_wrong(report: Report) -> None:
    sound = report.sound
    scores: set[float] = set()
    kinds: set[str] = set()
    rows: dict[int, None] = {}
    for probe in sound:
        scores.add(probe.score)
        kinds.add(probe.kind)
        rows[probe.row] = None

    if "gold" in kinds and len(scores) == 1:
        report.suspicions.append(
            f"all {len(sound)} answers tried, gold and wrong, score {scores.pop():g}."
        )
        return

    unsure = []
    for row in rows:
        gold = _best(sound, row, "gold")
        wrong = _best(sound, row, "wrong")
        if gold is not None and wrong is not None and gold.score <= wrong.score:
            unsure.append(
                f"{gold} scores {gold.score:g}, the wrong {wrong.sample.solution_str[:40]!r} "
                f"{wrong.score:g}"
            )

    if unsure:
        report.suspicions.append(
            f"on {len(unsure)} of {len(rows)} rows no gold answer scores above a wrong one. The "
            f"first: {unsure[0]}."
        )


def _best(probes: Sequence[Probe], row: int, kind: str) -> Probe | None:
    """Return the probe of a row and kind that has the highest score."""
    candidates = [probe for probe in probes if probe.row == row and probe.kind == kind]
    return max(candidates, key=lambda probe: probe.score, default=None)


def _same_again(report: Report) -> None:
    if not report.probes:
        return
    first = report.probes[0]
    again = report.probes[-1]
    if first.failure is None and again.failure is None and first.score != again.score:
        report.suspicions.append(
            f"two calls for one answer differ, {first.score:g} and {again.score:g}: {first}."
        )


def _speed(report: Report) -> None:
    if report.seconds_a_call > SLOW_S:
        report.suspicions.append(
            f"a call takes {report.seconds_a_call:.1f} s; 1,000 responses of a step take "
            f"{report.seconds_a_call * 1000 / 60:.0f} minutes. An async function or "
            "reward_model.reward_manager=prime makes calls in parallel."
        )


def _sendable(report: Report, function: RewardFunction) -> None:
    if isinstance(function, ProcessFunction):
        return
    try:
        pack_function(function)
    except ConfigError as error:
        report.notes.append(str(error))
