"""Deal the rows of a batch to ranks, by their lengths, so that ranks have equally many tokens."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.protocol import DataProto

MASK = "response_mask"

Rows = list[list[int]]  # of each share, in the order in which it gets them
Parts = list[tuple[int, list[int]]]  # of a partition: the sum of its weights, and its items


@dataclass(frozen=True)
class Dealt:
    """A batch with the rows of each share, which override those of the dispatch mode.

    Every row must be in exactly one share.
    """

    batch: DataProto
    rows: Rows

    def __post_init__(self) -> None:
        if sorted(itertools.chain(*self.rows)) != list(range(len(self.batch))):
            raise ValueError(
                f"Each of the {len(self.batch)} rows must be dealt exactly once, got {self.rows}."
            )


def balanced(
    lengths: Sequence[int], num_shares: int, groups: Sequence[object] | None = None
) -> Rows:
    """Deal rows to shares of nearly equal tokens (Karmarkar and Karp 1982).

    Shares may have different numbers of rows, which ascend. If there are several groups per share,
    rows of one of `groups` stay together, so that their common prefix is computed once. No share is
    empty if there are as many rows as shares.
    """
    units: Rows = [[row] for row in range(len(lengths))]
    if groups is not None:
        together: dict[object, list[int]] = {}
        for row, group in enumerate(groups):
            together.setdefault(group, []).append(row)
        if len(together) >= 2 * num_shares:
            units = list(together.values())

    # Every weight is at least 1: a unit without weight would leave its share empty, and its rank
    # would wait for the others.
    tokens: list[int] = []
    for unit in units:
        tokens.append(max(sum(lengths[row] for row in unit), 1))

    shares: Rows = []
    for part in largest_differencing(tokens, num_shares):
        share: list[int] = []
        for unit in part:
            share += units[unit]
        shares.append(sorted(share))
    return shares


def largest_differencing(weights: Sequence[int], num_parts: int) -> Rows:
    """Divide positive `weights` into `num_parts` parts of nearly equal sums.

    O(n log n) merges of `num_parts` parts, see `merge_partitions`.
    """
    if not weights:
        return [[] for _ in range(num_parts)]
    partitions: list[Parts] = []
    for item, weight in enumerate(weights):
        empty_parts = [(0, [])] * (num_parts - 1)
        partitions.append([(weight, [item]), *empty_parts])

    parts = [sorted(items) for _, items in merge_partitions(partitions)]
    return sorted(parts, key=lambda items: items[:1] or [len(weights)])


def merge_partitions(partitions: Sequence[Parts], *, tie_step: int = 1) -> Parts:
    """Merge the two partitions with the largest inner differences, until one is left.

    The parts of each must descend. The largest part of one joins the smallest of the other.

    Args:
        tie_step: which of several partitions with equal differences comes first: 1, the earliest;
            -1, the latest.
    """
    # The count breaks ties, so that parts are never compared and every run deals alike.
    count = itertools.count(step=tie_step)
    heap: list[tuple[int, int, Parts]] = []
    for parts in partitions:
        heap.append((parts[-1][0] - parts[0][0], next(count), parts))
    heapq.heapify(heap)

    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(count), merged))
    return heap[0][2]


def in_windows(lengths: Sequence[int], num_shares: int, unit_rows: int = 1) -> Rows:
    """Deal one unit of each window of `num_shares` units to each share.

    In a window, the longest unit goes to the share with the fewest tokens. A mini-batch of whole
    windows is then the same set of rows, whether one rank slices it or each rank slices its share.

    Args:
        unit_rows: number of consecutive rows that stay together, such as all samples of a prompt.
    """
    shares: Rows = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    units: Rows = []
    sizes: list[int] = []
    for start in range(0, len(lengths), unit_rows):
        end = min(start + unit_rows, len(lengths))
        units.append(list(range(start, end)))
        sizes.append(sum(lengths[start:end]))

    for start in range(0, len(units), num_shares):
        end = min(start + num_shares, len(units))
        window = sorted(range(start, end), key=lambda unit: (-sizes[unit], unit))
        emptiest = sorted(range(num_shares), key=lambda share: (tokens[share], share))
        for unit, share in zip(window, emptiest):
            shares[share] += units[unit]
            tokens[share] += sizes[unit]

    return shares


def contiguous(num_rows: int, num_shares: int) -> Rows:
    """Deal rows in order, to shares with sizes that differ by at most one."""
    return [rows.tolist() for rows in np.array_split(np.arange(num_rows), num_shares)]


def token_counts(batch: DataProto) -> list[int] | None:
    """Return the number of tokens of each row; None without an `attention_mask`."""
    if batch.batch is None or "attention_mask" not in batch.batch.keys():
        return None
    return batch.batch["attention_mask"].sum(-1).tolist()


def with_masked_rows(batch: DataProto, count: int) -> DataProto:
    """Append `count` copies of the first rows, with a `response_mask` of 0.

    They count in no loss and no metric.
    """
    rows = len(batch)
    padded = batch.select_idxs(np.arange(rows + count) % rows)
    mask = padded.batch[MASK]
    padded.batch[MASK] = torch.cat([mask[:rows], torch.zeros_like(mask[rows:])])
    return padded
