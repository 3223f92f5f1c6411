"""The exact KL to the reference in the loss: its value, its gradient, and the same run however rows
and roles are distributed."""

import pytest
import torch

from tests.trainer.runs import run, start_trainer, step_lines, weights, without_times
from tests.trainer.test_invariance import relative_distance
from tests.trainer.test_ranks import train
from verl.engine.microbatch import TokenBudget
from verl.protocol import DataProto

ACTOR = "actor_rollout_ref.actor"
FULL = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_coef=0.5"]


def test_the_loss_has_the_divergence_of_full_distributions(tmp_path):
    """Compute the KL from the logits of the models after the policy has left the reference."""
    trainer = start_trainer(tmp_path, *FULL, "trainer.max_steps=3")
    trainer.fit()
    assert trainer.metrics["actor/kl_loss"] > 1e-6

    batch = trainer.generate(next(iter(trainer.train_loader)))
    columns = trainer.ref_policy_wg.compute_ref_log_prob(batch).batch
    hidden = columns["ref_states"]
    mask = batch.batch["response_mask"].bool()
    assert hidden.shape[:2] == mask.shape
    actor = trainer.actor_wg.worker
    frozen = trainer.ref_policy_wg.worker
    head = frozen.engine.hf_model.get_output_embeddings()
    log_q = head(hidden[mask]).log_softmax(-1)
    chosen = log_q.gather(1, batch.batch["responses"][mask][:, None]).squeeze(1)
    torch.testing.assert_close(chosen, columns["ref_log_prob"][mask], rtol=1e-5, atol=1e-5)

    states = actor.engine.infer(batch, TokenBudget(), states=True)["states"][mask]
    log_p = actor.engine.hf_model.get_output_embeddings()(states).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    batch = batch.union(DataProto.from_dict(tensors={"ref_states": hidden}))
    batch.batch["advantages"] = torch.zeros(mask.shape)
    metrics = trainer.actor_wg.update_actor(batch)
    assert metrics["actor/kl_loss"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "LoRA"])
def test_metrics_and_weights_do_not_depend_on_micro_batches(tmp_path, adapted):
    own = [*FULL, f"{ACTOR}.ppo_epochs=2", "trainer.max_steps=1", "trainer.save_freq=1"]
    if adapted:
        own += ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=0.02"]
    assert run(tmp_path / "whole", *own) == 0
    assert run(tmp_path / "cut", *own, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3") == 0
    whole, cut = (without_times(step_lines(tmp_path / name)) for name in ("whole", "cut"))
    assert whole[0]["actor/kl_loss"] > 1e-6
    for name in ("actor/kl_loss", "actor/grad_norm"):
        assert cut[0][name] == pytest.approx(whole[0][name], rel=1e-4)
    if not adapted:
        saved = [weights(tmp_path / name, 1) for name in ("cut", "whole")]
        assert relative_distance(*saved) < 1e-4


def test_a_reference_on_ranks_of_its_own_gives_the_same_run(tmp_path):
    own = [*FULL, "trainer.max_steps=2"]
    apart = ["trainer.placement.actor=[0]", "trainer.placement.critic=[1]"]
    apart.append("trainer.placement.reference=[1]")
    alone = train(1, tmp_path / "alone", *own)
    assert alone[1]["actor/kl_loss"] > 1e-7
    assert without_times(train(2, tmp_path / "apart", *own, *apart)) == without_times(alone)
