"""Combine the metrics of all engines: counters of generation, and counts of agents."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

# Counters that are added up over all engines; for the others the largest counts.
_ADDED_UP = ("_tokens", "_steps", "_pages", "preemptions", "_per_s")


def combine_counters(of_engines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the counters of a generation, under the names of metrics.

    An engine without episodes has counted nothing.
    """
    metrics = {}
    for name in dict.fromkeys(itertools.chain(*of_engines)):
        combine = sum if name.endswith(_ADDED_UP) else max
        # Times are under perf/; all other metrics are the same in every run of a seed.
        key = f"perf/rollout_{name}" if name.endswith("_s") else f"rollout/{name}"
        metrics[key] = combine(each[name] for each in of_engines if name in each)
    return metrics


def combine_metrics(of_engines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of agents by their names: sums, but means, smallest and largest ones.

    A mean `<name>/mean` is weighed by `<name>/count`, which is left out of the answer.
    """
    combined: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for metrics in of_engines:
        for name, value in metrics.items():
            combined.setdefault(name, []).append(value)
            if name.endswith("/mean"):
                weights.setdefault(name, []).append(metrics.get(_count_of(name), 1.0))

    metrics = {}
    for name, values in combined.items():
        if name.endswith("/min"):
            metrics[name] = min(values)
        elif name.endswith("/max"):
            metrics[name] = max(values)
        elif name.endswith("/mean"):
            shares = zip(values, weights[name])
            metrics[name] = sum(value * weight for value, weight in shares) / sum(weights[name])
        else:
            metrics[name] = sum(values)

    for name in weights:
        metrics.pop(_count_of(name), None)
    return metrics


def _count_of(mean: str) -> str:
    return mean.removesuffix("mean") + "count"
