"""On-policy distillation in whole steps: the student approaches its teacher, alone and combined
with a reward, on any number of ranks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import save_tiny, tiny_tokenizer
from tests.trainer.runs import run, start_trainer, step_lines, without_times
from tests.trainer.test_ranks import assert_same, train
from verl.config import load_config
from verl.models.load import resolve_path
from verl.trainer.algorithm import describe_algorithm
from verl.utils.errors import ModelError
from verl.workers.teacher import check_same_vocabulary

ACTOR = "actor_rollout_ref.actor"
LOSS = "distillation.distillation_loss"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """Save the packaged model with noise as large as its weights."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    shutil.copytree(resolve_path("toy"), folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(parameter.std() * noise.to(parameter.dtype))
    model.save_pretrained(folder)
    return folder


def distilling(teacher: Path, mode: str, *more: str) -> list[str]:
    return [
        "distillation.enabled=True",
        f"distillation.teacher_models.teacher_model.model_path={teacher}",
        f"{LOSS}.loss_mode={mode}",
        *more,
    ]


WITHOUT_REWARD = f"{LOSS}.use_task_rewards=False"


@pytest.mark.slow
def test_the_student_approaches_the_teacher(tmp_path, teacher, capfd):
    """Train without a reward.

    The KL falls in 25 steps from 2.98 to 1.05 nats a token, means of three.
    """
    own = [
        WITHOUT_REWARD,
        "trainer.max_steps=25",
        "trainer.test_freq=-1",
        "data.train_batch_size=8",
        "actor_rollout_ref.rollout.ignore_eos=True",
        f"{ACTOR}.optim.lr=2e-3",
    ]
    assert run(tmp_path, *distilling(teacher, "reverse_kl", *own)) == 0
    lines = step_lines(tmp_path)
    losses = [line["actor/distillation_loss"] for line in lines]
    assert sum(losses[-3:]) < 0.5 * sum(losses[:3])
    assert all(line["actor/pg_loss"] == 0 for line in lines)

    output = capfd.readouterr()
    assert "Nothing to learn from" not in output.out + output.err, "nothing gave a score"
    assert not any("critic/score/mean" in line for line in lines)
    assert f"Distillation loss: {losses[0]:.4f}" in output.out
    assert "Reward:" not in output.out
    assert f"actor/distillation_loss: {losses[0]:.4f} (step 1) to {losses[-1]:.4f}" in output.out


@pytest.mark.parametrize("mode", ["forward_kl", "jsd", "k1+", "k3"])
def test_other_divergences_do_not_depend_on_micro_batches(tmp_path, teacher, mode):
    """Train without a critic, also under gae, and with one sample a prompt."""
    own = [WITHOUT_REWARD, "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1"]
    own += ["trainer.max_steps=1", "trainer.test_freq=-1"]
    assert run(tmp_path / "whole", *distilling(teacher, mode, *own)) == 0
    own.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    assert run(tmp_path / "cut", *distilling(teacher, mode, *own)) == 0
    whole, cut = (step_lines(tmp_path / name)[0] for name in ("whole", "cut"))
    assert whole["actor/distillation_loss"] > 0
    for name in ("actor/distillation_loss", "actor/grad_norm"):
        assert cut[name] == pytest.approx(whole[name], rel=1e-4)


def test_the_teacher_is_added_to_the_reward_with_its_coefficient(tmp_path, teacher):
    more = ["trainer.test_freq=-1", "trainer.max_steps=1"]
    assert run(tmp_path / "plain", *more) == 0
    folders = {"none": "0", "whole": "1"}
    for name, coef in folders.items():
        own = distilling(teacher, "jsd", f"{LOSS}.distillation_loss_coef={coef}", *more)
        assert run(tmp_path / name, *own) == 0
    plain = step_lines(tmp_path / "plain")[0]
    none, whole = (step_lines(tmp_path / name)[0] for name in folders)
    assert none["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-5)
    assert none["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], rel=1e-5)
    assert whole["actor/grad_norm"] != pytest.approx(plain["actor/grad_norm"], rel=1e-2)
    assert whole["critic/score/mean"] == plain["critic/score/mean"]


def test_a_divergence_can_be_subtracted_from_advantages(tmp_path, teacher):
    own = [f"{LOSS}.use_policy_gradient=True", f"{LOSS}.distillation_loss_coef=0.5"]
    trainer = start_trainer(tmp_path, *distilling(teacher, "k1", *own))
    batch = trainer.collect(next(iter(trainer.train_loader)))
    batch = trainer.estimate_advantages(trainer.evaluate_policies(batch))
    columns = batch.batch
    mask = batch.batch["response_mask"].bool()
    difference = columns["old_log_probs"] - columns["teacher_log_prob"]
    expected = (
        columns["returns"] - 0.5 * difference * mask
    )  # the returns of grpo are its advantages
    torch.testing.assert_close(columns["advantages"], expected)
    mean = difference[mask].mean().item()
    assert trainer.metrics["actor/distillation_loss"] == pytest.approx(mean, rel=1e-4)
    assert "teacher_states" not in columns.keys()


@pytest.mark.slow
def test_a_teacher_on_ranks_of_its_own_and_on_all_ranks(tmp_path, teacher):
    """Include the exact KL to the reference."""
    own = distilling(teacher, "reverse_kl", "trainer.max_steps=2")
    own += [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"]
    apart = ["trainer.placement.actor=[0]", "trainer.placement.critic=[0]"]
    apart.append("trainer.placement.teacher=[1]")
    alone = train(1, tmp_path / "alone", *own)
    assert alone[1]["actor/distillation_loss"] > 0.1
    assert without_times(train(2, tmp_path / "apart", *own, *apart)) == without_times(alone)
    assert_same(train(2, tmp_path / "together", *own), alone)


def test_another_vocabulary_is_an_error_that_names_both(tmp_path, teacher):
    save_tiny(tmp_path / "other")
    with pytest.raises(ModelError, match=r"'\S*other' and\s+'toy' differ in \d+ tokens"):
        start_trainer(tmp_path, *distilling(tmp_path / "other", "reverse_kl"))
    same = tiny_tokenizer()
    check_same_vocabulary(same, tiny_tokenizer(), student_path="a", teacher_path="b")


def test_the_log_states_the_loss(teacher):
    base = ["data.dataset_name=toy"]
    alone = load_config([*base, *distilling(teacher, "jsd", WITHOUT_REWARD)])
    first = describe_algorithm(alone)[0]
    assert first.startswith("Loss of a token, where r = pi / pi_old: 1 jsd(pi, teacher)")
    both = load_config([*base, *distilling(teacher, "k3")])
    assert "+ 1 k3(pi, teacher)" in " ".join(describe_algorithm(both))
