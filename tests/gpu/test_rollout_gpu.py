"""The rollout engines on CUDA: the parity of the CPU tests in fp32, bf16 as close as transformers' own, and memory."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.engines import (
    PROMPTS,
    forward_log_probs,
    make_engine,
    run,
    talkative_model,
    tokens_of,
    transformers_greedy,
)
from tests.tiny_models import FAMILIES
from verl.rollout.sampling import gumbel_noise, noise_integers, row_keys, sample_keys
from verl.utils.errors import EngineAsleepError, RolloutError

pytestmark = pytest.mark.gpu


def on_cuda(model: Any) -> Any:
    return model.cuda()


def cuda_engine(model, name="embedded", **settings):
    return make_engine(model, name, device="cuda", **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_is_transformers(family):
    model = on_cuda(talkative_model(family))
    engine = cuda_engine(model, dtype="float32")
    greedy = run(engine, PROMPTS, temperature=0, max_new_tokens=40)
    assert tokens_of(greedy) == [transformers_greedy(model, prompt, 40) for prompt in PROMPTS]
    sampled = run(engine, PROMPTS, n=3, temperature=1.3)
    for completion in sampled:
        expected = forward_log_probs(model, PROMPTS[completion.sample_id // 3], completion.token_ids, 1.3)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)
    assert tokens_of(sampled) == tokens_of(
        run(cuda_engine(model, "hf", dtype="float32"), PROMPTS, n=3, temperature=1.3)
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_close_to_fp32_as_transformers_is(family):
    model = on_cuda(talkative_model(family, dtype=torch.bfloat16))
    exact = on_cuda(talkative_model(family, dtype=torch.bfloat16).float())
    engine = cuda_engine(model)
    assert engine.twin.dtype == torch.bfloat16
    ours, theirs = [], []
    for completion in run(engine, PROMPTS, n=4, ignore_eos=True):
        prompt = PROMPTS[completion.sample_id // 4]
        truth = forward_log_probs(exact, prompt, completion.token_ids)
        ours.append((torch.tensor(completion.log_probs) - truth).abs().mean())
        theirs.append((forward_log_probs(model, prompt, completion.token_ids) - truth).abs().mean())
    assert torch.stack(ours).mean() <= 1.3 * torch.stack(theirs).mean() + 0.01


def test_preemption_changes_nothing():
    model = on_cuda(talkative_model("qwen2"))
    roomy = run(cuda_engine(model, dtype="float32"), PROMPTS, n=4)
    engine = cuda_engine(model, dtype="float32", num_pages=7)
    assert tokens_of(run(engine, PROMPTS, n=4)) == tokens_of(roomy)
    assert engine.statistics()["preemptions"] > 0


def test_the_noise_is_that_of_the_cpu():
    keys = torch.from_numpy(row_keys(sample_keys(3, 5, np.arange(64)), np.arange(64)))
    assert torch.equal(noise_integers(keys.cuda(), 5000).cpu(), noise_integers(keys, 5000))
    torch.testing.assert_close(gumbel_noise(keys.cuda(), 5000).cpu(), gumbel_noise(keys, 5000), rtol=1e-5, atol=1e-6)


def test_sleep_gives_the_memory_back():
    model = talkative_model("qwen2", dtype=torch.bfloat16, hidden_size=512, num_attention_heads=8)
    parameters = dict(model.named_parameters())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine = cuda_engine(model, gpu_memory_utilization=0.02)
    first = tokens_of(run(engine, PROMPTS, n=2))
    awake = torch.cuda.memory_allocated() - before
    engine.sleep()
    gc.collect()
    assert torch.cuda.memory_allocated() - before < 0.05 * awake
    with pytest.raises(EngineAsleepError):
        run(engine, PROMPTS)
    engine.wake()
    with pytest.raises(RolloutError, match="weights are incomplete"):
        run(engine, PROMPTS)
    engine.update_weights(parameters.items())
    assert tokens_of(run(engine, PROMPTS, n=2)) == first
