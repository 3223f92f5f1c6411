"""The rollout engines on CUDA: the parity of the CPU tests in fp32, bf16 as close as transformers'
own, and memory."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.engines import (
    PROMPTS,
    check_bits_of_a_thousand,
    forward_log_probs,
    make_engine,
    run,
    talkative_model,
    tokens_of,
    transformers_greedy,
)
from tests.tiny_models import FAMILIES
from verl.rollout.embedded.cuda_runner import StepKind
from verl.rollout.sampling import negative_exponential_noise, noise_integers, row_keys, sample_keys
from verl.utils.errors import EngineAsleepError, RolloutError

pytestmark = pytest.mark.gpu


def empty_device() -> None:
    """Give the memory of earlier tests back to the device."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def on_cuda(model: Any) -> Any:
    return model.cuda()


def cuda_engine(model, name="embedded", **settings):
    return make_engine(model, name, device="cuda", **settings)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_transformers(family):
    model = on_cuda(talkative_model(family))
    engine = cuda_engine(model, dtype="float32")
    greedy = run(engine, PROMPTS, temperature=0, max_new_tokens=40)
    assert tokens_of(greedy) == [transformers_greedy(model, prompt, 40) for prompt in PROMPTS]
    sampled = run(engine, PROMPTS, n=3, temperature=1.3)
    for completion in sampled:
        expected = forward_log_probs(
            model, PROMPTS[completion.sample_id // 3], completion.token_ids, 1.3
        )
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
    ours = []
    theirs = []
    for completion in run(engine, PROMPTS, n=4, ignore_eos=True):
        prompt = PROMPTS[completion.sample_id // 4]
        truth = forward_log_probs(exact, prompt, completion.token_ids)
        ours.append((torch.tensor(completion.log_probs) - truth).abs().mean())
        theirs.append((forward_log_probs(model, prompt, completion.token_ids) - truth).abs().mean())
    # The median: if bf16 changes the choice of a router of experts, one sample is off by much, in
    # theirs as in ours.
    assert torch.stack(ours).median() <= 1.3 * torch.stack(theirs).median() + 0.01


def test_preemption_changes_nothing():
    model = on_cuda(talkative_model("qwen2"))
    roomy = run(cuda_engine(model, dtype="float32"), PROMPTS, n=4)
    engine = cuda_engine(model, dtype="float32", num_pages=7)
    assert tokens_of(run(engine, PROMPTS, n=4)) == tokens_of(roomy)
    assert engine.statistics()["preemptions"] > 0


def test_the_noise_equals_that_of_the_cpu():
    keys = torch.from_numpy(row_keys(sample_keys(3, 5, np.arange(64)), np.arange(64)))
    assert torch.equal(noise_integers(keys.cuda(), 5000).cpu(), noise_integers(keys, 5000))
    there = negative_exponential_noise(keys.cuda(), 5000).neg().log()
    here = negative_exponential_noise(keys, 5000).neg().log()
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
def test_graphs_draw_what_eager_steps_draw(family):
    model = on_cuda(talkative_model(family))
    graphs, eager = (
        cuda_engine(model, dtype="float32", enforce_eager=flag) for flag in (False, True)
    )
    for params in ({"temperature": 0}, {}, {"top_p": 0.8, "top_k": 20, "temperature": 1.4}):
        drawn = run(graphs, PROMPTS, n=5, **params)
        assert tokens_of(drawn) == tokens_of(run(eager, PROMPTS, n=5, **params))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_graphs_record_the_experts_that_a_cpu_records(family):
    settings = {"dtype": "float32", "enable_rollout_routing_replay": True}
    model = talkative_model(family)
    expected = run(make_engine(model, **settings), PROMPTS, n=2, temperature=0)
    drawn = run(cuda_engine(on_cuda(model), **settings), PROMPTS, n=2, temperature=0)
    assert tokens_of(drawn) == tokens_of(expected)
    for one, other in zip(drawn, expected):
        assert one.routed_experts is not None
        # sets: equal scores may come in another order
        shape = (len(one.token_ids), -1, 2)
        ours = np.sort(one.routed_experts.reshape(shape), -1)
        theirs = np.sort(other.routed_experts.reshape(shape), -1)
        assert (ours == theirs).mean() > 0.99


def test_many_samples_of_long_prompts_attend_to_all_of_them():
    model = on_cuda(talkative_model("qwen2"))
    engine = cuda_engine(model, dtype="float32", prompt_length=128)
    prompts = [
        [5 + (7 * i) % 90 for i in range(100)],
        [9 + (11 * i) % 80 for i in range(49)],
        [7, 11, 13],
    ]
    sampled = run(engine, prompts, n=18)
    for completion in sampled:
        expected = forward_log_probs(
            model, prompts[completion.sample_id // 18], completion.token_ids
        )
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=1e-4)


def test_graphs_survive_sleep_and_new_weights():
    model, other = (on_cuda(talkative_model("qwen2", seed=seed)) for seed in (0, 1))
    engine = cuda_engine(model, dtype="float32")
    first = tokens_of(run(engine, PROMPTS, n=2))
    graphs = dict(engine.runner._graphs)
    assert graphs
    engine.sleep()
    engine.wake()
    engine.update_weights(other.named_parameters())
    changed = tokens_of(run(engine, PROMPTS, n=2))
    assert changed == tokens_of(run(cuda_engine(other, dtype="float32"), PROMPTS, n=2)) != first
    engine.update_weights(model.named_parameters())
    assert tokens_of(run(engine, PROMPTS, n=2)) == first
    assert engine.runner._graphs.items() >= graphs.items()


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt2"])
def test_a_second_turn_finds_the_keys_of_the_first(family):
    model = on_cuda(talkative_model(family))
    engine = cuda_engine(model, dtype="float32")
    first = run(engine, PROMPTS, n=2, ignore_eos=True)
    turns = [[*PROMPTS[c.sample_id // 2], *c.token_ids, 7, 9] for c in first]
    again = run(engine, turns, max_new_tokens=8)
    assert engine.statistics()["cached_tokens"] >= 16 * len(turns)
    assert tokens_of(again) == tokens_of(
        run(cuda_engine(model, dtype="float32"), turns, max_new_tokens=8)
    )


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2"])
def test_new_tokens_after_cached_ones_see_what_a_prefill_sees(family):
    """Compare in bf16, where the kernel for packed sequences computes plain attention."""
    engine = cuda_engine(on_cuda(talkative_model(family, head_dim=16)), dtype="bfloat16")
    run(engine, PROMPTS, max_new_tokens=2)
    runner = engine.runner
    runner.allocate(max(40, runner.num_pages))
    tokens = [[5 + (7 * i) % 90 for i in range(length)] for length in (37, 50, 100, 17)]
    pages = [list(range(8 * row, 8 * row + 8)) for row in range(4)]
    whole = runner.prefill(tokens, pages).float()
    states = runner.extend(tokens, pages, [32, 16, 48, 16], [0] * 4).float()
    assert ((states - whole).norm() / whole.norm()).item() < 2e-2


def test_late_stops_and_refills_lose_no_token():
    model = on_cuda(talkative_model("qwen2"))
    wide = run(cuda_engine(model, dtype="float32"), PROMPTS, n=12)
    assert any(completion.finish_reason == "stop" for completion in wide)
    narrow = run(cuda_engine(model, dtype="float32", max_num_seqs=5), PROMPTS, n=12)
    assert tokens_of(narrow) == tokens_of(wide)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gpt2", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_gives_the_same_bits_in_every_batch(family, dtype):
    model = on_cuda(talkative_model(family))
    crowd = run(cuda_engine(model, dtype=dtype, deterministic=True), PROMPTS, n=24)
    few = run(cuda_engine(model, dtype=dtype, deterministic=True, max_num_seqs=3), PROMPTS, n=24)
    tight = cuda_engine(model, dtype=dtype, deterministic=True, num_pages=9)
    preempted = run(tight, PROMPTS, n=24)
    assert tight.statistics()["preemptions"] > 0
    assert crowd == few == preempted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_gives_the_same_bits_among_a_thousand(dtype):
    check_bits_of_a_thousand(on_cuda(talkative_model("qwen2")), device="cuda", dtype=dtype)


def test_memory_that_stays_during_sleep_is_listed():
    model = on_cuda(
        talkative_model("qwen2", dtype=torch.bfloat16, hidden_size=512, num_attention_heads=8)
    )
    empty_device()
    before = torch.cuda.memory_reserved()
    engine = cuda_engine(model, gpu_memory_utilization=0.02)
    run(engine, PROMPTS, n=100)
    awake = engine.kept_asleep()
    engine.sleep()

    empty_device()
    kept = engine.kept_asleep()
    left = torch.cuda.memory_reserved() - before
    assert kept == awake
    assert kept["graphs"] > 0
    # A segment of torch has at least 2 MiB, and small tables may lie in one that was there before;
    # cuBLAS keeps a workspace of 32 MiB for each of two streams.
    assert left - 96 * 2**20 <= sum(kept.values()) <= left + 2 * 2**20
    assert left <= 0.02 * torch.cuda.get_device_properties(0).total_memory


@pytest.mark.parametrize(
    ("given", "raised"), [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, RolloutError)]
)
def test_a_failed_capture_does_not_end_the_engine(given, raised, monkeypatch):
    model = on_cuda(talkative_model("qwen2"))
    whole = tokens_of(run(cuda_engine(model, dtype="float32"), PROMPTS, n=2))
    engine = cuda_engine(model, dtype="float32")
    step = engine.runner._step
    calls = 0

    def broken(kind: StepKind) -> None:
        nonlocal calls
        calls += 1
        step(kind)
        if calls == 2:  # the first one compiles, the second is captured
            raise given("in the middle of a capture")

    with monkeypatch.context() as patched, pytest.raises(raised):
        patched.setattr(engine.runner, "_step", broken)
        run(engine, PROMPTS, n=2)
    torch.cuda.synchronize()
    assert tokens_of(run(engine, PROMPTS, n=2)) == whole


def test_sleep_frees_the_memory():
    model = talkative_model("qwen2", dtype=torch.bfloat16, hidden_size=512, num_attention_heads=8)
    parameters = dict(model.named_parameters())
    # Only this process's memory: other tests use the device meanwhile.
    engine = cuda_engine(model, gpu_memory_utilization=0.02)
    first = tokens_of(run(engine, PROMPTS, n=2))
    pages, weights = engine.runner._memory, engine.twin._memory
    assert pages.mapped_bytes >= engine.runner.page_bytes * engine.statistics()["num_pages"]
    assert weights.mapped_bytes >= sum(each.nbytes for each in parameters.values())
    empty_device()
    awake = torch.cuda.memory_allocated()
    engine.sleep()

    assert pages.mapped_bytes == weights.mapped_bytes == 0
    empty_device()
    assert torch.cuda.memory_allocated() <= awake, "nothing is copied to torch's allocator"
    with pytest.raises(EngineAsleepError):
        run(engine, PROMPTS)

    engine.wake()
    with pytest.raises(RolloutError, match="weights are incomplete"):
        run(engine, PROMPTS)
    engine.update_weights(parameters.items())
    assert tokens_of(run(engine, PROMPTS, n=2)) == first
