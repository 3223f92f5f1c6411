"""Advantages from the rewards of several responses to one prompt, without a critic.

Scores are (B,) sums of a row's token rewards; `group` numbers the prompts; every token of a
response gets the advantage of its response, and returns equal the advantages. Every row counts in
its group, also one without tokens.

A group of one has nothing to be compared with, which the papers leave open. For grpo, gpg, gdpo and
reinforce_plus_plus_baseline its mean counts as 0 and its standard deviation as 1, as in verl 0.5:
the plain reward is left. rloo, grpo_passk and opo give it advantage 0.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    advantage_estimators,
    formula,
)
from verl.algorithms.masked import masked_mean, masked_var, masked_whiten
from verl.utils.errors import ConfigError
from verl.utils.phases import phase


def group_ids(uids: Sequence[Hashable] | np.ndarray | Tensor) -> Int[Tensor, " B"]:
    """Turn prompt identifiers of any kind into group numbers 0, 1, ..."""
    # tensors of one number differ as keys
    uids = uids.tolist() if isinstance(uids, Tensor) else uids
    numbers: dict[object, int] = {}
    groups: list[int] = []
    for uid in uids:
        groups.append(numbers.setdefault(uid, len(numbers)))
    return torch.tensor(groups, dtype=torch.int64)


def group_sum(values: Float[Tensor, "B ..."], group: Int[Tensor, " B"]) -> Float[Tensor, "B ..."]:
    """Sum over each row's group, in float64."""
    # float64: with equal rewards a mean is off by one rounding, which divided by epsilon would be
    # an advantage.
    values = values.double()
    _, slot = torch.unique(group, return_inverse=True)
    return torch.zeros_like(values).index_add(0, slot, values)[slot]


