"""Rollout correction: importance weights, rejection, bypass and the REINFORCE loss."""

import math

import pytest
import torch

from tests.trainer.runs import (
    run,
    start_trainer,
    step_lines,
)
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
REINFORCE = [
    f"{CORRECTION}.bypass_mode=True",
    f"{CORRECTION}.loss_type=reinforce",
    f"{CORRECTION}.rollout_is=token",
]


def off_policy(trainer: PPOTrainer, shift: torch.Tensor) -> DataProto:
    """Return a batch with rollout log-probs that are off by `shift` (B, 1)."""
    trainer.load_checkpoint()
    trainer.global_step = 1
    batch = trainer.collect(next(iter(trainer.train_loader)))
    batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"] + shift
    return trainer.estimate_advantages(trainer.evaluate_policies(batch))


def test_the_actor_gets_weights_and_rejections_and_the_batch_is_unchanged(tmp_path):
    shift = torch.zeros(16, 1)
    # the trainer finds row 3 far less likely, and row 5 slightly more likely, a token
    shift[3], shift[5] = 2.0, -0.3
    given = [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_rs=geometric"]
    trainer = start_trainer(tmp_path, *given, "trainer.logger=[]")
    batch = off_policy(trainer, shift)
    mask = batch.batch["response_mask"].clone()
    corrected = trainer.correct_rollout(batch)
    assert torch.equal(batch.batch["response_mask"], mask)

    assert "rollout_is_weights" not in batch.batch.keys()
    assert not corrected.batch["response_mask"][3].any()
    others = torch.arange(16) != 3
    assert torch.equal(corrected.batch["response_mask"][others], mask[others])
    own = mask[5].bool()
    assert corrected.batch["rollout_is_weights"][5][own].tolist() == pytest.approx(
        [math.exp(0.3)] * int(own.sum()), rel=1e-4
    )

    assert trainer.metrics["rollout_corr/rejected_seqs"] == pytest.approx(1 / 16)
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0


def test_weights_reach_the_policy_loss_and_nothing_else(tmp_path):
    trainer = start_trainer(
        tmp_path,
        "trainer.logger=[]",
        f"{CORRECTION}.rollout_is=sequence",
        f"{ACTOR}.use_kl_loss=True",
    )
    batch = off_policy(trainer, torch.zeros(16, 1))
    objective = trainer.actor_wg.worker.objective

    names = ["advantages", "old_log_probs", "ref_log_prob", "rollout_log_probs"]
    mask = batch.batch["response_mask"].bool()
    columns = {name: batch.batch[name][mask] for name in names}
    columns |= {
        "response_mask": mask[mask].long(),
        "weights": torch.full_like(columns["advantages"], 0.5),
    }
    outputs = {
        "log_probs": columns["old_log_probs"] - 0.1,
        "entropy": torch.zeros_like(columns["advantages"]),
    }

    sequence = mask.nonzero()[:, 0]
    plain = objective(outputs, columns, sequence)
    halved = objective(
        outputs,
        {**columns, "rollout_is_weights": torch.full_like(columns["advantages"], 0.5)},
        sequence,
    )
    torch.testing.assert_close(halved.sums["actor/pg_loss"], plain.sums["actor/pg_loss"] / 2)

    assert torch.equal(halved.sums["actor/kl_loss"], plain.sums["actor/kl_loss"])
    assert plain.sums["actor/kl_loss"] > 0


def test_bypass_uses_the_log_probs_of_the_rollout(tmp_path, monkeypatch):
    trainer = start_trainer(
        tmp_path, "trainer.logger=[]", f"{CORRECTION}.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"
    )
    monkeypatch.delattr(type(trainer.actor_wg.worker), "compute_log_prob")
    batch = off_policy(trainer, torch.full((16, 1), -0.1))
    assert torch.equal(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"])
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0
    # Of the first epoch alone: the weights change in the second one.
    assert trainer.metrics["training/rollout_kl"] == pytest.approx(-0.1, rel=1e-4)


def test_reinforce_weights_by_the_policy_against_the_rollout(tmp_path, monkeypatch):
    trainer = start_trainer(tmp_path, "trainer.logger=[]", *REINFORCE)
    monkeypatch.delattr(type(trainer.actor_wg.worker), "compute_log_prob")
    batch = off_policy(trainer, torch.full((16, 1), -0.1))
    trainer.update(batch)
    assert trainer.metrics["actor/grad_norm"] > 0
    assert trainer.metrics["actor/rollout_is_weight"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert trainer.metrics["actor/pg_clipfrac"] == 0


def test_reinforce_does_not_depend_on_micro_batches(tmp_path, capfd):
    """Train on responses for two epochs; the second one has weights other than 1."""
    own = [*REINFORCE, f"{ACTOR}.ppo_epochs=2", "trainer.max_steps=1"]
    own += [f"{ACTOR}.optim.lr=1e-2", "trainer.test_freq=-1"]
    of_responses = f"{CORRECTION}.rollout_is=sequence"
    assert run(tmp_path / "whole", *own, of_responses) == 0
    said = capfd.readouterr()
    assert "reinforce: -sg(w) A log pi, w = r by sequence" in said.out + said.err
    assert run(tmp_path / "cut", *own, of_responses, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3") == 0
    assert run(tmp_path / "tokens", *own) == 0

    whole, cut, tokens = (step_lines(tmp_path / name)[0] for name in ("whole", "cut", "tokens"))
    for name in ("pg_loss", "grad_norm", "rollout_is_weight", "pg_clipfrac"):
        assert cut[f"actor/{name}"] == pytest.approx(whole[f"actor/{name}"], rel=1e-4)
    assert abs(tokens["actor/grad_norm"] / whole["actor/grad_norm"] - 1) > 0.01
