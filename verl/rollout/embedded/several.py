"""Several tokens of a sample in one step: drafts, and tokens that come between two turns."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from verl.rollout.embedded.runner import Draws
from verl.rollout.embedded.samples import IdLists, IntArray, Prefill
from verl.rollout.embedded.scheduler import Scheduler
from verl.utils.ranges import joined_ranges


@dataclass(frozen=True)
class Fed:
    """The tokens that a step feeds, those of a sample side by side; each (n,)."""

    slots: IntArray  # of their samples
    ids: IntArray
    positions: IntArray  # places in their sequences
    drawn: IntArray  # response positions of the draws after them

    @classmethod
    def last(cls, scheduler: Scheduler, slots: IntArray) -> "Fed":
        """Return the last token of each of `slots` (b,)."""
        drawn = scheduler.drawn[slots]
        return cls(slots, scheduler.token_ids[slots, drawn - 1], scheduler.cached[slots], drawn)

    @classmethod
    def drafts(cls, scheduler: Scheduler, slots: IntArray, drafts: IdLists) -> "Fed":
        """Return the last token of each of `slots` (b,), followed by its draft."""
        last = cls.last(scheduler, slots)
        counts = np.array([1 + len(draft) for draft in drafts])
        ids = [np.array([token, *draft], np.int64) for token, draft in zip(last.ids, drafts)]
        ahead = joined_ranges(np.zeros_like(counts), counts)
        return cls(
            slots.repeat(counts),
            np.concatenate(ids),
            last.positions.repeat(counts) + ahead,
            last.drawn.repeat(counts) + ahead,
        )

    @classmethod
    def prefills(cls, scheduler: Scheduler, prefills: Mapping[int, Prefill]) -> "Fed":
        """Return the tokens of `prefills`, by slot, whose keys are not cached.

        Only the draws after their last tokens count.
        """
        slots: list[int] = []
        ids: list[int] = []
        positions: list[int] = []
        for slot, prefill in prefills.items():
            new = prefill.token_ids[prefill.cached :]
            slots += [slot] * len(new)
            ids += new
            positions += range(prefill.cached, len(prefill.token_ids))
        owners = np.array(slots, np.int64)
        return cls(owners, np.array(ids), np.array(positions), scheduler.drawn[owners])

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Return which tokens are the first of their sample."""
        return np.insert(self.slots[1:] != self.slots[:-1], 0, True)

    @property
    def is_last(self) -> NDArray[np.bool_]:
        """Return which tokens are the last of their sample."""
        return np.append(self.slots[1:] != self.slots[:-1], True)

    def take(self, rows: NDArray) -> "Fed":
        """Return the tokens that `rows` selects."""
        return Fed(self.slots[rows], self.ids[rows], self.positions[rows], self.drawn[rows])


def right_draws(fed: Fed, draws: Draws) -> list[Draws]:
    """Return the right ones of the draws after drafts: first those of all samples, and so on.

    A draft is right if the draw before it, which was right, gave it.
    """
    tokens, _ = draws.result()
    starts = np.flatnonzero(fed.is_first)
    counts = np.diff(starts, append=len(fed.ids))
    ahead = joined_ranges(np.zeros_like(counts), counts)
    most = int(ahead.max())
    right = fed.is_first
    for number in range(1, most + 1):
        rows = np.flatnonzero(ahead == number)
        is_drawn = fed.ids[rows] == tokens[rows - 1]
        right[rows] = right[rows - 1] & is_drawn

    steps = []
    for number in range(most + 1):
        rows = np.flatnonzero(right & (ahead == number))
        if rows.size:
            steps.append(draws.take(rows))
    return steps
