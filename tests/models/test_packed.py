"""Packing rows, grouping sequences into blocks, and the results of a packed forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples
from torch import Tensor

from tests.tiny_models import tiny_model
from verl.models.layout import Layout, group_by_length
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.utils.errors import DataError

ROWS = lists(tuples(integers(1, 6), integers(0, 5)), min_size=1, max_size=8)


def padded(
    rows: list[tuple[int, int]], prompt_width: int = 7, response_width: int = 5
) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(len(rows), prompt_width + response_width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(rows):
        real = slice(prompt_width - prompt, prompt_width + response)
        ids[row, real] = torch.arange(1, prompt + response + 1) + 100 * row
        mask[row, real] = 1
    return ids, mask


@given(rows=ROWS)
def test_packing_keeps_every_real_token_in_order(rows: list[tuple[int, int]]) -> None:
    batch = PackedBatch.from_rows(*padded(rows), 5)
    ids = []
    positions = []
    predict = []
    targets = []
    ends = [0]

    for row, (prompt, response) in enumerate(rows):
        for place in range(prompt + response):
            if place >= prompt:
                predict.append(len(ids) - 1)
                targets.append(place + 1 + 100 * row)
            ids.append(place + 1 + 100 * row)
            positions.append(place)
        ends.append(len(ids))

    assert batch.input_ids.tolist() == ids
    assert batch.position_ids.tolist() == positions
    assert batch.predict.tolist() == predict
    assert batch.targets.tolist() == targets
    assert batch.cu_seqlens.tolist() == ends
    assert batch.cu_seqlens.dtype == torch.int32
    assert batch.lengths == tuple(prompt + response for prompt, response in rows)
    assert batch.max_seqlen == max(batch.lengths)


def test_gaps_in_a_row_are_closed() -> None:
    # Tool output may be masked out of a response; the row's real tokens still form one sequence.
    ids = torch.tensor([[9, 1, 2, 3, 4]])
    batch = PackedBatch.from_rows(ids, torch.tensor([[0, 1, 1, 0, 1]]), 3)
    assert batch.input_ids.tolist() == [1, 2, 4]
    assert batch.position_ids.tolist() == [0, 1, 2]
    assert batch.targets.tolist() == [2, 4]
    assert batch.predict.tolist() == [0, 1]


def test_empty_rows_are_skipped_and_an_empty_batch_is_an_error() -> None:
    ids, mask = padded([(2, 1), (3, 2)])
    mask[0] = 0
    batch = PackedBatch.from_rows(ids, mask, 5)
    assert batch.lengths == (5,)
    with pytest.raises(DataError, match="0 everywhere"):
        PackedBatch.from_rows(ids, torch.zeros_like(mask), 5)


def test_a_response_without_a_prompt_is_an_error() -> None:
    ids, mask = padded([(2, 1), (3, 2)])
    mask[1, :7] = 0
    with pytest.raises(DataError, match="empty prompt"):
        PackedBatch.from_rows(ids, mask, 5)


def test_a_batch_without_responses_gives_no_log_probs() -> None:
    ids, mask = padded([(2, 0), (1, 0)])
    module = PackedCausalLM(tiny_model("qwen2"))
    outputs = module(PackedBatch.from_rows(ids % 128, mask, 5), entropy=True)
    assert outputs["log_probs"].shape == outputs["entropy"].shape == (0,)
    # a rank without response tokens still takes part in the backward pass
    outputs["log_probs"].sum().backward()
    without_columns = PackedBatch.from_rows(ids % 128, mask, 0)
    assert without_columns.targets.numel() == 0


def test_entropy_is_computed_only_on_request() -> None:
    module = PackedCausalLM(tiny_model("qwen2"))
    batch = PackedBatch.from_sequences([[5, 6, 7], [8]])
    assert module(batch).keys() == {"log_probs"}
    assert module(batch, entropy=True)["entropy"].shape == (2,)


@settings(max_examples=200)
@given(lengths=lists(integers(1, 900), min_size=1, max_size=40))
def test_blocks_hold_each_sequence_once_and_waste_little(lengths: list[int]) -> None:
    groups = group_by_length(tuple(lengths))
    assert sorted(number for group in groups for number in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[number] for number in group)
        assert lengths[group[0]] == longest
        real = sum(lengths[number] * (lengths[number] + 64) for number in group)
        assert len(group) == 1 or len(group) * longest * (longest + 64) < 1.4 * real


@settings(max_examples=50)
@given(lengths=lists(integers(1, 40), min_size=1, max_size=12))
def test_laying_out_blocks_and_restoring_them_is_the_identity(lengths: list[int]) -> None:
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    layout = Layout(tuple(lengths), ends)
    tokens = torch.arange(sum(lengths))
    laid_out = torch.cat([tokens[block.index] for block in layout.blocks])
    assert torch.equal(laid_out[layout.restore], tokens)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for index, keys, rows, length, context in layout.blocks:
        assert context == 0
        assert torch.equal(keys, index)
        owners = sequence[index].view(rows, length)
        assert bool((owners == owners[:, :1]).all())  # padding belongs to the same sequence


def test_the_sum_of_squared_probabilities_equals_that_of_the_logits() -> None:
    model = tiny_model("gemma2")
    ids = [5, 6, 7, 8]
    expected = (model(torch.tensor([ids])).logits[0, :-1] / 0.7).softmax(-1).square().sum(-1)
    batch = PackedBatch.from_sequences([ids])
    outputs = PackedCausalLM(model)(batch, temperature=0.7, sum_pi_squared=True)
    torch.testing.assert_close(outputs["sum_pi_squared"], expected, rtol=1e-3, atol=1e-5)
