"""Samples that start within a decode step of others draw what a prefill gives them.

CUDA runners do so. Here a runner of the host feeds the same rows.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.cases import cases
from tests.rollout.engines import make_engine, play_turns, talkative_model
from verl.rollout.embedded import engine as engine_module
from verl.rollout.embedded.host_runner import HostRunner
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.runner import Draws
from verl.rollout.embedded.samples import Group, Prefill, Sample
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.several import Fed


class JoiningRunner(HostRunner):
    """Feeds the ends of prompts as rows of a decode step."""

    spare_rows = 24

    def __init__(self, *arguments: Any, verifies_drafts: bool, **settings: Any) -> None:
        super().__init__(*arguments, verifies_drafts=True, **settings)  # keys in pages alone
        self.joined = 0
        self.most_new = 0

    @torch.inference_mode()
    def decode_and_extend(
        self, scheduler: Scheduler, slots: NDArray[np.int64], prefills: Mapping[int, Prefill]
    ) -> Draws:
        running = slots[~np.isin(slots, list(prefills))]
        last = Fed.last(scheduler, running)
        new = Fed.prefills(scheduler, prefills)
        self.joined += len(running) > 0
        self.most_new = max(self.most_new, len(new.ids) - len(prefills))
        columns = []
        for name in ("slots", "ids", "positions", "drawn"):
            columns.append(np.concatenate([getattr(last, name), getattr(new, name)]))
        draws = self._feed(scheduler, Fed(*columns))
        ends = np.concatenate([last.is_last[: len(running)], new.is_last])
        return draws.take(np.flatnonzero(ends))


@pytest.mark.parametrize(
    ("family", "settings"),
    cases(
        ["qwen2", "gemma2", "gpt2"],
        [{}, {"num_pages": 40}, {"max_num_seqs": 4}],
        quick=lambda family, settings: family == "gemma2" or (family == "gpt2" and not settings),
    ),
)
def test_turns_that_join_a_step_draw_what_a_prefill_gives(
    family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    model = talkative_model(family).double()
    settings = {
        "dtype": "float64",
        "page_size": 4,
        "prompt_length": 100,
        "response_length": 100,
        **settings,
    }
    expected = play_turns(make_engine(model, enable_prefix_caching=False, **settings))
    monkeypatch.setattr(engine_module, "HostRunner", JoiningRunner)
    engine = make_engine(model, **settings)
    drawn = play_turns(engine)

    runner = engine.runner
    assert runner.joined > 5
    assert 0 < runner.most_new <= runner.spare_rows
    assert drawn.keys() == expected.keys()
    for sample_id, completion in drawn.items():
        assert completion.token_ids == expected[sample_id].token_ids
        np.testing.assert_allclose(
            completion.log_probs, expected[sample_id].log_probs, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("others_run", [True, False])
@pytest.mark.parametrize(
    ("ends", "admitted"),
    [
        ([4, 4, 4], [2, 1]),  # 3 rows each: the third waits for the next step
        ([12, 4], [2]),  # the first takes a prefill, which the second shares
        ([4, 12], [1, 1]),
        ([4] * 20, [20]),  # too many steps for rows
    ],
)
def test_ends_of_prompts_start_in_as_many_steps_as_they_fit(
    ends: list[int], admitted: list[int], others_run: bool
):
    pages = PageAllocator(100, page_size=4)
    prompt = list(range(8))
    held = pages.allocate(2)
    pages.register(prompt, held)
    pages.free(held)
    samples = []
    for number, end in enumerate([1, *ends]):
        group = Group(prompt=(*prompt, *[50 + number] * end), unstarted=1)
        samples.append(Sample(sample_id=number, group=group, limit=4, key=np.uint64(number)))
    scheduler = Scheduler(
        samples[:1],
        pages,
        max_num_seqs=32,
        max_num_batched_tokens=1000,
        prefix_caching=True,
        least_slots=32,
        least_tokens=64,
    )
    assert scheduler.admit(step_rows=8) is not None, "the first sample runs"
    if not others_run:
        scheduler.abort([0])
    scheduler.add(samples[1:])

    counts = []
    while scheduler.waiting:
        admission = scheduler.admit(step_rows=8)
        assert admission is not None
        counts.append(len(admission.slots))
    assert counts == admitted
