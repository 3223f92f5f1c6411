"""Every estimator and loss once more, as loops over rows and tokens in float64, written from the
papers."""

import math
import statistics
from collections.abc import Callable

import torch

SETTINGS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 3.0,
    "clip_cov_ratio": 0.3,
    "clip_cov_lb": 0.05,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.3,
    "ppo_kl_coef": 0.5,
    "tau_pos": 1.0,
    "tau_neg": 1.5,
    "dppo_divergence": "tv",
    "dppo_threshold": 0.05,
    "dppo_kl_threshold": 0.02,
    "dro_beta": 0.3,
}
LOW = 0.2
HIGH = 0.28
C = 3.0


# ---------------------------------------------------------------- advantages: (scores, groups, leng


def _members(values: list[float], groups: list[int], row: int) -> list[float]:
    return [value for value, group in zip(values, groups) if group == groups[row]]


def _centred(scores, groups, row):
    members = _members(scores, groups, row)
    return scores[row] - (statistics.fmean(members) if len(members) > 1 else 0.0)


def _grpo(scores, groups, lengths):
    advantages = []
    for row in range(len(scores)):
        members = _members(scores, groups, row)
        std = statistics.stdev(members) if len(members) > 1 else 1.0
        advantages.append(_centred(scores, groups, row) / (std + 1e-6))
    return advantages


def _grpo_passk(scores, groups, lengths):
    advantages = []
    for row, score in enumerate(scores):
        members = sorted(_members(scores, groups, row), reverse=True)
        if len(members) < 2 or score < members[0]:
            advantages.append(0.0)
        else:
            advantages.append((members[0] - members[1]) / (statistics.stdev(members) + 1e-6))
    return advantages


def _rloo(scores, groups, lengths):
    advantages = []
    for row, score in enumerate(scores):
        others = [
            s for other, s in enumerate(scores) if groups[other] == groups[row] and other != row
        ]
        advantages.append(score - statistics.fmean(others) if others else 0.0)
    return advantages


def _opo(scores, groups, lengths):
    advantages = []
    for row, score in enumerate(scores):
        products = _members([length * s for length, s in zip(lengths, scores)], groups, row)
        tokens = sum(_members(lengths, groups, row))
        advantages.append(score - sum(products) / max(tokens, 1))
    return advantages


def _gpg(scores, groups, lengths):
    without = sum(len(set(_members(scores, groups, row))) == 1 for row in range(len(scores)))
    scale = len(scores) / max(len(scores) - without, 1)
    return [scale * _centred(scores, groups, row) for row in range(len(scores))]


def _whitened_over_rows(values, lengths):
    counted = [value for value, length in zip(values, lengths) if length]
    mean = statistics.fmean(counted) if counted else 0.0
    std = statistics.stdev(counted) if len(counted) > 1 else 0.0
    return [(value - mean) / (std + 1e-6) for value in values]


def _gdpo(scores, groups, lengths):
    return _whitened_over_rows(_grpo(scores, groups, lengths), lengths)


def whitened(rows: list[list[float | None]]) -> list[list[float | None]]:
    """Mean 0 and (unbiased) variance 1 over all entries that are not None."""
    values = [value for row in rows for value in row if value is not None]
    mean = statistics.fmean(values) if values else 0.0
    variance = statistics.variance(values) if len(values) > 1 else 0.0
    scale = 1 / math.sqrt(variance + 1e-8)
    return [[None if value is None else (value - mean) * scale for value in row] for row in rows]


# name -> one advantage a row; those that work token by token are below
ADVANTAGES: dict[str, Callable[..., list[float]]] = {
    "grpo": _grpo,
    "grpo_passk": _grpo_passk,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "gdpo": _gdpo,
}


def rewards_to_go(rewards: list[float], own: list[bool], gamma: float) -> list[float | None]:
    """Of each own token; a reward between own tokens belongs to the one before it, none stands
    before the first."""
    tokens = [t for t, is_own in enumerate(own) if is_own]
    ends = [*tokens[1:], len(rewards)]
    segments = [sum(rewards[t:end]) for t, end in zip(tokens, ends)]
    sums = [
        sum(gamma ** (j - i) * segments[j] for j in range(i, len(segments)))
        for i in range(len(segments))
    ]
    places = {t: i for i, t in enumerate(tokens)}
    return [sums[places[t]] if t in places else None for t in range(len(rewards))]


# ---------------------------------------------------------------- losses: one response's tokens ->
# (new, old, advantages: lists of float64 scalars, new with gradient; selected: bools) -> list of
# scalars


def _clip(x, low, high):
    return torch.clamp(x, low, high)


