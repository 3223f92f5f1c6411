"""The scheduler without a model: with any sizes, every sample ends once, with its own tokens, on
its own pages."""

from collections import deque
from unittest.mock import patch

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout.embedded import scheduler as scheduling
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Admission, Group, Sample
from verl.rollout.embedded.scheduler import SLOTS_BEHIND, Scheduler
from verl.rollout.types import Completion

PAGE = 4


class FakeDevice:
    """A device that keeps tokens and tables, and a cache of the tokens written to each page slot.

    Sample i draws token 100 * i + position. Before each draw, the row must find its prompt and its
    own tokens in its pages, and must not write to a page of another row.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.cache = np.zeros((scheduler.pages.num_pages, PAGE), np.int64)
        self.table = np.zeros_like(scheduler.table)
        self.texts: dict[int, list[int]] = {}  # by slot

    def start(self, admission: Admission) -> np.ndarray:
        for prefill in admission.prefills:
            for place, token in enumerate(prefill.token_ids):
                where = prefill.pages[place // PAGE], place % PAGE
                if place < prefill.cached:
                    assert self.cache[where] == token, "a page was found that holds other tokens"
                else:
                    self.cache[where] = token
            if prefill.group is not None:
                prefill.group.hidden = torch.zeros(1)

        for slot in admission.slots:
            group = self.scheduler.group_of(slot)
            assert slot in admission.resumed or group.hidden is not None
            count = self.scheduler.drawn[slot]
            self.texts[slot] = [*group.prompt, *self.scheduler.token_ids[slot, :count].tolist()]

        return self.draw(np.array(admission.slots))

    def decode(self, slots: np.ndarray, ahead: int) -> np.ndarray:
        for slot in slots.tolist():
            place = len(self.texts[slot]) - 1
            assert place == self.scheduler.cached[slot] + ahead
            drawn = len(self.texts[slot]) - len(self.scheduler.group_of(slot).prompt)
            if drawn >= self.scheduler.limits[slot]:
                continue  # it has no page for what it is computed on with
            self.show()
            page = self.table[slot, place // PAGE]
            assert self.scheduler.pages.references[page] == 1, "a shared page was written to"
            assert page not in self.scheduler.pages._names, "a registered page was written to"
            self.cache[page, place % PAGE] = self.texts[slot][-1]
            assert self.cache[self.table[slot]].flatten()[: place + 1].tolist() == self.texts[slot]
        return self.draw(slots)

    def show(self) -> None:
        changed = self.scheduler.take_changed()
        self.table[changed] = self.scheduler.table[changed]

    def draw(self, slots: np.ndarray) -> np.ndarray:
        self.show()
        tokens = []
        for slot in slots.tolist():
            position = len(self.texts[slot]) - len(self.scheduler.group_of(slot).prompt)
            tokens.append(100 * self.scheduler.sample_id_of(slot) + position)
            self.texts[slot].append(tokens[-1])
        return np.array(tokens)


def drive(
    prompts: list[int],
    n: int,
    limits: list[int],
    spare: int,
    max_num_seqs: int,
    budget: int,
    stop: int = 99,
    lag: int = 0,
    refill: int = 1,
    redraw: bool = False,
    prefix_caching: bool = False,
    most: int = 1,
    behind: int = SLOTS_BEHIND,
) -> Scheduler:
    """Run samples to their limit, or until they draw their `stop`-th token.

    A stop is seen `lag` draws late. Up to `most` steps run at once when all samples are admitted,
    of which one in `behind` may end before the last step.
    """
    groups = [Group(prompt=tuple(range(length)), unstarted=n) for length in prompts]
    samples = [
        Sample(
            sample_id=i * n + j,
            group=group,
            limit=limits[(i * n + j) % len(limits)],
            key=np.uint64(0),
        )
        for i, group in enumerate(groups)
        for j in range(n)
    ]

    need = max(-(-(len(s.group.prompt) + s.limit - 1) // PAGE) for s in samples)
    pages = PageAllocator(need + spare, PAGE)
    scheduler = Scheduler(
        samples,
        pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        refill=refill,
        redraw=redraw,
        prefix_caching=prefix_caching,
    )

    device = FakeDevice(scheduler)
    expected = {sample.sample_id: sample for sample in samples}
    done: list[Completion] = []
    flight: deque[tuple[np.ndarray, np.ndarray, np.ndarray]] = deque()

    while scheduler.has_work:
        slots = np.empty(0, np.int64)
        admission = scheduler.admit()
        if admission is not None:
            sizes = [len(prefill.token_ids) - prefill.cached for prefill in admission.prefills]
            assert sum(sizes) <= budget or len(sizes) == 1
            slots = np.array(admission.slots)
            flight.append((slots, scheduler.epoch[slots], device.start(admission)))
            scheduler.launch(slots, fed=0)
            scheduler.release_started_prompts()
        else:
            with patch.object(scheduling, "SLOTS_BEHIND", behind):
                steps = scheduler.steps_ahead(most)
            preempted = scheduler.preemptions
            copies, complete = scheduler.prepare_decode(steps, may_preempt=not flight)
            assert steps == 1 or (complete and scheduler.preemptions == preempted), (
                "samples go for one step alone"
            )
            for source, target in copies:
                device.cache[target] = device.cache[source]
            slots = scheduler.unfinished if complete else slots
            if slots.size:
                flight += [
                    (slots, scheduler.epoch[slots], device.decode(slots, ahead))
                    for ahead in range(steps)
                ]
                scheduler.launch(slots, fed=steps)
        assert len(scheduler.running) <= max_num_seqs
        scheduler.check_integrity()
        launched = slots.size > 0
        while flight and (not launched or len(flight) > lag):
            slots, epochs, tokens = flight.popleft()
            current = scheduler.epoch[slots] == epochs
            slots = slots[current]
            tokens = tokens[current]
            counts = scheduler.record(slots, tokens, -(tokens // 100).astype(np.float32))
            stopped = counts >= stop
            ended = stopped | (counts >= scheduler.limits[slots])
            done += scheduler.finish(slots[ended].tolist(), set(slots[stopped].tolist()))

    for completion in done:
        count = min(expected.pop(completion.sample_id).limit, stop)
        assert completion.token_ids == [
            100 * completion.sample_id + place for place in range(count)
        ]
        assert completion.log_probs == [-completion.sample_id] * count
        assert completion.finish_reason == ("stop" if count == stop else "length")

    assert not expected
    pages.check_integrity([])
    return scheduler


@settings(max_examples=150)
@given(
    prompts=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    n=st.integers(1, 4),
    limits=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    spare=st.integers(0, 12),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 30),
    stop=st.integers(1, 12),
    lag=st.integers(0, 2),
    refill=st.integers(1, 4),
    redraw=st.booleans(),
    prefix_caching=st.booleans(),
    most=st.integers(1, 9),
    behind=st.sampled_from([2, 3, 16]),
)
def test_every_sample_ends_once_with_its_own_tokens(**case):
    drive(**case)


def test_a_prompt_ends_with_its_last_full_page():
    groups = [Group(prompt=(0,) * tokens, unstarted=2) for tokens in (8, 11, 3, 4)]
    samples = [
        Sample(sample_id=number, group=groups[number // 2], limit=4, key=np.uint64(0))
        for number in range(8)
    ]
    pages = PageAllocator(40, PAGE)
    scheduler = Scheduler(samples, pages, max_num_seqs=8, max_num_batched_tokens=100)
    assert scheduler.admit() is not None
    scheduler.prepare_decode(steps=1)  # pages that prompts fill in part are copied

    second = scheduler.table[:4, 1].tolist()
    first = scheduler.table[6:, 0].tolist()
    assert scheduler.prompt_ends.tolist() == [*second, -1, -1, *first]
    assert len({*second, *first}) == 3


def test_the_same_calls_give_the_same_order():
    one = drive([5, 9, 3], 3, [7, 12], 2, 6, 12)
    other = drive([5, 9, 3], 3, [7, 12], 2, 6, 12)
    assert one.preemptions == other.preemptions > 0
    assert one.pages._free == other.pages._free
