"""Which rows of a batch go to which rank: as many tokens to each, decided from the lengths
alone."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl.protocol import DataProto

MASK = "response_mask"

Rows = list[list[int]]  # of each share, in the order in which it gets them


@dataclass(frozen=True)
class Dealt:
    """A batch with the rows of each share, where the caller knows better than the dispatch mode how
    to deal them.

    Every row must stand in exactly one share.
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
    """Shares of nearly equal tokens, of any number of rows (Karmarkar and Karp 1982); rows of a
    share ascend.

    Rows of one of `groups` stay together where there are several groups to a share, so that what
    they have in common is computed once. No share is empty while there are as many rows as shares.
    """
    units: Rows = [[row] for row in range(len(lengths))]
    if groups is not None:
        together: dict[object, list[int]] = {}
        for row, group in enumerate(groups):
            together.setdefault(group, []).append(row)
        if len(together) >= 2 * num_shares:
            units = list(together.values())
    # At least one each: a part without weight would be merged away, and its rank would wait for the
    # others.
    tokens = [max(sum(lengths[row] for row in unit), 1) for unit in units]
    return [
        sorted(row for unit in part for row in units[unit])
        for part in largest_differencing(tokens, num_shares)
    ]


def largest_differencing(weights: Sequence[int], num_parts: int) -> Rows:
    """Positive `weights` in `num_parts` parts of nearly equal sums: the two partitions that differ
    most within are merged, largest part with smallest, until one is left. O(n log n) merges of
    `num_parts` parts."""
    # breaks ties, so that parts are never compared and every run deals alike
    count = itertools.count()
    heap = [
        (-weight, next(count), [(weight, [item])] + [(0, [])] * (num_parts - 1))
        for item, weight in enumerate(weights)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(count), merged))
    parts = [items for _, items in heap[0][2]] if heap else [[] for _ in range(num_parts)]
    return sorted((sorted(items) for items in parts), key=lambda items: items[:1] or [len(weights)])


def in_windows(lengths: Sequence[int], num_shares: int, unit_rows: int = 1) -> Rows:
    """One unit of each window of `num_shares` units to each share, the longest to the share that
    has the fewest tokens.

    A mini-batch of whole windows is then the same set of rows whether one rank slices it or each
    slices its share.
    `unit_rows`: how many rows in sequence stay together, all samples of a prompt, say.
    """
    shares: Rows = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    units = [
        list(range(len(lengths)))[start : start + unit_rows]
        for start in range(0, len(lengths), unit_rows)
    ]
    sizes = [sum(lengths[row] for row in unit) for unit in units]

    for start in range(0, len(units), num_shares):
        window = sorted(
            range(start, min(start + num_shares, len(units))), key=lambda unit: (-sizes[unit], unit)
        )
        emptiest = sorted(range(num_shares), key=lambda share: (tokens[share], share))
        for unit, share in zip(window, emptiest):
            shares[share] += units[unit]
            tokens[share] += sizes[unit]

    return shares


def contiguous(num_rows: int, num_shares: int) -> Rows:
    """Shares in order, of sizes that differ by at most one."""
    return [rows.tolist() for rows in np.array_split(np.arange(num_rows), num_shares)]


def token_counts(batch: DataProto) -> list[int] | None:
    """Tokens of each row, where `attention_mask` tells them."""
    if batch.batch is None or "attention_mask" not in batch.batch.keys():
        return None
    return batch.batch["attention_mask"].sum(-1).tolist()


def with_masked_rows(batch: DataProto, count: int) -> DataProto:
    """`count` rows more, copies of the first ones whose `response_mask` is 0: they count in no loss
    and no metric."""
    rows = len(batch)
    padded = batch.select_idxs(np.arange(rows + count) % rows)
    padded.batch[MASK] = torch.cat(
        [padded.batch[MASK][:rows], torch.zeros_like(padded.batch[MASK][rows:])]
    )
    return padded
