"""Rows with a shared prompt: their detection, and results independent of sharing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, smooth_loss
from tests.models.rows import KeepFloat64
from tests.tiny_models import VOCABULARY, tiny_model
from verl.config import OptimConfig
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.engine.packing import MIN_SAVING, MiniBatch
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto

CPU = torch.device("cpu")
WHOLE = TokenBudget(max_tokens=100_000)
Group = tuple[int, list[int]]  # tokens of a prompt, tokens of each of its responses
GROUPS: list[Group] = [(12, [9, 3, 14, 1]), (5, [2, 20]), (7, [4]), (20, [1, 2, 3])]


def grouped_batch(groups: list[Group], *, interleave: bool = False) -> DataProto:
    """Make groups of rows with one prompt each, in order or interleaved.

    All prompts are prefixes of one text.
    """
    placed = [
        (place, number)
        for number, (_, responses) in enumerate(groups)
        for place in range(len(responses))
    ]
    if interleave:
        placed.sort()
    batch = make_batch([(groups[number][0], groups[number][1][place]) for place, number in placed])
    width = max(prompt for prompt, _ in groups)
    text = torch.randint(3, VOCABULARY, (width,), generator=torch.Generator().manual_seed(0))
    for row, (_, number) in enumerate(placed):
        prompt = groups[number][0]
        batch.batch["input_ids"][row, width - prompt : width] = text[:prompt]
    return batch


def mini_batch(batch: DataProto, share_prompts: bool = True) -> MiniBatch:
    return MiniBatch(batch, ("response_mask", *COLUMNS), CPU, share_prompts=share_prompts)


def test_rows_with_identical_prompts_share_them():
    batch = grouped_batch(GROUPS)
    prompts = mini_batch(batch).prompts
    assert prompts is not None
    assert list(prompts.number) == [0, 0, 0, 0, 4, 4, 6, 7, 7, 7]
    assert list(prompts.lengths) == [12, 12, 12, 12, 5, 5, 7, 20, 20, 20]
    batch.batch["input_ids"][2, 12] += 1  # in the prompt of row 2
    batch.non_tensor_batch["uid"][:] = "the same"
    prompts = mini_batch(batch).prompts
    assert prompts is not None
    assert list(prompts.number) == [0, 0, 2, 0, 4, 4, 6, 7, 7, 7]
    assert mini_batch(batch, share_prompts=False).prompts is None


@pytest.mark.parametrize(("response", "shares"), [(88, False), (40, False), (39, True), (1, True)])
def test_prompt_with_a_small_saving_is_not_shared(response, shares):
    # Sharing saves 10 of 2 * (10 + R) tokens: a tenth at R = 40.
    assert MIN_SAVING == 0.1
    assert (mini_batch(grouped_batch([(10, [response, response])])).prompts is not None) == shares


def test_batch_without_shared_prompts_is_packed_as_usual():
    batch = make_batch([(5, 9), (5, 3), (12, 20)])
    shared = mini_batch(batch)
    plain = mini_batch(batch, share_prompts=False)
    assert shared.prompts is None
    one = shared.pack([0, 1, 2]).packed
    other = plain.pack([0, 1, 2]).packed
    assert one.lengths == other.lengths
    assert torch.equal(one.input_ids, other.input_ids)


def test_empty_rows_do_not_affect_other_prompts():
    batch = grouped_batch(GROUPS)
    batch.batch["attention_mask"][[0, 8]] = 0
    packed = mini_batch(batch).pack([0, 1, 2, 3, 6, 7, 8, 9]).packed
    assert packed.shared == (3, 2)
    assert packed.lengths == (11, 12, 20, 3, 14, 1, 1, 3)


def test_columns_and_row_numbers_stay_with_their_tokens():
    batch = grouped_batch(GROUPS, interleave=True)
    shared = mini_batch(batch)
    plain = mini_batch(batch, share_prompts=False)
    rows = [0, 2, 3, 4, 6, 9]
    one = shared.pack(rows)
    other = plain.pack(rows)
    assert one.packed.shared
    assert torch.equal(one.sequence, other.sequence)
    assert torch.equal(one.packed.targets, other.packed.targets)
    for name, column in one.columns.items():
        torch.testing.assert_close(column, other.columns[name])


@pytest.fixture(scope="module")
def engine() -> TrainEngine:
    return make_engine()


def make_engine(**arguments) -> TrainEngine:
    return TrainEngine(
        PackedCausalLM(tiny_model("qwen2", dtype=torch.float64)),
        EngineOptions(device=CPU, optim=OptimConfig(lr=1e-2), grad_clip=1.0, **arguments),
        total_steps=10,
    )


def gradient(engine: TrainEngine, batch: DataProto, budget: TokenBudget) -> torch.Tensor:
    with KeepFloat64():
        engine.forward_backward(batch, budget, smooth_loss, COLUMNS)
    return flat_gradient(engine)


def relative_l2(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


groups_strategy = lists(
    tuples(integers(1, 20), lists(integers(1, 15), min_size=1, max_size=6)), min_size=1, max_size=4
)


@settings(max_examples=12)
@given(
    groups=groups_strategy, interleave=booleans(), max_tokens=integers(35, 90), rows=integers(1, 5)
)
def test_gradients_and_log_probs_do_not_depend_on_sharing(
    engine, groups, interleave, max_tokens, rows
):
    batch = grouped_batch(groups, interleave=interleave)
    sharing = engine.options
    engine.options = replace(sharing, share_prompts=False)
    expected = gradient(engine, batch, WHOLE)
    expected_log_probs = engine.infer(batch, WHOLE, temperature=0.7)["log_probs"]
    engine.options = sharing
    for budget in (WHOLE, TokenBudget(max_tokens=max_tokens), TokenBudget(rows=rows)):
        assert relative_l2(gradient(engine, batch, budget), expected) <= 1e-9
        log_probs = engine.infer(batch, budget, temperature=0.7)["log_probs"]
        torch.testing.assert_close(log_probs, expected_log_probs, rtol=0, atol=1e-6)


def test_budget_counts_a_shared_prompt_once(engine):
    batch = grouped_batch([(20, [5, 5, 5, 5])])
    passes = []
    handle = engine.module.register_forward_pre_hook(
        lambda module, arguments: passes.append(arguments[0].lengths)
    )
    for share in (False, True):
        engine.options = replace(engine.options, share_prompts=share)
        engine.infer(batch, TokenBudget(max_tokens=40))
    handle.remove()
    assert passes == [(25,)] * 4 + [(20, 5, 5, 5, 5)]


def test_checkpointing_with_shared_prompts_keeps_the_gradient():
    gradients = []
    # without KeepFloat64, which has no effect on a recomputed forward pass
    for checkpointing in (False, True):
        engine = make_engine(enable_gradient_checkpointing=checkpointing)
        engine.forward_backward(
            grouped_batch(GROUPS), TokenBudget(max_tokens=50), smooth_loss, COLUMNS
        )
        gradients.append(flat_gradient(engine))
    assert relative_l2(*gradients) <= 1e-12


def test_bad_row_is_found_among_rows_of_its_prompt():
    batch = grouped_batch(GROUPS)
    batch.batch["advantages"][2, 0] = float("nan")
    engine = make_engine()
    engine.forward_backward(batch, WHOLE, smooth_loss, COLUMNS)
    result = engine.step()
    assert result.skipped
    assert [offender.split(" (")[0] for offender in result.offenders] == ["row 2"]
