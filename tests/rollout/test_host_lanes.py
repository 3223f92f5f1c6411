"""Decode steps in lanes, with the kernels of numba, against those of torch and against the
trainer's model."""

import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.rollout import test_embedded, test_engines
from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from tests.rollout.test_embedded import worst_log_prob_error
from verl.models.families import LLAMA_FAMILIES
from verl.rollout import Request, SamplingParams, sampling
from verl.rollout.embedded import host_lanes, host_runner, scheduler
from verl.rollout.embedded.kernels import blas
from verl.rollout.embedded.runner import ModelRunner
from verl.utils.errors import VerlError
from verl.utils.logging import say_once

numba = pytest.importorskip("numba")
if blas.sgemm_address() is None:
    pytest.skip("torch has no products of MKL here", allow_module_level=True)
from verl.rollout.embedded.kernels import host  # noqa: E402


@pytest.fixture(params=[1, 3], ids=["one lane", "three lanes"])
def lanes(request, monkeypatch):
    """Run every step in lanes, as many as rows and threads allow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(host_lanes, "TOKENS_THAT_PAY", 0)
    monkeypatch.setattr(
        host_lanes, "count_lanes", lambda rows, threads, weight_bytes: min(rows, threads)
    )
    yield request.param
    for number in (
        torch.get_num_threads(),
        ThreadPoolExecutor(1).submit(torch.get_num_threads).result(),
    ):
        assert number == request.param, "lanes change no other thread, nor those to come"
    torch.set_num_threads(threads)


def test_steps_use_only_lanes(lanes):
    pool = host_lanes._single_threads(lanes)
    assert [pool.submit(torch.get_num_threads).result() for _ in range(9)] == [1] * 9


@pytest.mark.parametrize("family", LLAMA_FAMILIES)
def test_lanes_equal_the_trainers_model(family, lanes):
    """Let keys leave the window, samples reuse rows of others, and the weights change."""
    window = {"sliding_window": 9} if family == "mistral" else {}
    model = talkative_model(family, rms_norm_eps=0.1, **window)
    engine = make_engine(model, max_num_seqs=7)
    torch.manual_seed(0)
    for _ in range(2):
        completions = run(engine, PROMPTS, n=4)
        assert worst_log_prob_error(model, completions, 4, 1.0) <= 1e-4
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 0.1 * torch.rand_like(parameter))


@pytest.mark.parametrize(
    ("promise", "arguments"),
    [
        (test_embedded.test_tokens_do_not_depend_on_other_samples, ("qwen2",)),
        (test_embedded.test_preemption_changes_only_its_counter, (4,)),
        (test_embedded.test_preemption_changes_only_its_counter, (11,)),
        (test_embedded.test_samples_of_a_prompt_share_its_pages_and_its_prefill, ()),
        (test_embedded.test_a_second_turn_finds_the_keys_of_the_first, ("mistral",)),
        (test_embedded.test_the_keys_of_other_weights_are_not_found, ()),
        (test_embedded.test_limits_of_samples_and_requests_without_samples, ()),
        (test_embedded.test_all_pages_are_returned_and_the_page_table_is_consistent_throughout, ()),
        (test_embedded.test_closing_the_iterator_early_frees_the_engine, ()),
        (test_embedded.test_responses_end_when_the_sequence_is_full, ()),
        (test_embedded.test_sleep_and_wake, ()),
        (test_engines.test_end_of_sequence_and_stop_tokens, ("embedded",)),
        (test_engines.test_stop_strings_end_with_the_token_that_completes_them, ("embedded",)),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_lanes_keep_the_guarantees_of_the_engine(promise, arguments, lanes):
    promise(*arguments)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_tokens_after_the_end_of_a_response_are_discarded(steps, lanes, monkeypatch):
    """Check any number of steps in one call."""
    monkeypatch.setattr(host_runner, "STEPS_AT_ONCE", steps)
    model = talkative_model("qwen2")
    engine = make_engine(model, max_num_seqs=5)
    completions = run(engine, PROMPTS, n=6)
    statistics = engine.statistics()
    assert len({len(completion.token_ids) for completion in completions}) > 3, (
        "they end at different steps"
    )

    assert statistics["generated_tokens"] == sum(
        len(completion.token_ids) for completion in completions
    )
    monkeypatch.setattr(host_lanes, "TOKENS_THAT_PAY", 1 << 40)
    plain = make_engine(model, max_num_seqs=5)
    assert tokens_of(run(plain, PROMPTS, n=6)) == tokens_of(completions)
    assert plain.statistics()["decode_steps"] <= statistics["decode_steps"]


@pytest.mark.parametrize("most", [8, 1])
def test_threads_of_their_own_share_next_turns(lanes, monkeypatch, most):
    """torch's threads compute a turn of many tokens, where few samples go on."""
    monkeypatch.setattr(host_runner, "LONG_EXTENSION", most)
    engine = make_engine(talkative_model("qwen2"), page_size=4)
    prompts = PROMPTS[1:]
    turns = [[*prompts[done.sample_id], *done.token_ids, 7, 9] for done in run(engine, prompts)]
    seen = []
    extend = ModelRunner.extend

    def watched(self, sequences, *others):
        seen.append((len(sequences), torch.get_num_threads()))
        return extend(self, sequences, *others)

    monkeypatch.setattr(ModelRunner, "extend", watched)
    run(engine, turns, max_new_tokens=2)
    assert engine.statistics()["cached_tokens"] > 0
    if lanes == 1:
        assert seen == [(2, 1)]
    else:
        assert seen == ([(1, 1), (1, 1)] if most == 8 else [(2, lanes)])


