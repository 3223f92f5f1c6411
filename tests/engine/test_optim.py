"""Schedules by their exact values, and the optimizer's settings."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.optimization import get_cosine_with_min_lr_schedule_with_warmup

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.optim import build_optimizer, restore_moments
from verl.engine.options import EngineOptions
from verl.engine.schedule import build_schedule
from verl.models.packed import PackedCausalLM
from verl.utils.errors import CheckpointError, ConfigError, MissingDependencyError

# torchao is not a development package: where installed, transformers imports it, with warnings.
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
EIGHT_BIT = pytest.param("AdamW8bit", marks=needs_torchao)
EIGHT_BIT_TO_32 = pytest.param("AdamW8bit", "AdamW", marks=needs_torchao)


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


def test_cosine_falls_to_its_minimum():
    factors = values(8, 11, warmup_style="cosine", min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(8)] + [0.1] * 3
    assert factors == pytest.approx(expected, abs=1e-15)
    assert factors[4] == pytest.approx(0.55)


def test_cosine_repeats_num_cycles():
    factors = values(8, 9, warmup_style="cosine", num_cycles=1.0)
    assert factors[4] == pytest.approx(0.0)
    assert factors[8] == pytest.approx(1.0)


def test_configured_total_steps_take_precedence():
    assert values(100, 3, warmup_style="cosine", total_training_steps=2)[2] == pytest.approx(0.0)


def test_cosine_equals_transformers():
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 3, 12, min_lr_rate=0.2)
    for factor in values(12, 12, warmup_style="cosine", min_lr_ratio=0.2, lr_warmup_steps=3):
        assert factor == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_wsd_stays_at_the_peak_and_then_falls_in_a_cosine():
    factors = values(22, 24, warmup_style="wsd", lr_warmup_steps=2, min_lr_ratio=0.2)
    assert factors[:3] == [0.0, 0.5, 1.0]
    assert set(factors[2:21]) == {1.0}
    assert factors[21:] == pytest.approx([0.6, 0.2, 0.2])
    assert values(2, 2, warmup_style="wsd", lr_warmup_steps=5) == [0.0, 0.2]


def test_unknown_schedule_is_an_error():
    with pytest.raises(ConfigError, match="'linear'"):
        build_schedule(OptimConfig(warmup_style="linear"), 10)


def test_adamw_settings_and_half_precision():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    optimizer = build_optimizer(
        module, OptimConfig(lr=0.3, betas=[0.8, 0.95], eps=1e-6, weight_decay=0.2)
    )
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (
        0.3,
        (0.8, 0.95),
        1e-6,
        0.2,
    )

    assert len(group["params"]) == 1
    with pytest.raises(ConfigError, match="fp32"):
        build_optimizer(module.bfloat16(), OptimConfig())


def test_adamw_step_matches_the_paper():
    """Compare with two steps of Algorithm 2 of Loshchilov & Hutter 2019 in float64."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
    module = nn.ParameterList([parameter])
    lr = 0.1
    beta1 = 0.9
    beta2 = 0.99
    eps = 1e-8
    decay = 0.05
    optimizer = build_optimizer(
        module, OptimConfig(lr=lr, betas=[beta1, beta2], eps=eps, weight_decay=decay)
    )

    theta = parameter.detach().clone()
    m = torch.zeros(2).double()
    v = torch.zeros(2).double()

    for step, gradient in enumerate(
        (torch.tensor([0.3, -1.0]).double(), torch.tensor([-0.7, 0.2]).double()), 1
    ):
        parameter.grad = gradient.clone()
        optimizer.step()
        m = beta1 * m + (1 - beta1) * gradient
        v = beta2 * v + (1 - beta2) * gradient**2
        update = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
        theta = theta - lr * decay * theta - lr * update
        torch.testing.assert_close(parameter.detach(), theta, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- other optimizers, through the eng


@pytest.fixture
def process_group():
    yield
    close_process_group()


def make_engine(optimizer: str, *, shard: bool = False, lr: float = 1e-2) -> TrainEngine:
    optim = OptimConfig(optimizer=optimizer, lr=lr, warmup_style="cosine", weight_decay=0.1)
    return TrainEngine(
        PackedCausalLM(tiny_model("qwen2", hidden_size=64)),
        EngineOptions(device=torch.device("cpu"), optim=optim, grad_clip=1.0, shard=shard),
        total_steps=8,
    )


def train(engine: TrainEngine, first: int, count: int) -> list[tuple[float, float]]:
    seen = []
    for number in range(first, first + count):
        engine.forward_backward(
            make_batch([(5, 9), (12, 10)], seed=number), TokenBudget(rows=1), smooth_loss, COLUMNS
        )
        result = engine.step()
        engine.step_schedule()
        seen.append((result.grad_norm, result.lr))
    return seen


def weights_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.parameters_for_rollout()}


