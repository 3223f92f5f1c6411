"""The embedded engine against transformers' own `generate` and forward."""

import numpy as np
import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2MLP

from tests.cases import cases
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
from tests.tiny_models import FAMILIES, MORE_FAMILIES
from verl.models.attention import Facts
from verl.models.families import LLAMA_FAMILIES
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.embedded import attention as paged
from verl.utils.errors import ConfigError, EngineAsleepError, RolloutError


def worst_log_prob_error(model, completions: list[Completion], n: int, temperature: float) -> float:
    return max(
        float(
            (
                forward_log_probs(model, PROMPTS[c.sample_id // n], c.token_ids, temperature)
                - torch.tensor(c.log_probs)
            )
            .abs()
            .max()
        )
        for c in completions
    )


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_greedy_tokens_and_log_probs_equal_those_of_transformers(family):
    model = talkative_model(family)
    ours = run(make_engine(model), PROMPTS, temperature=0, max_new_tokens=40)
    assert tokens_of(ours) == [transformers_greedy(model, prompt, 40) for prompt in PROMPTS]
    assert max(len(set(tokens)) for tokens in tokens_of(ours)) >= 4, "too dull to fail"
    assert worst_log_prob_error(model, ours, 1, 1.0) <= 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_log_probs_of_samples_equal_those_of_a_full_forward(family):
    model = talkative_model(family)
    sampled = run(make_engine(model), PROMPTS, n=3, temperature=1.3)
    assert worst_log_prob_error(model, sampled, 3, 1.3) <= 1e-4


def test_log_probs_ignore_top_k_top_p_and_min_p():
    model = talkative_model("qwen2")
    sampled = run(
        make_engine(model), PROMPTS, n=3, temperature=1.5, top_k=10, top_p=0.8, min_p=0.05
    )
    assert worst_log_prob_error(model, sampled, 3, 1.5) <= 1e-4


@pytest.mark.parametrize(
    ("family", "dropped"),
    [
        ("mistral", {"window": None}),
        ("gemma2", {"cap": None}),
        ("gpt2", {"scale": 8**-0.5}),
        ("gpt_oss", {"sinks": None}),
    ],
)
def test_the_parity_test_notices_a_dropped_feature(family, dropped, monkeypatch):
    """Drop the window, the cap, the scaling or the sinks from the decode step."""
    true_facts = paged.layer_facts
    monkeypatch.setattr(
        paged, "layer_facts", lambda *a: Facts(**{**true_facts(*a)._asdict(), **dropped})
    )
    model = talkative_model(family)
    sampled = run(make_engine(model), PROMPTS)
    assert worst_log_prob_error(model, sampled, 1, 1.0) > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "gemma2", "opt"])
def test_tokens_do_not_depend_on_other_samples(family):
    model = talkative_model(family)
    crowd = tokens_of(run(make_engine(model), PROMPTS, n=4))
    few = tokens_of(run(make_engine(model, max_num_seqs=3), PROMPTS, n=4))
    small_prefills = tokens_of(run(make_engine(model, max_num_batched_tokens=1), PROMPTS, n=4))
    assert crowd == few == small_prefills
    alone = Request(prompt_ids=tuple(PROMPTS[1]), sample_ids=(6,))
    [completion] = make_engine(model).generate(
        [alone], SamplingParams(max_new_tokens=24), seed=0, step=0
    )
    assert completion.token_ids == crowd[6]


def test_tokens_depend_on_seed_step_and_sample():
    engine = make_engine(talkative_model("qwen2"))
    first = tokens_of(run(engine, PROMPTS, n=4))
    assert first == tokens_of(run(engine, PROMPTS, n=4))
    assert first != tokens_of(run(engine, PROMPTS, n=4, seed=1))
    assert first != tokens_of(run(engine, PROMPTS, n=4, step=1))
    assert len({tuple(tokens) for tokens in first[:4]}) == 4


@pytest.mark.parametrize("num_pages", [4, 7, 11])
def test_preemption_changes_only_its_counter(num_pages):
    model = talkative_model("qwen2")
    free = make_engine(model)
    roomy = run(free, PROMPTS, n=4)
    assert free.statistics()["preemptions"] == 0
    engine = make_engine(model, num_pages=num_pages)
    tight = run(engine, PROMPTS, n=4)
    assert engine.statistics()["preemptions"] > 0
    assert engine.statistics()["peak_pages"] <= num_pages
    assert tokens_of(tight) == tokens_of(roomy)
    assert worst_log_prob_error(model, tight, 4, 1.0) <= 1e-4


