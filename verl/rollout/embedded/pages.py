"""Which page of the key-value cache belongs to whom."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class PageAllocator:
    """Pages 0..num_pages-1 with reference counts: a page is free when nobody holds it, shared when several do.

    The order in which pages are handed out depends on the calls alone, so a run can be repeated.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references: NDArray[np.int32] = np.zeros(num_pages, np.int32)
        self._free = list(range(num_pages - 1, -1, -1))
        self.peak = 0  # most pages in use at once since `reset_peak`

    @property
    def num_free(self) -> int:
        return len(self._free)

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` pages, each held once. Ask `can_allocate` first."""
        assert self.can_allocate(count), f"asked for {count} pages with {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        self.references[pages] = 1
        self.peak = max(self.peak, self.num_pages - len(self._free))
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Hold `pages` (all in use, each once) one time more."""
        assert all(self.references[page] > 0 for page in pages), "shared a page that nobody holds"
        self.references[list(pages)] += 1
        return list(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Let go of `pages`, one hold each; a page whose last hold this was is free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} was freed twice"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return bool(self.references[page] > 1)

    def reset_peak(self) -> None:
        self.peak = self.num_pages - len(self._free)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Every page is either free or held exactly as often as `holders` (one list of pages each) say."""
        expected = np.zeros(self.num_pages, np.int32)
        for pages in holders:
            for page in pages:
                expected[page] += 1
        assert np.array_equal(expected, self.references), "reference counts differ from the holders' lists"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert sorted(self._free) == np.flatnonzero(expected == 0).tolist(), "free list differs from the counts"
