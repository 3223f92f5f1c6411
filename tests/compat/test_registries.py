"""The registries of verl 0.5's core_algos: our functions with its signatures, users' functions."""

import warnings
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.algorithms.references import ADVANTAGES, LOSSES, SETTINGS, aggregate
from tests.algorithms.tensors import random_columns, random_mask
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.algorithms.masked import AGGREGATION_MODES, agg_loss, aggregation_weights
from verl.algorithms.padded import PaddedEstimator
from verl.algorithms.policy_losses import PolicyLossInputs, policy_losses
from verl.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from verl.config.load import config_from_dict
from verl.diagnostics.parts import check_names
from verl.utils.errors import AlgorithmError, ConfigError

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.ppo import core_algos  # pyright: ignore[reportMissingImports]
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
        ADV_ESTIMATOR_REGISTRY,
        POLICY_LOSS_REGISTRY,
        AdvantageEstimator,
        get_adv_estimator_fn,
        get_policy_loss_fn,
        register_adv_est,
        register_policy_loss,
    )

MASK = random_mask(5, 6, 7)
OLD, DRIFT, ADVANTAGES_OF = random_columns(5, 6, 7, 3)
OLD = -OLD.abs()
NEW = (OLD + 0.4 * DRIFT).clamp(max=-0.01)  # log probabilities are negative
GAINS = ADVANTAGES_OF[:, :1].expand(6, 7).contiguous()
UIDS = np.array(["x", "y", "x", "y", "y", "x"], dtype=object)

_CLIP = {"clip_ratio": 9.0, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
_POLICY_LOSS = {
    name: value for name, value in SETTINGS.items() if not name.startswith("clip_ratio")
}
CONFIGS = {
    "dict": {**_CLIP, "policy_loss": _POLICY_LOSS},
    "omegaconf": OmegaConf.create({**_CLIP, "policy_loss": _POLICY_LOSS}),
    "namespace": SimpleNamespace(**_CLIP, policy_loss=SimpleNamespace(**_POLICY_LOSS)),
    "ours": ActorConfig(**_CLIP, policy_loss=PolicyLossConfig(**_POLICY_LOSS)),
}


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", sorted(name for name in LOSSES if not name.endswith("_cov")))
def test_loss_with_verl_signature_matches_the_paper(name, mode):
    leaf = NEW.clone().requires_grad_()
    other = NEW.clone().requires_grad_()
    rows = [
        LOSSES[name](
            *([column[row, t] for t in own] for column in (other, OLD, GAINS)), [False] * len(own)
        )
        for row in range(len(MASK))
        if (own := MASK[row].nonzero().flatten().tolist())
    ]

    expected = aggregate(rows, mode, MASK.shape[1])
    expected.backward()
    for config in CONFIGS.values():
        leaf.grad = None
        loss, *numbers = get_policy_loss_fn(name)(OLD, leaf, GAINS, MASK, mode, config)
        loss.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-6, atol=1e-9)
        assert len(numbers) == 3
        assert numbers[1].item() == pytest.approx(
            ((OLD - NEW) * MASK).sum().item() / MASK.sum().item()
        )


def test_covariance_losses_with_verl_signature():
    """Select tokens over the whole batch; clip_cov draws from torch's generator."""
    for name in ("clip_cov", "kl_cov"):
        torch.manual_seed(0)
        first = get_policy_loss_fn(name)(OLD, NEW, GAINS, MASK, "token-mean", CONFIGS["dict"])
        torch.manual_seed(0)
        again = get_policy_loss_fn(name)(OLD, NEW, GAINS, MASK, "token-mean", CONFIGS["dict"])
        plain = get_policy_loss_fn("vanilla")(
            OLD, NEW, GAINS, MASK, "token-mean", {**CONFIGS["dict"], "clip_ratio_c": 1e9}
        )
        assert first[0] == again[0] != plain[0]