def test_samples_that_reach_their_limit_are_computed_on_with(lanes, monkeypatch):
    """One ends at the last position that the model may have; a next turn finds their keys."""
    model = talkative_model("qwen2")
    prompt = tuple(PROMPTS[0])
    longest = len(prompt) + 30
    prompts = [*[prompt] * 12, (*prompt, *[5] * 18)]
    first = []
    for row, own in enumerate(prompts):
        first.append(
            Request(prompt_ids=own, sample_ids=(row,), limits=(30 - 2 * row if row < 12 else 12,))
        )
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)

    def two_turns(slots_behind):
        monkeypatch.setattr(scheduler, "SLOTS_BEHIND", slots_behind)
        engine = make_engine(model, max_model_len=longest)
        decode = Mock(wraps=engine.runner.decode)
        monkeypatch.setattr(engine.runner, "decode", decode)
        drawn = list(engine.generate(first, params, seed=0, step=0))
        calls = decode.call_count
        second = []
        for done in drawn:
            context = (*prompts[done.sample_id], *done.token_ids)
            if len(context) + 2 < longest:
                ids = (100 + done.sample_id,)
                second.append(Request(prompt_ids=context, sample_ids=ids, limits=(2,)))
        again = list(engine.generate(second, params, seed=0, step=0))
        tokens = {done.sample_id: done.token_ids for done in [*drawn, *again]}
        log_probs = {done.sample_id: done.log_probs for done in [*drawn, *again]}
        return tokens, log_probs, calls

    tokens, log_probs, calls = two_turns(slots_behind=2)
    exact_tokens, exact_log_probs, exact_calls = two_turns(slots_behind=1 << 10)
    assert tokens == exact_tokens
    for row, values in log_probs.items():
        assert values == pytest.approx(exact_log_probs[row], abs=1e-5)
    assert calls < exact_calls, "the others went on, together with those that had ended"


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}],
    ids=lambda asked: next(iter(asked)),
)
def test_lanes_draw_the_tokens_of_torch(asked, lanes, monkeypatch):
    model = talkative_model("qwen2")
    drawn = run(make_engine(model), PROMPTS, n=4, **asked)
    monkeypatch.setattr(host_lanes, "TOKENS_THAT_PAY", 1 << 40)
    plain = run(make_engine(model), PROMPTS, n=4, **asked)
    assert tokens_of(drawn) == tokens_of(plain)
    assert all(
        one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
        for one, other in zip(drawn, plain)
    )


