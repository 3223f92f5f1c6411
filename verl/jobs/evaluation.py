"""Score the responses in a file: mean, pass@k and maj@k, per data source and over all."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config.evaluation import SHARED, EvaluationConfig, EvaluationDataConfig
from verl.data.files import Rows, as_file_list, open_rows, require_column
from verl.jobs.finished_batches import require_writable
from verl.jobs.scores import MAX_VOTES, bootstrap_intervals, majority_at_k, pass_at_k
from verl.protocol import DataProto
from verl.rewards.build import build_reward
from verl.rewards.manager import RewardManager, Scores
from verl.rewards.registry import answer_extractors
from verl.rewards.results import ground_truth_of
from verl.rewards.rules import require_rules, require_truths
from verl.rewards.text_tokenizer import TextTokenizer
from verl.trainer.scored import vote
from verl.utils.errors import ConfigError, DataError, RewardError
from verl.utils.logging import logger
from verl.utils.text_table import aligned
from verl.utils.whole_file import whole_file

RESPONSES_A_CALL = 2048
PROGRESS_EVERY_S = 10.0
ALL = "all"
Report = dict[str, Any]


@dataclass(slots=True)
class ScoredPrompt:
    """A prompt with its responses, and the results of those that the reward could score."""

    source: str
    prompt: str
    responses: list[str]
    columns: dict[str, Any]  # the arguments of the reward function except for the response
    place: str  # file and row
    scores: list[float] = field(default_factory=list)
    passed: list[bool] = field(default_factory=list)
    answers: list[str | None] = field(default_factory=list)


def evaluate(config: EvaluationConfig) -> Report:
    """Score every response, print the table, write the JSON file, and return the report."""
    prompts = read_prompts(config.data)
    check_k(config.metrics.k, prompts)
    output = None if config.data.output_path is None else Path(config.data.output_path)
    if output is not None:
        require_writable(output)

    failures = score(config, prompts)
    report = summarize(config, prompts) | {"failures": failures}
    print(table(report), flush=True)
    if output is not None:
        text = json.dumps(report, indent=1) + "\n"
        with whole_file(output, flush=True) as path:
            path.write_text(text, encoding="utf-8")
    return report


def read_prompts(data: EvaluationDataConfig) -> list[ScoredPrompt]:
    """Read every row of the files.

    Raises DataError with the file, row and column of an invalid value.
    """
    prompts: list[ScoredPrompt] = []
    for file in as_file_list(data.path):
        rows = open_rows(file, key="data.path", made_by="`verl generate`")
        check_columns(file, rows, data)
        for number in range(len(rows)):
            row = rows.row(number)
            responses = row[data.response_key]
            if isinstance(responses, str):
                responses = [responses]
            if not _are_texts(responses):
                raise DataError(
                    f"{file}, row {number}, column '{data.response_key}': must be a list of texts, "
                    f"at least one, got {str(responses)[:80]!r}."
                )

            source = row.get(data.data_source_key)
            columns = {
                "data_source": source,
                "reward_model": row.get(data.reward_model_key),
                "extra_info": row.get(data.extra_info_key),
            }
            name = "unknown" if source is None else str(source)
            prompt = str(row.get(data.prompt_key, ""))
            place = f"{file}, row {number}"
            prompts.append(ScoredPrompt(name, prompt, responses, columns, place))

    return prompts


def check_columns(file: str, rows: Rows, data: EvaluationDataConfig) -> None:
    """Raise DataError if the column of the responses, or one that the user named, is missing."""
    require_column(file, rows, data.response_key, "data.response_key")

    # The usual columns may be absent: a reward function of the user's own may do without them.
    usual = EvaluationDataConfig()
    for key in ("prompt_key", "data_source_key", "reward_model_key", "extra_info_key"):
        column = getattr(data, key)
        if column != getattr(usual, key):
            require_column(file, rows, column, f"data.{key}")


def _are_texts(value: Any) -> bool:
    """Return whether a value is a list of texts, at least one."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(text, str) for text in value)


def check_k(k: Sequence[int], prompts: Sequence[ScoredPrompt]) -> None:
    """Raise ConfigError if no prompt has that many responses, before any is scored."""
    most = max(len(prompt.responses) for prompt in prompts)
    if max(k, default=1) > most:
        raise ConfigError(
            f"metrics.k={list(k)} needs more responses than any prompt has, which is {most}. "
            "Remove larger values, or generate more: data.n_samples of main_generation."
        )


