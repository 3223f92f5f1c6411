"""Actor, critic and reference on a tiny model: their columns, and their agreement."""

import math

import pytest
import torch

from tests.tiny_models import tiny_model
from tests.workers.batches import (
    P,
    R,
    actor_of,
    config,
    critic_of,
    prompts,
    reference_of,
    rollout_of,
    trajectories,
)
from verl.columns import COLUMNS
from verl.rollout.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture
def settings(folder):
    return config(folder)


def assert_as_in_the_table(batch, names):
    for name in names:
        column = COLUMNS[name]
        shape = tuple(
            {"B": len(batch), "P": P, "R": R, "T": P + R}[letter] for letter in column.shape.split()
        )
        assert tuple(batch.batch[name].shape) == shape, name
        assert batch.batch[name].dtype == getattr(torch, column.dtype), name


def test_generate_writes_its_columns(settings):
    batch = trajectories(actor_of(settings))
    assert len(batch) == 8
    written = [
        name
        for name, column in COLUMNS.items()
        if column.written_by == "generate" and column.dtype != "object"
    ]
    assert_as_in_the_table(batch, written)
    lengths = batch.batch["attention_mask"][:, :P].sum(-1).tolist()
    assert lengths == [len(ids) for ids in batch.non_tensor_batch["raw_prompt_ids"]]


def test_log_probs_of_all_roles_agree_before_the_first_update(settings):
    actor = actor_of(settings)
    batch = trajectories(actor)
    mask = batch.batch["response_mask"].bool()
    answer = actor.compute_log_prob(batch)
    assert answer.meta_info["metrics"]["training/rollout_probs_diff_max"] < 1e-4
    reference = reference_of(settings).compute_ref_log_prob(batch)
    assert_as_in_the_table(answer, ["old_log_probs", "entropys"])
    assert_as_in_the_table(reference, ["ref_log_prob"])
    old = answer.batch["old_log_probs"]
    torch.testing.assert_close(old, reference.batch["ref_log_prob"], rtol=0, atol=1e-6)
    torch.testing.assert_close(old[mask], batch.batch["rollout_log_probs"][mask], rtol=0, atol=1e-3)
    assert bool((old[mask] < 0).all())
    assert bool((old[~mask] == 0).all())


def test_log_probs_use_the_temperature(folder):
    """Compare one row with the padded forward of transformers."""
    settings = config(folder)
    settings.actor_rollout_ref.rollout.temperature = 0.5
    actor = actor_of(settings)
    batch = trajectories(actor, count=1, n=1)
    ours = actor.compute_log_prob(batch).batch["old_log_probs"][0]
    real = batch.batch["attention_mask"][0].bool()
    ids = batch.batch["input_ids"][0][real][None]
    logits = tiny_model("qwen2")(ids).logits[0] / 0.5
    first = int(batch.batch["attention_mask"][0, :P].sum())
    expected = logits.log_softmax(-1)[first - 1 : -1].gather(-1, ids[0, first:, None])[:, 0]
    torch.testing.assert_close(ours[: len(expected)], expected.detach(), rtol=0, atol=1e-4)


def test_samples_do_not_depend_on_the_split_of_the_prompts(settings):
    rollout = rollout_of(actor_of(settings))
    params = SamplingParams(max_new_tokens=R)
    together = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=1).batch[
        "responses"
    ]
    parts = [
        rollout.generate_sequences(
            prompts(2, first_row=row), n=2, params=params, seed=0, step=1
        ).batch["responses"]
        for row in (0, 2)
    ]

    assert torch.equal(together, torch.cat(parts))
    other = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=2).batch[
        "responses"
    ]
    assert not torch.equal(together, other)


