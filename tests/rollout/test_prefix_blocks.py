"""Neighbors of a decode step, and the blocks of rows that share the pages of a prompt."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl.rollout.embedded.prefix_blocks import neighbors, prefix_blocks

PAGE_SIZE = 4
FEWEST = 4
MOST = 8


def test_neighbors_have_the_same_prompt_and_prompts_that_begin_alike_come_together():
    one = [1, 2]
    like_one = [1, 3]
    other = [0, 4]
    table = np.array([one, other, like_one, one, other, like_one])
    samples: Any = SimpleNamespace(table=table, prompt_ends=table[:, 1])
    order = neighbors(samples, np.arange(6))
    assert order.tolist() == [1, 4, 0, 3, 2, 5]


@given(st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 40)), max_size=12))
def test_blocks_cover_prompts_of_enough_rows(runs: list[tuple[int, int]]):
    """Runs of rows: the page in which their prompts end, and how many they are."""
    ends = np.array([end for end, count in runs for _ in range(count)], np.int64)
    tokens = PAGE_SIZE * (ends + 1) + 8 * (ends >= 0)
    blocks = prefix_blocks(ends, tokens, fewest=FEWEST, most=MOST)

    assert len(blocks.covered) == len(ends)
    assert len(blocks.rows) <= len(ends) // FEWEST
    assert (blocks.counts <= MOST).all()
    seen = np.zeros(len(ends), np.int64)
    for first, count, shared in zip(blocks.rows, blocks.counts, blocks.tokens):
        rows = slice(first, first + count)
        assert len(set(ends[rows])) == 1
        assert ends[first] >= 0
        assert (blocks.covered[rows] == shared).all()
        assert shared == tokens[first]
        seen[rows] += 1

    bounds = np.flatnonzero(np.diff(ends)) + 1
    wanted = []
    for part in np.split(ends, bounds):
        wanted += [int(len(part) >= FEWEST and part[0] >= 0)] * len(part)
    assert seen.tolist() == wanted
    assert (blocks.covered[seen == 0] == 0).all()


def test_blocks_of_a_prompt_are_about_as_large_as_one_another():
    blocks = prefix_blocks(np.full(17, 3), np.full(17, 20), fewest=FEWEST, most=MOST)
    assert blocks.rows.tolist() == [0, 5, 11]
    assert blocks.counts.tolist() == [5, 6, 6]
    assert blocks.saved == 20 * 14 / 17


def test_no_rows_have_no_blocks():
    none = np.empty(0, np.int64)
    blocks = prefix_blocks(none, none, fewest=FEWEST, most=MOST)
    assert blocks.saved == 0
    assert [len(numbers) for numbers in blocks] == [0, 0, 0, 0]
