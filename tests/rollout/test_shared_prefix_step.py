"""Decode steps of samples that share the pages of their prompts, interpreted on the CPU and compared
with transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.rollout.interpreter import interpreted
from tests.rollout.test_cuda_decoder import PAGE_SIZE, make_decoder, make_model
from verl.models.attention import Layout
from verl.rollout.embedded.attention import PrefillStep
from verl.rollout.embedded.cuda_decoder import DeviceStep, TritonDecoder
from verl.rollout.embedded.device_slots import DeviceSlots
from verl.rollout.embedded.kernels import paged_attention
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.prefix_blocks import neighbors
from verl.rollout.embedded.samples import Group, Prefill, Sample
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.several import Fed

PROMPTS = (15, 3, 8)  # tokens
SAMPLES = 5
STEPS = 5
PAGES = 80


def admitted(prompts: list[list[int]]) -> tuple[Scheduler, list[Prefill]]:
    """Start SAMPLES samples of each prompt."""
    samples = []
    for prompt in prompts:
        group = Group(prompt=tuple(prompt), unstarted=SAMPLES)
        for _ in range(SAMPLES):
            key = np.uint64(len(samples))
            samples.append(Sample(sample_id=len(samples), group=group, limit=STEPS + 1, key=key))
    allocator = PageAllocator(PAGES, page_size=PAGE_SIZE)
    scheduler = Scheduler(
        samples, allocator, max_num_seqs=len(samples), max_num_batched_tokens=1000
    )
    admission = scheduler.admit()
    assert admission is not None
    return scheduler, admission.prefills


def compute_prompt(decoder: TritonDecoder, prefill: Prefill) -> None:
    count = len(prefill.token_ids)
    places = torch.arange(count)
    pages = torch.tensor(prefill.pages)[places // PAGE_SIZE]
    ends = torch.tensor([0, count], dtype=torch.int32)
    step = PrefillStep(Layout((count,), ends), pages, places % PAGE_SIZE)
    with decoder.paging.computing(step):
        decoder(torch.tensor(prefill.token_ids), places, step)


def take_step(
    decoder: TritonDecoder, scheduler: Scheduler, slots: DeviceSlots, ids: Tensor
) -> tuple[np.ndarray, Tensor]:
    """Feed ids (S,) of all slots. Return the slots of the rows, and their hidden states."""
    copies, _ = scheduler.prepare_decode(steps=1)
    for layer in decoder.paging.layers.values():
        for cache in layer.tensors:
            for source, target in copies:
                cache[target] = cache[source]

    rows = neighbors(scheduler, scheduler.running)
    slots.show(scheduler, rows, blocks=True)
    slots.place(scheduler, Fed(rows, ids[rows].numpy(), scheduler.cached[rows], rows))
    fed, positions, pages, offsets = slots.feed(len(rows))
    step = DeviceStep(
        slots=slots.rows[: len(rows)],
        state=slots.state,
        pages=pages,
        offsets=offsets,
        num_splits=1,
        split_tokens=None,
        workspace=None,
        takes_fresh=False,
        prefixes=slots.prefixes.of(len(rows)),
    )
    states = decoder(fed, positions, step)
    scheduler.launch(rows, fed=1)
    return rows, states


@pytest.mark.parametrize("family", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
@interpreted
def test_steps_equal_transformers(family: str):
    """The first sample of a prompt ends early, and a block goes on without its first row."""
    model = make_model(family, torch.float16)
    decoder = make_decoder(model, pages=PAGES)
    prompts = [torch.randint(50, (count,)).tolist() for count in PROMPTS]
    scheduler, prefills = admitted(prompts)
    for prefill in prefills:
        compute_prompt(decoder, prefill)

    count = len(PROMPTS) * SAMPLES
    answers = torch.randint(50, (count, STEPS))
    slots = DeviceSlots(
        count, 0, width=8, page_size=PAGE_SIZE, device=torch.device("cpu"), shifts=False
    )
    truths: list[Tensor] = []
    for sample in range(count):
        ids = torch.tensor([*prompts[sample // SAMPLES], *answers[sample].tolist()])
        body: Any = model.base_model
        truths.append(body(input_ids=ids[None]).last_hidden_state[0].float())

    calls = []
    real = paged_attention.attend_prefixes

    def counted(prefixes: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(int(prefixes.counts.sum()))
        return real(prefixes, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "attend_prefixes", counted)
        for number in range(STEPS):
            if number == 2:
                firsts = [slot for slot in range(count) if slot % SAMPLES == 0]
                scheduler.finish(firsts, set())
            rows, states = take_step(decoder, scheduler, slots, answers[:, number])
            for slot, state in zip(rows.tolist(), states):
                sample = scheduler.sample_id_of(slot)
                place = PROMPTS[sample // SAMPLES] + number
                truth = truths[sample][place]
                torch.testing.assert_close(state.float(), truth, rtol=0, atol=4e-2)

    shared = sum(count >= PAGE_SIZE for count in PROMPTS)
    layers = 1 if family == "gpt_oss" else 2  # one of gpt-oss has a window
    assert calls == 2 * layers * [5 * shared] + (STEPS - 2) * layers * [4 * shared]
