"""Attention with the pages of a prompt read once for many rows, interpreted on the CPU."""

from typing import Any

import pytest
import torch

from tests.rollout.interpreter import interpreted
from tests.rollout.test_paged_attention_kernel import (
    BY_WARPS,
    DIM,
    FEATURES,
    GROUP,
    KV_HEADS,
    Batch,
    assert_near,
    attend,
    expected,
    make_batch,
)
from verl.rollout.embedded.kernels import shared_prefix
from verl.rollout.embedded.kernels.shared_prefix import SharedPrefixes, can_share

# Row i has slot i. The first three rows share two pages, the next two three, and the last has none
# to share.
POSITIONS = (16, 40, 31, 24, 47, 9)
SHARED = (2, 2, 2, 3, 3, 0)
BLOCKS = ((0, 3, 16), (0, 0, 0), (3, 2, 24))  # first row, rows, tokens


def make_shared(
    dtype: torch.dtype = torch.float32, group: int = GROUP
) -> tuple[Batch, Batch, SharedPrefixes]:
    """Build a batch of rows that share pages, and the same with NaN pages that none may read.

    There, shared pages are only in the table of the first row of each block.
    """
    batch = make_batch(dtype, positions=POSITIONS, group=group)
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(len(POSITIONS), KV_HEADS * group, DIM, generator=generator).to(dtype)
    batch = batch._replace(q=q, slots=torch.arange(len(POSITIONS), dtype=torch.int32))
    hidden = batch._replace(table=batch.table.clone())
    for first, count, tokens in BLOCKS:
        pages = tokens // 8
        for row in range(first + 1, first + count):
            own = batch.table[row, :pages].long()
            batch.keys[own] = batch.values[own] = float("nan")
            batch.table[row, :pages] = batch.table[first, :pages]

    prefixes = SharedPrefixes(
        *torch.tensor(BLOCKS, dtype=torch.int32).T.contiguous(),
        covered=8 * torch.tensor(SHARED, dtype=torch.int32),
    )
    return batch, hidden, prefixes


@pytest.mark.parametrize("features", [each for each in FEATURES if "window" not in each])
@interpreted
def test_shared_pages_are_read_for_the_first_row_of_a_block(features: dict[str, Any]):
    batch, hidden, prefixes = make_shared()
    assert_near(attend(hidden, **features, prefixes=prefixes), expected(batch, **features))
    assert attend(hidden, **features)[1].isnan().all(), "pages of the others are not read"


@pytest.mark.parametrize("group", [1, GROUP, 9])
@interpreted
def test_half_precision_by_warps(group: int):
    batch, hidden, prefixes = make_shared(torch.float16, group)
    assert_near(attend(hidden, config=BY_WARPS, prefixes=prefixes), expected(batch), 4e-3)


@interpreted
def test_many_query_heads_are_refused():
    batch, _, prefixes = make_shared(group=17)
    cpu = torch.device("cpu")
    assert can_share(16, DIM, torch.float16, cpu)
    assert not can_share(17, DIM, torch.float16, cpu)
    with pytest.raises(AssertionError, match="17 query heads"):
        attend(batch, prefixes=prefixes)


def test_programs_that_take_too_much_memory_are_not_launched(monkeypatch: pytest.MonkeyPatch):
    desktop = 99 * 1024
    monkeypatch.setattr(shared_prefix, "shared_memory", lambda device: desktop)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    device = torch.device("cuda")
    assert can_share(7, 128, torch.bfloat16, device)
    assert can_share(16, 64, torch.bfloat16, device)
    assert not can_share(16, 128, torch.bfloat16, device)


@pytest.mark.parametrize("splits", [{"num_splits": 2}, {"split_tokens": 16}, {"window": 9}])
@interpreted
def test_splits_and_windows_are_refused(splits: dict[str, Any]):
    batch, _, prefixes = make_shared()
    with pytest.raises(AssertionError, match="shared pages"):
        attend(batch, **splits, prefixes=prefixes)
