"""What the actor minimises is put together from the configuration, and the engine is told what it reads."""

import pytest
import torch

from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_losses import extra_losses
from verl.config import ActorConfig, ExtraLossConfig
from verl.workers.losses import PolicyObjective, ValueObjective


@extra_losses.register("test_sum_of_returns")
def _sum_of_returns(inputs, columns):
    return (inputs.log_probs * columns["returns"] * inputs.weights).sum()


def packed(tokens: int = 6) -> tuple[dict, dict, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(tokens, generator=generator)  # noqa: E731
    outputs = {"log_probs": -draw().abs().requires_grad_(), "entropy": draw().abs()}
    columns = {name: draw() for name in ("advantages", "ref_log_prob", "rollout_log_probs", "returns")}
    columns["old_log_probs"] = outputs["log_probs"].detach() + 0.3 * draw()
    columns["weights"] = torch.full((tokens,), 1 / tokens)
    columns["response_mask"] = torch.ones(tokens)
    return outputs, columns, torch.zeros(tokens, dtype=torch.int64)


def test_the_terms_add_up():
    outputs, columns, sequence = packed()
    plain = PolicyObjective(ActorConfig())(outputs, columns, sequence)
    config = ActorConfig(
        entropy_coeff=0.5,
        use_kl_loss=True,
        kl_loss_coef=0.25,
        kl_loss_type="k2",
        loss_extra=[ExtraLossConfig(name="test_sum_of_returns", coef=2.0)],
    )
    everything = PolicyObjective(config)(outputs, columns, sequence)
    kl = kl_penalty(outputs["log_probs"], columns["ref_log_prob"], "k2").mean()
    extra = (outputs["log_probs"] * columns["returns"]).mean()
    expected = plain.loss - 0.5 * outputs["entropy"].mean() + 0.25 * kl + 2.0 * extra
    torch.testing.assert_close(everything.loss, expected)
    torch.testing.assert_close(everything.sums["actor/kl_loss"], kl.detach())
    torch.testing.assert_close(everything.sums["actor/pg_loss"], plain.loss.detach())
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"} <= set(everything.means)


def test_the_ratio_is_taken_against_old_log_probs():
    outputs, columns, sequence = packed()
    result = PolicyObjective(ActorConfig(clip_ratio=100.0, clip_ratio_low=1.0, clip_ratio_high=100.0))(
        outputs, columns, sequence
    )
    ratio = (outputs["log_probs"] - columns["old_log_probs"]).exp()
    torch.testing.assert_close(result.loss, -(ratio * columns["advantages"]).mean())


def test_without_old_log_probs_the_ratio_is_one():
    outputs, columns, sequence = packed()
    objective = PolicyObjective(ActorConfig())
    del columns["old_log_probs"]
    result = objective(outputs, columns, sequence)
    torch.testing.assert_close(result.loss, -(columns["advantages"] * columns["weights"]).sum())
    (gradient,) = torch.autograd.grad(result.loss, outputs["log_probs"])
    torch.testing.assert_close(gradient, -columns["advantages"] * columns["weights"])
    mismatch = objective.take_mismatch()
    expected = (outputs["log_probs"].exp() - columns["rollout_log_probs"].exp()).abs().max().item()
    assert mismatch["training/rollout_probs_diff_max"] == pytest.approx(expected)
    assert objective.take_mismatch() == {}, "told once"


def test_only_what_is_read_is_packed():
    available = {"advantages", "old_log_probs", "rollout_log_probs", "ref_log_prob", "returns", "input_ids", "prompts"}
    assert "ref_log_prob" not in PolicyObjective(ActorConfig()).columns(available)
    assert "ref_log_prob" in PolicyObjective(ActorConfig(use_kl_loss=True)).columns(available)
    extra = PolicyObjective(ActorConfig(loss_extra=[ExtraLossConfig(name="test_sum_of_returns")])).columns(available)
    assert "returns" in extra
    assert not {"input_ids", "prompts"} & set(extra)
    assert len(extra) == len(set(extra))
    assert ValueObjective(0.5).columns(available) == ["values", "returns"]


def test_the_value_loss_is_clipped():
    values = torch.tensor([0.0, 2.0], requires_grad=True)
    columns = {
        "values": torch.tensor([0.0, 0.0]),
        "returns": torch.tensor([1.0, 0.0]),
        "weights": torch.tensor([0.5, 0.5]),
    }
    result = ValueObjective(0.5)({"values": values}, columns, torch.zeros(2, dtype=torch.int64))
    # 1/2 max((v - r)^2, (clip(v) - r)^2): 1 for the first token, 4 for the second
    assert result.loss.item() == pytest.approx(0.5 * (0.5 * 1.0 + 0.5 * 4.0))
    assert result.sums["critic/vf_loss"].item() == pytest.approx(result.loss.item())
