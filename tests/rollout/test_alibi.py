"""ALiBi biases in the embedded engine's decode steps."""

import pytest

from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from tests.rollout.test_embedded import worst_log_prob_error
from tests.tiny_models import ALIBI_FAMILIES, LATENT_FAMILIES
from verl.config.rollout import RolloutConfig
from verl.models.alibi import has_key_bias
from verl.rollout import check_engine_model
from verl.rollout.embedded import attention as paged
from verl.rollout.embedded import host_rows, host_runner
from verl.utils.errors import ConfigError


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_hf_and_embedded_draw_the_same_tokens(family):
    model = talkative_model(family)
    reference = run(make_engine(model, "hf"), PROMPTS, n=2, temperature=1.2)
    ours = run(make_engine(model), PROMPTS, n=2, temperature=1.2)
    assert tokens_of(ours) == tokens_of(reference)


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_gathered_pages_give_the_tokens_of_rows(family, monkeypatch):
    model = talkative_model(family)
    rows = run(make_engine(model), PROMPTS, n=2)
    monkeypatch.setattr(host_runner, "ROWS_BYTES", 0)
    pages = run(make_engine(model, page_size=4), PROMPTS, n=2)
    assert tokens_of(pages) == tokens_of(rows)
    assert worst_log_prob_error(model, pages, 2, 1.0) <= 1e-4


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_a_second_turn_counts_positions_from_its_first_token(family):
    model = talkative_model(family)
    engine = make_engine(model, page_size=4)
    first = run(engine, PROMPTS)
    turns = [[*PROMPTS[c.sample_id], *c.token_ids, 7, 9] for c in first]
    again = run(engine, turns, max_new_tokens=8)
    assert engine.statistics()["cached_tokens"] > 0
    fresh = run(make_engine(model, page_size=4), turns, max_new_tokens=8)
    assert tokens_of(again) == tokens_of(fresh)


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
@pytest.mark.parametrize("rows_bytes", [0, 1 << 31])
def test_the_parity_test_notices_dropped_biases(family, rows_bytes, monkeypatch):
    monkeypatch.setattr(host_runner, "ROWS_BYTES", rows_bytes)
    true_facts = paged.layer_facts
    monkeypatch.setattr(paged, "layer_facts", lambda *a: true_facts(*a)._replace(bias=None))
    model = talkative_model(family)
    assert worst_log_prob_error(model, run(make_engine(model), PROMPTS), 1, 1.0) > 1e-2


@pytest.mark.parametrize("family", ALIBI_FAMILIES)
def test_the_parity_test_notices_positions_that_do_not_advance(family, monkeypatch):
    true_bias = host_rows.add_bias

    def still(offset, bias, positions, heads):
        return true_bias(offset, bias, positions // 2, heads)

    monkeypatch.setattr(host_rows, "add_bias", still)
    model = talkative_model(family)
    assert worst_log_prob_error(model, run(make_engine(model), PROMPTS), 1, 1.0) > 1e-2


def test_the_deterministic_engine_rejects_biases_by_name():
    with pytest.raises(ConfigError, match="does not support.*ALiBi.*'bloom'"):
        make_engine(talkative_model("bloom"), deterministic=True)


@pytest.mark.parametrize(("family", "feature"), [("bloom", "ALiBi"), ("deepseek_v3", "MLA")])
def test_the_engine_on_cuda_rejects_by_name(family, feature):
    model = talkative_model(family)
    config = RolloutConfig()
    check_engine_model(config, model.config, on_cuda=False)
    with pytest.raises(ConfigError, match=f"On CUDA .*{feature}.*'{family}'. Set it to hf"):
        check_engine_model(config, model.config, on_cuda=True)

    config.name = "hf"
    check_engine_model(config, model.config, on_cuda=True)


@pytest.mark.parametrize("family", ["qwen2", *ALIBI_FAMILIES, *LATENT_FAMILIES])
def test_a_configuration_describes_the_attention_like_the_module(family):
    model = talkative_model(family)
    paging = make_engine(model).runner.paging
    has_bias = any(has_key_bias(module) for module in model.modules())
    is_special = bool(paging.latent_layers) or has_bias
    deterministic = RolloutConfig(deterministic=True)
    if is_special:
        with pytest.raises(ConfigError, match="does not support"):
            check_engine_model(deterministic, model.config, on_cuda=False)
    else:
        check_engine_model(deterministic, model.config, on_cuda=True)