def test_samples_of_a_prompt_share_its_pages_and_its_prefill():
    engine = make_engine(talkative_model("qwen2"), page_size=4)
    prompt = list(range(10, 31))  # 21 tokens: 5 whole pages and a sixth with one token
    run(engine, [prompt], n=6, max_new_tokens=3, ignore_eos=True)
    statistics = engine.statistics()
    assert statistics["prefill_tokens"] == 21
    # Whole pages are shared, and each sample has its own copy of the sixth, with room for two
    # cached tokens.
    assert statistics["peak_pages"] == 5 + 6
    assert statistics["copied_pages"] == 5  # the last sample writes into the original


def test_samples_admitted_late_still_share_the_prefill():
    engine = make_engine(talkative_model("qwen2"), max_num_seqs=2)
    run(engine, PROMPTS, n=5, max_new_tokens=6)
    assert engine.statistics()["prefill_tokens"] == sum(map(len, PROMPTS))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt2"])
def test_a_second_turn_finds_the_keys_of_the_first(family):
    model = talkative_model(family)
    engine = make_engine(model, page_size=4)
    first = run(engine, PROMPTS, n=2)
    assert engine.statistics()["cached_tokens"] == 0
    turns = [[*PROMPTS[c.sample_id // 2], *c.token_ids, 7, 9] for c in first]
    again = run(engine, turns, max_new_tokens=8)
    found = engine.statistics()["cached_tokens"]
    assert found >= sum(len(turn) - 8 for turn in turns)
    assert found + engine.statistics()["prefill_tokens"] == sum(map(len, turns))
    fresh = run(make_engine(model, page_size=4), turns, max_new_tokens=8)
    assert tokens_of(again) == tokens_of(fresh)
    for one, other in zip(again, fresh):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_the_keys_of_other_weights_are_not_found():
    model = talkative_model("qwen2")
    other = talkative_model("qwen2", seed=1)
    engine = make_engine(model, page_size=4)

    def cached() -> float:
        run(engine, PROMPTS)
        return engine.statistics()["cached_tokens"]

    assert cached() == 0
    assert cached() > 0
    engine.update_weights(model.named_parameters())
    assert cached() == 0
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters()):
            parameter.copy_(new)
    assert cached() == 0
    engine.forget_prefixes()
    assert cached() == 0
    assert cached() > 0
    engine.sleep()
    engine.wake()
    assert cached() == 0
    engine = make_engine(model, page_size=4, enable_prefix_caching=False)
    assert cached() == cached() == 0


def test_requests_after_new_weights_read_no_old_keys():
    model = talkative_model("qwen2")
    other = talkative_model("qwen2", seed=1)
    expected = tokens_of(run(make_engine(other, page_size=4), PROMPTS))
    for sleeps in (False, True):
        engine = make_engine(model, page_size=4)
        run(engine, PROMPTS)
        if sleeps:
            engine.sleep()
            engine.wake()
        engine.update_weights(other.named_parameters())
        assert tokens_of(run(engine, PROMPTS)) == expected
        engine.check_integrity()


def test_weights_do_not_change_while_samples_run():
    model = talkative_model("qwen2")
    engine = make_engine(model, max_num_seqs=1)
    asked = [Request(prompt_ids=tuple(PROMPTS[0]), sample_ids=(0, 1))]
    running = engine.generate(asked, SamplingParams(max_new_tokens=4), seed=0, step=0)
    next(running)
    with pytest.raises(RolloutError, match="not finished"):
        engine.update_weights(model.named_parameters())
    assert len(list(running)) == 1


class HalvedMLP(Qwen2MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 0.5


def test_a_model_with_custom_parts_decodes_through_them():
    model = talkative_model("qwen2")

    class Halved(Qwen2ForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = HalvedMLP(config)

    halved = Halved(model.config).eval()
    halved.load_state_dict(model.state_dict())
    assert worst_log_prob_error(halved, run(make_engine(halved), PROMPTS), 1, 1.0) <= 1e-4


def test_limits_of_samples_and_requests_without_samples():
    engine = make_engine(talkative_model("qwen2"), max_num_seqs=2)
    limits = {0: (3, 9), 1: (), 2: (5,)}
    ids = {0: (0, 1), 1: (), 2: (2,)}
    asked = [
        Request(prompt_ids=tuple(prompt), sample_ids=ids[i], limits=limits[i])
        for i, prompt in enumerate(PROMPTS)
    ]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)

    lengths = {
        c.sample_id: len(c.token_ids) for c in engine.generate(asked, params, seed=0, step=0)
    }
    assert lengths == {0: 3, 1: 6, 2: 5}
    with pytest.raises(RolloutError, match="each sample needs one"):
        engine.generate(
            [Request(prompt_ids=(5,), sample_ids=(0, 1), limits=(3,))], params, seed=0, step=0
        )


def test_all_pages_are_returned_and_the_page_table_is_consistent_throughout():
    engine = make_engine(talkative_model("qwen2"), num_pages=9, max_num_seqs=5)
    settings = SamplingParams(max_new_tokens=20)
    requests = [
        Request(prompt_ids=tuple(p), sample_ids=(2 * i, 2 * i + 1)) for i, p in enumerate(PROMPTS)
    ]
    completions = engine.generate(requests, settings, seed=0, step=0)
    for _ in completions:
        engine.check_integrity()
    engine.check_integrity()
    assert engine._pages.num_free == 9


def test_closing_the_iterator_early_frees_the_engine():
    engine = make_engine(talkative_model("qwen2"))
    settings = SamplingParams(max_new_tokens=8, ignore_eos=True)
    request = Request(prompt_ids=(5, 6), sample_ids=(0, 1), limits=(2, 8))
    completions = engine.generate([request], settings, seed=0, step=0)
    next(completions)
    with pytest.raises(RolloutError, match="not finished"):
        engine.generate([request], settings, seed=0, step=0)
    with pytest.raises(RolloutError, match="not finished"):
        engine.sleep()
    completions.close()
    assert len(list(engine.generate([request], settings, seed=0, step=0))) == 2


def test_unsupported_requests_and_settings_are_rejected_at_once():
    engine = make_engine(talkative_model("qwen2"), num_pages=2, prompt_length=40, response_length=8)
    settings = SamplingParams(max_new_tokens=8)

    def ask(prompt, *sample_ids, params=settings):
        engine.generate(
            [Request(prompt_ids=tuple(prompt), sample_ids=sample_ids)], params, seed=0, step=0
        )

    with pytest.raises(RolloutError, match="may need 3 pages .* has room for 2"):
        ask([5] * 33, 0)
    with pytest.raises(RolloutError, match="empty prompt"):
        ask([], 0)
    with pytest.raises(RolloutError, match="Sample id 3 was asked for twice"):
        ask([5], 3, 3)
    with pytest.raises(RolloutError, match="no room for a response"):
        ask([5] * 48, 0)
    with pytest.raises(RolloutError, match="the model knows 0..127"):
        ask([5, 128], 0)
    with pytest.raises(
        RolloutError, match="sample id 9223372036854775808; ids must fit in 64 bits"
    ):
        ask([5], 2**63)
    for message, setting in (
        ("top_p must be above 0", {"top_p": 0.0}),
        ("temperature must be 0 .* or at least 1e-37", {"temperature": 1e-40}),
        ("stop must be a tuple of strings", {"stop": "Qx"}),
    ):
        with pytest.raises(ConfigError, match=message):
            ask([5], 0, params=SamplingParams(max_new_tokens=1, **setting))
    with pytest.raises(ConfigError, match="has 256 positions"):
        make_engine(talkative_model("qwen2"), max_model_len=257)


def test_responses_end_when_the_sequence_is_full():
    engine = make_engine(talkative_model("qwen2"), max_model_len=20)
    [completion] = run(engine, [[5] * 15], max_new_tokens=24, ignore_eos=True)
    assert len(completion.token_ids) == 5
    assert completion.finish_reason == "length"


def test_seeds_can_be_numpy_integers():
    engine = make_engine(talkative_model("qwen2"), enable_prefix_caching=False)
    drawn = run(engine, PROMPTS, seed=-5, step=3)
    assert run(engine, PROMPTS, seed=np.int64(-5), step=np.int64(3)) == drawn


def test_sleep_and_wake():
    model = talkative_model("qwen2")
    engine = make_engine(model)
    before = tokens_of(run(engine, PROMPTS))
    whole = engine.runner.kept_bytes
    pages = engine.runner.num_pages * engine.runner.page_bytes
    assert whole > pages + sum(
        layer.weight.nbytes for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    )

    assert engine.statistics()["memory_gib"] == whole / 2**30
    engine.sleep()
    assert engine.runner.kept_bytes == 0
    assert engine.runner.num_pages == 0
    assert not engine.runner.paging.layers
    with pytest.raises(EngineAsleepError):
        run(engine, PROMPTS)
    with pytest.raises(EngineAsleepError):
        engine.update_weights(model.named_parameters())

    engine.wake()
    assert tokens_of(run(engine, PROMPTS)) == before


# They have learned positions, transposed weights, biases, windows with caps, experts and sinks.
DIFFERENT = ["opt", "gpt2", "qwen2", "gemma2", "qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("family", cases(FAMILIES, quick=lambda family: family in DIFFERENT))
def test_deterministic_gives_the_same_bits_in_every_batch(family):
    model = talkative_model(family)
    crowd = run(make_engine(model, deterministic=True), PROMPTS, n=2)
    assert worst_log_prob_error(model, crowd, 2, 1.0) <= 1e-4
    few = run(make_engine(model, deterministic=True, max_num_seqs=3), PROMPTS, n=2)
    tight = make_engine(model, deterministic=True, num_pages=10)
    preempted = run(tight, PROMPTS, n=2)
    assert tight.statistics()["preemptions"] > 0
    alone = Request(prompt_ids=tuple(PROMPTS[1]), sample_ids=(3,))
    engine = make_engine(model, deterministic=True)
    [completion] = engine.generate([alone], SamplingParams(max_new_tokens=24), seed=0, step=0)
    assert crowd == few == preempted
    assert completion == crowd[3]


def test_deterministic_gives_the_same_bits_among_a_thousand():
    check_bits_of_a_thousand(talkative_model("qwen2"))


def test_a_diverged_model_is_an_error():
    model = talkative_model("qwen2")
    engine = make_engine(model)
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite for sample 0"):
        run(engine, PROMPTS)


def test_long_rows_are_gathered_in_chunks(monkeypatch):
    model = talkative_model("gemma2")
    whole = tokens_of(run(make_engine(model), PROMPTS, n=3))
    monkeypatch.setattr(paged, "GATHER_TOKENS", 100)
    assert tokens_of(run(make_engine(model), PROMPTS, n=3)) == whole


def test_bfloat16_copies_the_weights_and_stays_close():
    model = talkative_model("qwen2")
    engine = make_engine(model, dtype="bfloat16")
    [own] = {parameter.dtype for parameter in engine.twin.module.parameters()}
    assert own == torch.bfloat16
    rounded = talkative_model("qwen2", dtype=torch.bfloat16).float()
    sampled = run(engine, PROMPTS, n=2)
    assert worst_log_prob_error(rounded, sampled, 2, 1.0) <= 0.5


@pytest.mark.parametrize("family", LLAMA_FAMILIES)
def test_bfloat16_decodes_with_the_bits_of_the_modules_own_layers(family, monkeypatch):
    """Compare every rounding of the trainer's layers: an omitted or added one is a mismatch."""
    model = talkative_model(family)
    fused = run(make_engine(model, dtype="bfloat16"), PROMPTS, n=2)
    monkeypatch.setattr("verl.rollout.embedded.runner.can_fuse", lambda *_: False)
    assert run(make_engine(model, dtype="bfloat16"), PROMPTS, n=2) == fused


def test_long_generations_show_progress(monkeypatch, caplog):
    monkeypatch.setattr("verl.rollout.embedded.run.PROGRESS_EVERY_S", 0.0)
    with caplog.at_level("INFO", logger="verl"):
        run(make_engine(talkative_model("qwen2")), PROMPTS)
    assert "3/3 samples done" in caplog.messages[-1]
    assert "0 running, 0 waiting" in caplog.messages[-1]
