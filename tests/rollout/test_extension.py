"""New tokens after cached ones, against the prefill of whole sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.rollout.engines import make_engine, run, talkative_model
from verl.models.attention import Facts, masked_attention
from verl.rollout.embedded import extension

PAGE = 4
FAMILIES = ("qwen2", "mistral", "gemma2", "gpt_oss", "bloom", "deepseek_v3")


@pytest.fixture(scope="module", params=FAMILIES)
def runner(request):
    engine = make_engine(talkative_model(request.param), page_size=PAGE, num_pages=200)
    run(engine, [[5, 6, 7]], max_new_tokens=2)  # which makes the decoder
    return engine.runner


def reference(q, k, v, longest, ends, scale, *, window, key_offsets) -> Tensor:
    """Compute `torch_attention` from its definition, sequence by sequence."""
    outputs = []
    facts = Facts(scale, window, None, None)
    for row in range(len(ends) - 1):
        queries = q[ends[row] : ends[row + 1]]
        mine = slice(key_offsets[row], key_offsets[row + 1])
        length = mine.stop - mine.start
        assert 0 < len(queries) <= length <= longest[0]
        key = torch.arange(length)
        last = key[-len(queries) :, None]
        seen = key <= last
        if window is not None:
            seen = seen & (key > last - window)
        q_block, k_block, v_block = (
            each.transpose(0, 1)[None] for each in (queries, k[mine], v[mine])
        )
        out = masked_attention(q_block, k_block, v_block, seen, facts)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@settings(max_examples=12)
@given(
    packed=st.booleans(),
    gathered=st.sampled_from([1 << 18, 40]),
    sequences=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 20)), min_size=1, max_size=7),
    seed=st.integers(0, 99),
)
@torch.inference_mode()
def test_new_tokens_see_what_they_see_in_a_whole_sequence(
    runner, packed, gathered, sequences, seed
):
    random = torch.Generator().manual_seed(seed)
    tokens = []
    pages = []
    cached = []
    free = torch.randperm(200, generator=random).tolist()
    for num_cached_pages, num_new in sequences:
        length = num_cached_pages * PAGE + num_new
        tokens.append(torch.randint(5, 90, (length,), generator=random).tolist())
        pages.append([free.pop() for _ in range(-(-length // PAGE))])
        cached.append(num_cached_pages * PAGE)

    whole = runner.prefill(tokens, pages)
    layers = list(runner.paging.layers.values())
    expected = [[cache.clone() for cache in layer.tensors] for layer in layers]
    for layer in layers:
        for cache in layer.tensors:
            for mine, start in zip(pages, cached):
                # memory that no token was written to may hold anything
                cache[mine[start // PAGE :]] = float("nan")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "GATHER_TOKENS", gathered)
        if packed:
            plain = lambda q, v, facts: facts.is_plain  # noqa: E731
            patch.setattr(extension, "varlen_can", plain)
            patch.setattr(extension, "torch_attention", reference)
        states = runner.extend(tokens, pages, cached, [0] * len(tokens))

    torch.testing.assert_close(states, whole, atol=2e-5, rtol=1e-5)
    for layer, caches in zip(layers, expected):
        for cache, other in zip(layer.tensors, caches):
            for mine, each in zip(pages, tokens):
                place = torch.arange(len(each))
                at = (torch.tensor(mine)[place // PAGE], slice(None), place % PAGE)
                torch.testing.assert_close(cache[at], other[at], atol=2e-5, rtol=1e-5)


def test_a_window_and_isolation_matter(monkeypatch):
    """Check that the comparison above fails where a query sees another key."""
    engine = make_engine(talkative_model("mistral"), page_size=PAGE, num_pages=50)
    run(engine, [[5, 6, 7]], max_new_tokens=2)
    tokens = [list(range(10, 40))]
    pages = [list(range(8))]
    whole = engine.runner.prefill(tokens, pages)
    right = extension.seen_keys
    monkeypatch.setattr(extension, "seen_keys", lambda at, length, window: right(at, length, None))
    states = engine.runner.extend(tokens, pages, [16], [0])
    assert (states - whole).abs().max() > 1e-3