def test_defaults_of_sequence_losses_without_a_config():
    mean = get_policy_loss_fn("gspo")(OLD, NEW, GAINS, MASK)
    assert (
        mean[0]
        == get_policy_loss_fn("gspo")(OLD, NEW, GAINS, MASK, "seq-mean-token-mean", ActorConfig())[
            0
        ]
    )
    both = get_policy_loss_fn("vanilla")(OLD, NEW, GAINS, MASK, "token-mean", {"clip_ratio": 0.1})
    low_high = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
    assert (
        both[0] == get_policy_loss_fn("vanilla")(OLD, NEW, GAINS, MASK, "token-mean", low_high)[0]
    )


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_estimator_with_verl_signature_matches_the_paper(name):
    rewards = random_columns(9, 6, 7, 1)[0]
    groups = [0, 1, 0, 1, 1, 0]
    expected = ADVANTAGES[name](rewards.sum(-1).tolist(), groups, MASK.sum(-1).tolist())
    advantages, returns = get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=MASK, index=UIDS, config=None
    )
    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=torch.float64)[:, None] * MASK
    )
    assert torch.equal(advantages, returns)


def test_other_estimators_with_verl_signature():
    rewards = random_columns(9, 6, 7, 1)[0]
    baselines = torch.arange(6.0).double()
    inputs = AdvantageInputs(rewards, MASK, gamma=0.5, group=torch.tensor([0, 1, 0, 1, 1, 0]))

    for name, given in (
        ("reinforce_plus_plus", {"config": SimpleNamespace(gamma=0.5)}),
        ("reinforce_plus_plus", {"config": {"gamma": 0.5}}),
        ("reinforce_plus_plus_baseline", {"index": UIDS, "config": None}),
        ("remax", {"reward_baselines": baselines, "config": None}),
    ):
        got = get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=MASK, **given)
        expected = advantage_estimators.get(name)(
            inputs._replace(columns={"reward_baselines": baselines})
        )
        assert all(torch.equal(one, other) for one, other in zip(got, expected)), name

    scaled, _ = get_adv_estimator_fn("gpg")(
        rewards, MASK, index=torch.tensor([0, 1, 0, 1, 1, 0]), f_norm=2.0, alpha=3.0
    )
    torch.testing.assert_close(scaled, advantage_estimators.get("gpg")(inputs)[0] * 1.5)


@pytest.mark.parametrize("section", [dict, SimpleNamespace])
def test_section_controls_the_std_division_of_passk(section):
    rewards = random_columns(9, 6, 7, 1)[0]
    estimator = get_adv_estimator_fn("grpo_passk")
    plain, _ = estimator(rewards, MASK, index=UIDS, norm_adv_by_std_in_grpo=False)
    divided, _ = estimator(rewards, MASK, index=UIDS)
    assert not torch.equal(plain, divided)
    for asked, expected in ((False, plain), (True, divided)):
        config = section(norm_adv_by_std_in_grpo=asked)
        assert torch.equal(estimator(rewards, MASK, index=UIDS, config=config)[0], expected)


def test_registries_are_dictionaries():
    assert set(LOSSES) <= set(POLICY_LOSS_REGISTRY)
    assert set(ADVANTAGES) | {"gae", "remax"} <= set(ADV_ESTIMATOR_REGISTRY)
    assert "vanilla" in POLICY_LOSS_REGISTRY
    assert len(POLICY_LOSS_REGISTRY) == len(list(policy_losses))
    assert POLICY_LOSS_REGISTRY.get("nothing") is None
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is ADV_ESTIMATOR_REGISTRY["grpo"]
    assert get_policy_loss_fn("gspo") is get_policy_loss_fn("gspo")
    for lookup in (get_policy_loss_fn, get_adv_estimator_fn):
        with pytest.raises(ValueError, match="Unknown .*: nothing"):
            lookup("nothing")
    with pytest.raises(ConfigError, match="already been registered"):
        register_policy_loss("vanilla")(lambda *args: None)


@pytest.mark.parametrize("registry", [POLICY_LOSS_REGISTRY, ADV_ESTIMATOR_REGISTRY])
def test_cleared_registry_is_empty_until_restored(registry):
    before = registry.copy()
    policy_loss = policy_losses.get("vanilla")
    estimator = advantage_estimators.get("gae")

    registry.clear()
    try:
        assert dict(registry) == {}
        assert before.keys() - registry == before.keys()
    finally:
        registry.update(before)

    assert dict(registry) == before
    assert policy_losses.get("vanilla") is policy_loss, "the packed loss, not its padded view"
    assert advantage_estimators.get("gae") is estimator


