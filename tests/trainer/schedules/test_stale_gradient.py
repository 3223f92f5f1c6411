"""The gradient of stale episodes is the published estimator's, computed here by another way."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.cases import cases
from tests.trainer.runs import run
from tests.trainer.schedules.test_agents import BASE
from verl.data.toy import TOY_MODEL
from verl.engine.base import TrainEngine
from verl.protocol import DataProto

STEPS = 3
DEFAULT = "default"  # without a preset: that of decoupled_token_is
PRESETS = [DEFAULT, "decoupled_token_is", "decoupled_seq_is", "bypass_ppo_clip", "bypass_pg_is"]
BOUND = 2.0  # of the weights of all presets
ROUNDING = 1e-6  # of the gradient: weights have float64, advantages and recorded log-probs fp32


class LastUpdate:
    """Keeps the batch, the weights and the gradient of the last update of a run."""

    batch: DataProto
    weights: dict[str, Tensor]
    gradient: dict[str, Tensor]

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward_backward = TrainEngine.forward_backward

        def watched(
            engine: TrainEngine, batch: DataProto, *arguments: Any, **options: Any
        ) -> dict[str, float]:
            metrics = forward_backward(engine, batch, *arguments, **options)
            self.batch = batch
            self.gradient = {}
            for name, parameter in engine.hf_model.named_parameters():
                assert parameter.grad is not None
                self.gradient[name] = parameter.grad.clone()
            state = engine.hf_model.state_dict()
            self.weights = {name: weight.clone() for name, weight in state.items()}
            return metrics

        monkeypatch.setattr(TrainEngine, "forward_backward", watched)


def group_advantage(batch: DataProto, row: int) -> float:
    """Return the reward less the mean of its group, in units of the group's deviation."""
    uids = batch.non_tensor_batch["uid"]
    rewards = batch.non_tensor_batch["agent_reward"]
    group = torch.tensor(rewards[uids == uids[row]].astype(float))
    return ((rewards[row] - group.mean()) / (group.std() + 1e-6)).item()


def loss_of_response(preset: str, log_probs: Tensor, drawn: Tensor, advantage: float) -> Tensor:
    """Return the sum of a preset's loss over the tokens of a response.

    Args:
        log_probs, drawn: of its tokens under the current weights, and under those that drew them.
    """
    ratio = (log_probs - drawn).exp()
    if preset == "bypass_ppo_clip":
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        return (loss if advantage > 0 else loss.clamp(max=-3 * advantage)).sum()

    weight = ratio.detach()
    if preset in ("decoupled_seq_is", "bypass_pg_is"):
        weight = weight.prod()
    return -(advantage * weight.clamp(max=BOUND) * log_probs).sum()


def gradient_by_hand(update: LastUpdate, preset: str) -> dict[str, Tensor]:
    """Return the gradient of the mean over all tokens, one response after another, in float64."""
    model = AutoModelForCausalLM.from_pretrained(TOY_MODEL, dtype=torch.float64)
    model.load_state_dict(update.weights)
    columns = update.batch.batch
    width = columns["responses"].shape[1]

    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(update.batch)):
        real = columns["attention_mask"][row].bool()
        tokens = columns["input_ids"][row][real]
        is_drawn = torch.cat([torch.zeros(len(real) - width), columns["response_mask"][row]])
        places = is_drawn[real].nonzero()[:, 0]

        logits = model(tokens[None]).logits[0, places - 1]
        log_probs = logits.log_softmax(-1).gather(-1, tokens[places, None])[:, 0]
        drawn = columns["rollout_log_probs"][row][columns["response_mask"][row].bool()].double()
        advantage = group_advantage(update.batch, row)
        total = total + loss_of_response(preset, log_probs, drawn, advantage)

    (total / columns["response_mask"].sum()).backward()
    gradient = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        gradient[name] = parameter.grad
    return gradient


@pytest.mark.parametrize("preset", cases(PRESETS, quick=lambda preset: preset == DEFAULT))
def test_gradient_of_stale_turns_is_that_of_the_estimator(tmp_path, monkeypatch, preset):
    update = LastUpdate()
    update.watch(monkeypatch)
    length = f"trainer.max_steps={STEPS}"
    stale = [
        "trainer.mode=one_step_off",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.model.dtype=float64",
    ]
    if preset != DEFAULT:
        stale.append(f"algorithm.rollout_correction.preset={preset}")
    assert run(tmp_path, *BASE[2:], length, *stale) == 0

    expected = gradient_by_hand(update, preset)
    got = torch.cat([update.gradient[name].flatten() for name in expected]).double()
    by_hand = torch.cat([expected[name].flatten() for name in expected])
    assert (got - by_hand).norm() <= ROUNDING * by_hand.norm()
