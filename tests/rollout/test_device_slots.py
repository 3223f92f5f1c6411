"""What a decode step on CUDA reads of its slots. Here the tensors lie on the host."""

import numpy as np
import pytest
import torch

from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Group, Sample
from verl.rollout.embedded.scheduler import Scheduler

pytest.importorskip("triton", reason="comes with the CUDA builds of torch")
from verl.rollout.embedded.device_slots import DeviceSlots
from verl.rollout.embedded.prefix_blocks import neighbors

SAMPLES = 4
SPARE = 3
WIDTH = 8  # of the device's tables; those of the scheduler are narrower


@pytest.fixture
def scheduler() -> Scheduler:
    samples = []
    for number in range(SAMPLES):
        group = Group(prompt=(1, 2, 3, 4, 5, number), unstarted=1)
        samples.append(Sample(sample_id=number, group=group, limit=4, key=np.uint64(number)))
    made = Scheduler(
        samples, PageAllocator(20, page_size=4), max_num_seqs=SAMPLES, max_num_batched_tokens=100
    )
    assert made.admit() is not None
    return made


@pytest.fixture
def slots() -> DeviceSlots:
    return DeviceSlots(
        SAMPLES, SPARE, width=WIDTH, page_size=4, device=torch.device("cpu"), shifts=False
    )


def test_a_step_reads_the_tables_of_its_samples_and_spare_slots(
    scheduler: Scheduler, slots: DeviceSlots
):
    rows = np.array([2, 0, 3])
    owners = np.array([3, 0])
    slots.show(scheduler, rows, owners)
    padding = SAMPLES + SPARE
    assert slots.rows.tolist() == [2, 0, 3, SAMPLES, SAMPLES + 1, padding, padding]

    width = scheduler.table.shape[1]
    tables = slots.state.table[:, :width]
    assert width < WIDTH
    assert tables[:SAMPLES].tolist() == scheduler.table.tolist()
    assert tables[SAMPLES : SAMPLES + 2].tolist() == scheduler.table[owners].tolist()


def test_only_news_reach_the_device(scheduler: Scheduler, slots: DeviceSlots):
    rows = np.arange(SAMPLES)
    slots.show(scheduler, rows)
    slots.rows.fill_(9)
    slots.state.table.fill_(9)
    slots.show(scheduler, rows)
    assert set(slots.rows.tolist()) == {9}
    assert set(slots.state.table.flatten().tolist()) == {9}

    scheduler.prepare_decode(steps=4)  # a copy of each prompt's last page, and the next one
    slots.show(scheduler, rows)
    assert set(slots.rows.tolist()) == {9}
    assert slots.state.table[:SAMPLES, 1:3].tolist() == scheduler.table[:, 1:3].tolist()
    slots.state.table[:SAMPLES, 1:3] = 9
    assert set(slots.state.table.flatten().tolist()) == {9}


def make_scheduler(prompts: list[int], samples: int) -> Scheduler:
    """Admit samples of prompts with as many tokens."""
    waiting = []
    for number, count in enumerate(prompts):
        group = Group(prompt=tuple(range(50 * number, 50 * number + count)), unstarted=samples)
        for _ in range(samples):
            key = np.uint64(len(waiting))
            waiting.append(Sample(sample_id=len(waiting), group=group, limit=4, key=key))
    made = Scheduler(
        waiting, PageAllocator(90, page_size=4), max_num_seqs=20, max_num_batched_tokens=100
    )
    assert made.admit() is not None
    made.prepare_decode(steps=1)
    return made


def test_rows_of_a_prompt_are_blocks_that_share_its_pages():
    slots = DeviceSlots(20, 0, width=WIDTH, page_size=4, device=torch.device("cpu"), shifts=False)
    scheduler = make_scheduler([9, 3, 8], samples=5)
    rows = neighbors(scheduler, scheduler.running)
    slots.show(scheduler, rows, blocks=True)
    assert slots.saved_tokens == 2 * 4 * 8 / 15
    assert slots.prefixes.counts.tolist() == [5, 5, 0, 0, 0]
    assert slots.prefixes.tokens.tolist() == [8, 8, 0, 0, 0]
    covered = slots.prefixes.of(15).covered
    prompts = [scheduler.prompt_tokens[slot] for slot in rows]
    assert covered.tolist() == [0 if count == 3 else 8 for count in prompts]
    for first in slots.prefixes.rows[:2].tolist():
        tables = scheduler.table[rows[first : first + 5], :2]
        assert (tables == tables[0]).all()

    fewer = rows[3:]  # too few of the first prompt are left
    slots.show(scheduler, fewer, blocks=True)
    assert slots.saved_tokens == 4 * 8 / 12
    assert slots.prefixes.counts.tolist() == [5, 0, 0, 0, 0]
    assert slots.prefixes.covered[:12].tolist() == [0] * 2 + [8] * 5 + [0] * 5


def test_rows_and_blocks_are_shown_again_after_a_capture():
    slots = DeviceSlots(20, 0, width=WIDTH, page_size=4, device=torch.device("cpu"), shifts=False)
    scheduler = make_scheduler([9], samples=5)
    slots.show(scheduler, scheduler.running, blocks=True)
    with slots.only_padding():
        assert set(slots.rows.tolist()) == {20}
        assert not any(tensor.any() for tensor in slots.prefixes)
    assert slots.rows[:5].tolist() == scheduler.running.tolist()
    assert slots.prefixes.counts.tolist() == [5, 0, 0, 0, 0]
    assert slots.prefixes.covered[:6].tolist() == [8] * 5 + [0]


def test_the_rollout_after_an_interrupted_capture_shows_its_blocks():
    slots = DeviceSlots(20, 0, width=WIDTH, page_size=4, device=torch.device("cpu"), shifts=False)
    for _ in range(2):
        slots.forget()
        scheduler = make_scheduler([9], samples=5)
        slots.show(scheduler, scheduler.running, blocks=True)
        assert slots.rows[:5].tolist() == scheduler.running.tolist()
        assert slots.prefixes.counts.tolist() == [5, 0, 0, 0, 0]
        with pytest.raises(KeyboardInterrupt), slots.only_padding():
            raise KeyboardInterrupt


def test_blocks_follow_pages_that_have_become_those_of_a_longer_prompt():
    slots = DeviceSlots(20, 0, width=WIDTH, page_size=4, device=torch.device("cpu"), shifts=False)
    one = make_scheduler([8], samples=4)
    slots.show(one, one.running, blocks=True)
    other = make_scheduler([12], samples=4)
    other.prompt_ends[:] = one.prompt_ends  # the page of the same number ends it
    slots.show(other, other.running, blocks=True)
    assert slots.prefixes.tokens.tolist()[0] == 12
    assert slots.prefixes.covered[:4].tolist() == [12] * 4
