"""Routing replay: the same experts in rollout, old log-probs and update."""

from typing import Any

import pytest
import torch

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, smooth_loss
from tests.rollout.engines import PROMPTS, make_engine, run
from tests.tiny_models import tiny_model
from verl.config import OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.attention import PackingSlot, prepare
from verl.models.packed import PackedCausalLM
from verl.models.routing import none, watch_routers
from verl.protocol import DataProto
from verl.rollout.assemble import assemble, trajectories_of
from verl.utils.errors import ModelError

MANY: dict[str, Any] = {"num_experts": 16, "num_experts_per_tok": 4}
SHAPES = [(20, 11), (20, 9), (1, 3), (30, 20)]
WHOLE = TokenBudget(rows=4)
ROUTES = ["routed_experts"]


@pytest.fixture(autouse=True)
def close():
    torch._dynamo.reset()
    yield
    close_process_group()


def make_model(family: str = "qwen3_moe") -> Any:
    """Return a model with experts whose logits are often nearly equal."""
    model: Any = tiny_model(family, **(MANY if family == "qwen3_moe" else {}))
    for layer in model.model.layers:
        router = layer.mlp.gate if family == "qwen3_moe" else layer.mlp.router
        router.weight.data *= 0.03
    return model


def make_trainer(family: str = "qwen3_moe", options: dict[str, Any] | None = None) -> TrainEngine:
    model = make_model(family)
    watch_routers(model, prepare(model))
    made = EngineOptions(
        device=torch.device("cpu"), optim=OptimConfig(), **{"shard": False, **(options or {})}
    )
    return TrainEngine(PackedCausalLM(model), made, total_steps=1)


def test_replay_removes_the_mismatch_of_a_rollout_in_bf16():
    model = make_model()
    engine = make_engine(model, dtype="bfloat16", enable_rollout_routing_replay=True, num_pages=16)
    # few pages: samples are pre-empted, and keep what was recorded
    completions = run(engine, PROMPTS, n=6, ignore_eos=True)
    assert engine.statistics()["preemptions"] > 0
    prompts = [prompt for prompt in PROMPTS for _ in range(6)]
    columns = assemble(
        trajectories_of(prompts, completions), prompt_length=40, response_length=24, pad_token_id=0
    )
    routes = columns["routed_experts"]
    assert routes.shape == (18, 24, 2 * 4)
    unknown = (routes == none(routes.dtype)).any(-1)
    assert unknown[:, 0].all()
    assert unknown[:, 1:].float().mean() < 0.1  # the first tokens after a pre-emption

    trainer = make_trainer()
    batch = DataProto.from_dict(tensors=columns)
    rollout = columns["rollout_log_probs"]
    live = trainer.infer(batch, WHOLE)["log_probs"]
    replayed = trainer.infer(batch, WHOLE, ROUTES)["log_probs"]
    off_live = (live - rollout).abs().mean()
    off_replayed = (replayed - rollout).abs().mean()
    print(f"mean |difference| of log-probs: {off_live:.4f} without replay, {off_replayed:.4f} with")
    assert off_replayed < 0.6 * off_live


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_pass_that_replays_its_own_choices_is_the_same(family: str):
    trainer = make_trainer(family)
    batch = make_batch(SHAPES)
    live = trainer.infer(batch, WHOLE, routed_experts=torch.uint8)
    batch.batch["routed_experts"] = live["routed_experts"]
    assert live["routed_experts"].dtype == torch.uint8
    trainer.forward_backward(batch, WHOLE, smooth_loss, COLUMNS)
    gradient = flat_gradient(trainer)

    replayed = trainer.infer(batch, TokenBudget(rows=1), ROUTES)
    torch.testing.assert_close(replayed["log_probs"], live["log_probs"], rtol=1e-4, atol=1e-4)
    trainer.forward_backward(batch, WHOLE, smooth_loss, [*COLUMNS, *ROUTES])
    torch.testing.assert_close(flat_gradient(trainer), gradient, rtol=1e-4, atol=1e-6)

    # Other choices are taken, too, and no choice means free ones.
    batch.batch["routed_experts"] = (live["routed_experts"] + 1) % 4
    other = trainer.infer(batch, WHOLE, ROUTES)["log_probs"]
    assert (other - live["log_probs"]).abs().max() > 0.1
    batch.batch["routed_experts"].fill_(none(torch.uint8))
    free = trainer.infer(batch, WHOLE, ROUTES)["log_probs"]
    torch.testing.assert_close(free, live["log_probs"], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_replay_in_compiled_and_recomputed_layers():
    changes = {"use_torch_compile": True, "compile_backend": "aot_eager"}
    plain = make_trainer()
    compiled = make_trainer(options={**changes, "enable_gradient_checkpointing": True})
    batch = make_batch(SHAPES)
    drawn = torch.Generator().manual_seed(0)
    size = (4, 20, 8)
    batch.batch["routed_experts"] = torch.randint(16, size, generator=drawn).to(torch.uint8)
    gradients = []
    for trainer in (plain, compiled):
        trainer.module.train()
        trainer.module.zero_grad()
        mini_batch = trainer._mini_batch(batch, ["response_mask", "weights", *COLUMNS, *ROUTES])
        trainer._backward(mini_batch.pack(range(4)), smooth_loss, {})
        # a pass of another batch in between must not change what is recomputed
        gradients.append(flat_gradient(trainer))
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert error < 1e-4


def test_dense_models_are_refused():
    with pytest.raises(ModelError, match="got 'qwen2'"):
        watch_routers(tiny_model("qwen2"), PackingSlot())
