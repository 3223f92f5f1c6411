"""What a decode step on CUDA reads of its slots. Here the tensors lie on the host."""

import numpy as np
import pytest
import torch

from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Group, Sample
from verl.rollout.embedded.scheduler import Scheduler

pytest.importorskip("triton", reason="comes with the CUDA builds of torch")
from verl.rollout.embedded.device_slots import DeviceSlots

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

    scheduler.prepare_decode(steps=4)  # page 2 of every sample
    slots.show(scheduler, rows)
    assert set(slots.rows.tolist()) == {9}
    width = scheduler.table.shape[1]
    assert slots.state.table[:SAMPLES, :width].tolist() == scheduler.table.tolist()
