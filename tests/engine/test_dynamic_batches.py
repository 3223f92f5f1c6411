"""Micro-batches in verl 0.5's form: no part is too large, and the row order can be restored."""

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists, permutations

from verl.engine.dynamic_batches import (
    get_reverse_idx,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from verl.protocol import DataProto
from verl.utils.arithmetic import ceil_div
from verl.utils.errors import ConfigError, DataError

LENGTHS = lists(integers(1, 60), min_size=1, max_size=40)


def batch_of(lengths: list[int]) -> DataProto:
    """Make a batch with the value i in row i."""
    rows = torch.arange(len(lengths))
    mask = (torch.arange(60) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict(
        {"attention_mask": mask, "row": rows},
        {"name": [f"row {i}" for i in rows.tolist()]},
        {"step": 3},
    )


@given(LENGTHS, integers(60, 300), booleans(), integers(1, 6), integers(1, 4))
def test_parts_hold_every_row_once_within_the_budget(lengths, max_tokens, even, fewest, divisor):
    batch = batch_of(lengths).batch
    given_numbers = {"min_num_micro_batch": fewest, "num_batches_divided_by": divisor}
    plain, rows_of_plain = rearrange_micro_batches(batch, max_tokens, use_dynamic_bsz_balance=even)
    count = ceil_div(max(len(plain), fewest), divisor) * divisor

    if count > len(lengths):
        with pytest.raises(DataError, match=f"{count} micro-batches.* {len(lengths)} rows"):
            rearrange_micro_batches(
                batch, max_tokens, use_dynamic_bsz_balance=even, **given_numbers
            )
        return

    parts, rows = rearrange_micro_batches(
        batch, max_tokens, use_dynamic_bsz_balance=even, **given_numbers
    )
    assert len(parts) == len(rows) == count
    for part, numbers in [*zip(parts, rows), *zip(plain, rows_of_plain)]:
        assert part["row"].tolist() == numbers != []
        assert part["attention_mask"].sum() <= max_tokens

    assert torch.equal(
        restore_dynamic_batch(torch.cat([part["row"] for part in parts]), rows), batch["row"]
    )
    if not even:
        assert [row for numbers in rows_of_plain for row in numbers] == list(range(len(lengths)))


@given(LENGTHS, integers(60, 300))
def test_batch_is_restored_with_its_objects(lengths, max_tokens):
    data = batch_of(lengths)
    parts, rows = prepare_dynamic_batch(data, max_tokens)
    assert all(
        part.batch["attention_mask"].sum() <= max_tokens and part.meta_info == {"step": 3}
        for part in parts
    )
    joined = DataProto.concat(parts)
    assert joined.non_tensor_batch["name"].tolist() == [
        f"row {row}" for row in joined.batch["row"].tolist()
    ]
    values = torch.stack([joined.batch["row"], joined.batch["row"] * 2], dim=1)
    assert restore_dynamic_batch(values, rows).tolist() == [
        [row, 2 * row] for row in range(len(lengths))
    ]


def test_number_of_parts_is_minimal():
    """Use lengths that simple greedy packing would put into three parts."""
    lengths = [28, 23, 13, 17, 26, 5]
    parts, _ = rearrange_micro_batches(batch_of(lengths).batch, 57)
    assert len(parts) == ceil_div(sum(lengths), 57) == 2


def test_balanced_parts_are_more_even():
    lengths = [10, 1, 1, 1, 1, 1, 1, 10, 10, 10]
    fullest = {}
    for even in (True, False):
        parts, _ = rearrange_micro_batches(
            batch_of(lengths).batch, 60, use_dynamic_bsz_balance=even
        )
        parts += rearrange_micro_batches(batch_of(lengths).batch, 30, use_dynamic_bsz_balance=even)[
            0
        ]
        fullest[even] = [int(part["attention_mask"].sum()) for part in parts]
    assert fullest == {True: [46, 23, 23], False: [46, 26, 20]}


@given(integers(0, 12).flatmap(lambda count: permutations(range(count))))
def test_the_reverse_is_the_inverse(order):
    reverse = get_reverse_idx(order)
    assert [order[i] for i in reverse] == [reverse[i] for i in order] == list(range(len(order)))


def test_too_long_row_is_named():
    with pytest.raises(
        ConfigError, match="at most 20 tokens, but row 1 has 30. Raise max_token_len to at least 30"
    ):
        rearrange_micro_batches(batch_of([10, 30]).batch, max_token_len=20)
