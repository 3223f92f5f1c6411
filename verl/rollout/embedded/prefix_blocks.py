"""Rows of a decode step in the order of their prompts, and blocks of rows that share pages."""

from typing import NamedTuple

import numpy as np

from verl.rollout.embedded.running import RunningSamples
from verl.rollout.embedded.samples import IntArray
from verl.utils.ranges import joined_ranges


class PrefixBlocks(NamedTuple):
    """The rows [rows[i], rows[i] + counts[i]) share the pages of their first tokens[i] tokens."""

    rows: IntArray  # (n,)
    counts: IntArray  # (n,)
    tokens: IntArray  # (n,)
    covered: IntArray  # (b,), the tokens of each row's block; 0: the row is in none

    @property
    def saved(self) -> float:
        """Return the tokens that a row need not read for itself, on average."""
        return float(((self.counts - 1) * self.tokens).sum()) / max(1, len(self.covered))


def neighbors(samples: RunningSamples, slots: IntArray) -> IntArray:
    """Return slots (b,) with the samples of a prompt side by side.

    Its pages are then read from memory once, and again from the L2 cache. Prompts that begin alike
    are neighbors, too.
    """
    return slots[np.lexsort((samples.prompt_ends[slots], samples.table[slots, 0]))]


def prefix_blocks(ends: IntArray, tokens: IntArray, *, fewest: int, most: int) -> PrefixBlocks:
    """Cut neighbors of the same prompt into blocks of about equal size, up to `most` rows.

    Args:
        ends: (b,), see `RunningSamples.prompt_ends`.
        tokens: (b,), in the pages up to there.
        fewest: rows of a prompt that get blocks. If it is `most / 2` or less, b rows have b /
            fewest blocks at most.
        most: rows of a block.
    """
    starts = np.flatnonzero(np.append(True, ends[1:] != ends[:-1])[: len(ends)])
    sizes = np.diff(np.append(starts, len(ends)))
    taken = (sizes >= fewest) & (ends[starts] >= 0)
    starts, sizes = starts[taken], sizes[taken]

    parts = -(-sizes // most)
    prompt = np.repeat(np.arange(len(sizes)), parts)
    part = joined_ranges(np.zeros_like(parts), parts)
    begin = sizes[prompt] * part // parts[prompt]
    end = sizes[prompt] * (part + 1) // parts[prompt]
    rows = starts[prompt] + begin
    counts = end - begin

    covered = np.zeros_like(tokens)
    index = joined_ranges(rows, counts)
    covered[index] = tokens[index]
    return PrefixBlocks(rows, counts, tokens[rows], covered)
