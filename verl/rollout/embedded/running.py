"""The samples that run: their tokens, their page tables and their counts, as arrays over slots."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from verl.rollout.embedded.samples import Group, IntArray, Sample
from verl.rollout.types import RouteArray
from verl.utils.ranges import joined_ranges


class RunningSamples:
    """The state of running samples. Runners read it; the scheduler decides who runs.

    A running sample owns a slot: one row of the arrays below. `running` lists the slots in order of
    admission.

    The device may be some draws ahead of this book-keeping: `launched` counts the launched draws,
    `drawn` those with tokens that have come back. A slot's `epoch` changes when its sample leaves,
    so that tokens which come back late are ignored.

    Args:
        slots: most samples that run at once.
        longest: most tokens that a sample draws.
        pages: most pages of a sample, its prompt included.
    """

    def __init__(self, *, slots: int, longest: int, pages: int) -> None:
        self.running: IntArray = np.empty(0, np.int64)
        self.table = np.zeros((slots, pages), np.int64)
        # pages of each sample, in the first entries of its row of `table`
        self.num_pages = np.zeros(slots, np.int64)
        # of these, the first ones that the last `take_changed` knew
        self._known_pages = np.zeros(slots, np.int64)
        self.prompt_tokens = np.zeros(slots, np.int64)
        # The last page that each prompt fills, or -1 if it fills none. Slots with the same one share
        # all pages up to it, or have copies with the keys of the same tokens.
        self.prompt_ends = np.zeros(slots, np.int64)
        # tokens with keys in the pages, now or after the launched steps
        self.cached = np.zeros(slots, np.int64)

        self.launched = np.zeros(slots, np.int64)
        self.drawn = np.zeros(slots, np.int64)
        self.epoch = np.zeros(slots, np.int64)
        self.limits = np.zeros(slots, np.int64)
        self.keys = np.zeros(slots, np.uint64)
        self.shifts = np.zeros(slots, np.int64)  # see `Group.shift`
        self.token_ids = np.zeros((slots, longest), np.int64)
        self.log_probs = np.zeros((slots, longest), np.float32)
        # (slots, longest, C) experts, if draws have them; see `Completion.routed_experts`
        self.routes: RouteArray | None = None

        self._samples: list[Sample | None] = [None] * slots

    @property
    def num_slots(self) -> int:
        """Number of samples that can run at once."""
        return len(self._samples)

    @property
    def unfinished(self) -> IntArray:
        """Return the running slots with draws left to launch."""
        return self.running[self.launched[self.running] < self.limits[self.running]]

    def group_of(self, slot: int) -> Group:
        return self._sample_in(slot).group

    def sample_id_of(self, slot: int) -> int:
        return self._sample_in(slot).sample_id

    def pages_of(self, slot: int) -> list[int]:
        """Return the pages of the sample in `slot`, in order; none if the slot is free."""
        return self.table[slot, : self.num_pages[slot]].tolist()

    def take_changed(self) -> tuple[IntArray, IntArray]:
        """Return the entries of `table` with pages that are new since the last call.

        Gives their slots and their places in the rows of these slots, both (n,).
        """
        slots = np.flatnonzero(self._known_pages < self.num_pages)
        known = self._known_pages[slots]
        counts = self.num_pages[slots] - known
        self._known_pages[slots] += counts
        return slots.repeat(counts), joined_ranges(known, counts)

    def launch(self, slots: IntArray, *, fed: int) -> None:
        """Record the launch of the first draw of each slot (fed = 0), or of `fed` further draws.

        Each further draw also writes one token to the slot's pages.
        """
        self.launched[slots] += max(fed, 1)
        self.cached[slots] += fed

    def keep_routes(self, choices: int, dtype: np.dtype) -> None:
        """Make room for the experts of every token, `choices` ids each."""
        size = (*self.token_ids.shape, choices)
        self.routes = np.full(size, np.iinfo(dtype).max, dtype)

    def record(
        self,
        slots: IntArray,
        token_ids: IntArray,
        log_probs: NDArray[np.float32],
        routes: RouteArray | None = None,
    ) -> IntArray:
        """Record the tokens drawn by slots (b,). Return the number of tokens of each, (b,).

        `routes` (b, C) are the experts of the tokens that were fed; None after a prefill.
        """
        place = self.drawn[slots]
        if self.routes is not None:
            unknown = np.iinfo(self.routes.dtype).max
            self.routes[slots, place] = unknown if routes is None else routes
        self.token_ids[slots, place] = token_ids
        self.log_probs[slots, place] = log_probs
        self.drawn[slots] = place + 1
        return place + 1

    def drawn_since(self, known: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Return tokens and log-probs of running samples after the first `known[sample id]`."""
        news = {}
        for slot in self.running.tolist():
            sample_id = self.sample_id_of(slot)
            begin = known.get(sample_id)
            end = self.drawn[slot]
            if begin is not None and begin < end:
                token_ids = self.token_ids[slot, begin:end].tolist()
                news[sample_id] = (token_ids, self.log_probs[slot, begin:end].tolist())
        return news

    def _sample_in(self, slot: int) -> Sample:
        sample = self._samples[slot]
        assert sample is not None
        return sample

    def _load(self, slot: int, sample: Sample) -> None:
        """Copy a sample into the arrays of its slot, with the tokens that it has drawn before."""
        count = len(sample.token_ids)
        if count:
            self.token_ids[slot, :count] = sample.token_ids
            self.log_probs[slot, :count] = sample.log_probs
            if self.routes is not None:
                unknown = np.iinfo(self.routes.dtype).max
                self.routes[slot, :count] = unknown if sample.routes is None else sample.routes

        self.launched[slot] = self.drawn[slot] = count
        self.limits[slot] = sample.limit
        self.keys[slot] = sample.key
        self.shifts[slot] = sample.group.shift
        self.prompt_tokens[slot] = len(sample.group.prompt)
        self._samples[slot] = sample

    def _save(self, slot: int) -> Sample:
        """Return the sample in `slot`, with all tokens that it has drawn."""
        sample = self._sample_in(slot)
        count = self.drawn[slot]
        sample.token_ids = self.token_ids[slot, :count].tolist()
        sample.log_probs = self.log_probs[slot, :count].tolist()
        if self.routes is not None:
            sample.routes = self.routes[slot, :count].copy()
        return sample