def test_muon_trains_layer_matrices_and_adamw_the_rest():
    engine = make_engine("Muon")
    start = dict(tiny_model("qwen2", hidden_size=64).named_parameters())
    engine.forward_backward(
        make_batch([(5, 9), (12, 10)]), TokenBudget(rows=1), smooth_loss, COLUMNS
    )
    norm = engine._gradient_norm()
    gradients = {name: p.grad / (norm + 1e-6) for name, p in engine.hf_model.named_parameters()}
    engine.step()

    hidden = [name for name in start if ".layers." in name and start[name].ndim == 2]
    others = [name for name in start if name not in hidden]
    assert len(hidden) == 14
    for name, gradient in gradients.items():
        start[name].grad = gradient
    torch.optim.Muon(
        [start[name] for name in hidden], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    ).step()

    torch.optim.AdamW([start[name] for name in others], lr=1e-2, weight_decay=0.1).step()
    for name, tensor in engine.parameters_for_rollout():
        torch.testing.assert_close(tensor, start[name].detach(), rtol=1e-4, atol=1e-5)


@needs_torchao
def test_8_bit_moments_match_adamw_with_less_memory():
    one = make_engine("AdamW")
    other = make_engine("AdamW8bit")
    before = weights_of(one)
    train(one, 0, 3)
    train(other, 0, 3)
    # 4,096 elements: torchao leaves smaller ones in fp32
    name = "model.layers.0.self_attn.q_proj.weight"
    moment = other.optimizer.state[other.hf_model.get_parameter(name)]["exp_avg"]
    assert moment.codes.nbytes + moment.scale.nbytes < 4096 * 1.02
    steps = [(weights_of(engine)[name] - before[name]).flatten() for engine in (one, other)]
    assert torch.cosine_similarity(*steps, dim=0) > 0.98
    assert not torch.equal(*steps)


@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("optimizer", ["Muon", EIGHT_BIT])
@pytest.mark.usefixtures("process_group")
def test_reload_continues_bit_for_bit(tmp_path: Path, optimizer: str, shard: bool):
    whole, first, second = (make_engine(optimizer, shard=shard) for _ in range(3))
    undisturbed = train(whole, 0, 4)
    before = train(first, 0, 2)
    first.save(tmp_path)
    train(second, 50, 1)
    second.load(tmp_path)
    assert before + train(second, 2, 2) == undisturbed
    rates = [lr for _, lr in undisturbed]

    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 1e-2 > rates[-1]
    assert [float(group["lr"]) for group in second.optimizer.param_groups] == pytest.approx(
        [5e-3] * len(second.optimizer.param_groups)
    ), "half way down the cosine"
    expected = weights_of(whole)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights_of(second).items())


@pytest.mark.parametrize(
    ("saver", "loader"), [("AdamW", "Muon"), ("Muon", "AdamW"), EIGHT_BIT_TO_32]
)
def test_moments_of_another_optimizer_are_rejected(tmp_path: Path, saver: str, loader: str):
    engine = make_engine(saver)
    train(engine, 0, 1)
    engine.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"Set optim\.optimizer"):
        make_engine(loader).load(tmp_path)


def test_moments_of_weights_that_are_frozen_now_name_the_keys():
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    saved = {"tower": {"step": torch.ones(()), "exp_avg": frozen, "exp_avg_sq": frozen}}
    with pytest.raises(
        CheckpointError,
        match=r"does not train\. Set optim\.optimizer, freeze_vision_tower and lora",
    ):
        restore_moments(optimizer, [("tower", frozen)], saved)


def test_missing_package_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.delitem(sys.modules, "torchao.optim", raising=False)
    with pytest.raises(
        MissingDependencyError, match="AdamW8bit needs the package 'torchao.*pip install torchao"
    ):
        make_engine("AdamW8bit")


@pytest.mark.usefixtures("process_group")
def test_64_micro_batches_in_bf16_accumulate_in_fp32():
    """Compare with the float64 sum of the 64 gradients of the same bf16 passes."""
    engine = TrainEngine(
        PackedCausalLM(tiny_model("qwen2")),
        EngineOptions(
            device=torch.device("cpu"),
            optim=OptimConfig(),
            fsdp_config=FSDPConfig(compute_dtype="bfloat16"),
            shard=True,
        ),
        total_steps=1,
    )
    batch = make_batch([(3, 4)] * 64)

    each = TokenBudget(rows=1)
    engine.forward_backward(batch, each, smooth_loss, COLUMNS)
    together = flat_gradient(engine).double()
    total = torch.zeros_like(together)
    rounded = torch.zeros_like(together, dtype=torch.bfloat16)

    for row in range(64):
        engine.forward_backward(batch[[row]], each, smooth_loss, COLUMNS)
        gradient = flat_gradient(engine)
        total += gradient.double()
        rounded += gradient.bfloat16()

    assert ((together - total).norm() / total.norm()).item() < 1e-6
    assert ((rounded.double() - total).norm() / total.norm()).item() > 1e-3, (
        "adding up in bf16 would be seen"
    )
