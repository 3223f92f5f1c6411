"""Contradictions between the keys of the algorithm."""

import pytest

from tests.config.conftest import Load
from verl.utils.errors import ConfigError

CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("overrides", "told"),
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
            "rollout_is=token.*bypass_mode",
        ),
        (
            [f"{CORRECTION}.rollout_is_threshold_lower=3"],
            "rollout_is_threshold_lower must not exceed",
        ),
        ([f"{CORRECTION}.rollout_rs_threshold=0.5"], "rollout_rs_threshold_lower must not exceed"),
    ],
)
def test_contradictions_are_told(build: Load, overrides: list[str], told: str):
    n = (
        []
        if any("rollout.n=" in override for override in overrides)
        else ["actor_rollout_ref.rollout.n=4"]
    )
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        build(*overrides, *n)


def test_a_loss_of_sequences_under_another_mean_is_doubtful(
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


def test_sapo_by_tokens_is_doubtful(build: Load, caplog: pytest.LogCaptureFixture):
    sapo = "actor_rollout_ref.actor.policy_loss.loss_mode=sapo"
    build(sapo)
    assert "loss_mode=sapo is defined with the mean over the tokens of each" in caplog.text
    caplog.clear()
    build(sapo, "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean")
    assert "loss_mode=sapo is defined" not in caplog.text
