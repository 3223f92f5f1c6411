"""Loss and gradient norm of a small fixed model, through the names of verl 0.5: as TRL computes
them, and as the formulas of the papers do, written out in numpy.
"""

import random
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from verl.algorithms.masked import AGGREGATION_MODES

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from verl.trainer.ppo.core_algos import (  # pyright: ignore[reportMissingImports]
        agg_loss,
        compute_grpo_outcome_advantage,
        compute_policy_loss,
        get_policy_loss_fn,
        kl_penalty,
    )

LENGTHS = [7, 2, 5, 1, 6, 3]
GROUPS = [0, 1, 0, 1, 1, 0]
SCORES = [1.0, 0.0, 0.3, 0.0, 1.0, 0.5]
PROMPT = 4
WIDTH = 7
VOCABULARY = 32
KL_COEF = 0.04
MASK = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).long()


class Recipe(NamedTuple):
    loss: str
    low: float
    high: float
    mode: str
    by_std: bool = True
    drift: float = 0.3  # of the log-probs since the tokens were drawn
    c: float = 1e9


RECIPES = {
    "grpo": Recipe("vanilla", 0.2, 0.2, "seq-mean-token-mean"),
    "dr_grpo": Recipe("vanilla", 0.2, 0.2, "seq-mean-token-sum-norm", by_std=False),
    "dapo": Recipe("vanilla", 0.2, 0.28, "token-mean"),
    "gspo": Recipe("gspo", 0.02, 0.03, "seq-mean-token-mean", drift=0.1),
    "cispo": Recipe("cispo", 1.0, 0.2, "token-mean"),
    "dual_clip": Recipe("vanilla", 0.2, 0.2, "seq-mean-token-mean", c=1.3),
}

# (loss, gradient norm) of TRL 1.16.0 without and with 0.04 k3; `python -m
# tests.algorithms.goldens_of_trl` prints them.
TRL = {
    "grpo": ((0.0626141, 3.8405712), (0.0639405, 3.8324831)),
    "dr_grpo": ((-0.0902403, 0.8735374), (-0.0893135, 0.8667157)),
    "dapo": ((-0.3261854, 3.0572307), (-0.3245635, 3.0379052)),
    "gspo": ((0.0156460, 2.7025855), (0.0169724, 2.7046881)),
    "cispo": ((1.0948256, 5.7359204), (1.0964473, 5.7358122)),
    "dual_clip": ((0.0306030, 2.2716784), (0.0319295, 2.2552638)),
}


