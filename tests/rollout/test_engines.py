"""Requirements for every engine: hf and embedded agree, stop at the configured tokens, and use the
trainer's weights."""

from pathlib import Path

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
from tests.tiny_models import FAMILIES, tiny_tokenizer
from verl.config.rollout import RolloutConfig
from verl.rollout import create_rollout_engine, rollout_engines
from verl.rollout.stopping import StopRule
from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError, RolloutError

ENGINES = ["hf", "embedded"]


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_and_embedded_draw_the_same_tokens(family):
    model = talkative_model(family)
    reference = run(make_engine(model, "hf"), PROMPTS, n=2, temperature=1.2)
    ours = run(make_engine(model), PROMPTS, n=2, temperature=1.2)
    assert tokens_of(ours) == tokens_of(reference)
    assert [c.finish_reason for c in ours] == [c.finish_reason for c in reference]
    for one, other in zip(ours, reference):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_the_engine_of_the_page_draws_the_same_tokens(monkeypatch):
    """The code in docs/how_to/own_engine.md, as a reader copies it."""
    page = (Path(__file__).parents[2] / "docs/how_to/own_engine.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.setattr(rollout_engines, "_entries", dict(rollout_engines._entries))
    exec(compile(code, "own_engine.md", "exec"), {"__name__": "page"})

    model = talkative_model("qwen2")
    settings = {"n": 2, "temperature": 1.2, "top_k": 20}
    written = [make_engine(model, name) for name in ("plain", "embedded")]
    own, reference = (run(engine, PROMPTS, **settings) for engine in written)
    assert tokens_of(own) == tokens_of(reference)
    assert [each.finish_reason for each in own] == [each.finish_reason for each in reference]
    for one, other in zip(own, reference):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_hf_and_embedded_agree_under_filters_and_in_chunks():
    model = talkative_model("qwen2")
    settings = {"n": 3, "temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    reference = run(make_engine(model, "hf", max_num_seqs=4), PROMPTS, **settings)
    assert tokens_of(run(make_engine(model), PROMPTS, **settings)) == tokens_of(reference)


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("gpt2", {}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}},
        ),
    ],
)
def test_hf_feeds_no_row_beyond_the_longest_sequence(family, arguments):
    """Run a full sequence next to a short one that continues for longer."""
    model = talkative_model(family, max_position_embeddings=64, **arguments)
    engine = make_engine(model, "hf", prompt_length=60, response_length=4)
    prompts = [[5 + (7 * i) % 90 for i in range(60)], [9, 11], [7, 13, 17]]
    completions = run(engine, prompts, max_new_tokens=40, ignore_eos=True)
    assert [len(completion.token_ids) for completion in completions] == [4, 40, 40]
    for prompt, completion in zip(prompts, completions):
        expected = forward_log_probs(model, prompt, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-3)


def test_hf_greedy_equals_transformers_generate():
    model = talkative_model("qwen3")
    ours = run(make_engine(model, "hf"), PROMPTS, temperature=0, max_new_tokens=30)
    assert tokens_of(ours) == [transformers_greedy(model, prompt, 30) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ENGINES)
def test_the_models_own_generation_settings_are_not_applied(name):
    model = talkative_model("qwen2")
    before = tokens_of(run(make_engine(model, name), PROMPTS))
    model.generation_config.top_k = 1
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.do_sample = True
    assert tokens_of(run(make_engine(model, name), PROMPTS)) == before


def test_stop_tokens_without_text_are_rejected():
    for token in (99_999, -4):
        with pytest.raises(
            ConfigError, match="stop_token_ids must be ids of the tokenizer, from 0 to"
        ):
            StopRule(
                SamplingParams(max_new_tokens=4, stop_token_ids=(token,)), (), tiny_tokenizer()
            )


@pytest.mark.parametrize("name", ENGINES)
def test_end_of_sequence_and_stop_tokens(name):
    model = talkative_model("qwen2")
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    engine = make_engine(model, name)
    engine.eos_ids = ()
    free = run(engine, PROMPTS, n=2)
    assert all(c.finish_reason == "length" and len(c.token_ids) == 24 for c in free)
    chosen = free[0].token_ids[5]

    stopped = run(engine, PROMPTS, n=2, stop_token_ids=(chosen,))
    assert any(c.finish_reason == "stop" for c in stopped)
    for whole, cut in zip(free, stopped):
        end = whole.token_ids.index(chosen) + 1 if chosen in whole.token_ids else 24
        assert cut.token_ids == whole.token_ids[:end]  # the stop token is kept
        assert cut.finish_reason == ("stop" if chosen in whole.token_ids else "length")

    engine.eos_ids = (chosen,)
    assert tokens_of(run(engine, PROMPTS, n=2)) == tokens_of(stopped)
    assert tokens_of(run(engine, PROMPTS, n=2, ignore_eos=True)) == tokens_of(free)


def test_end_of_sequence_ids_come_from_model_and_tokenizer():
    model = talkative_model("qwen2")
    model.generation_config.eos_token_id = [7, 9]
    assert make_engine(model).eos_ids == (2, 7, 9)


@pytest.mark.parametrize("name", ENGINES)
def test_stop_strings_end_with_the_token_that_completes_them(name):
    tokenizer = tiny_tokenizer()
    engine = make_engine(talkative_model("qwen2"), name)
    free = run(engine, PROMPTS, n=2, ignore_eos=True)
    stop = str(tokenizer.decode(free[1].token_ids[10:13]))
    stopped = run(engine, PROMPTS, n=2, ignore_eos=True, stop=(stop,))
    for whole, cut in zip(free, stopped):
        end = next(
            (i for i in range(1, 25) if stop in str(tokenizer.decode(whole.token_ids[:i]))), None
        )
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.finish_reason == ("length" if end is None else "stop")
    assert stopped[1].finish_reason == "stop"


