"""Scores of a validation set, per data source: mean@n, best@n and maj@n."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from verl.trainer.scored import numbers_of


def validation_metrics(
    sources: Sequence[str],
    prompts: Sequence[Hashable],
    scores: Sequence[float],
    answers: Sequence[Hashable | None] | None = None,
    fields: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, float]:
    """Compute `<section>/<source>/<variable>/{mean,best,maj}@n` over samples in parallel sequences.

    The variables are `reward`, the score, and the numeric fields. The section of one of them is
    `val-core`: `acc` where the source has it, or else `reward`. That of the others is `val-aux`.

    Args:
        sources: data source of each sample.
        prompts: which prompt a sample answers; samples of one prompt form the group of size n.
        scores: score of each sample.
        answers: the extracted answer of each sample, where the reward gives one: maj@n is the mean
            score of the most frequent answer (ties go to the first seen; None does not vote, and a
            prompt without any answer counts its mean score). A source without answers has no maj@n.
        fields: further values of the reward, by name. None and NaN stand for an absent value; a
            source in which a field has other values than numbers leaves it out.
    """
    rows_of: dict[str, list[int]] = defaultdict(list)
    for i, source in enumerate(sources):
        rows_of[source].append(i)

    metrics: dict[str, float] = {}
    for source, rows in rows_of.items():
        variables: dict[str, Mapping[int, float]] = {"reward": {i: scores[i] for i in rows}}
        for name, values in (fields or {}).items():
            numbers = numbers_of({i: values[i] for i in rows})
            if numbers:
                variables.setdefault(name, numbers)

        core = "acc" if "acc" in variables else "reward"
        for name, numbers in variables.items():
            section = "val-core" if name == core else "val-aux"
            for statistic, value in _statistics(numbers, prompts, answers).items():
                metrics[f"{section}/{source}/{name}/{statistic}"] = value

    return metrics


def _statistics(
    values: Mapping[int, float],
    prompts: Sequence[Hashable],
    answers: Sequence[Hashable | None] | None,
) -> dict[str, float]:
    """Return mean@n, best@n and maj@n of one source's values, by sample."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for i in values:
        groups[prompts[i]].append(i)

    means = []
    bests = []
    majorities = []
    has_answers = False
    for rows in groups.values():
        group_values = [values[i] for i in rows]
        means.append(np.mean(group_values))
        bests.append(max(group_values))
        if answers is not None:
            majorities.append(_majority_score(rows, values, answers))
            has_answers |= any(answers[i] is not None for i in rows)

    n = max(map(len, groups.values()))
    statistics = {f"mean@{n}": float(np.mean(means))}
    if n > 1:
        statistics[f"best@{n}"] = float(np.mean(bests))
    if n > 1 and has_answers:
        statistics[f"maj@{n}"] = float(np.mean(majorities))
    return statistics


def _majority_score(
    rows: list[int], values: Mapping[int, float], answers: Sequence[Hashable | None]
) -> float:
    votes = Counter(answers[i] for i in rows if answers[i] is not None)
    winner = None
    if votes:
        winner = votes.most_common(1)[0][0]
    return float(np.mean([values[i] for i in rows if answers[i] == winner]))