def test_cleared_name_can_be_reused():
    before = ADV_ESTIMATOR_REGISTRY.copy()
    estimator = advantage_estimators.get("gae")
    ADV_ESTIMATOR_REGISTRY.clear()
    try:

        @register_adv_est(AdvantageEstimator.GAE)
        def own():
            return "mine"

        assert get_adv_estimator_fn("gae") is own
        assert AdvantageEstimator.GAE in ADV_ESTIMATOR_REGISTRY
        assert register_adv_est("gae")(own) is own, "the same function again is no mistake"
        with pytest.raises(ValueError, match="already been registered"):
            register_adv_est("gae")(lambda: None)
        with pytest.raises(ValueError, match="Unknown advantage estimator simply: GAE"):
            get_adv_estimator_fn("GAE")
    finally:
        ADV_ESTIMATOR_REGISTRY.clear()
        ADV_ESTIMATOR_REGISTRY.update(before)
    assert get_adv_estimator_fn("gae").__name__ == "compute_gae_advantage_return"
    assert advantage_estimators.get("gae") is estimator


@pytest.mark.parametrize(
    ("registry", "register"),
    [
        ("ADV_ESTIMATOR_REGISTRY", register_adv_est),
        ("POLICY_LOSS_REGISTRY", register_policy_loss),
    ],
)
def test_registry_replaced_by_a_dictionary(monkeypatch, registry, register):
    replaced: dict[str, Any] = {}
    before = getattr(core_algos, registry)
    monkeypatch.setattr(core_algos, registry, replaced)
    function = register("of_my_own")(lambda: "mine")
    assert replaced == {"of_my_own": function}
    assert register("of_my_own")(function) is function, "the same function again is no mistake"
    with pytest.raises(ValueError, match="already been registered"):
        register("of_my_own")(lambda: "another")
    assert replaced == {"of_my_own": function}

    monkeypatch.undo()
    assert getattr(core_algos, registry) is before


def test_member_of_an_enum_names_an_estimator(monkeypatch):
    class Mine(Enum):
        TEST = "of_my_own"

    replaced: dict[str, Any] = {}
    monkeypatch.setattr(core_algos, "ADV_ESTIMATOR_REGISTRY", replaced)
    function = register_adv_est(Mine.TEST)(lambda: "mine")
    assert replaced == {"of_my_own": function}


@register_policy_loss("test_padded_reinforce")
def _padded_reinforce(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None
):
    tokens = -advantages * log_prob * (1.0 if config is None else config.clip_ratio_c)
    share = (response_mask * (log_prob > old_log_prob)).sum() / response_mask.sum()
    return (
        agg_loss(tokens, response_mask, loss_agg_mode),
        share,
        torch.tensor(0.25),
        torch.tensor(0.0),
    )


def test_user_padded_loss_in_packed_micro_batches():
    loss = policy_losses.get("test_padded_reinforce")
    assert get_policy_loss_fn("test_padded_reinforce") is _padded_reinforce
    actor = ActorConfig(clip_ratio_c=2.0)

    for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        weights = aggregation_weights(MASK, mode).double()
        expected = 2.0 * (-GAINS * NEW * weights).sum()
        leaf = NEW.clone().requires_grad_()
        total = 0.0
        for rows in (torch.tensor([4, 0]), torch.tensor([1, 2, 3, 5])):
            # some are tool tokens
            columns = [column[rows].flatten() for column in (leaf, OLD, GAINS, weights)]
            number = rows.repeat_interleave(MASK.shape[1])
            inputs = PolicyLossInputs(*columns, number, mask=MASK[rows].flatten())
            output = loss(inputs, loss_agg_mode=mode, actor=actor, clip_ratio_low=0.2)
            output.loss.backward()
            total += output.loss.item()
            assert output.means["ppo_kl"].tolist() == [0.25] * len(number)
        assert total == pytest.approx(expected.item(), rel=1e-6)
        torch.testing.assert_close(leaf.grad, 2.0 * -GAINS * weights, rtol=1e-6, atol=1e-12)


