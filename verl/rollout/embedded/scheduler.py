"""Schedule samples: which run, which wait, and which pages each holds.

`running` has the arrays of those that run, `waiting_pages` the pages held for those that wait. The
last hidden state of a prompt is the only tensor here.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.running import RunningSamples
from verl.rollout.embedded.samples import Admission, IntArray, Prefill, Sample, completion_of
from verl.rollout.embedded.waiting_pages import WaitingPages
from verl.rollout.types import Completion
from verl.utils.arithmetic import ceil_div
from verl.utils.ranges import joined_ranges

# Steps that a CPU takes at once; samples that end are computed on with until the last. With 1, 2, 4,
# 8 and 16 of them 128 samples of 64 tokens took 195, 183, 160, 153 and 143 ms.
STEPS_AT_ONCE = 8
# Of so many slots one may be known to end before the last of them.
SLOTS_BEHIND = 16


class Scheduler(RunningSamples):
    """Admits samples in order of request and sample, and pre-empts the latest admitted one.

    A pre-empted sample waits at the front. With `redraw` it begins anew, otherwise with the tokens
    it has drawn.

    `kept` has the full pages of samples that were taken out and will go on, by their noise key.
    They are held until then, or until their memory is needed.
    """

    def __init__(
        self,
        samples: Iterable[Sample],
        pages: PageAllocator,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        refill: int = 1,
        prefix_caching: bool = False,
        redraw: bool = False,
        least_slots: int = 0,
        least_tokens: int = 0,
        kept: dict[int, list[int]] | None = None,
    ) -> None:
        self.waiting = deque(samples)
        self.pages = pages
        self.page_size = pages.page_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.refill = refill
        self.prefix_caching = prefix_caching
        self.redraw = redraw
        self.max_num_seqs = max_num_seqs
        self.preemptions = 0
        self.discarded = 0  # tokens that pre-empted samples draw again

        slots = min(max_num_seqs, max(len(self.waiting), least_slots))
        longest = max(1, _most_drawn(self.waiting), least_tokens)
        sequence = max(1, _longest_sequence(self.waiting), least_tokens)
        super().__init__(slots=slots, longest=longest, pages=ceil_div(sequence, self.page_size))

        self._free_slots = list(range(slots))
        self._waiting_pages = WaitingPages(
            pages,
            prefix_caching=prefix_caching,
            kept={} if kept is None else kept,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.waiting) or self.running.size > 0

    def sample_ids(self) -> set[int]:
        """Return the ids of the samples that wait or run."""
        running = [sample.sample_id for sample in self._samples if sample is not None]
        return {*running, *(sample.sample_id for sample in self.waiting)}

    def has_room_for(self, samples: Sequence[Sample]) -> bool:
        """Return whether `add` can take these samples: enough slots, and wide enough tables."""
        longest = _most_drawn(samples)
        tokens = _longest_sequence(samples)
        pages = ceil_div(tokens, self.page_size)
        wanted = len(self.waiting) + self.running.size + len(samples)
        return (
            min(wanted, self.max_num_seqs) <= self.num_slots
            and longest <= self.token_ids.shape[1]
            and pages <= min(self.table.shape[1], self.pages.num_pages)
        )

    def add(self, samples: Iterable[Sample]) -> None:
        """Add samples to the end of the queue."""
        self.waiting.extend(samples)

    def abort(self, sample_ids: Collection[int], *, keep: bool = False) -> list[Completion]:
        """End samples with the tokens drawn so far, maybe none.

        None of their tokens may still be on the device. `keep` holds their pages.
        """
        slots = [slot for slot in self.running.tolist() if self.sample_id_of(slot) in sample_ids]
        if keep:
            for slot in slots:
                full = int(self.cached[slot]) // self.page_size
                pages = self.pages.share(self.pages_of(slot)[:full])
                self._waiting_pages.keep(int(self.keys[slot]), pages)
        completions = self.finish(slots, set(), reason="abort")

        staying: deque[Sample] = deque()
        for sample in self.waiting:
            if sample.sample_id not in sample_ids:
                staying.append(sample)
                continue
            if not sample.token_ids:
                sample.group.unstarted -= 1
            completions.append(completion_of(sample, "abort"))
        self.waiting = staying
        self.release_started_prompts()
        return completions

    def withdraw(self) -> list[Sample]:
        """Return all samples with their tokens, in the order in which they would continue.

        The scheduler cannot be used afterwards; it forgets their pages.
        """
        self._waiting_pages.drop_prompts()
        for slot in reversed(self.running.tolist()):
            self._preempt(slot)
        return list(self.waiting)

    def admit(self, step_rows: int = 0) -> Admission | None:
        """Start as many waiting samples as slots, pages and the token budget of a prefill allow.

        While others run, samples start only when `refill` of them can start at once, because each
        prefill has a fixed price. It is spared where all that has to be computed fits `step_rows`
        additional rows of their next step, so a few samples too many wait for the step after.
        """
        if self.running.size and len(self._free_slots) < min(self.refill, len(self.waiting)):
            return None
        admission = Admission()
        while self.waiting and self._free_slots:
            sample = self.waiting[0]
            if sample.token_ids or sample.group.pages is None:
                if not self._admit_to_prefill(sample, admission, step_rows):
                    break
            elif self.pages.can_allocate(self._spare_pages(admission)):
                admission.are_rows = False  # it draws from the prefill of another sample
            else:
                break
            self._start(self.waiting.popleft(), admission)

        if not admission.slots:
            return None
        self.running = np.append(self.running, admission.slots)
        if self.prefix_caching:
            for prefill in admission.prefills:
                if not prefill.has_old_keys:
                    self.pages.register(prefill.names, prefill.pages)

        return admission

    def _admit_to_prefill(self, sample: Sample, admission: Admission, step_rows: int) -> bool:
        """Give a sample pages for its tokens so far. Return False if it has to wait."""
        group = sample.group
        is_prompt = not sample.token_ids
        token_ids = [*group.prompt, *sample.token_ids]
        names = np.concatenate([group.names, np.array(sample.token_ids, np.int64)])
        needed = ceil_div(len(token_ids), self.page_size)
        kept = [] if is_prompt else self._waiting_pages.take_kept(sample)
        found = kept or self._waiting_pages.find(names, group)
        cached = len(found) * self.page_size
        uncached = len(token_ids) - cached

        # Samples that start later need the hidden state, which a step does not give.
        is_row = bool(found) and not (is_prompt and group.unstarted > 1)
        waits = self._waits_a_step(admission, uncached - 1 if is_row else None, step_rows)
        # A sequence longer than the whole budget is computed alone.
        fits = not admission.prefills or admission.tokens + uncached <= self.max_num_batched_tokens
        spare = self._spare_pages(admission)
        idle = not admission.slots and not self.running.size
        if waits or not fits or not self._make_room(needed - len(kept), spare, idle=idle):
            if kept:
                self._waiting_pages.keep(int(sample.key), kept)
            return False

        held = kept or self.pages.share(found)
        pages = [*held, *self.pages.allocate(needed - len(found))]
        sample.has_old_keys = bool(kept)
        prefill = Prefill(token_ids, names, pages, cached, group, is_prompt, bool(kept))
        admission.add(prefill, is_row=is_row)
        if is_prompt:
            self._waiting_pages.hold_prompt(group, pages)
        return True

    def _make_room(self, needed: int, spare: int, *, idle: bool) -> bool:
        if idle:
            # Nothing runs, so only prompts and samples kept for later can hold pages. That one
            # sample fits alone was checked before the first was admitted.
            return self._waiting_pages.drop_until(needed)
        return self.pages.can_allocate(needed + spare)

    def _spare_pages(self, admission: Admission) -> int:
        """Return how many pages stay free when the next sample starts.

        Every sample needs a page of its own soon: the copy of its prompt's last page, or the next
        one.
        """
        started = len(admission.slots)
        return started + (self.running.size + started) // self.page_size

    def _waits_a_step(self, admission: Admission, rows: int | None, step_rows: int) -> bool:
        """Return whether the next sample, of `rows`, waits so that the others fit `step_rows`.

        Where they would be many steps behind, one prefill for all is cheaper.
        """
        if not admission.fits_step(step_rows):
            return False
        fits = rows is not None and admission.rows + rows <= step_rows
        return not fits and len(self.waiting) <= 2 * len(admission.slots)

    def steps_ahead(self, most: int) -> int:
        """Return how many steps, from 1 to `most`, all unfinished slots can take together.

        No more than one slot of SLOTS_BEHIND is computed on with after its last token, and all have
        pages for what they may draw.
        """
        most = min(most, self.page_size)
        if most == 1:
            return 1
        rows = self.unfinished
        if rows.size:
            left = self.limits[rows] - self.launched[rows]
            place = rows.size // SLOTS_BEHIND
            most = min(most, int(np.partition(left, place)[place]))
        return self.steps_with_pages(most)

    def steps_with_pages(self, steps: int) -> int:
        """Return `steps` if there are pages for so many tokens of each unfinished slot, else 1."""
        if steps == 1 or self.pages.can_allocate(len(self._lacking_pages(steps)[0])):
            return steps
        return 1

    def prepare_decode(
        self, steps: int, *, may_preempt: bool = True
    ) -> tuple[list[tuple[int, int]], bool]:
        """Give every unfinished slot pages of its own for `steps` more tokens, or all it may draw.

        Pre-empts the latest admitted sample where pages are missing.

        Returns:
            The pages to copy, (from, to): the partly filled last page of a prompt is shared until a
            sample writes to it. And whether every slot has its pages: False only where a sample
            would have to be pre-empted and `may_preempt` is False, because tokens that it has drawn
            are still on the device.
        """
        slots, places = self._lacking_pages(steps)
        if not slots.size:
            return [], True
        if self.pages.can_allocate(len(slots)):
            missing = places >= self.num_pages[slots]
            self._give_pages(slots[missing], places[missing])
            slots, places = slots[~missing], places[~missing]

        copies: list[tuple[int, int]] = []
        for slot, place in zip(slots.tolist(), places.tolist()):
            while self._samples[slot] is not None:
                old = int(self.table[slot, place]) if place < self.num_pages[slot] else None
                if old is not None and not self.pages.is_shared(old):
                    break  # the other samples no longer share it
                if not self.pages.can_allocate(1):
                    if not self._waiting_pages.drop_some():
                        if not may_preempt:
                            return copies, False
                        self._preempt(int(self.running[-1]))
                    continue
                self._give_pages(np.array([slot]), np.array([place]))
                if old is not None:
                    copies.append((old, int(self.table[slot, place])))
                    self.pages.free([old])
                break

        return copies, True

    def _give_pages(self, slots: IntArray, places: IntArray) -> None:
        """Allocate pages for entries of `table`, both (n,): next ones, or a single replaced one."""
        self.table[slots, places] = self.pages.allocate(len(slots))
        # Of several next entries of a slot, the last counts.
        self.num_pages[slots] = np.maximum(self.num_pages[slots], places + 1)
        self._known_pages[slots] = np.minimum(self._known_pages[slots], places)

    def release_started_prompts(self) -> None:
        """Release the pages of prompts that have started all samples.

        Called once the first tokens of these samples are drawn.
        """
        self._waiting_pages.release_started()

    def finish(
        self, slots: Sequence[int], stopped: set[int], reason: str = "length"
    ) -> list[Completion]:
        """End the samples in `slots`.

        The finish reason is "stop" for the slots in `stopped`, and `reason` for the others.
        """
        completions = []
        for slot in slots:
            sample = self._save(slot)
            if self.prefix_caching and not sample.has_old_keys:
                drawn = self.token_ids[slot, : self.drawn[slot]]
                names = np.concatenate([sample.group.names, drawn])[: self.cached[slot]]
                self.pages.register(names, self.pages_of(slot))
            own_reason = "stop" if slot in stopped else reason
            completions.append(completion_of(sample, own_reason))
            self._release(slot)
        # Every running sample has a page.
        self.running = self.running[self.num_pages[self.running] > 0]
        return completions

    def check_integrity(self) -> None:
        """Assert that pages are held by running samples and for waiting ones, and by none else."""
        held = map(self.pages_of, range(self.num_slots))
        self.pages.check_integrity([*held, *self._waiting_pages.holders()])

    def _lacking_pages(self, steps: int) -> tuple[IntArray, IntArray]:
        """Find the pages that unfinished slots need for `steps` tokens, or the last, but do not own.

        Returns their slots and their places in the rows of `table`, both (n,). The page is missing
        or shared.
        """
        rows = self.unfinished
        size = self.page_size
        cached = self.cached[rows]
        full = cached // size
        is_own = (cached > full * size) & (self.pages.references[self.table[rows, full]] == 1)
        begin = full + is_own  # the last page, partly filled, may be shared
        left = self.limits[rows] - self.launched[rows]
        end = -(-(cached + np.minimum(steps, left)) // size)

        lacking = np.flatnonzero(begin < end)
        begin = begin[lacking]
        counts = end[lacking] - begin
        return rows[lacking].repeat(counts), joined_ranges(begin, counts)

    def _start(self, sample: Sample, admission: Admission) -> None:
        slot = heapq.heappop(self._free_slots)
        group = sample.group
        if sample.token_ids:
            prefill = admission.prefills[-1]
            admission.resumed[slot] = prefill
            held = prefill.pages
        else:
            assert group.pages is not None
            held = self.pages.share(group.pages)
            group.unstarted -= 1

        self.cached[slot] = len(group.prompt) + len(sample.token_ids)
        self.table[slot] = 0
        self.table[slot, : len(held)] = held
        self.num_pages[slot] = len(held)
        full = len(group.prompt) // self.page_size
        self.prompt_ends[slot] = held[full - 1] if full else -1

        self._load(slot, sample)
        admission.slots.append(slot)

    def _preempt(self, slot: int) -> None:
        sample = self._save(slot)
        if self.redraw:
            # Drawing again gives the same tokens and the same bits of their keys. A prefill would
            # give keys with other bits.
            self.discarded += len(sample.token_ids) - sample.begun
            sample.token_ids = sample.token_ids[: sample.begun]
            sample.log_probs = sample.log_probs[: sample.begun]
            if sample.routes is not None:
                sample.routes = sample.routes[: sample.begun]
            if not sample.begun:
                sample.group.unstarted += 1

        self.waiting.appendleft(sample)
        self._release(slot)
        self.running = self.running[:-1]
        self.preemptions += 1

    def _release(self, slot: int) -> None:
        self.pages.free(self.pages_of(slot))
        self.num_pages[slot] = self._known_pages[slot] = 0
        self._samples[slot] = None
        self.epoch[slot] += 1
        heapq.heappush(self._free_slots, slot)


def _most_drawn(samples: Collection[Sample]) -> int:
    """Return the most tokens that one of these samples draws."""
    return max((sample.limit for sample in samples), default=0)


def _longest_sequence(samples: Collection[Sample]) -> int:
    """Return the most tokens of a sample with its prompt."""
    lengths = [len(sample.group.prompt) + sample.limit for sample in samples]
    return max(lengths, default=0)