def test_an_update_moves_the_policy_and_the_rollout_follows(settings):
    actor = actor_of(settings)
    batch = trajectories(actor)
    batch = batch.union(reference_of(settings).compute_ref_log_prob(batch))
    before = actor.compute_log_prob(batch).batch["old_log_probs"]
    columns = dict(batch.batch)
    metrics = actor.update_actor(batch)
    assert dict(batch.batch).keys() == columns.keys(), "no further column"
    assert metrics["actor/lr"] == 1e-3
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/skipped_updates"] == 0

    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    after = actor.compute_log_prob(batch).batch["old_log_probs"]
    advantage = (batch.batch["advantages"] * (after - before)).sum()
    assert advantage > 0, "tokens of positive advantage became likelier"
    assert (
        actor.compute_log_prob(trajectories(actor)).meta_info["metrics"][
            "training/rollout_probs_diff_max"
        ]
        < 1e-4
    )


def test_mini_batches_count_prompts(folder):
    settings = config(folder, ppo_mini_batch_size=2, ppo_epochs=3)
    actor = actor_of(settings)
    batch = trajectories(actor)
    batch = batch.union(reference_of(settings).compute_ref_log_prob(batch)).union(
        actor.compute_log_prob(batch)
    )
    steps = []
    original = actor.engine.step
    actor.engine.step = lambda: steps.append(1) or original()
    actor.update_actor(batch)
    assert len(steps) == 3 * 2  # four prompts of two samples, two prompts a mini-batch, three times


def test_the_critic_learns_the_returns(settings):
    actor = actor_of(settings)
    critic = critic_of(settings)
    batch = trajectories(actor)
    mask = batch.batch["response_mask"].bool()
    losses = []
    for _ in range(4):
        values = critic.compute_values(batch)
        assert_as_in_the_table(values, ["values"])
        assert bool((values.batch["values"][~mask] == 0).all())
        fresh = batch.select().union(values)
        losses.append(critic.update_critic(fresh)["critic/vf_loss"])
    assert losses[-1] < losses[0]


def test_a_row_that_is_not_finite_is_skipped_and_named(settings, caplog):
    actor = actor_of(settings)
    batch = trajectories(actor)
    batch = batch.union(reference_of(settings).compute_ref_log_prob(batch))
    batch.batch["advantages"][5, 0] = torch.inf
    before = [parameter.detach().clone() for parameter in actor.engine.module.parameters()]
    with caplog.at_level("WARNING", logger="verl"):
        metrics = actor.update_actor(batch)
    assert metrics["actor/skipped_updates"] == 1
    assert "row 5 (uid 1-2)" in caplog.text
    assert all(
        torch.equal(old, new)
        for old, new in zip(before, actor.engine.module.parameters(), strict=True)
    )


def test_a_skipped_mini_batch_leaves_the_means_of_the_others(folder):
    actor = actor_of(config(folder, ppo_mini_batch_size=2, shuffle=False))
    batch = trajectories(actor)
    batch = batch.union(actor.compute_log_prob(batch))
    batch = batch.union(reference_of(config(folder)).compute_ref_log_prob(batch))
    batch.batch["advantages"][0, 0] = torch.inf
    metrics = actor.update_actor(batch)
    assert metrics["actor/skipped_updates"] == 1
    assert math.isfinite(metrics["actor/pg_loss"])
    assert 0 < metrics["actor/grad_norm"] < math.inf


@pytest.mark.parametrize("make", [actor_of, critic_of])
def test_a_saved_role_is_restored_unchanged(settings, tmp_path, make):
    actor = actor_of(settings)
    batch = trajectories(actor)
    batch = batch.union(reference_of(settings).compute_ref_log_prob(batch)).union(
        critic_of(settings).compute_values(batch)
    )

    def update(role):
        return role.update_actor(batch) if make is actor_of else role.update_critic(batch)

    one = make(settings)
    other = make(settings)
    update(one)
    one.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    update(one)
    update(other)
    pairs = zip(one.engine.module.parameters(), other.engine.module.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("role", [actor_of, critic_of, reference_of])
def test_every_role_imports_the_users_code(settings, tmp_path, role):
    """Import it in each role: a role may run in another process than the driver."""
    library = tmp_path / "library.py"
    library.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'imported')!r}).touch()\n")
    settings.actor_rollout_ref.model.external_lib = settings.critic.model.external_lib = str(
        library
    )
    role(settings)
    assert (tmp_path / "imported").exists()
