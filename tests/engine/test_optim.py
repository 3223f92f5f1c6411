"""Schedules by their exact values, and the optimizer's settings."""

import math

import pytest
import torch
from torch import nn
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from verl.config import OptimConfig
from verl.engine.optim import build_adamw, build_schedule
from verl.utils.errors import ConfigError


def values(total: int, steps: int, **settings) -> list[float]:
    schedule = build_schedule(OptimConfig(**settings), total)
    return [schedule(step) for step in range(steps)]


def test_constant_without_warmup_is_one():
    assert values(10, 4) == [1.0] * 4


def test_constant_with_warmup_starts_at_zero():
    assert values(10, 6, lr_warmup_steps=4) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_warmup_ratio_counts_only_when_steps_are_negative():
    assert values(10, 4, lr_warmup_steps=-1, lr_warmup_steps_ratio=0.2) == [0.0, 0.5, 1.0, 1.0]
    assert values(10, 2, lr_warmup_steps=0, lr_warmup_steps_ratio=0.5) == [1.0, 1.0]


def test_cosine_falls_to_the_minimum_and_stays():
    factors = values(8, 11, warmup_style="cosine", min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)] + [0.1] * 3
    assert factors == pytest.approx(expected, abs=1e-15)
    assert factors[4] == pytest.approx(0.55)


def test_cosine_counts_its_waves():
    factors = values(8, 9, warmup_style="cosine", num_cycles=1.0)
    assert factors[4] == pytest.approx(0.0)
    assert factors[8] == pytest.approx(1.0)


def test_total_of_the_configuration_beats_the_trainers():
    assert values(100, 3, warmup_style="cosine", total_training_steps=2)[2] == pytest.approx(0.0)


def test_cosine_equals_transformers():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 12, min_lr_rate=0.2)
    for factor in values(12, 12, warmup_style="cosine", min_lr_ratio=0.2, lr_warmup_steps=3):
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_unknown_schedule_is_an_error():
    with pytest.raises(ConfigError, match="'linear'"):
        build_schedule(OptimConfig(warmup_style="linear"), 10)


def test_adamw_takes_its_settings_and_refuses_half_precision():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    optimizer = build_adamw(module.parameters(), OptimConfig(lr=0.3, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.2))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.3, (0.8, 0.95), 1e-6, 0.2)
    assert len(group["params"]) == 1
    with pytest.raises(ConfigError, match="fp32"):
        build_adamw(module.bfloat16().parameters(), OptimConfig())


def test_adamw_step_is_the_papers():
    """Algorithm 2 of Loshchilov & Hutter 2019, two steps by hand in float64."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.05
    optimizer = build_adamw([parameter], OptimConfig(lr=lr, betas=[beta1, beta2], eps=eps, weight_decay=decay))
    theta, m, v = parameter.detach().clone(), torch.zeros(2).double(), torch.zeros(2).double()
    for step, gradient in enumerate((torch.tensor([0.3, -1.0]).double(), torch.tensor([-0.7, 0.2]).double()), 1):
        parameter.grad = gradient.clone()
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * gradient, beta2 * v + (1 - beta2) * gradient**2
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        theta = theta - lr * decay * theta - lr * update
        torch.testing.assert_close(parameter.detach(), theta, rtol=1e-12, atol=1e-12)
