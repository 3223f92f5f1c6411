"""The 0.5 signatures: parameter names, order of the returns, and the same numbers as the room behind them."""

import inspect

import numpy as np
import pytest
import torch

from tests.algorithms.tensors import random_columns, random_mask
from verl.algorithms import compat_signatures as core
from verl.algorithms.advantages import AdvantageInputs, gae
from verl.algorithms.group_advantages import grpo
from verl.algorithms.masked import agg_loss, masked_mean
from verl.utils.errors import ConfigError

MASK = random_mask(5, 4, 6)
ONE, TWO, THREE = random_columns(5, 4, 6, 3)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("compute_gae_advantage_return", "token_level_rewards values response_mask gamma lam"),
        (
            "compute_grpo_outcome_advantage",
            "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config",
        ),
        (
            "compute_policy_loss",
            "old_log_prob log_prob advantages response_mask cliprange cliprange_low cliprange_high clip_ratio_c "
            "loss_agg_mode",
        ),
        (
            "compute_grpo_passk_outcome_advantage",
            "token_level_rewards response_mask index epsilon norm_adv_by_std_in_grpo config kwargs",
        ),
        (
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            "token_level_rewards response_mask index epsilon config kwargs",
        ),
        ("compute_rloo_outcome_advantage", "token_level_rewards response_mask index epsilon config kwargs"),
        ("compute_opo_outcome_advantage", "token_level_rewards response_mask index epsilon config kwargs"),
        ("compute_reinforce_plus_plus_outcome_advantage", "token_level_rewards response_mask config kwargs"),
        ("compute_remax_outcome_advantage", "token_level_rewards reward_baselines response_mask config kwargs"),
        (
            "compute_gpg_outcome_advantage",
            "token_level_rewards response_mask index epsilon f_norm alpha config kwargs",
        ),
        ("compute_policy_loss_gpg", "old_log_prob log_prob advantages response_mask loss_agg_mode config"),
        ("compute_policy_loss_clip_cov", "old_log_prob log_prob advantages response_mask loss_agg_mode config"),
        ("compute_policy_loss_kl_cov", "old_log_prob log_prob advantages response_mask loss_agg_mode config"),
        ("compute_value_loss", "vpreds returns values response_mask cliprange_value loss_agg_mode"),
        ("compute_entropy_loss", "logits response_mask loss_agg_mode"),
        ("agg_loss", "loss_mat loss_mask loss_agg_mode"),
        ("get_kl_controller", "kl_ctrl"),
    ],
)
def test_parameter_names(name, parameters):
    assert list(inspect.signature(getattr(core, name)).parameters) == parameters.split()


def test_advantages():
    got = core.compute_gae_advantage_return(ONE, TWO, MASK, torch.tensor(0.9), 0.8)
    expected = gae(AdvantageInputs(ONE, MASK, values=TWO, gamma=torch.tensor(0.9).item(), lam=0.8))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    uids = np.array(["x", "y", "x", "y"], dtype=object)
    for norm in (True, False):
        got = core.compute_grpo_outcome_advantage(ONE, MASK, uids, norm_adv_by_std_in_grpo=norm)
        expected = grpo(AdvantageInputs(ONE, MASK, group=torch.tensor([0, 1, 0, 1]), norm_by_std=norm))
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_policy_loss():
    loss, clipfrac, kl, lower = core.compute_policy_loss(ONE, TWO, THREE, MASK, cliprange=0.2, clip_ratio_c=1.5)
    ratio = (TWO - ONE).exp()
    bounded = torch.maximum(-THREE * ratio, -THREE * ratio.clamp(0.8, 1.2))
    tokens = torch.where(THREE < 0, torch.minimum(bounded, -1.5 * THREE), bounded)
    torch.testing.assert_close(loss, masked_mean(tokens, MASK), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(clipfrac, masked_mean((bounded > -THREE * ratio).double(), MASK))
    torch.testing.assert_close(kl, masked_mean(ONE - TWO, MASK))
    torch.testing.assert_close(lower, masked_mean(((THREE < 0) & (bounded > -1.5 * THREE)).double(), MASK))
    open_above = core.compute_policy_loss(ONE, TWO, THREE, MASK, 0.2, cliprange_high=1e9)
    clipped_below = (THREE < 0) & (ratio < 0.8)
    torch.testing.assert_close(open_above[1], masked_mean(clipped_below.double(), MASK))
    with pytest.raises(ConfigError, match="cliprange"):
        core.compute_policy_loss(ONE, TWO, THREE, MASK, cliprange_low=0.2)


def test_value_loss():
    loss, clipfrac = core.compute_value_loss(ONE, TWO, THREE, MASK, 0.5, "seq-mean-token-sum")
    near = torch.clamp(ONE, THREE - 0.5, THREE + 0.5)
    plain, clipped = (ONE - TWO) ** 2, (near - TWO) ** 2
    expected = 0.5 * agg_loss(torch.maximum(plain, clipped), MASK, "seq-mean-token-sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(clipfrac, masked_mean((clipped > plain).double(), MASK))


def test_entropy_loss():
    logits = torch.stack([ONE, TWO, THREE], dim=-1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(core.compute_entropy_loss(logits, MASK), masked_mean(entropy, MASK))
