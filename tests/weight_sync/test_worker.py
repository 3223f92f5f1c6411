"""Hand-over by the actor: buckets of the configured size, in the dtype of the engine, verified at
the configured interval."""

from typing import Any

import pytest
import torch

from tests.workers.batches import actor_of, config, rollout_of
from verl.utils.errors import RolloutError

ROWS = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def rollout(tmp_path) -> Any:
    settings = config(tmp_path)
    settings.actor_rollout_ref.rollout.dtype = "bfloat16"  # so that something must be copied
    settings.actor_rollout_ref.rollout.fingerprint_interval = 2
    return rollout_of(actor_of(settings))


def swap_rows_after_the_next_update(rollout: Any) -> None:
    take = rollout.engine.update_weights

    def take_and_swap(named_tensors: Any) -> None:
        take(named_tensors)
        weight = rollout.engine.twin.module.get_parameter(ROWS).data
        weight[[0, 5]] = weight[[5, 0]]
        rollout.engine.update_weights = take

    rollout.engine.update_weights = take_and_swap


def test_damage_is_detected_on_the_first_hand_over_and_every_second(rollout):
    found = []
    for _ in range(5):
        swap_rows_after_the_next_update(rollout)
        try:
            rollout.take_weights()
            found.append("")
        except RolloutError as error:
            found.append(str(error))
    assert [ROWS in message for message in found] == [True, False, True, False, True]
    rollout.take_weights()
    rollout.take_weights()  # verified, and sound


def test_the_speed_is_a_statistic_of_the_rollout(rollout):
    rollout.take_weights()
    numbers = rollout.engine.statistics()
    copied = sum(2 * weight.numel() for weight in rollout.actor.engine.hf_model.parameters())
    assert numbers["update_weights_gb_per_s"] == pytest.approx(
        copied / numbers["update_weights_s"] / 1e9
    )
    for name, weight in rollout.actor.engine.hf_model.named_parameters():
        assert torch.equal(
            rollout.engine.twin.module.get_parameter(name), weight.to(torch.bfloat16)
        )


def test_buckets_have_the_configured_size(rollout, monkeypatch):
    asked = []
    hand_over = rollout.actor.engine.parameters_for_rollout

    def noted(**options: Any) -> Any:
        asked.append(options)
        return hand_over(**options)

    monkeypatch.setattr(rollout.actor.engine, "parameters_for_rollout", noted)
    rollout.actor.config.rollout.update_weights_bucket_megabytes = 3
    rollout.take_weights()
    assert asked[0]["bucket_bytes"] == 3 * 2**20
    assert asked[0]["dtype"] == torch.bfloat16
