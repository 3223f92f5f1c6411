"""Contradictions between the keys of the algorithm."""

import pytest

from tests.config.conftest import Load
from verl.utils.errors import ConfigError

CORRECTION = "algorithm.rollout_correction"
REINFORCE = f"{CORRECTION}.loss_type=reinforce"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm.adv_estimator=gdpo", "actor_rollout_ref.rollout.n=1"],
            "adv_estimator=gdpo compares.*at least 2",
        ),
        (
            ["algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.n=1"],
            "filter_groups.*at least 2",
        ),
        (
            ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=remax"],
            "filter_groups.*remax.*got both",
        ),
        (
            ["algorithm.gdpo_reward_keys=[score,format]", "algorithm.gdpo_reward_weights=[1]"],
            "1 weights for the 2",
        ),
        (
            [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_is=token"],
            "rollout_is=token would correct a second time.*loss_type=reinforce",
        ),
        (
            [f"{CORRECTION}.bypass_mode=True", f"{CORRECTION}.rollout_rs=geometric", REINFORCE],
            "rollout_rs=geometric.*bypass_mode=True does not compute",
        ),
        ([REINFORCE], "loss_type=reinforce.*needs.*bypass_mode=True, got False"),
        (
            [REINFORCE, f"{CORRECTION}.bypass_mode=True", f"{LOSS_MODE}=gspo"],
            "loss_type=reinforce is the policy loss, got.*loss_mode=gspo",
        ),
        ([f"{CORRECTION}.loss_type=ppo"], "unknown value 'ppo'.*ppo_clip"),
        (
            [f"{CORRECTION}.rollout_is_threshold_lower=3"],
            "rollout_is_threshold_lower must not exceed",
        ),
        ([f"{CORRECTION}.rollout_rs_threshold=0.5"], "rollout_rs_threshold_lower must not exceed"),
    ],
)
def test_contradictions_are_errors(build: Load, overrides: list[str], message: str):
    n = (
        []
        if any("rollout.n=" in override for override in overrides)
        else ["actor_rollout_ref.rollout.n=4"]
    )
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build(*overrides, *n)


def test_sequence_loss_with_another_mean_gives_a_warning(
    build: Load, caplog: pytest.LogCaptureFixture
):
    build("actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    assert "gspo has one ratio a response" in caplog.text
    caplog.clear()
    build(
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
    )
    assert "one ratio a response" not in caplog.text


def test_sapo_with_a_token_mean_gives_a_warning(build: Load, caplog: pytest.LogCaptureFixture):
    sapo = "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
    build(sapo)
    assert "loss_mode=sapo is defined with the mean over the tokens of each" in caplog.text
    caplog.clear()
    build(sapo, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean")
    assert "loss_mode=sapo is defined" not in caplog.text


def test_reinforce_accepts_weights_and_several_epochs(
    build: Load, caplog: pytest.LogCaptureFixture
):
    given = [REINFORCE, f"{CORRECTION}.bypass_mode=True", "actor_rollout_ref.rollout.n=4"]
    build(*given, "actor_rollout_ref.actor.ppo_epochs=3", f"{CORRECTION}.rollout_is=sequence")
    assert "does not correct" not in caplog.text
    build(*given)
    assert "loss_type=reinforce without rollout_is does not correct" in caplog.text


TEACHER = "distillation.teacher_models.teacher_model.model_path=teacher"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "needs a teacher"),
        ([TEACHER, "loss_mode=jsd", "jsd_beta=1"], "jsd_beta must be below 1.*reverse_kl"),
        ([TEACHER, "loss_mode=jsd", "use_policy_gradient=True"], "over the whole vocabulary"),
        ([TEACHER, "use_task_rewards=False", REINFORCE], "which distillation replaces"),
        ([TEACHER, "loss_mode=forward_kl_topk"], "unknown value 'forward_kl_topk'.*forward_kl"),
    ],
)
def test_incomplete_distillation_settings_are_errors(
    build: Load, overrides: list[str], message: str
):
    section = "distillation.distillation_loss."
    whole = (TEACHER, REINFORCE)
    full = [each if each in whole else section + each for each in overrides]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build("distillation.enabled=True", "actor_rollout_ref.rollout.n=4", *full)


def test_loss_without_expected_gradient_gives_a_warning(
    build: Load, caplog: pytest.LogCaptureFixture
):
    loss = "distillation.distillation_loss"
    distilling = ["distillation.enabled=True", TEACHER, f"{loss}.loss_mode=k1"]
    build(*distilling)
    assert "loss_mode=k1 has an expected gradient of 0" in caplog.text
    caplog.clear()
    config = build(*distilling, f"{loss}.use_policy_gradient=True")
    assert "expected gradient of 0" not in caplog.text
    assert config.advantages_read_old_log_probs


def test_bounds_of_two_numbers_and_presets_set_single_keys(build: Load):
    prefix = "algorithm.rollout_correction"
    icepop = build(f"{prefix}.rollout_is=token", f"{prefix}.rollout_is_threshold=0.5_5.0")
    correction = icepop.algorithm.rollout_correction
    assert correction.weight_band == (0.5, 5.0)
    assert correction.rollout_is_mode == "mask"

    correction = build(f"{prefix}.preset=decoupled_geo_rs_token_tis").algorithm.rollout_correction
    assert correction.rollout_is == "token"
    assert correction.accept_band == (0.999, 1.001)
    own = build(f"{prefix}.preset=decoupled_token_is", f"{prefix}.rollout_is_threshold=5")
    assert own.algorithm.rollout_correction.weight_band == (0.0, 5.0)
    with pytest.raises(ConfigError, match="must be a number or two as in 0.5_2.0, got 'a_b'"):
        build(f"{prefix}.rollout_is=token", f"{prefix}.rollout_is_threshold=a_b")
