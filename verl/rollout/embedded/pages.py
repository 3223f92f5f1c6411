"""Pages of the key-value cache: their holders, and the tokens that free pages still remember."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# token ids, or others that name them
Tokens = Sequence[int] | NDArray[np.int64]


class PageAllocator:
    """Pages 0..num_pages-1 of `page_size` tokens, with reference counts: free at 0, shared above 1.

    A full page can be registered under the tokens it holds and those before it. `find` returns it
    until it is allocated again. That happens when no other page is free, and the page that was
    freed longest ago comes first. The order of allocation depends on the calls alone, so a run can
    be repeated.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = 0
        self.page_size = page_size
        self.references: NDArray[np.int32] = np.zeros(0, np.int32)
        self._free: list[int] = []
        # Registered pages by their names, which are the key of the page before and the tokens. Keys
        # are never used twice, so once a page is allocated again, the pages behind it cannot be
        # found. All are bytes and numbers, which the garbage collector does not look at: with
        # tuples it stopped a rollout of 23,000 pages twice, for 15 ms each time.
        self._registered: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._keys: dict[int, int] = {}
        # registered pages without a holder, oldest first
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._last_key = 0
        self.peak = 0  # most pages in use at once since `reset_peak`
        self.grow(num_pages)

    def grow(self, num_pages: int) -> None:
        """Grow to `num_pages` pages. Existing pages keep their state."""
        assert num_pages >= self.num_pages
        free = [*range(num_pages - 1, self.num_pages - 1, -1), *self._free]
        references = np.append(self.references, np.zeros(num_pages - self.num_pages, np.int32))
        # no interrupt comes in between
        self._free = free
        self.references = references
        self.num_pages = num_pages

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Return `count` pages, each held once. Call `can_allocate` first."""
        assert self.can_allocate(count), f"asked for {count} pages with {self.num_free} free"
        unnamed = min(count, len(self._free))
        pages = self._free[len(self._free) - unnamed :][::-1]
        del self._free[len(self._free) - unnamed :]
        for _ in range(count - unnamed):
            pages.append(self._take_oldest())
        self.references[pages] = 1
        self._note_peak()
        return pages

    def share(self, pages: Sequence[int]) -> list[int]:
        """Add one hold to each of `pages`, which are in use or registered."""
        held = np.array(pages, np.int64)
        for page in held[self.references[held] == 0].tolist():
            assert page in self._idle, "shared a page without a holder"
            del self._idle[page]
        self.references[held] += 1
        self._note_peak()
        return list(pages)

    def free(self, pages: Sequence[int]) -> None:
        """Remove one hold from each of `pages`, all different. A page without holds is free."""
        # Backwards: without its first page the rest of a sequence cannot be found, so the first
        # page is reused last.
        held = np.array(pages[::-1], np.int64)
        counts = self.references[held] - 1
        assert (counts >= 0).all(), f"pages {held[counts < 0].tolist()} were freed twice"
        self.references[held] = counts
        for page in held[counts == 0].tolist():
            if page in self._names:
                self._idle[page] = None
            else:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return bool(self.references[page] > 1)

    def register(self, token_ids: Tokens, pages: Sequence[int]) -> None:
        """Let `find` return the full pages among `pages`, which hold the keys of `token_ids`."""
        full = len(token_ids) // self.page_size
        first, key = self._registered_part(pages[:full])
        rest = token_ids[first * self.page_size :]
        for page, tokens in zip(pages[first:], self._tokens_of_pages(rest)):
            name = _name(key, tokens)
            found = self._registered.get(name)
            if found is None:
                if page in self._names:
                    return  # registered behind other pages than these
                self._last_key += 1
                self._registered[name] = found = page
                self._names[page] = name
                self._keys[page] = self._last_key
            key = self._keys[found]

    def _registered_part(self, pages: Sequence[int]) -> tuple[int, int]:
        """Return how many of the first pages of a sequence need no look, and the key of the last.

        A registered page implies the tokens before it: its name has the key of the page before.
        """
        for number in range(len(pages) - 1, -1, -1):
            key = self._keys.get(pages[number])
            if key is not None:
                return number + 1, key
        return 0, 0

    def find(self, token_ids: Tokens) -> list[int]:
        """Return the registered pages with the keys of as many leading tokens as possible.

        `share` accepts them.
        """
        pages: list[int] = []
        key = 0
        for tokens in self._tokens_of_pages(token_ids):
            page = self._registered.get(_name(key, tokens))
            if page is None:
                break
            pages.append(page)
            key = self._keys[page]
        return pages

    def _tokens_of_pages(self, token_ids: Tokens) -> Iterator[bytes]:
        """Yield the tokens of each full page."""
        array = np.asarray(token_ids, np.int64)
        size = self.page_size * array.itemsize
        data = array.tobytes()
        for end in range(size, len(data) + 1, size):
            yield data[end - size : end]

    def forget(self) -> None:
        """Forget the tokens that pages hold. Pages in use stay in use."""
        self._free += list(self._idle)
        self._idle.clear()
        self._registered.clear()
        self._names.clear()
        self._keys.clear()

    def reset_peak(self) -> None:
        self.peak = self.num_pages - self.num_free

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that every page is free, or held exactly as often as `holders` list it.

        Each holder is one list of pages.
        """
        expected = np.zeros(self.num_pages, np.int32)
        for pages in holders:
            for page in pages:
                expected[page] += 1
        assert np.array_equal(expected, self.references), (
            "reference counts differ from the holders' lists"
        )

        free = [*self._free, *self._idle]
        assert len(set(free)) == len(free), "a page is free twice"
        assert sorted(free) == np.flatnonzero(expected == 0).tolist(), (
            "free list differs from the counts"
        )
        assert {page: name for name, page in self._registered.items()} == self._names, (
            "names of pages are lost"
        )
        assert self._keys.keys() == self._names.keys(), "a page has a key or a name alone"
        assert self._idle.keys() <= self._names.keys(), "a page without a name waits to be found"

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self.num_pages - self.num_free)

    def _take_oldest(self) -> int:
        page, _ = self._idle.popitem(last=False)
        del self._registered[self._names.pop(page)]
        del self._keys[page]
        return page


def _name(key: int, tokens: bytes) -> bytes:
    """Return the name of a page with these tokens, behind the page with `key` (0: the first)."""
    return key.to_bytes(8, "little") + tokens