def test_steps_switch_to_and_from_lanes_as_samples_end(monkeypatch):
    monkeypatch.setattr(host_lanes, "TOKENS_THAT_PAY", 0)
    counts = []
    monkeypatch.setattr(
        host_lanes, "count_lanes", lambda rows, *_: counts.append(rows % 3) or rows % 3
    )
    model = talkative_model("qwen2")
    asked = [
        Request(
            prompt_ids=tuple(prompt),
            sample_ids=ids,
            limits=tuple(1 + 7 * number % 23 for number in ids),
        )
        for prompt, ids in zip(
            PROMPTS, (tuple(range(0, 6)), tuple(range(6, 12)), tuple(range(12, 18)))
        )
    ]

    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    completions = list(make_engine(model).generate(asked, params, seed=0, step=0))
    assert set(counts) == {0, 1, 2}
    assert (
        worst_log_prob_error(model, sorted(completions, key=lambda c: c.sample_id), 6, 1.0) <= 1e-4
    )


@pytest.mark.parametrize(
    ("megabytes", "rows", "threads", "lanes"),
    [
        *[
            (3, 1, 1, 1),
            (3, 500, 1, 1),
            (3, 31, 2, 1),
            (3, 32, 2, 2),
            (3, 900, 2, 2),
            (3, 128, 16, 8),
            (3, 512, 9, 9),
        ],
        *[
            (60, 63, 2, 1),
            (60, 64, 2, 2),
            (60, 32, 16, 1),
            (60, 33, 16, 0),
            (60, 511, 16, 0),
            (60, 512, 16, 16),
        ],
    ],
)
def test_the_fastest_number_of_lanes_is_used(megabytes, rows, threads, lanes):
    assert host_lanes.count_lanes(rows, threads, megabytes << 20) == lanes


def test_logits_of_a_few_rows_at_a_time_draw_the_same(lanes, monkeypatch):
    model = talkative_model("llama")
    expected = {
        top_k: tokens_of(run(make_engine(model), PROMPTS, n=4, top_k=top_k)) for top_k in (-1, 5)
    }
    monkeypatch.setattr(host_lanes, "LANE_LOGITS", 3 * model.config.vocab_size)
    for top_k, tokens in expected.items():
        assert tokens_of(run(make_engine(model), PROMPTS, n=4, top_k=top_k)) == tokens


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_equal_those_of_torch(transposed, with_bias):
    x = torch.randn(7, 12)
    matrix = torch.randn(12, 5)
    bias = torch.randn(int(with_bias), 5)
    out = torch.full((7, 5), float("nan"))
    stored = matrix.t().contiguous() if transposed else matrix
    host.multiply(x.numpy(), stored.numpy(), bias.numpy(), out.numpy(), transposed)
    torch.testing.assert_close(out, x @ matrix + bias.sum(dim=0))


def test_small_calls_do_not_load_numba(monkeypatch):
    monkeypatch.setattr(
        host_lanes, "load_kernels", lambda: pytest.fail("0.6 s that such a call does not gain")
    )
    run(make_engine(talkative_model("qwen2")), PROMPTS, n=4)