def group_max(values: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Return the largest value of each row's group."""
    _, slot = torch.unique(group, return_inverse=True)
    return torch.full_like(values, -torch.inf).scatter_reduce(0, slot, values, "amax")[slot]


def group_size(group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    return group_sum(torch.ones(len(group), device=group.device), group)


def group_mean_and_std(
    scores: Float[Tensor, " B"], group: Int[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return mean and unbiased standard deviation of each row's group, in float64.

    A group of one has mean 0 and std 1.
    """
    count = group_size(group)
    mean = group_sum(scores, group) / count
    squares = group_sum((scores - mean) ** 2, group)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    alone = count == 1
    return torch.where(alone, 0.0, mean), torch.where(alone, 1.0, std)


def grpo_advantages(
    scores: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Compute (r_i - mean of the group) / (std of the group + epsilon).

    Without `norm_by_std` there is no division.
    """
    mean, std = group_mean_and_std(scores, group)
    advantages = scores.double() - mean
    if norm_by_std:
        advantages = advantages / (std + epsilon)
    return advantages.to(scores.dtype)


@advantage_estimators.register("grpo")
@formula("r - mean of the group{by_std}")
@phase(reads="token_level_rewards response_mask uid")
def grpo(inputs: AdvantageInputs) -> Advantages:
    """Group-relative advantages, section 4.1.2 of Shao et al. 2024 (arXiv:2402.03300).

        A_it = (r_i - mean(r_1..r_G)) / (std(r_1..r_G) + 1e-6)
        r_i  = sum over t of the row's rewards

    std is the unbiased one (G - 1). `norm_by_std=False` leaves the division out: Dr.GRPO (Liu et
    al. 2025, arXiv:2503.20783).
    """
    scores, group = _scores_and_group(inputs, "grpo")
    advantages = grpo_advantages(scores, group, norm_by_std=inputs.norm_by_std)
    return _on_tokens(advantages, inputs)


def passk_advantages(
    scores: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
) -> Float[Tensor, " B"]:
    """Compute best reward less second best for a group's best response, 0 for all others."""
    best = group_max(scores, group)
    is_best = scores == best
    second = group_max(torch.where(is_best, -torch.inf, scores), group)
    # by two, or there is no second
    shared = (group_sum(is_best.double(), group) > 1) | second.isinf()
    advantages = torch.where(is_best & ~shared, best - second, 0.0).double()
    if norm_by_std:
        _, std = group_mean_and_std(scores, group)
        advantages = advantages / (std + epsilon)
    return advantages.to(scores.dtype)


@advantage_estimators.register("grpo_passk")
@formula("best r - second best r of the group for the best response, 0 for the others{by_std}")
@phase(reads="token_level_rewards response_mask uid")
def grpo_passk(inputs: AdvantageInputs) -> Advantages:
    """Reward the best response of a group only: pass@k, Tang et al. 2025 (arXiv:2503.19595).

        A_i = (r_(1) - r_(2)) / (std(r_1..r_G) + 1e-6)  for the best response,  0 for all others

    Two best ones have no lead over each other: 0. `norm_by_std=False` leaves the division out.
    """
    scores, group = _scores_and_group(inputs, "grpo_passk")
    advantages = passk_advantages(scores, group, norm_by_std=inputs.norm_by_std)
    return _on_tokens(advantages, inputs)


def rloo_advantages(scores: Float[Tensor, " B"], group: Int[Tensor, " B"]) -> Float[Tensor, " B"]:
    """Subtract from each reward the mean of the others of its group."""
    count = group_size(group)
    others_mean = (group_sum(scores, group) - scores) / (count - 1).clamp(min=1)
    return torch.where(count > 1, scores - others_mean, 0.0).to(scores.dtype)


@advantage_estimators.register("rloo")
@formula("r - mean of the group's other rewards")
@phase(reads="token_level_rewards response_mask uid")
def rloo(inputs: AdvantageInputs) -> Advantages:
    """Leave-one-out advantages, Ahmadian et al. 2024 (arXiv:2402.14740).

    A_i = r_i - mean of the other rewards of the same prompt
    """
    scores, group = _scores_and_group(inputs, "rloo")
    return _on_tokens(rloo_advantages(scores, group), inputs)


@advantage_estimators.register("opo")
@formula("r - (sum of length r / sum of length over the group)")
@phase(reads="token_level_rewards response_mask uid")
def opo(inputs: AdvantageInputs) -> Advantages:
    """Subtract the optimal baseline, as on-policy RL by Hao et al. 2025 (arXiv:2505.23585) does.

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    l_j is the number of response tokens, with which the norm of a response's gradient grows.
    """
    scores, group = _scores_and_group(inputs, "opo")
    lengths = inputs.response_mask.bool().sum(-1).double()
    weighted = group_sum(lengths * scores, group)
    baseline = weighted / group_sum(lengths, group).clamp(min=1)
    return _on_tokens((scores - baseline).to(scores.dtype), inputs)


def gpg_advantages(
    scores: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    *,
    f_norm: float = 1.0,
    alpha: float = 1.0,
) -> Float[Tensor, " B"]:
    """Return alpha * B / (B - M) * (r_i - mean of the group) / f_norm.

    M counts the rows in groups with equal rewards.
    """
    mean, _ = group_mean_and_std(scores, group)
    with_gradient = (group_max(scores, group) != -group_max(-scores, group)).sum()
    scale = alpha * len(scores) / with_gradient.clamp(min=1) / f_norm
    return (scale * (scores - mean)).to(scores.dtype)


@advantage_estimators.register("gpg")
@formula("B / (B - M) (r - mean of the group), M rows being of groups without spread")
@phase(reads="token_level_rewards response_mask uid")
def gpg(inputs: AdvantageInputs) -> Advantages:
    """Group policy gradient, Chu et al. 2025 (arXiv:2504.02546), with F_norm = 1.

        A_i = B / (B - M) (r_i - mean(r_1..r_G))

    M of the B rows belong to groups with equal rewards: they give no gradient, and the other rows
    are scaled up in their place. Goes with the policy loss `gpg`.
    """
    scores, group = _scores_and_group(inputs, "gpg")
    return _on_tokens(gpg_advantages(scores, group), inputs)


@advantage_estimators.register("reinforce_plus_plus_baseline")
@formula("(r - mean of the group), whitened over all tokens")
@phase(reads="token_level_rewards response_mask uid")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """Subtract the mean of the group, then whiten: Hu et al. 2025 (arXiv:2501.03262).

    A_i = r_i - mean(r_1..r_G), then whitened over all response tokens of the batch rather than
    within the group.
    """
    scores, group = _scores_and_group(inputs, "reinforce_plus_plus_baseline")
    tokens, _ = _on_tokens(grpo_advantages(scores, group, norm_by_std=False), inputs)
    whitened = masked_whiten(tokens, inputs.response_mask)
    return whitened, whitened.clone()


@advantage_estimators.register("optimal_token_baseline")
@formula("G_t - sum of W_t G_t / sum of W_t over the group, W_t = sum to t of |grad_y log pi|^2")
@phase(reads="token_level_rewards response_mask uid old_log_probs sum_pi_squared")
def optimal_token_baseline(inputs: AdvantageInputs) -> Advantages:
    """Optimal token baseline, Li et al. 2026 (arXiv:2602.07078), with the logit-gradient proxy.

        A_it = G_it - sum_j W_jt G_jt / sum_j W_jt,    G_it = r_it + r_i,t+1 + ...
        W_it = sum over s <= t of (1 - 2 pi_is + sum_v pi_is(v)^2)

    over the responses j of the prompt that have a token t. The bracket is the squared norm of the
    gradient of log pi by the logits. Reads the columns `old_log_probs` and `sum_pi_squared`.
    """
    _, group = _scores_and_group(inputs, "optimal_token_baseline")
    required = ("old_log_probs", "sum_pi_squared")
    missing = [name for name in required if inputs.columns.get(name) is None]
    if missing:
        raise ConfigError(
            f"adv_estimator=optimal_token_baseline needs the columns {missing} of the pass for old "
            "log-probs, which bypass_mode=True leaves out. Set bypass_mode=False."
        )
    own = inputs.response_mask.bool()
    rewards = inputs.token_level_rewards.double()
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)

    chosen = inputs.columns["old_log_probs"].double().exp()
    energy = 1 - 2 * chosen + inputs.columns["sum_pi_squared"].double()
    weights = torch.where(own, energy.clamp(min=0), 0.0).cumsum(-1)
    weights = torch.where(own, weights, 0.0)

    weighted = group_sum(weights * to_go, group)
    baseline = weighted / group_sum(weights, group).clamp(min=1e-8)
    tokens = torch.where(own, to_go - baseline, 0.0).to(inputs.token_level_rewards.dtype)
    return tokens, tokens.clone()


@advantage_estimators.register("gdpo")
@formula(
    "sum over kinds of reward of w (r - mean of the group) / (std of the group + 1e-6); whitened "
    "over the rows"
)
@phase(reads="token_level_rewards response_mask uid")
def gdpo(inputs: AdvantageInputs) -> Advantages:
    """Group reward-decoupled normalization, Liu et al. 2026 (arXiv:2601.05242).

        A_i^k = (r_i^k - mean_group r^k) / (std_group r^k + 1e-6)      for each kind k of reward
        A_i   = (S_i - mean_batch S) / (std_batch S + 1e-6),           S_i = sum_k w_k A_i^k

    so that a kind of reward with a small spread is not drowned by the others. Kinds are
    `components`, else the score is the only one. The batch's mean and std are taken over the rows
    that have response tokens.
    """
    scores, group = _scores_and_group(inputs, "gdpo")
    kinds = scores[:, None] if inputs.components is None else inputs.components
    weights = inputs.component_weights
    if weights is None:
        weights = kinds.new_ones(kinds.shape[1])

    total = torch.zeros_like(scores, dtype=torch.float64)
    for number in range(kinds.shape[1]):
        total = total + weights[number] * grpo_advantages(kinds[:, number].double(), group)

    counted = inputs.response_mask.bool().any(-1)
    mean = masked_mean(total, counted)
    std = masked_var(total, counted).sqrt()
    return _on_tokens(((total - mean) / (std + 1e-6)).to(scores.dtype), inputs)


def _scores_and_group(
    inputs: AdvantageInputs, name: str
) -> tuple[Float[Tensor, " B"], Int[Tensor, " B"]]:
    if inputs.group is None:
        raise ConfigError(
            f"adv_estimator={name} needs a group number (which prompt) for every row, got none."
        )
    return inputs.token_level_rewards.sum(-1), inputs.group


def _on_tokens(advantages: Float[Tensor, " B"], inputs: AdvantageInputs) -> Advantages:
    tokens = torch.where(inputs.response_mask.bool(), advantages[:, None], 0.0)
    return tokens, tokens.clone()