def test_user_padded_loss_that_returns_its_own_metrics():
    """As later versions of verl call them: (loss, metrics)."""

    @register_policy_loss("test_padded_metrics")
    def of_later_versions(
        old_log_prob,
        log_prob,
        advantages,
        response_mask,
        loss_agg_mode="token-mean",
        config=None,
        rollout_is_weights=None,
    ):
        loss = agg_loss(-advantages * log_prob, response_mask, loss_agg_mode)
        return loss, metrics

    rows = torch.arange(len(MASK)).repeat_interleave(MASK.shape[1])
    weights = aggregation_weights(MASK, "token-mean").double()
    columns = [column.flatten() for column in (NEW, OLD, GAINS, weights)]
    inputs = PolicyLossInputs(*columns, rows, mask=MASK.flatten())
    loss = policy_losses.get("test_padded_metrics")

    metrics = {"actor/ppo_kl": 0.25, "mine/spread": torch.tensor([2.0])}
    output = loss(inputs, loss_agg_mode="token-mean")
    assert output.loss.item() == pytest.approx((-GAINS * NEW * weights).sum().item())
    assert {name: set(values.tolist()) for name, values in output.means.items()} == {
        "ppo_kl": {0.25},
        "mine/spread": {2.0},
    }

    metrics = {"mine/spread": torch.zeros(2)}
    with pytest.raises(
        AlgorithmError, match=r"the metric 'mine/spread', got torch.float32 Tensor of shape \(2,"
    ):
        loss(inputs, loss_agg_mode="token-mean")


def test_padded_loss_cannot_weight_tokens():
    config = config_from_dict(
        {
            "data": {"dataset_name": "toy"},
            "algorithm": {"rollout_correction": {"rollout_is": "token"}},
        }
    )
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "test_padded_reinforce"
    with pytest.raises(ConfigError, match="rollout_is=null"):
        check_names(config)


def test_user_padded_estimator_in_training():
    @register_adv_est("test_padded_mean")
    def centred(token_level_rewards, response_mask, index, config=None, epsilon=1e-6):
        scores = token_level_rewards.sum(-1) * config.gamma
        baseline = {uid: scores[index == uid].mean() for uid in set(index.tolist())}
        advantages = (scores - torch.stack([baseline[uid] for uid in index.tolist()]))[
            :, None
        ] * response_mask
        return advantages, advantages

    rewards = random_columns(9, 6, 7, 1)[0]
    group = torch.tensor([0, 1, 0, 1, 1, 0])
    got, _ = advantage_estimators.get("test_padded_mean")(
        AdvantageInputs(rewards, MASK, group=group, gamma=0.5)
    )
    plain, _ = advantage_estimators.get("grpo")(
        AdvantageInputs(rewards, MASK, group=group, norm_by_std=False)
    )
    torch.testing.assert_close(got, 0.5 * plain)

    assert ADV_ESTIMATOR_REGISTRY["test_padded_mean"] is centred
    assert advantage_estimators.get("test_padded_mean").__module__ == __name__, (
        "a user's, who may read old_log_probs"
    )


def test_user_estimator_reads_the_section_of_the_run():
    seen = {}

    def own(token_level_rewards, response_mask, config=None, **_):
        seen.update(
            gamma=config.gamma, name=config.get("adv_estimator"), coef=config["kl_ctrl"].kl_coef
        )
        seen.update(missing=config.get("nothing", 7), has="use_kl_in_reward" in config)
        return token_level_rewards, token_level_rewards

    section = AlgorithmConfig(gamma=0.9, adv_estimator="own")
    section.kl_ctrl.kl_coef = 0.05
    ones = torch.ones(2, 3)
    PaddedEstimator(own)(AdvantageInputs(ones, ones, config=section))
    assert seen == {"gamma": 0.9, "name": "own", "coef": 0.05, "missing": 7, "has": True}


def test_estimator_without_a_section_reads_the_inputs():
    seen = []

    def own(token_level_rewards, response_mask, config=None):
        seen.append((config.gamma, config.lam, config.norm_adv_by_std_in_grpo))
        return token_level_rewards, token_level_rewards

    ones = torch.ones(2, 3)
    for by_std in (True, False):
        PaddedEstimator(own)(AdvantageInputs(ones, ones, gamma=0.9, lam=0.8, norm_by_std=by_std))
    assert seen == [(0.9, 0.8, True), (0.9, 0.8, False)]


def test_prompt_numbers_may_be_a_tensor():
    rewards = torch.rand(4, 3)
    mask = torch.ones(4, 3)
    for name in ("grpo", "gdpo"):
        by_tensor, by_array = (
            get_adv_estimator_fn(name)(rewards, mask, index=index)[0]
            for index in (torch.tensor([0, 0, 1, 1]), np.array([0, 0, 1, 1]))
        )
        assert torch.equal(by_tensor, by_array)
