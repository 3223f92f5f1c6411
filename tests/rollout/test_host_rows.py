"""The rows and stacked weights that a CPU decodes with, against the pages and the trainer's
model."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from tests.rollout.test_embedded import worst_log_prob_error
from verl.models.families import LLAMA_FAMILIES
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.embedded import host_rows, host_runner
from verl.rollout.embedded.host_rows import KeyRows


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt_oss"])
def test_rows_hold_the_contents_of_the_pages(family, monkeypatch):
    """Run samples of many lengths with few slots, few pages and little memory; then new turns."""
    model = talkative_model(family)
    limits = [(24, 3, 17, 9, 1), (13, 24, 2, 20, 6), (5, 11, 24, 8, 24)]
    asked = [
        Request(
            prompt_ids=tuple(prompt), sample_ids=tuple(range(5 * i, 5 * i + 5)), limits=limits[i]
        )
        for i, prompt in enumerate(PROMPTS)
    ]

    def answers() -> list[Completion]:
        engine = make_engine(model, max_num_seqs=4, page_size=4, num_pages=20)
        first = engine.generate(
            asked, SamplingParams(max_new_tokens=24, ignore_eos=True), seed=0, step=0
        )
        first = sorted(first, key=lambda completion: completion.sample_id)
        assert engine.statistics()["preemptions"] > 0
        assert worst_log_prob_error(model, first, 5, 1.0) <= 1e-4
        turns = [[*PROMPTS[c.sample_id // 5], *c.token_ids, 7, 9] for c in first]
        return [*first, *run(engine, turns, max_new_tokens=8)]

    monkeypatch.setattr(host_rows, "_spare_columns", lambda length: 1)
    rows = answers()
    monkeypatch.setattr(host_runner, "ROWS_BYTES", 0)
    pages = answers()
    assert tokens_of(rows) == tokens_of(pages)
    assert all(
        one.log_probs == pytest.approx(other.log_probs, abs=1e-4) for one, other in zip(rows, pages)
    )


def test_samples_that_come_back_longer_than_all_rows_seldom_need_new_memory():
    scheduler: Any = SimpleNamespace(
        waiting=False,
        prefix_caching=False,
        page_size=16,
        epoch=np.zeros(8, np.int64),
        cached=np.full(8, 20),
        table=np.zeros((8, 300), np.int64),
    )
    paging: Any = SimpleNamespace(layers={})
    rows = KeyRows(paging)
    with patch.object(KeyRows, "_renew", autospec=True, side_effect=KeyRows._renew) as renew:
        for turn in range(200):
            rows.arrange(scheduler, np.arange(8), 8, by_column=False)
            rows.advance(scheduler, 8)
            scheduler.cached += 8
            back = turn % 8
            scheduler.epoch[back] += 1
            scheduler.cached[back] = scheduler.cached.max() + 3
    assert renew.call_count < 20


@pytest.mark.parametrize("family", LLAMA_FAMILIES)
def test_stacked_weights_equal_the_trainers(family, monkeypatch):
    model = talkative_model(family, rms_norm_eps=0.1)
    engine = make_engine(model)
    for _ in range(2):
        assert worst_log_prob_error(model, run(engine, PROMPTS), 1, 1.0) <= 1e-4
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))
    monkeypatch.setattr(host_runner, "STACKED_BYTES", 0)
    assert worst_log_prob_error(model, run(make_engine(model), PROMPTS), 1, 1.0) <= 1e-4
