"""Multi-head latent attention in the embedded engine: pages of latents, absorbed decode steps."""

from typing import Any

import pytest
import torch

from tests.rollout.engines import (
    PROMPTS,
    forward_log_probs,
    make_engine,
    run,
    talkative_model,
    tokens_of,
)
from tests.tiny_models import LATENT_FAMILIES
from verl.models.attention import Facts
from verl.rollout.embedded import host_runner
from verl.rollout.embedded.attention import attend_keys
from verl.rollout.embedded.latent import LatentLayer
from verl.rollout.embedded.tensor_parallel import check_tensor_parallel
from verl.utils.errors import ConfigError
from verl.weight_sync.fingerprint import fingerprints

# of the tiny models
RANK = 12
ROTARY = 4


def worst_error(model, completions) -> float:
    errors = []
    for completion in completions:
        prompt = PROMPTS[completion.sample_id // 2]
        expected = forward_log_probs(model, prompt, completion.token_ids)
        errors.append((expected - torch.tensor(completion.log_probs)).abs().max().item())
    return max(errors)


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_a_page_holds_only_latents_and_rotary_keys(family):
    model = talkative_model(family)
    engine = make_engine(model, page_size=8)
    run(engine, PROMPTS, max_new_tokens=4)
    layers = list(engine.runner.paging.layers.values())
    assert len(layers) == model.config.num_hidden_layers
    for pages in layers:
        assert pages.keys.shape[1:] == (1, 8, ROTARY)
        assert pages.values.shape[1:] == (1, 8, RANK)
    assert engine.runner.page_bytes == len(layers) * 8 * (RANK + ROTARY) * 4


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_hf_and_embedded_draw_the_same_tokens(family):
    model = talkative_model(family)
    reference = run(make_engine(model, "hf"), PROMPTS, n=2, temperature=1.2)
    ours = run(make_engine(model), PROMPTS, n=2, temperature=1.2)
    assert tokens_of(ours) == tokens_of(reference)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_gathered_pages_give_the_tokens_of_rows(family, monkeypatch):
    """Gather pages in a step when rows would take too much memory."""
    model = talkative_model(family)
    rows = run(make_engine(model), PROMPTS, n=2)
    monkeypatch.setattr(host_runner, "ROWS_BYTES", 0)
    pages = run(make_engine(model, page_size=4), PROMPTS, n=2)
    assert tokens_of(pages) == tokens_of(rows)
    assert worst_error(model, pages) <= 1e-4


@pytest.mark.parametrize("family", ["deepseek_v3", "minicpm3"])
def test_a_second_turn_finds_the_latents_of_the_first(family):
    model = talkative_model(family)
    engine = make_engine(model, page_size=4)
    first = run(engine, PROMPTS)
    turns = [[*PROMPTS[c.sample_id], *c.token_ids, 7, 9] for c in first]
    again = run(engine, turns, max_new_tokens=8)
    assert engine.statistics()["cached_tokens"] >= sum(len(turn) - 8 for turn in turns)
    fresh = run(make_engine(model, page_size=4), turns, max_new_tokens=8)
    assert tokens_of(again) == tokens_of(fresh)
    for one, other in zip(again, fresh):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)


def test_preemption_changes_no_token():
    model = talkative_model("deepseek_v3")
    roomy = run(make_engine(model), PROMPTS, n=4)
    engine = make_engine(model, num_pages=7)
    assert tokens_of(run(engine, PROMPTS, n=4)) == tokens_of(roomy)
    assert engine.statistics()["preemptions"] > 0


def test_half_precision_attends_like_full_precision():
    draw = torch.Generator().manual_seed(0)
    rows = 3
    length = 24
    q = torch.randn(rows, 4, ROTARY + RANK, generator=draw).bfloat16()
    k = torch.randn(rows, length, ROTARY, generator=draw).bfloat16()
    v = torch.randn(rows, length, RANK, generator=draw).bfloat16()
    seen = torch.arange(length) <= torch.tensor([[3], [11], [23]])
    masks: dict[str, Any] = {
        "visible": lambda: seen,
        "offset": lambda dtype: (
            torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")).unsqueeze(1)
        ),
    }

    facts = Facts(scale=0.4, window=None, cap=None, sinks=None, latent=True)
    half = attend_keys(q, k, v, facts, **masks)
    exact = attend_keys(q.double(), k.double(), v.double(), facts, **masks)
    torch.testing.assert_close(half.double(), exact, atol=2e-2, rtol=2e-2)


def forget_rotary_keys(layer: LatentLayer, q: torch.Tensor) -> torch.Tensor:
    absorbed = TRUE_ABSORB(layer, q)
    absorbed[..., :ROTARY] = 0
    return absorbed


def forget_key_weights(layer: LatentLayer, q: torch.Tensor) -> torch.Tensor:
    absorbed = TRUE_ABSORB(layer, q)
    absorbed[..., ROTARY:] = 0
    return absorbed


def give_every_head_the_weights_of_the_first(layer: LatentLayer, out: torch.Tensor) -> torch.Tensor:
    return TRUE_EXPAND(layer, out[:, :1].expand_as(out))


TRUE_ABSORB = LatentLayer.absorb
TRUE_EXPAND = LatentLayer.expand_output


@pytest.mark.parametrize("family", LATENT_FAMILIES)
@pytest.mark.parametrize(
    ("method", "mutation"),
    [
        ("absorb", forget_rotary_keys),
        ("absorb", forget_key_weights),
        ("expand_output", give_every_head_the_weights_of_the_first),
    ],
)
def test_the_parity_test_notices_a_wrong_absorption(family, method, mutation, monkeypatch):
    monkeypatch.setattr(LatentLayer, method, mutation)
    model = talkative_model(family)
    assert worst_error(model, run(make_engine(model), PROMPTS, n=2)) > 1e-2


@pytest.mark.parametrize("dtype", [None, "float64"])
def test_absorbed_weights_are_those_of_the_last_update(dtype):
    """Copy the trainer's weights for `float64`, and read them in place for None."""
    model = talkative_model("deepseek_v3")
    other = talkative_model("deepseek_v3", seed=1)
    engine = make_engine(model, dtype=dtype)
    before = tokens_of(run(engine, PROMPTS, n=2))
    engine.update_weights(other.named_parameters())
    after = run(engine, PROMPTS, n=2)
    assert tokens_of(after) != before
    assert worst_error(other, after) <= 1e-4

    layers = dict(engine.twin.module.named_modules())
    name = "model.layers.1.self_attn"
    absorber = engine.runner.paging.latent_layers[layers[name]]
    key_weight, value_weight = absorber._weights()
    held = layers[name].kv_b_proj.weight
    assert key_weight.data_ptr() == held.data_ptr(), (
        "a view: nothing is derived that could be stale"
    )
    parts = torch.cat([key_weight, value_weight], dim=1).flatten(0, 1)
    [own] = fingerprints([parts.contiguous()]).tolist()
    assert engine.twin.fingerprints()[f"{name}.kv_b_proj.weight"].value == own


def test_the_deterministic_engine_rejects_latents_by_name():
    with pytest.raises(ConfigError, match="does not support.*MLA.*'deepseek_v3'"):
        make_engine(talkative_model("deepseek_v3"), deterministic=True)


def test_ranks_that_share_an_engine_reject_latents_by_name():
    with pytest.raises(ConfigError, match="cannot cut multi-head latent attention.*'deepseek_v3'"):
        check_tensor_parallel(talkative_model("deepseek_v3").config, 2)
