"""The engine on one CPU process: gradients, means, clipping, the guard, evaluation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples

from tests.engine.batches import COLUMNS, gradients_of, make_batch, moments_of, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import OptimConfig
from verl.engine.base import LossOutput, TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.utils.errors import ConfigError, DataError

WHOLE = TokenBudget(max_tokens=100_000)
SHAPES = [(5, 9), (1, 3), (12, 20), (7, 1), (3, 14)]


def make_engine(
    dtype: torch.dtype = torch.float32,
    *,
    family: str = "qwen2",
    **settings,
) -> TrainEngine:
    defaults = {"optim": OptimConfig(lr=1e-2), "grad_clip": 1.0}
    return TrainEngine(
        PackedCausalLM(tiny_model(family, dtype=dtype)),
        EngineOptions(device=torch.device("cpu"), **{**defaults, **settings}),
        total_steps=10,
    )


def gradients(engine: TrainEngine, batch: DataProto, budget: TokenBudget) -> tuple[dict, dict]:
    metrics = engine.forward_backward(batch, budget, smooth_loss, COLUMNS)
    return gradients_of(engine), metrics


def worst_relative_l2(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(
        ((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-30)).item()
        for name in one
    )


@pytest.fixture(scope="module")
def engine64():
    return make_engine(torch.float64)


@pytest.fixture(scope="module")
def engine32():
    return make_engine(torch.float32)


shapes_strategy = lists(tuples(integers(3, 20), integers(1, 20)), min_size=1, max_size=7)


@settings(max_examples=15)
@given(
    shapes=shapes_strategy,
    max_tokens=integers(40, 120),
    rows=integers(1, 4),
    padding=integers(0, 9),
)
def test_gradient_is_independent_of_micro_batches_and_padding(
    engine64, engine32, shapes, max_tokens, rows, padding
):
    for engine, tolerance in ((engine64, 1e-9), (engine32, 1e-5)):
        whole, means = gradients(engine, make_batch(shapes), WHOLE)
        for budget in (TokenBudget(max_tokens=max_tokens), TokenBudget(rows=rows)):
            parts, other_means = gradients(
                engine, make_batch(shapes, extra_padding=padding), budget
            )
            assert worst_relative_l2(parts, whole) <= tolerance
            assert other_means == pytest.approx(means, rel=1e-4, abs=1e-6)


def test_gradient_matches_separate_rows_without_the_engine(engine64):
    """Compare with the definition, computed row by row with the forward pass of transformers."""
    batch = make_batch(SHAPES)
    packed, metrics = gradients(engine64, batch, TokenBudget(rows=2))
    model = tiny_model("qwen2", dtype=torch.float64)
    loss = torch.zeros(()).double()
    ratios = []
    rows = []

    for row, (prompt, response) in enumerate(SHAPES):
        columns = batch.batch[row]
        ids = columns["input_ids"][columns["attention_mask"].bool()][None]
        log_probs = (
            model(ids)
            .logits[0, prompt - 1 : -1]
            .log_softmax(-1)
            .gather(1, ids[0, prompt:, None])[:, 0]
        )
        mask = columns["response_mask"][:response].bool()
        ratio = torch.sin(log_probs - columns["old_log_probs"][:response])
        terms = (
            columns["advantages"][:response]
            * (log_probs + 0.5 * ratio)
            * columns["weights"][:response]
        )
        loss = loss - terms[mask].sum()
        ratios.append(ratio[mask])
        rows += [row] * int(mask.sum())

    loss.backward()
    expected = {f"model.{name}": p.grad for name, p in model.named_parameters()}
    # Not 1e-9: norms, rotations and softmax of transformers run in fp32 even in a float64 model.
    assert worst_relative_l2(packed, expected) <= 1e-5
    assert metrics["ratio"] == pytest.approx(torch.cat(ratios).mean().item(), rel=1e-5)
    assert metrics["row"] == pytest.approx(sum(rows) / len(rows), rel=1e-9)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_gradient_checkpointing_keeps_the_gradient():
    plain, _ = gradients(make_engine(), make_batch(SHAPES), TokenBudget(rows=2))
    recomputed, _ = gradients(
        make_engine(enable_gradient_checkpointing=True), make_batch(SHAPES), TokenBudget(rows=2)
    )
    assert worst_relative_l2(recomputed, plain) <= 1e-6


def test_infer_returns_padded_columns_without_a_graph(engine64):
    batch = make_batch(SHAPES)
    whole = engine64.infer(batch, WHOLE, temperature=0.7, entropy=True)
    parts = engine64.infer(batch, TokenBudget(max_tokens=33), temperature=0.7, entropy=True)
    present = batch.batch["attention_mask"][:, -20:].bool()
    assert set(whole) == {"log_probs", "entropy"}
    for name, values in whole.items():
        assert values.shape == (len(SHAPES), 20)
        assert values.dtype == torch.float32
        assert not values.requires_grad
        assert (values[~present] == 0).all()
        assert (values[present] != 0).all()
        torch.testing.assert_close(parts[name], values, rtol=0, atol=1e-6)


def test_infer_matches_the_log_probs_of_training(engine32):
    batch = make_batch(SHAPES)
    inferred = engine32.infer(batch, TokenBudget(rows=2))["log_probs"]
    batch.batch["inferred"] = inferred
    differences = []

    def loss_fn(outputs, columns, sequence):
        differences.append((outputs["log_probs"] - columns["inferred"]).abs().max().item())
        return LossOutput(loss=outputs["log_probs"].sum())

    engine32.forward_backward(batch, TokenBudget(rows=2), loss_fn, ["inferred"])
    assert differences == [0.0, 0.0, 0.0]


def test_step_is_adamw_on_the_clipped_gradient():
    engine = make_engine(
        torch.float64, grad_clip=0.01, optim=OptimConfig(lr=0.1, weight_decay=0.02)
    )
    reference = tiny_model("qwen2", dtype=torch.float64)
    collected, _ = gradients(engine, make_batch(SHAPES), WHOLE)
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in collected.values()))
    assert norm > 0.01
    for name, parameter in reference.named_parameters():
        parameter.grad = collected[f"model.{name}"] * (0.01 / (norm + 1e-6))

    torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.02).step()
    result = engine.step()
    assert result.grad_norm == pytest.approx(norm, rel=1e-9)
    assert (result.lr, result.skipped, result.offenders) == (0.1, False, [])

    for name, parameter in engine.parameters_for_rollout():
        torch.testing.assert_close(
            parameter, dict(reference.named_parameters())[name].detach(), rtol=1e-9, atol=1e-12
        )

    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_no_grad_clip_keeps_the_gradient():
    clipped = make_engine(grad_clip=1e9)
    whole = make_engine(grad_clip=None)
    for engine in (clipped, whole):
        engine.forward_backward(make_batch(SHAPES), WHOLE, smooth_loss, COLUMNS)
        engine.step()
    for (_, one), (_, other) in zip(
        clipped.parameters_for_rollout(), whole.parameters_for_rollout()
    ):
        assert torch.equal(one, other)


def test_forward_backward_starts_from_zero(engine32):
    batch = make_batch(SHAPES)
    once, _ = gradients(engine32, batch, WHOLE)
    again, _ = gradients(engine32, batch, WHOLE)
    assert worst_relative_l2(again, once) == 0.0


def test_schedule_advances_once_per_training_step():
    engine = make_engine(optim=OptimConfig(lr=1e-3, lr_warmup_steps=4))
    rates = []
    for _ in range(3):
        for _ in range(2):
            engine.forward_backward(make_batch(SHAPES), WHOLE, smooth_loss, COLUMNS)
            rates.append(engine.step().lr)
        engine.step_schedule()
    assert rates == pytest.approx([0.0, 0.0, 2.5e-4, 2.5e-4, 5e-4, 5e-4])


def spoil_loss(batch: DataProto, row: int) -> None:
    batch.batch["advantages"][row, 0] = float("nan")


def overflow_gradient(outputs, columns, sequence):
    """Return a finite loss with an infinite gradient in the third row."""
    log_probs = torch.where(
        sequence == 2, outputs["log_probs"] - outputs["log_probs"].detach(), outputs["log_probs"]
    )
    root = torch.where(sequence == 2, log_probs.abs().sqrt(), log_probs)  # d sqrt(|x|)/dx at 0
    return LossOutput(loss=(root * columns["weights"]).sum())


@pytest.mark.parametrize("budget", [WHOLE, TokenBudget(rows=1), TokenBudget(max_tokens=40)])
def test_non_finite_values_skip_the_step_and_name_the_row(budget):
    engine = make_engine(optim=OptimConfig(lr=1e-2, lr_warmup_steps=2))
    engine.forward_backward(make_batch(SHAPES), budget, smooth_loss, COLUMNS)
    engine.step()
    engine.step_schedule()
    before = {name: tensor.clone() for name, tensor in engine.parameters_for_rollout()}
    moments = [value.clone() for value in moments_of(engine)]
    spoilt = make_batch(SHAPES)
    spoil_loss(spoilt, 3)

    for batch, loss_fn, culprit in (
        (spoilt, smooth_loss, "row 3 (uid prompt-1)"),
        (make_batch(SHAPES), overflow_gradient, "row 2 (uid prompt-1)"),
    ):
        engine.forward_backward(batch, budget, loss_fn, COLUMNS)
        result = engine.step()
        engine.step_schedule()
        assert result.skipped
        assert result.offenders == [culprit]
        assert result.lr == pytest.approx(5e-3)
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in engine.parameters_for_rollout()
        )
        assert all(torch.equal(one, other) for one, other in zip(moments_of(engine), moments))
        assert all(parameter.grad is None for parameter in engine.module.parameters())

    engine.forward_backward(make_batch(SHAPES), budget, smooth_loss, COLUMNS)
    assert not engine.step().skipped


def test_missing_rows_and_column_and_a_long_row_are_named(engine32):
    batch = make_batch(SHAPES)
    with pytest.raises(DataError, match="rank 0 of 1 got none for a pass over the model"):
        engine32.infer(batch.select_idxs([]), WHOLE)
    with pytest.raises(DataError, match="returns"):
        engine32.forward_backward(batch, WHOLE, smooth_loss, ["returns"])
    with pytest.raises(ConfigError, match="row 2 has 32"):
        engine32.forward_backward(batch, TokenBudget(max_tokens=31), smooth_loss, COLUMNS)


def test_rollout_weights_alias_the_parameters():
    engine = make_engine(family="qwen2", optim=OptimConfig())
    named = dict(engine.parameters_for_rollout())
    assert list(named) == [name for name, _ in engine.hf_model.named_parameters()]
    for name, parameter in engine.hf_model.named_parameters():
        assert named[name].data_ptr() == parameter.data_ptr()
        assert not named[name].requires_grad
