"""Values that nothing reads give one line each, by the readers of every key."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import verl.algorithms  # noqa: F401  (fills the registries)
from tests.config.conftest import Load
from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.policy_losses import policy_losses, selections
from verl.config.actor import PolicyLossConfig
from verl.config.choices import ESTIMATORS, POLICY_LOSSES
from verl.config.unread import READ_BY_ESTIMATORS, READ_BY_LOSSES, unread_keys
from verl.utils.registry import Registry

ACTOR = "actor_rollout_ref.actor"
ALGORITHM = "algorithm"
PF_PPO = ("algorithm.use_pf_ppo=True", "algorithm.pf_ppo.reweight_method=max_min")
DISTILLED = (
    *("distillation.enabled=True", "distillation.distillation_loss.use_task_rewards=False"),
    "distillation.teacher_models.teacher_model.model_path=toy",
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2")


@pytest.mark.parametrize(
    ("overrides", "unread"),
    [
        ([*GRPO, "algorithm.gamma=1.0", "algorithm.lam=1", f"{ACTOR}.clip_ratio_c=3.0"], []),
        (["algorithm.gamma=0.9", "algorithm.lam=0.95", f"{ACTOR}.clip_ratio=0.3"], []),
        ([*GRPO, "algorithm.norm_adv_by_std_in_grpo=False", "critic.optim.num_cycles=2"], []),
        ([f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.num_cycles=2"], []),
        ([f"{ACTOR}.optim.warmup_style=wsd", f"{ACTOR}.optim.min_lr_ratio=0.1"], []),
        ([f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio=0.3"], ["clip_ratio=0.3"]),
        (
            [
                *(f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio_low=0.1"),
                f"{ACTOR}.clip_ratio_high=0.2",
            ],
            ["clip_ratio_low=0.1"],
        ),
        ([f"{ACTOR}.policy_loss.tau_pos=2"], ["policy_loss.tau_pos=2.0"]),
        ([f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.policy_loss.tau_pos=2"], []),
        (
            [
                *("algorithm.rollout_correction.loss_type=reinforce", f"{ACTOR}.clip_ratio=0.3"),
                *("algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.clip_ratio_c=5"),
            ],
            ["clip_ratio=0.3", "clip_ratio_c=5.0"],
        ),
        ([*DISTILLED, f"{ACTOR}.policy_loss.loss_mode=gpg"], ["policy_loss.loss_mode=gpg"]),
        ([*DISTILLED, f"{ACTOR}.clip_ratio=0.3"], ["clip_ratio=0.3"]),
        (
            [DISTILLED[2], "distillation.distillation_loss.jsd_beta=0.9"],
            [
                "distillation.teacher_models.teacher_model.model_path=toy",
                "distillation.distillation_loss.jsd_beta=0.9",
            ],
        ),
        ([f"{ALGORITHM}.pf_ppo.weight_pow=3"], [f"{ALGORITHM}.pf_ppo.weight_pow=3.0"]),
        (
            [*PF_PPO, f"{ALGORITHM}.pf_ppo.weight_pow=3"],
            [f"{ALGORITHM}.pf_ppo.weight_pow=3.0"],
        ),
        ([*PF_PPO[:1], f"{ALGORITHM}.pf_ppo.weight_pow=3"], []),
        ([f"{ALGORITHM}.entropy_ctrl.delta=0.1"], [f"{ALGORITHM}.entropy_ctrl.delta=0.1"]),
        ([f"{ALGORITHM}.entropy_ctrl.type=adaptive", f"{ALGORITHM}.entropy_ctrl.delta=0.1"], []),
    ],
)
def test_each_value_that_nothing_reads_has_one_line(
    build: Load, log: pytest.LogCaptureFixture, overrides: list[str], unread: list[str]
):
    build(*overrides)
    lines = [record.message for record in log.records if "has no effect" in record.message]
    whole = (ALGORITHM, "distillation")
    keys = [value if value.startswith(whole) else f"{ACTOR}.{value}" for value in unread]
    assert [line.partition(" ")[0] for line in lines] == keys


def test_settings_of_drafts_without_their_method_have_one_line(
    build: Load, log: pytest.LogCaptureFixture
):
    tokens = "actor_rollout_ref.rollout.speculative.num_speculative_tokens=3"
    build(tokens, "actor_rollout_ref.rollout.speculative.method=ngram")
    assert "has no effect" not in log.text
    build(tokens)
    assert f"{tokens} has no effect: it is read with" in log.text


def test_estimators_and_losses_of_a_user_may_read_every_key(build: Load):
    config = build()
    config.algorithm.adv_estimator = "mine"
    config.algorithm.gamma = 0.9
    config.algorithm.norm_adv_by_std_in_grpo = False
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "mine"
    config.actor_rollout_ref.actor.clip_ratio = 0.3
    assert not list(unread_keys(config))


def packaged(registry: Registry[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    parts = {name: inspect.unwrap(registry.get(name)) for name in registry}
    return {name: part for name, part in parts.items() if part.__module__.startswith("verl.")}


def test_readers_of_keys_are_those_of_the_code():
    estimators = packaged(advantage_estimators)
    assert set(estimators) == set(ESTIMATORS)
    for key, readers in READ_BY_ESTIMATORS.items():
        field = "norm_by_std" if key == "norm_adv_by_std_in_grpo" else key
        reading = {
            name
            for name, estimator in estimators.items()
            if f"inputs.{field}" in inspect.getsource(estimator)
        }
        assert reading == set(readers), key

    losses = packaged(policy_losses)
    assert set(losses) == set(POLICY_LOSSES)
    for key, readers in READ_BY_LOSSES.items():
        taken = "clip_ratio_low" if key == "clip_ratio" else key.rpartition(".")[2]
        reading = {name for name, loss in losses.items() if taken in parameters(name, loss)}
        assert reading == set(readers), key

    # and every key of the section has an entry, but for those of a user's own loss
    listed = {key.rpartition(".")[2] for key in READ_BY_LOSSES}
    assert {entry.name for entry in fields(PolicyLossConfig)} - {
        "loss_mode",
        "loss_kwargs",
    } <= listed


def parameters(name: str, loss: Callable[..., Any]) -> set[str]:
    """Return the settings that a loss reads, and its selection of tokens."""
    taken = set(inspect.signature(loss).parameters)
    if name in selections:
        taken |= set(inspect.signature(selections.get(name)).parameters)
    return taken