def score(config: EvaluationConfig, prompts: Sequence[ScoredPrompt]) -> dict[str, int]:
    """Score every response by the reward manager of training; return failures by kind.

    Raises RewardError if the reward failed for all responses, or, under on_error=stop, for one.
    """
    train = SHARED.as_train_config(config)
    train.data.reward_fn_key = "data_source"
    tokenizer = TextTokenizer()
    manager = build_reward(train, tokenizer, num_examine=0)
    if isinstance(manager, RewardManager) and manager.by_rule:
        check_rows(prompts, with_truth=manager.on_error == "stop")

    rows: list[tuple[ScoredPrompt, str]] = []
    places: list[str] = []  # of each response
    for prompt in prompts:
        for number, response in enumerate(prompt.responses):
            rows.append((prompt, response))
            places.append(f"{prompt.place}, response {number}")

    failures = {"errors": 0, "timeouts": 0, "retries": 0, "dropped": 0}
    started = time.perf_counter()
    last_report = started

    for start in range(0, len(rows), RESPONSES_A_CALL):
        chunk = rows[start : start + RESPONSES_A_CALL]
        tokenizer.texts.clear()
        batch = _batch(chunk, tokenizer)
        samples = manager.read(batch)
        for sample, place in zip(samples, places[start:]):
            sample.place = place
        result = manager.score(samples, batch)

        _record(chunk, result, config.metrics.pass_score)
        for name in ("errors", "timeouts", "retries"):
            failures[name] += getattr(result, f"num_{name}")
        failures["dropped"] += len(result.dropped)

        now = time.perf_counter()
        done = start + len(chunk)
        if now - last_report > PROGRESS_EVERY_S and done < len(rows):
            left_s = (now - started) / done * (len(rows) - done)
            logger.info("%d of %d responses scored, ETA %.0f s", done, len(rows), left_s)
            last_report = now

    if failures["dropped"] == len(rows):
        raise RewardError(
            "No response could be scored: the reward failed for all. The warning above names the "
            "first."
        )

    return failures


def check_rows(prompts: Sequence[ScoredPrompt], *, with_truth: bool) -> None:
    """Raise RewardError for the first row that no rule can score.

    Runs before any response is scored, so that a row at the end does not cost the work before it.
    """
    sources = [(prompt.place, prompt.columns["data_source"]) for prompt in prompts]
    require_rules(sources)
    if with_truth:
        truths = (ground_truth_of(prompt.columns["reward_model"]) for prompt in prompts)
        require_truths((*source, truth) for source, truth in zip(sources, truths))


def _batch(rows: Sequence[tuple[ScoredPrompt, str]], tokenizer: TextTokenizer) -> DataProto:
    prompts: list[str] = []
    responses: list[str] = []
    objects: dict[str, list[Any]] = {"data_source": [], "reward_model": [], "extra_info": []}
    for prompt, response in rows:
        prompts.append(prompt.prompt)
        responses.append(response)
        for name, column in objects.items():
            column.append(prompt.columns[name])

    tensors = {
        "prompts": tokenizer.encode(prompts),
        "responses": tokenizer.encode(responses),
        "attention_mask": torch.ones(len(rows), 2, dtype=torch.int64),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=objects)


def _record(rows: Sequence[tuple[ScoredPrompt, str]], result: Scores, pass_score: float) -> None:
    """Record the score of each response, whether it passes, and its vote.

    The field `acc` of its reward, else its score, determines whether it passes. It votes for the
    field `pred`, else for the answer that the rule of its data source extracts.
    """
    dropped = set(result.dropped)
    results = zip(rows, result.scores, result.extra)
    for number, ((prompt, response), value, extra) in enumerate(results):
        if number in dropped:
            continue

        answer = extra.get("pred")
        if "pred" not in extra and prompt.source in answer_extractors:
            answer = answer_extractors.get(prompt.source)(response)

        passes = value >= pass_score
        accuracy = extra.get("acc")
        if isinstance(accuracy, (Real, np.bool_)):
            passes = float(accuracy) >= 1

        prompt.scores.append(value)
        prompt.passed.append(passes)
        prompt.answers.append(vote(answer))


