"""Roles with adapters: the reference within the actor, and a rollout engine with merged weights."""

import pytest
import torch
from peft import PeftModel

from tests.rollout.engines import transformers_greedy
from tests.tiny_models import tiny_model
from tests.workers.batches import (
    R,
    actor_of,
    config,
    critic_of,
    prompts,
    reference_of,
    rollout_of,
    trajectories,
)
from verl.models.lora import adapted_layers
from verl.rollout.types import SamplingParams


@pytest.fixture
def settings(tmp_path):
    settings = config(tmp_path, optim={"lr": 3e-2})
    settings.actor_rollout_ref.model.lora_rank = 4
    settings.critic.model.lora_rank = 2
    return settings


@pytest.mark.parametrize("engine", ["embedded", "hf"])
def test_rollouts_equal_those_of_the_merged_model(settings, tmp_path, engine):
    settings.actor_rollout_ref.rollout.name = engine
    actor = actor_of(settings)
    rollout = rollout_of(actor)

    for _ in range(3):
        batch = trajectories(actor)
        batch = batch.union(actor.compute_ref_log_prob(batch))
        actor.update_actor(batch)
        rollout.take_weights()

    actor.save_checkpoint(tmp_path / "saved")
    greedy = SamplingParams(max_new_tokens=R, temperature=0.0)
    answer = rollout.generate_sequences(prompts(), n=1, params=greedy, seed=0, step=1)
    merged = PeftModel.from_pretrained(
        tiny_model("qwen2"), tmp_path / "saved" / "lora_adapter"
    ).merge_and_unload()
    changed = 0

    for row, ids in enumerate(prompts().non_tensor_batch["raw_prompt_ids"]):
        length = int(answer.batch["response_mask"][row].sum())
        expected = transformers_greedy(merged, ids, R)[:length]
        assert answer.batch["responses"][row, :length].tolist() == expected
        changed += expected != transformers_greedy(tiny_model("qwen2"), ids, R)[:length]

    assert changed, "adapters that do something"
    difference = actor.compute_log_prob(trajectories(actor)).meta_info["metrics"][
        "training/rollout_probs_diff_max"
    ]
    assert difference < 1e-3


def test_the_reference_is_the_base_model_within_the_actor(settings):
    actor = actor_of(settings)
    batch = trajectories(actor)
    expected = reference_of(settings).compute_ref_log_prob(batch).batch["ref_log_prob"]
    batch = batch.union(actor.compute_ref_log_prob(batch))
    assert actor.update_actor(batch)["actor/kl_loss"] == 0.0
    assert torch.equal(actor.compute_ref_log_prob(batch).batch["ref_log_prob"], expected)
    assert not torch.equal(actor.compute_log_prob(batch).batch["old_log_probs"], expected)


def test_only_the_engine_owns_merged_weights(settings):
    actor = actor_of(settings)
    twin = rollout_of(actor).engine.twin
    adapted = sum(
        layer.base_layer.weight.numel() for layer in adapted_layers(actor.engine.hf_model).values()
    )
    assert twin.copied_bytes == 4 * adapted
    assert twin.module.model.embed_tokens.weight is actor.engine.hf_model.model.embed_tokens.weight


def test_a_critic_trains_its_adapters_and_its_head(settings):
    actor = actor_of(settings)
    critic = critic_of(settings)
    batch = trajectories(actor)
    losses = []

    for _ in range(3):
        fresh = batch.select().union(critic.compute_values(batch))
        losses.append(critic.update_critic(fresh)["critic/vf_loss"])

    assert losses[-1] < losses[0]
    trained = [
        name
        for name, parameter in critic.engine.module.named_parameters()
        if parameter.requires_grad
    ]
    assert "model.value_head.weight" in trained
    assert all("lora_" in name or "value_head" in name for name in trained)


def test_save_contents_can_include_merged_weights(settings, tmp_path):
    settings.actor_rollout_ref.actor.checkpoint.save_contents = [
        "model",
        "optimizer",
        "extra",
        "hf_model",
    ]
    actor_of(settings).save_checkpoint(tmp_path / "merged")
    critic_of(settings).save_checkpoint(tmp_path / "adapters")
    assert (tmp_path / "merged" / "huggingface" / "model.safetensors").is_file()
    assert (tmp_path / "merged" / "lora_adapter").is_dir()
    assert not (tmp_path / "adapters" / "huggingface").exists()