def test_a_stop_string_may_span_tokens_without_text():
    tokenizer = tiny_tokenizer()
    begin = tokenizer.convert_tokens_to_ids("a")
    end = tokenizer.convert_tokens_to_ids("b")
    nothing = len(tokenizer)
    rule = StopRule(SamplingParams(max_new_tokens=64, stop=("ab",)), (), tokenizer)
    response = np.array([begin, *[nothing] * 40, end])
    assert tokenizer.decode(response.tolist()) == "ab"
    assert rule.completes_string(response)
    assert not rule.completes_string(response[:-1])
    assert not rule.completes_string(response[1:])


def test_stop_strings_need_a_tokenizer():
    model = talkative_model("qwen2")
    engine = create_rollout_engine(
        RolloutConfig(prompt_length=64, response_length=64),
        model=model,
        tokenizer=None,
        device=torch.device("cpu"),
    )
    with pytest.raises(ConfigError, match="need a tokenizer"):
        run(engine, PROMPTS, stop=("a",))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "gpt2"])
def test_on_cpu_the_engine_reads_the_trainers_weights_and_does_not_change_its_module(name, family):
    model = talkative_model(family).train()
    engine = make_engine(model, name)
    assert model.config._attn_implementation == "eager"
    assert model.training
    assert not engine.twin.module.training
    pairs = zip(model.named_parameters(), engine.twin.module.named_parameters())
    assert all(mine[0] == its[0] and mine[1].data_ptr() == its[1].data_ptr() for mine, its in pairs)
    assert all(parameter.requires_grad for parameter in model.parameters())

    before = tokens_of(run(engine, PROMPTS))
    other = talkative_model(family, seed=1)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters()):
            parameter.copy_(new)

    after = tokens_of(run(engine, PROMPTS))
    assert after != before
    assert after == tokens_of(run(make_engine(other, name), PROMPTS))


@pytest.mark.parametrize("fused", [False, True])
def test_on_cpu_an_optimizer_step_is_visible_at_once(fused):
    model = talkative_model("qwen2")
    engine = make_engine(model, page_size=4)
    run(engine, PROMPTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    completions = run(engine, PROMPTS)
    assert engine.statistics()["cached_tokens"] == 0
    for prompt, completion in zip(PROMPTS, completions):
        expected = forward_log_probs(model, prompt, completion.token_ids)
        assert completion.log_probs == pytest.approx(expected.tolist(), abs=1e-3)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_update_weights_takes_foreign_tensors_without_changing_the_trainers(dtype):
    model = talkative_model("qwen2")
    other = talkative_model("qwen2", seed=1)
    engine = make_engine(model, dtype=dtype)
    saved = {name: parameter.clone() for name, parameter in model.named_parameters()}
    before = tokens_of(run(engine, PROMPTS))
    engine.update_weights(
        (name, parameter.detach()) for name, parameter in other.named_parameters()
    )

    assert tokens_of(run(engine, PROMPTS)) == tokens_of(
        run(make_engine(other, dtype=dtype), PROMPTS)
    )
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
    engine.update_weights(model.named_parameters())
    assert tokens_of(run(engine, PROMPTS)) == before
    if dtype is None:
        assert engine.twin.module.lm_head.weight is model.lm_head.weight  # aliased again


def test_copies_keep_their_addresses():
    model = talkative_model("qwen2")
    engine = make_engine(model, dtype="bfloat16")
    addresses = [parameter.data_ptr() for parameter in engine.twin.module.parameters()]
    engine.update_weights(talkative_model("qwen2", seed=1).named_parameters())
    assert addresses == [parameter.data_ptr() for parameter in engine.twin.module.parameters()]


def test_update_weights_requires_all_names_and_shapes():
    model = talkative_model("qwen2")
    engine = make_engine(model)
    weights = dict(model.named_parameters())
    first = next(iter(weights))

    with pytest.raises(RolloutError, match="1 are missing: model.norm.weight"):
        engine.update_weights(
            (name, tensor) for name, tensor in weights.items() if name != "model.norm.weight"
        )

    with pytest.raises(RolloutError, match="weights are incomplete"):
        run(engine, PROMPTS)
    with pytest.raises(
        RolloutError,
        match="'model.norm.wieght', which the model does not have. .*model.norm.weight",
    ):
        engine.update_weights({**weights, "model.norm.wieght": weights[first]}.items())

    with pytest.raises(RolloutError, match="of shape"):
        engine.update_weights({**weights, first: weights[first][:3]}.items())
    engine.update_weights(weights.items())
    run(engine, PROMPTS)


def test_tied_weights_stay_tied_and_either_name_is_known():
    model = talkative_model("qwen2", tie_word_embeddings=True)
    engine = make_engine(model, dtype="bfloat16")
    twin = engine.twin.module
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())
    weights = dict(model.named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    engine.update_weights(weights.items())
    run(engine, PROMPTS)


def test_only_the_embedded_engine_is_deterministic():
    with pytest.raises(ConfigError, match="name=hf. Set name=embedded.*, or deterministic=false"):
        make_engine(talkative_model("qwen2"), "hf", deterministic=True)


def test_an_unknown_engine_is_an_error():
    with pytest.raises(ConfigError, match="Unknown rollout engine .* 'embeded'"):
        make_engine(talkative_model("qwen2"), "embeded")
