"""The actor's hand-over: buckets of the configured size, in the engine's dtype, proved when it is
due."""

from typing import Any

import pytest
import torch

from tests.workers.batches import actor_of, config
from verl.utils.errors import RolloutError

ROWS = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def actor(tmp_path) -> Any:
    settings = config(tmp_path)
    settings.actor_rollout_ref.rollout.dtype = "bfloat16"  # so that there is something to copy
    settings.actor_rollout_ref.rollout.fingerprint_interval = 2
    return actor_of(settings)


def swap_rows_after_the_next_update(actor: Any) -> None:
    take = actor.rollout.update_weights

    def take_and_swap(named_tensors: Any) -> None:
        take(named_tensors)
        weight = actor.rollout.twin.module.get_parameter(ROWS).data
        weight[[0, 5]] = weight[[5, 0]]
        actor.rollout.update_weights = take

    actor.rollout.update_weights = take_and_swap


def test_damage_is_found_on_the_first_hand_over_and_every_second(actor):
    found = []
    for _ in range(5):
        swap_rows_after_the_next_update(actor)
        try:
            actor.sync_weights()
            found.append("")
        except RolloutError as error:
            found.append(str(error))
    assert [ROWS in message for message in found] == [True, False, True, False, True]
    actor.sync_weights()
    actor.sync_weights()  # proved, and sound


def test_its_speed_is_a_statistic_of_the_rollout(actor):
    actor.sync_weights()
    numbers = actor.rollout.statistics()
    copied = sum(2 * weight.numel() for weight in actor.engine.hf_model.parameters())
    assert numbers["update_weights_gb_per_s"] == pytest.approx(
        copied / numbers["update_weights_s"] / 1e9
    )
    for name, weight in actor.engine.hf_model.named_parameters():
        assert torch.equal(actor.rollout.twin.module.get_parameter(name), weight.to(torch.bfloat16))


def test_the_configured_size_is_that_of_a_bucket(actor, monkeypatch):
    asked = []
    hand_over = actor.engine.parameters_for_rollout

    def noted(**options: Any) -> Any:
        asked.append(options)
        return hand_over(**options)

    monkeypatch.setattr(actor.engine, "parameters_for_rollout", noted)
    actor.config.rollout.update_weights_bucket_megabytes = 3
    actor.sync_weights()
    assert asked[0]["bucket_bytes"] == 3 * 2**20
    assert asked[0]["dtype"] == torch.bfloat16
