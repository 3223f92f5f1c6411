"""Pages for samples that wait: held until they start or go on, or found by their tokens."""

from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Group, IntArray, Sample


class WaitingPages:
    """Pages with keys and values that spare a waiting sample its prefill, or a part of it.

    Held are the pages of a prompt until its last sample has started, and the full pages of samples
    that were taken out and will go on. Either is dropped where running samples need the memory.
    Other pages are free, but can be found by their tokens (`prefix_caching`).

    Args:
        pages: the pages of the cache and their holds.
        prefix_caching: whether pages can be found by their tokens.
        kept: the pages of samples that were taken out, by their noise key. The engine owns this
            dictionary, which outlives a scheduler.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        prefix_caching: bool,
        kept: dict[int, list[int]],
    ) -> None:
        self._pages = pages
        self._prefix_caching = prefix_caching
        self._kept = kept
        self._prompts: list[Group] = []  # with pages that are held

    def hold_prompt(self, group: Group, pages: list[int]) -> None:
        """Take over a hold on the pages of a prompt, for its samples."""
        group.pages = pages
        self._prompts.append(group)

    def release_started(self) -> None:
        """Release the pages of prompts that have started all samples."""
        for group in [group for group in self._prompts if group.unstarted == 0]:
            self._drop_prompt(group)

    def keep(self, key: int, pages: list[int]) -> None:
        """Take over a hold on the full pages of the sample with this noise key."""
        self._kept[key] = pages

    def take_kept(self, sample: Sample) -> list[int]:
        """Return the pages that were kept for a sample; none if they end within a picture."""
        kept = self._kept.pop(int(sample.key), [])
        if len(kept) * self._pages.page_size >= sample.group.text_begins:
            return kept
        self._pages.free(kept)
        return []

    def find(self, names: IntArray, group: Group) -> list[int]:
        """Return cached pages of the first tokens, if they cover at least a fifth of all tokens.

        They must cover the last picture, because the rest is computed from tokens alone.

        The last token is always left to compute. Sequences with cached pages are a pass of their
        own over the weights, so a few cached tokens do not pay.
        """
        if not self._prefix_caching:
            return []
        found = self._pages.find(names[:-1])
        covered = len(found) * self._pages.page_size
        pays = 5 * covered >= len(names)
        return found if pays and covered >= group.text_begins else []

    def drop_some(self) -> bool:
        """Drop all prompts, or else all kept pages. Returns False if none was held."""
        return self.drop_prompts() or self._drop_kept()

    def drop_until(self, needed: int) -> bool:
        """Drop as much as it takes to allocate `needed` pages. Returns whether that is possible."""
        for drop in (self.drop_prompts, self._drop_kept):
            if self._pages.can_allocate(needed):
                break
            drop()
        return self._pages.can_allocate(needed)

    def drop_prompts(self) -> bool:
        """Drop the prompts of samples yet to start, which compute them again.

        Returns False if no prompt was held.
        """
        dropped = bool(self._prompts)
        for group in list(self._prompts):
            self._drop_prompt(group)
        return dropped

    def holders(self) -> list[list[int]]:
        """Return the pages that are held, a list for each prompt and each kept sample."""
        prompts = [group.pages for group in self._prompts if group.pages is not None]
        return [*prompts, *self._kept.values()]

    def _drop_kept(self) -> bool:
        """Drop the pages kept for samples that go on, which compute them again.

        Returns False if none was kept.
        """
        dropped = bool(self._kept)
        for pages in self._kept.values():
            self._pages.free(pages)
        self._kept.clear()
        return dropped

    def _drop_prompt(self, group: Group) -> None:
        assert group.pages is not None
        self._pages.free(group.pages)
        group.pages = None
        group.hidden = None
        self._prompts.remove(group)
