"""Models with multi-head latent attention: planned shapes, FSDP and checkpoints."""

from pathlib import Path

import torch

from tests.engine.test_fsdp import BUDGET, SHAPES, make_engine, process_group, train  # noqa: F401
from tests.rollout.engines import PROMPTS, run, talkative_model
from tests.rollout.engines import make_engine as make_rollout
from tests.tiny_models import save_tiny, tiny_model
from verl.engine.model_shape import ModelShape
from verl.models.load import load_causal_lm


def test_plan_counts_one_latent_and_one_rotary_key():
    for family, cached in (("deepseek_v3", 12 + 4), ("qwen3", 2 * 2 * 12), ("bloom", 2 * 36)):
        model = talkative_model(family)
        shape = ModelShape.from_module(model)
        assert shape.cached == cached
        engine = make_rollout(model, page_size=8)
        run(engine, PROMPTS, max_new_tokens=2)
        assert engine.runner.page_bytes == shape.layers * shape.cached * 8 * 4


def test_widths_count_expanded_heads_and_active_experts():
    shape = ModelShape.from_module(tiny_model("deepseek_v3"))
    assert shape.query == shape.key == 4 * (6 + 4)
    assert shape.intermediate == max(48, 2 * 16 + 16)


def test_sharded_model_trains_like_a_plain_one():
    plain = make_engine(shard=False, family="deepseek_v3")
    sharded = make_engine(shard=True, family="deepseek_v3")
    for one, other in zip(train(plain, 2), train(sharded, 2)):
        for name, value in one.items():
            assert abs(value - other[name]) <= 1e-4 * max(1.0, abs(value)), name


def test_saved_model_has_the_router_buffer(tmp_path: Path):
    """Save `e_score_correction_bias`, a buffer that affects the choice of experts."""
    model = tiny_model("deepseek_v3")
    gate = model.get_submodule("model.layers.1.mlp.gate")
    with torch.no_grad():
        gate.e_score_correction_bias.normal_()  # pyright: ignore[reportCallIssue]
    save_tiny(tmp_path, "deepseek_v3")
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(tmp_path, dtype="float32")
    ids = torch.tensor([PROMPTS[1]])
    loaded.set_attn_implementation("eager")
    assert torch.equal(loaded(ids).logits, model(ids).logits)