def _vanilla(new, old, advantages, selected):
    losses = []
    for n, o, a in zip(new, old, advantages):
        r = torch.exp(n - o)
        surrogate = torch.minimum(r * a, _clip(r, 1 - LOW, 1 + HIGH) * a)
        losses.append(-torch.maximum(surrogate, C * a) if a < 0 else -surrogate)
    return losses


def _gpg_loss(new, old, advantages, selected):
    return [-a * n for n, a in zip(new, advantages)]


def _cispo(new, old, advantages, selected):
    return [
        -_clip(torch.exp(n - o), 1 - LOW, 1 + HIGH).detach() * a * n
        for n, o, a in zip(new, old, advantages)
    ]


def _sapo(new, old, advantages, selected):
    losses = []
    for n, o, a in zip(new, old, advantages):
        tau = SETTINGS["tau_pos"] if a > 0 else SETTINGS["tau_neg"]
        losses.append(-a * 4 / tau / (1 + torch.exp(-tau * (torch.exp(n - o) - 1))))
    return losses


def _dppo(new, old, advantages, selected):
    losses = []
    for n, o, a in zip(new, old, advantages):
        r = torch.exp(n - o)
        far = abs(math.exp(n.item()) - math.exp(o.item())) > SETTINGS["dppo_threshold"]
        away = (a > 0 and r > 1) or (a < 0 and r < 1)
        losses.append(0.0 * n if far and away else -r * a)
    return losses


def _dppo_kl(new, old, advantages, selected):
    losses = []
    for n, o, a in zip(new, old, advantages):
        r = torch.exp(n - o)
        p = math.exp(n.item())
        q = math.exp(o.item())
        rest = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
        far = q * math.log(q / p) + rest > SETTINGS["dppo_kl_threshold"]
        away = (a > 0 and r > 1) or (a < 0 and r < 1)
        losses.append(0.0 * n if far and away else -r * a)
    return losses


def _dro(new, old, advantages, selected):
    """(A - beta log r)^2 / (2 beta) less A^2 / (2 beta) and A log pi_old."""
    beta = SETTINGS["dro_beta"]
    losses = []
    for n, o, a in zip(new, old, advantages):
        losses.append(((a - beta * (n - o)) ** 2 - a**2) / (2 * beta) - a * o)
    return losses


def _gspo(new, old, advantages, selected):
    s = torch.exp(sum(n - o for n, o in zip(new, old)) / len(new))
    return [-torch.minimum(s * a, _clip(s, 1 - LOW, 1 + HIGH) * a) for a in advantages]


def _geo_mean(new, old, advantages, selected):
    product = torch.ones((), dtype=torch.float64)
    for n, o, a in zip(new, old, advantages):
        r = torch.exp(n - o)
        clipped = _clip(torch.exp(n - o), math.exp(-LOW), math.exp(HIGH))
        product = product * (torch.minimum(r, clipped) if a > 0 else torch.maximum(r, clipped))
    return [-sum(advantages) / len(advantages) * product ** (1 / len(new))] * len(new)


def _clip_cov(new, old, advantages, selected):
    losses = []
    for n, o, a, is_selected in zip(new, old, advantages, selected):
        r = torch.exp(n - o)
        plain = -torch.minimum(r * a, _clip(r, 1 - LOW, 1 + HIGH) * a)
        losses.append(0.0 * n if is_selected else plain)
    return losses


def _kl_cov(new, old, advantages, selected):
    return [
        -torch.exp(n - o) * a + (SETTINGS["ppo_kl_coef"] * abs(n - o) if is_selected else 0.0)
        for n, o, a, is_selected in zip(new, old, advantages, selected)
    ]


LOSSES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "vanilla": _vanilla,
    "gpg": _gpg_loss,
    "cispo": _cispo,
    "sapo": _sapo,
    "dppo": _dppo,
    "dppo_tv": _dppo,
    "dppo_kl": _dppo_kl,
    "dro": _dro,
    "gspo": _gspo,
    "geo_mean": _geo_mean,
    "clip_cov": _clip_cov,
    "kl_cov": _kl_cov,
}


def aggregate(rows: list[list[torch.Tensor]], mode: str, width: int) -> torch.Tensor:
    """One number from the token losses of each response (`rows` without empty ones)."""
    if mode == "token-mean":
        tokens = [loss for row in rows for loss in row]
        return sum(tokens) / len(tokens)
    divisor = {
        "seq-mean-token-sum": lambda row: 1,
        "seq-mean-token-mean": len,
        "seq-mean-token-sum-norm": lambda _: width,
    }
    return sum(sum(row) / divisor[mode](row) for row in rows) / len(rows)
