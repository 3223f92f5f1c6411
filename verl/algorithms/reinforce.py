"""REINFORCE and its variants: advantages without a critic and without a group."""

import torch
from jaxtyping import Float
from torch import Tensor

from verl.algorithms.advantages import (
    AdvantageInputs,
    Advantages,
    advantage_estimators,
    formula,
    unwhitened_gae,
)
from verl.algorithms.masked import masked_whiten
from verl.utils.errors import ConfigError
from verl.utils.phases import phase


@advantage_estimators.register("reinforce_plus_plus")
@formula("sum of the rewards from here on, discounted by gamma = {gamma}; whitened over all tokens")
@phase(reads="token_level_rewards response_mask")
def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """Whiten discounted returns: REINFORCE++, Hu et al. 2025 (arXiv:2501.03262).

        return_t = r_t + gamma return_{t+1}
        A = (return - mean) / std    over all response tokens of the batch

    The paper has the KL penalty in r (`algorithm.use_kl_in_reward`). t counts the model's own
    tokens, as in `gae`.
    """
    mask = inputs.response_mask.bool()
    returns = _rewards_to_go(inputs, inputs.gamma)
    return masked_whiten(returns, mask), returns


@advantage_estimators.register("remax")
@formula("sum of the rewards from here on - score of the greedy response")
@phase(reads="token_level_rewards response_mask reward_baselines")
def remax(inputs: AdvantageInputs) -> Advantages:
    """Subtract the score of the greedy response: ReMax, Li et al. 2023 (arXiv:2310.10505).

        A_t = sum over s >= t of r_s - r(greedy response to the same prompt)

    The greedy response's score is the column `reward_baselines` (B,), which `ReMaxTrainer` writes.
    """
    if "reward_baselines" not in inputs.columns:
        raise ConfigError(
            "adv_estimator=remax needs the column reward_baselines, got none. Train with "
            "verl.trainer.remax.ReMaxTrainer (main_ppo does), which scores a greedy response to "
            "every prompt."
        )
    returns = _rewards_to_go(inputs, 1.0)
    baselines = inputs.columns["reward_baselines"].to(returns.dtype)
    advantages = torch.where(inputs.response_mask.bool(), returns - baselines[:, None], 0.0)
    return advantages, returns


def _rewards_to_go(inputs: AdvantageInputs, gamma: float) -> Float[Tensor, "B R"]:
    """Sum the discounted rewards from each of the row's own tokens on: GAE of values 0, lam 1."""
    rewards = inputs.token_level_rewards
    return unwhitened_gae(rewards, torch.zeros_like(rewards), inputs.response_mask, gamma, 1.0)
