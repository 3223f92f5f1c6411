"""The functions of verl 0.5: the order of their results, and the values of our functions."""

import numpy as np
import pytest
import torch

from tests.algorithms.tensors import random_columns, random_mask
from verl.algorithms.advantages import AdvantageInputs, gae
from verl.algorithms.group_advantages import grpo
from verl.algorithms.masked import agg_loss, masked_mean
from verl.compat import signatures as core
from verl.utils.errors import ConfigError

MASK = random_mask(5, 4, 6)
ONE, TWO, THREE = random_columns(5, 4, 6, 3)


def test_advantages():
    got = core.compute_gae_advantage_return(ONE, TWO, MASK, torch.tensor(0.9), 0.8)
    expected = gae(AdvantageInputs(ONE, MASK, values=TWO, gamma=torch.tensor(0.9).item(), lam=0.8))
    assert all(torch.equal(a, b) for a, b in zip(got, expected))
    uids = np.array(["x", "y", "x", "y"], dtype=object)
    for norm in (True, False):
        got = core.compute_grpo_outcome_advantage(ONE, MASK, uids, norm_adv_by_std_in_grpo=norm)
        expected = grpo(
            AdvantageInputs(ONE, MASK, group=torch.tensor([0, 1, 0, 1]), norm_by_std=norm)
        )
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


def test_policy_loss():
    loss, clipfrac, kl, lower = core.compute_policy_loss(
        ONE, TWO, THREE, MASK, cliprange=0.2, clip_ratio_c=1.5
    )
    ratio = (TWO - ONE).exp()
    bounded = torch.maximum(-THREE * ratio, -THREE * ratio.clamp(0.8, 1.2))
    tokens = torch.where(THREE < 0, torch.minimum(bounded, -1.5 * THREE), bounded)
    torch.testing.assert_close(loss, masked_mean(tokens, MASK), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(clipfrac, masked_mean((bounded > -THREE * ratio).double(), MASK))

    torch.testing.assert_close(kl, masked_mean(ONE - TWO, MASK))
    torch.testing.assert_close(
        lower, masked_mean(((THREE < 0) & (bounded > -1.5 * THREE)).double(), MASK)
    )
    open_above = core.compute_policy_loss(ONE, TWO, THREE, MASK, 0.2, cliprange_high=1e9)
    clipped_below = (THREE < 0) & (ratio < 0.8)
    torch.testing.assert_close(open_above[1], masked_mean(clipped_below.double(), MASK))
    with pytest.raises(ConfigError, match="cliprange"):
        core.compute_policy_loss(ONE, TWO, THREE, MASK, cliprange_low=0.2)


def test_value_loss():
    loss, clipfrac = core.compute_value_loss(ONE, TWO, THREE, MASK, 0.5, "seq-mean-token-sum")
    near = torch.clamp(ONE, THREE - 0.5, THREE + 0.5)
    plain = (ONE - TWO) ** 2
    clipped = (near - TWO) ** 2
    expected = 0.5 * agg_loss(torch.maximum(plain, clipped), MASK, "seq-mean-token-sum")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(clipfrac, masked_mean((clipped > plain).double(), MASK))


def test_entropy_loss():
    logits = torch.stack([ONE, TWO, THREE], dim=-1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(core.compute_entropy_loss(logits, MASK), masked_mean(entropy, MASK))