def model() -> LlamaForCausalLM:
    """Its weights, as all numbers here, come from `random.uniform`, which draws the same in every
    version."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="eager",
    )
    made = LlamaForCausalLM(config)

    generator = random.Random(0)
    with torch.no_grad():
        for weights in made.parameters():
            drawn = [generator.uniform(-0.5, 0.5) for _ in range(weights.numel())]
            weights.copy_(
                torch.tensor(drawn).view_as(weights) + (1.0 if weights.ndim == 1 else 0.0)
            )

    return made.eval()


def tokens() -> torch.Tensor:
    """Prompts and responses, (B, PROMPT + WIDTH); 0 after the end of a response."""
    generator = random.Random(1)
    prompts, responses = (
        [[int(generator.uniform(3, VOCABULARY)) for _ in range(width)] for _ in range(rows)]
        for rows, width in ((2, PROMPT), (len(LENGTHS), WIDTH))
    )
    return torch.tensor(
        [
            prompts[group] + row[:n] + [0] * (WIDTH - n)
            for group, row, n in zip(GROUPS, responses, LENGTHS)
        ]
    )


def log_probs(made: LlamaForCausalLM) -> torch.Tensor:
    """Of the response tokens, (B, WIDTH)."""
    ids = tokens()
    logits = made(input_ids=ids).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, PROMPT:, None])[..., 0]


def old_and_reference(recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    generator = random.Random(2)
    old, reference = (
        torch.tensor([[generator.uniform(-1.7, 1.7) for _ in range(WIDTH)] for _ in LENGTHS])
        for _ in range(2)
    )
    with torch.no_grad():
        now = log_probs(model())
    return now + recipe.drift * old, now + 0.3 * reference


def ours(recipe: Recipe, kl: str | None, in_reward: bool = False) -> tuple[float, float]:
    """Loss and gradient norm."""
    old, reference = old_and_reference(recipe)
    rewards = torch.zeros(MASK.shape).scatter(
        1, MASK.sum(1, keepdim=True) - 1, torch.tensor(SCORES)[:, None]
    )
    if in_reward:
        rewards = rewards - KL_COEF * kl_penalty(old, reference, kl) * MASK
    uids = np.array(["one", "other"], dtype=object)[GROUPS]
    advantages, _ = compute_grpo_outcome_advantage(rewards, MASK, uids, 1e-6, recipe.by_std)

    actor = model()
    new = log_probs(actor)
    if recipe.loss == "vanilla":
        loss, _, _, _ = compute_policy_loss(
            old, new, advantages, MASK, None, recipe.low, recipe.high, recipe.c, recipe.mode
        )
    else:
        config = {"clip_ratio_low": recipe.low, "clip_ratio_high": recipe.high}
        loss, _, _, _ = get_policy_loss_fn(recipe.loss)(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=MASK,
            loss_agg_mode=recipe.mode,
            config=config,
        )

    if kl is not None and not in_reward:
        penalty = kl_penalty(logprob=new, ref_logprob=reference, kl_penalty=kl)
        loss = loss + KL_COEF * agg_loss(
            loss_mat=penalty, loss_mask=MASK, loss_agg_mode=recipe.mode
        )

    loss.backward()
    return loss.item(), norm(actor)


def norm(actor: LlamaForCausalLM) -> float:
    gradients = [weights.grad for weights in actor.parameters() if weights.grad is not None]
    return torch.stack([(gradient**2).sum() for gradient in gradients]).sum().sqrt().item()


def advantages_by_hand(recipe: Recipe, rewards: np.ndarray) -> np.ndarray:
    members = [rewards[np.array(GROUPS) == group] for group in GROUPS]
    mean = np.array([group.mean() for group in members])
    std = np.array([group.std(ddof=1) for group in members])
    return (rewards - mean) / (std + 1e-6 if recipe.by_std else 1.0)


def by_hand(recipe: Recipe, kl: str | None, in_reward: bool = False) -> tuple[float, float]:
    """The same in float64, with the derivative of each token written out."""
    actor = model().double()
    leaf = log_probs(actor)
    new = leaf.detach().numpy()
    old, reference = (column.double().numpy() for column in old_and_reference(recipe))
    rewards = np.array(SCORES)
    if in_reward:
        rewards = rewards - KL_COEF * ((old - reference) * MASK.numpy()).sum(1)
    advantages = advantages_by_hand(recipe, rewards)

    loss = 0.0
    slopes = np.zeros_like(new)
    for row, (a, n) in enumerate(zip(advantages, LENGTHS)):
        x = new[row, :n]
        gap = new[row, :n] - reference[row, :n]
        ratio = np.exp(x - old[row, :n])
        if recipe.loss == "gspo":
            ratio = np.full(n, np.exp((x - old[row, :n]).mean()))
        bounded = np.clip(ratio, 1 - recipe.low, 1 + recipe.high)
        if recipe.loss == "cispo":
            values = -bounded * a * x
            slope = -bounded * a
        else:
            values = np.maximum(-ratio * a, -bounded * a)
            moves = -ratio * a >= -bounded * a
            if a < 0:
                moves &= values < -recipe.c * a
                values = np.minimum(values, -recipe.c * a)
            slope = np.where(moves, -ratio * a, 0.0)
        if kl is not None and not in_reward:
            penalty, change = {
                "kl": (gap, np.ones(n)),
                "mse": (gap**2 / 2, gap),
                "low_var_kl": (np.exp(-gap) - 1 + gap, 1 - np.exp(-gap)),
            }[kl]
            values = values + KL_COEF * penalty
            slope = slope + KL_COEF * change
        weight = {
            "token-mean": 1 / sum(LENGTHS),
            "seq-mean-token-sum": 1 / len(LENGTHS),
            "seq-mean-token-mean": 1 / len(LENGTHS) / n,
            "seq-mean-token-sum-norm": 1 / len(LENGTHS) / WIDTH,
        }[recipe.mode]
        loss += weight * values.sum()
        slopes[row, :n] = weight * slope

    leaf.backward(torch.from_numpy(slopes))
    return loss, norm(actor)


@pytest.mark.parametrize("kl", [None, "low_var_kl"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_are_those_of_trl(name, kl):
    assert ours(RECIPES[name], kl) == pytest.approx(TRL[name][kl is not None], rel=1e-5, abs=1e-6)


KL_VARIANTS = [(None, False), ("kl", False), ("mse", False), ("low_var_kl", False), ("kl", True)]


@pytest.mark.parametrize(("kl", "in_reward"), KL_VARIANTS)
@pytest.mark.parametrize("name", RECIPES)
def test_the_numbers_are_those_of_the_paper(name, kl, in_reward):
    assert ours(RECIPES[name], kl, in_reward) == pytest.approx(
        by_hand(RECIPES[name], kl, in_reward), rel=1e-5
    )


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("c", [1.3, 3.0])
def test_every_aggregation_with_the_dual_clip(mode, c):
    recipe = Recipe("vanilla", 0.1, 0.3, mode, drift=0.8, c=c)
    assert ours(recipe, "low_var_kl") == pytest.approx(by_hand(recipe, "low_var_kl"), rel=1e-5)
