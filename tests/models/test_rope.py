"""Families that use the kernel of the rotary embedding."""

import sys

import pytest

from tests.tiny_models import tiny_model
from verl.models.rope import use_fast_rope

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("qwen2", True),
        ("llama", True),
        ("gemma2", True),
        ("phi", True),
        ("phi3", False),
        ("gpt2", False),
    ],
)
def test_the_formula_of_llama_is_found_by_its_source(family: str, known: bool, monkeypatch):
    model = tiny_model(family)
    name = type(model).__module__
    original = getattr(sys.modules[name], "apply_rotary_pos_emb", None)
    if original is not None:
        # restored after the test
        monkeypatch.setattr(sys.modules[name], "apply_rotary_pos_emb", original)
    assert use_fast_rope(model) == ([name] if known else [])
    if known:
        first = sys.modules[name].apply_rotary_pos_emb
        assert first is not original
        use_fast_rope(model)
        assert sys.modules[name].apply_rotary_pos_emb is first
