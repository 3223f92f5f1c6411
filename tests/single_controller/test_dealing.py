"""Rows are distributed so that every rank has about as many tokens, each row exactly once."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.single_controller.workers import rows
from verl.protocol import DataProto
from verl.single_controller import Dealt
from verl.single_controller.dealing import (
    balanced,
    contiguous,
    in_windows,
    largest_differencing,
    with_masked_rows,
)

lengths_of_rows = st.lists(st.integers(0, 60), min_size=1, max_size=40)
shares_of_ranks = st.integers(1, 5)


def sums(shares: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in share) for share in shares]


def test_the_example_of_karmarkar_and_karp():
    parts = largest_differencing([4, 5, 6, 7, 8], 2)
    assert sorted(sums(parts, [4, 5, 6, 7, 8])) == [14, 16]  # greedy: 13 and 17


@given(lengths_of_rows, shares_of_ranks)
@example([0, 0, 0], 3)
def test_balanced_shares_differ_by_less_than_the_longest_row(lengths, num_shares):
    shares = balanced(lengths, num_shares)
    assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))
    assert len(shares) == num_shares
    assert sum(not share for share in shares) == max(num_shares - len(lengths), 0), (
        "no rank waits longer than necessary"
    )
    assert all(share == sorted(share) for share in shares)
    tokens = sums(shares, lengths)
    # a row without tokens counts as one
    assert max(tokens) - min(tokens) <= max(lengths) + len(lengths)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_rows_of_a_prompt_stay_together_if_there_are_enough_prompts(num_shares, samples, data):
    prompts = data.draw(st.integers(2 * num_shares, 12))
    lengths = data.draw(
        st.lists(st.integers(1, 60), min_size=prompts * samples, max_size=prompts * samples)
    )
    uids = [f"prompt {row // samples}" for row in range(len(lengths))]
    shares = balanced(lengths, num_shares, uids)
    found = [{uids[row] for row in share} for share in shares]
    assert sum(map(len, found)) == prompts


def test_few_prompts_are_split():
    shares = balanced([10] * 8, 4, ["one"] * 8)
    assert [len(share) for share in shares] == [2, 2, 2, 2]


@given(lengths_of_rows, shares_of_ranks, st.integers(1, 3), st.integers(1, 3))
def test_slices_of_shares_make_the_mini_batches_of_one_process(
    lengths, num_shares, unit_rows, windows
):
    mini_batch = windows * num_shares * unit_rows
    shares = in_windows(lengths, num_shares, unit_rows)
    for number in range(len(lengths) // mini_batch):
        part = windows * unit_rows
        together = sorted(
            itertools.chain(*(share[number * part : (number + 1) * part] for share in shares))
        )
        assert together == list(range(number * mini_batch, (number + 1) * mini_batch))
    tokens = sums(shares, lengths)
    longest = max(
        sum(lengths[start : start + unit_rows]) for start in range(0, len(lengths), unit_rows)
    )
    assert max(tokens) - min(tokens) <= longest
    assert sorted(itertools.chain(*shares)) == list(range(len(lengths)))


@given(st.integers(0, 20), shares_of_ranks)
def test_contiguous_shares_differ_by_one(num_rows, num_shares):
    shares = contiguous(num_rows, num_shares)
    assert list(itertools.chain(*shares)) == list(range(num_rows))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_masked_rows_do_not_count_and_the_callers_batch_is_unchanged():
    batch = rows(3)
    batch.batch["response_mask"] = torch.ones(3, 4, dtype=torch.long)
    padded = with_masked_rows(batch, 2)
    assert padded.batch["response_mask"].sum(-1).tolist() == [4, 4, 4, 0, 0]
    assert padded.batch["x"].tolist() == [0, 1, 2, 0, 1]
    assert batch.batch["response_mask"].sum() == 12


def test_every_row_must_be_dealt_once():
    with pytest.raises(ValueError, match="3 rows must be dealt exactly once"):
        Dealt(rows(3), [[0, 1], [1]])
    nothing = DataProto.from_dict(non_tensors={"name": np.array([], dtype=object)})
    assert Dealt(nothing, [[], []]).rows == [[], []]
