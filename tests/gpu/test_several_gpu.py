"""Several tokens of a sample in one decode step on CUDA: ends of prompts, and drafts."""

import numpy as np
import pytest
import torch

from tests.rollout.engines import PROMPTS, make_engine, play_turns, run, talkative_model
from verl.config.rollout import SpeculativeConfig

pytestmark = pytest.mark.gpu
NGRAM = SpeculativeConfig(method="ngram", max_rows=64)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gpt2", "mistral"])
@pytest.mark.parametrize("settings", [{}, {"num_pages": 24}, {"enforce_eager": True}])
def test_turns_that_join_a_step_draw_what_a_prefill_gives(family, settings):
    model = talkative_model(family).cuda()
    settings = {"dtype": "float32", "prompt_length": 100, "response_length": 100, **settings}
    plain = make_engine(model, device="cuda", enable_prefix_caching=False, **settings)
    expected = play_turns(plain)
    engine = make_engine(model, device="cuda", **settings)
    drawn = play_turns(engine)

    if not engine.runner.enforce_eager:
        assert any(kind.several for kind, *_ in engine.runner._graphs)
    assert drawn.keys() == expected.keys()
    for sample_id, completion in drawn.items():
        assert completion.token_ids == expected[sample_id].token_ids, sample_id
        np.testing.assert_allclose(
            completion.log_probs, expected[sample_id].log_probs, rtol=0, atol=1e-3
        )


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_change_no_bit_of_a_deterministic_engine(family, dtype):
    model = talkative_model(family, dtype=getattr(torch, dtype)).cuda()
    settings = {"device": "cuda", "dtype": dtype, "deterministic": True}
    params = {"temperature": 0.05, "max_new_tokens": 48}
    expected = run(make_engine(model, **settings), PROMPTS, n=4, **params)
    drafting = make_engine(model, **settings, speculative=NGRAM)

    assert run(drafting, PROMPTS, n=4, **params) == expected
    statistics = drafting.statistics()
    assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"]
    drafting.check_integrity()


def test_drafts_begin_when_few_samples_are_left():
    model = talkative_model("qwen2").cuda()
    params = {"temperature": 0.05, "max_new_tokens": 48}
    settings = {"device": "cuda", "dtype": "float32", "max_num_seqs": 14}
    expected = run(make_engine(model, **settings), PROMPTS, n=6, **params)
    few = SpeculativeConfig(method="ngram", max_rows=24)
    drafting = make_engine(model, **settings, speculative=few)
    drawn = run(drafting, PROMPTS, n=6, **params)

    assert [each.token_ids for each in drawn] == [each.token_ids for each in expected]
    assert drafting.statistics()["accepted_tokens"] > 0