def test_a_failing_lane_ends_the_call_and_not_the_engine(lanes, monkeypatch):
    engine = make_engine(talkative_model("qwen2"))
    expected = tokens_of(run(engine, PROMPTS, n=4))
    generate = host_lanes.Lane.generate

    def fails(lane, *arguments):
        if lane.rows.start == 0:
            raise RuntimeError("out of luck")
        return generate(lane, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(host_lanes.Lane, "generate", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            run(engine, PROMPTS, n=4)
    assert tokens_of(run(engine, PROMPTS, n=4)) == expected


def test_weights_that_are_nan_are_named(lanes):
    model = talkative_model("llama")
    engine = make_engine(model)
    run(engine, PROMPTS)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")
    engine.update_weights(model.named_parameters())
    with pytest.raises(VerlError, match="finite"):
        run(engine, PROMPTS)


def test_without_numba_the_log_names_the_missing_package(monkeypatch, caplog):
    monkeypatch.setattr(host_lanes, "TOKENS_THAT_PAY", 0)
    monkeypatch.setattr(
        host_lanes, "load_kernels", functools.cache(host_lanes.load_kernels.__wrapped__)
    )
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    model = talkative_model("qwen2")

    def breaks(name):
        raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 9.0.")

    monkeypatch.setattr(host_lanes.importlib, "import_module", breaks)
    with caplog.at_level(logging.INFO):
        broken = run(make_engine(model), PROMPTS)
    assert "Got NumPy 9.0. Fix it: pip install -U numba" in caplog.text
    host_lanes.load_kernels.cache_clear()
    monkeypatch.setattr(blas.torch.backends.mkl, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        other = run(make_engine(model), PROMPTS)
    assert "MKL's products, which this torch does not have" in caplog.text
    host_lanes.load_kernels.cache_clear()
    monkeypatch.setattr(host_lanes, "is_installed", lambda package: False)
    with caplog.at_level(logging.INFO):
        missing = run(make_engine(model), PROMPTS)
    assert "pip install numba" in caplog.text
    assert tokens_of(missing) == tokens_of(other) == tokens_of(broken)


def test_the_wait_for_the_compiler_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("verl"), "propagate", True)
    say_once.cache_clear()
    fresh = numba.njit(host.largest_of.py_func)  # not in any disk cache
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fresh(np.ones(8, np.float32))
    assert [record.message[:40] for record in caplog.records] == [
        "rollout: numba compiles kernels for this"
    ]


def draw(logits, temperature, keys):
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows)
    columns = sampling.column_hashes(vocabulary, logits.device)[0].numpy().view(np.uint32)
    host.draw(
        logits.numpy(),
        np.float32(temperature),
        keys.numpy().view(np.uint32),
        columns,
        np.empty(vocabulary, np.float32),
        tokens.numpy(),
        log_probs.numpy(),
    )
    return tokens, log_probs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-3, 1e-30, 0.0])
def test_a_draw_has_the_noise_of_all_draws(temperature):
    params = SamplingParams(max_new_tokens=1, temperature=temperature)
    numbers = np.random.default_rng(0)
    for spread, vocabulary in ((0.01, 1000), (4.0, 1024), (30.0, 37)):
        logits = torch.from_numpy(numbers.normal(0, spread, (512, vocabulary)).astype(np.float32))
        hashes = numbers.integers(0, 1 << 62, 512).astype(np.uint64)
        keys = torch.from_numpy(sampling.row_keys(hashes, np.arange(512)))
        tokens, log_probs = draw(logits, temperature or 1.0, keys[:0] if temperature == 0 else keys)
        expected, _ = sampling.sample(logits, params, None if temperature == 0 else keys)
        same = tokens == expected
        assert same.float().mean() >= 0.998, (
            "logarithms may differ in the last place, and so a draw in thousands"
        )

        exact = (
            (logits.double() / (temperature or 1.0))
            .log_softmax(-1)
            .gather(1, tokens[:, None])[:, 0]
        )
        torch.testing.assert_close(log_probs.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf")])
def test_a_draw_from_nan_has_no_log_prob(value):
    logits = torch.randn(3, 50)
    logits[1, 20] = value
    _, log_probs = draw(logits, 1.0, torch.ones(3, 2, dtype=torch.int32))
    assert log_probs.isfinite().tolist() == [True, False, True]


def test_functions_have_their_documented_accuracy():
    @numba.njit
    def each(function, numbers):
        return np.array([function(number) for number in numbers])

    x = np.linspace(-87, 88, 100_001).astype(np.float32)
    assert np.abs(each(host.exp, x) / np.exp(x.astype(np.float64)) - 1).max() < 3e-7
    assert each(host.exp, np.array([-1e30, 1e30], np.float32)) == pytest.approx(
        [0, 1.65e38], rel=1e-2
    )
    uniforms = -((np.arange(0, 1 << 31, 9973) + 0.5) / (1 << 31))
    x = np.concatenate([uniforms, -np.logspace(-9.6, 0, 5000)]).astype(np.float32)
    with np.errstate(divide="ignore"):
        exact = np.maximum(np.log1p(x.astype(np.float64)), -22)
    assert np.abs(each(host.log1p, x) / exact - 1).max() < 3e-7


@pytest.mark.parametrize(
    "numbers", [[-0.0, -3.0], [1.5, 7.25, -9.0], [-5.0, -2.0, -2.5], [float("-inf"), -(2.0**100)]]
)
def test_the_largest_number_is_found_among_integers(numbers):
    assert host.largest_of(np.array(numbers, np.float32)) == max(numbers)