def summarize(config: EvaluationConfig, prompts: Sequence[ScoredPrompt]) -> Report:
    """Build the report: its settings, and the metrics of each data source and of all prompts."""
    metrics = config.metrics
    by_source: dict[str, list[ScoredPrompt]] = {}
    for prompt in prompts:
        if prompt.scores:
            by_source.setdefault(prompt.source, []).append(prompt)

    scored: list[ScoredPrompt] = []
    summaries: Report = {}
    for source, members in by_source.items():
        scored += members
        summaries[source] = _summary(config, members)

    most = max(len(prompt.scores) for prompt in scored)
    if max(metrics.k, default=1) > most:  # the files had as many, see `check_k`
        logger.warning("metrics.k above %d is left out: no prompt has more scored responses.", most)

    if most > MAX_VOTES:
        logger.warning(
            "maj@k is left out: it is computed for up to %d responses a prompt, got %d.",
            MAX_VOTES,
            most,
        )

    return {
        "files": config.data.path,
        "pass_score": metrics.pass_score,
        "intervals": {
            "method": "percentile bootstrap over prompts",
            "confidence": metrics.confidence,
            "resamples": metrics.resamples,
            "seed": metrics.seed,
        },
        "data_sources": summaries,
        ALL: _summary(config, scored),
    }


def _summary(config: EvaluationConfig, prompts: Sequence[ScoredPrompt]) -> Report:
    """Compute means over prompts, each with its bounds and the number of prompts that have it."""
    metrics = config.metrics
    columns = _columns(prompts, metrics.k)
    values = np.array(list(columns.values())).T
    low, high = bootstrap_intervals(
        values, confidence=metrics.confidence, resamples=metrics.resamples, seed=metrics.seed
    )
    summary: Report = {
        "prompts": len(prompts),
        "responses": sum(len(prompt.scores) for prompt in prompts),
    }

    for number, name in enumerate(columns):
        summary[name] = {
            "value": float(np.nanmean(values[:, number])),
            "low": float(low[number]),
            "high": float(high[number]),
            "prompts": int(np.isfinite(values[:, number]).sum()),
        }

    return summary


def _columns(prompts: Sequence[ScoredPrompt], k: Sequence[int]) -> dict[str, list[float]]:
    """Return one value per prompt for each metric that some prompt has.

    It is NaN for a prompt with too few responses, or without votes.
    """
    most = max(len(prompt.scores) for prompt in prompts)
    ks = sorted(set(k))
    if not ks:
        powers = {1 << exponent for exponent in range(most.bit_length())}
        ks = sorted({*powers, most})

    voting: set[str] = set()
    for prompt in prompts:
        if any(answer is not None for answer in prompt.answers):
            voting.add(prompt.source)

    columns = {"mean": [float(np.mean(prompt.scores)) for prompt in prompts]}
    for k_value in ks:
        columns[f"pass@{k_value}"] = [_pass_at_k(prompt, k_value) for prompt in prompts]
    if most <= MAX_VOTES:
        for k_value in ks:
            if k_value > 1:  # the majority of one response is the mean
                votes = [_majority_at_k(prompt, k_value, voting) for prompt in prompts]
                columns[f"maj@{k_value}"] = votes

    return {name: values for name, values in columns.items() if not np.isnan(values).all()}


def _pass_at_k(prompt: ScoredPrompt, k: int) -> float:
    n = len(prompt.passed)
    return pass_at_k(n, sum(prompt.passed), k) if n >= k else np.nan


def _majority_at_k(prompt: ScoredPrompt, k: int, voting: set[str]) -> float:
    if len(prompt.scores) < k or prompt.source not in voting:
        return np.nan
    return majority_at_k(prompt.answers, prompt.scores, k)


def table(report: Report) -> str:
    """Format the report as text, one line for each data source and metric.

    Lines of all prompts follow where there are several sources.
    """
    interval = f"{report['intervals']['confidence']:.0%} interval"
    lines = [("data source", "metric", "value", interval, "prompts")]
    summaries = list(report["data_sources"].items())
    if len(summaries) > 1:
        summaries.append((ALL, report[ALL]))
    for source, summary in summaries:
        for name, entry in summary.items():
            if isinstance(entry, dict):
                value = f"{entry['value']:.4f}"
                bounds = f"[{entry['low']:.4f}, {entry['high']:.4f}]"
                lines.append((source, name, value, bounds, str(entry["prompts"])))

    note = f"Intervals: {report['intervals']['method']}."
    failures = [f"{count} {name}" for name, count in report["failures"].items() if count]
    if failures:
        note += f" Rewards: {', '.join(failures)}."
    return "\n".join([*aligned(lines), note])
