"""The scheduler without a model: whatever the sizes, every sample ends once, with its own tokens, on its own pages."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.scheduler import Group, Sample, Scheduler
from verl.rollout.types import Completion

PAGE = 4


def drive(prompts: list[int], n: int, limits: list[int], spare: int, max_num_seqs: int, budget: int) -> Scheduler:
    """Run samples that draw token (100 * sample id + position) and write (token -> page slot) into a fake cache.

    A fake cache holds, for each page slot, the token that was last written there; before each draw every running
    sample must find its prompt and its own tokens in its pages.
    """
    groups = [Group(prompt=tuple(range(-length, 0)), unstarted=n) for length in prompts]
    samples = [
        Sample(sample_id=i * n + j, group=group, limit=limits[(i * n + j) % len(limits)], key=np.uint64(0))
        for i, group in enumerate(groups)
        for j in range(n)
    ]
    need = max(-(-(len(s.group.prompt) + s.limit - 1) // PAGE) for s in samples)
    pages = PageAllocator(need + spare)
    scheduler = Scheduler(samples, pages, page_size=PAGE, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    cache = np.zeros((pages.num_pages, PAGE), np.int64)
    expected = {sample.sample_id: sample for sample in samples}
    done: list[Completion] = []
    while scheduler.has_work:
        admission = scheduler.admit()
        if admission is not None:
            slots = np.array(admission.slots)
            tokens = [len(prefill.token_ids) for prefill in admission.prefills]
            assert sum(tokens) <= budget or len(tokens) == 1
            for prefill in admission.prefills:
                for place, token in enumerate(prefill.token_ids):
                    cache[prefill.pages[place // PAGE], place % PAGE] = token
                if prefill.group is not None:
                    prefill.group.hidden = torch.zeros(1)
            for slot in admission.slots:
                assert slot in admission.resumed or scheduler.group_of(slot).hidden is not None
        else:
            for source, target in scheduler.prepare_decode():
                cache[target] = cache[source]
            slots = scheduler.running
            for slot in slots:
                place = scheduler.cached[slot]
                page = scheduler.table[slot, place // PAGE]
                assert pages.references[page] == 1, "a shared page was written to"
                cache[page, place % PAGE] = scheduler.token_ids[slot, scheduler.drawn[slot] - 1]
                scheduler.cached[slot] += 1
        assert len(scheduler.running) <= max_num_seqs
        scheduler.check_integrity()
        ids = np.array([scheduler.sample_id_of(slot) for slot in slots])
        for slot in scheduler.running:
            prompt = list(scheduler.group_of(slot).prompt)
            text = [*prompt, *scheduler.token_ids[slot, : scheduler.drawn[slot]]]
            found = cache[scheduler.table[slot]].flatten()[: scheduler.cached[slot]].tolist()
            assert found == text[: scheduler.cached[slot]]
        counts = scheduler.record(slots, 100 * ids + scheduler.drawn[slots], -ids.astype(np.float32))
        ended = slots[counts >= scheduler.limits[slots]]
        done += scheduler.finish(ended.tolist(), set())
        scheduler.release_started_prompts()
    for completion in done:
        limit = expected.pop(completion.sample_id).limit
        assert completion.token_ids == [100 * completion.sample_id + place for place in range(limit)]
        assert completion.log_probs == [-completion.sample_id] * limit
    assert not expected
    pages.check_integrity([])
    return scheduler


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    n=st.integers(1, 4),
    limits=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    spare=st.integers(0, 12),
    max_num_seqs=st.integers(1, 9),
    budget=st.integers(1, 30),
)
def test_every_sample_ends_once_with_its_own_tokens(prompts, n, limits, spare, max_num_seqs, budget):
    drive(prompts, n, limits, spare, max_num_seqs, budget)


def test_the_same_calls_give_the_same_order():
    one = drive([5, 9, 3], 3, [7, 12], 2, 6, 12)
    other = drive([5, 9, 3], 3, [7, 12], 2, 6, 12)
    assert one.preemptions == other.preemptions > 0
    assert one.pages._free == other.pages._free
