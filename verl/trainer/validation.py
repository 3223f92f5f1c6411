"""Scores of a validation set, per data source: mean@n, best@n and maj@n."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np


def validation_metrics(
    sources: Sequence[str],
    prompts: Sequence[Hashable],
    scores: Sequence[float],
    answers: Sequence[Hashable | None] | None = None,
) -> dict[str, float]:
    """Compute `val-core/<source>/reward/{mean,best,maj}@n` over samples in parallel sequences.

    Args:
        sources: data source of each sample.
        prompts: which prompt a sample answers; samples of one prompt form the group of size n.
        scores: score of each sample.
        answers: the extracted answer of each sample, where the reward gives one: maj@n is the mean
            score of the most frequent answer (ties go to the first seen; None does not vote, and a
            prompt without any answer counts its mean score). A source without answers has no maj@n.
    """
    groups: dict[str, dict[Hashable, list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, (source, prompt) in enumerate(zip(sources, prompts)):
        groups[source][prompt].append(i)
    metrics: dict[str, float] = {}

    for source, by_prompt in groups.items():
        means = []
        bests = []
        majorities = []
        has_answers = False
        for rows in by_prompt.values():
            group_scores = [scores[i] for i in rows]
            means.append(np.mean(group_scores))
            bests.append(max(group_scores))
            if answers is not None:
                majorities.append(_majority_score(rows, scores, answers))
                has_answers |= any(answers[i] is not None for i in rows)

        n = max(map(len, by_prompt.values()))
        prefix = f"val-core/{source}/reward"
        metrics[f"{prefix}/mean@{n}"] = float(np.mean(means))
        if n > 1:
            metrics[f"{prefix}/best@{n}"] = float(np.mean(bests))
        if n > 1 and has_answers:
            metrics[f"{prefix}/maj@{n}"] = float(np.mean(majorities))

    return metrics


def _majority_score(
    rows: list[int], scores: Sequence[float], answers: Sequence[Hashable | None]
) -> float:
    votes = Counter(answers[i] for i in rows if answers[i] is not None)
    winner = None
    if votes:
        winner = votes.most_common(1)[0][0]
    return float(np.mean([scores[i] for i in rows if answers[i] == winner]))
