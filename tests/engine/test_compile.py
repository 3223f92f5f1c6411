"""Compiled decoder layers: same gradients as uncompiled ones, and few graphs for all lengths."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers, lists, tuples
from torch._dynamo.utils import counters

from tests.engine.batches import COLUMNS, flat_gradient, make_batch, smooth_loss
from tests.models.test_vision import packed_batch
from tests.tiny_models import tiny_model
from tests.tiny_vision_models import tiny_vision_model
from verl.config import OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.compile import KEY, apply_compile
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.attention import apply_checkpointing
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.utils.errors import ConfigError

CPU = torch.device("cpu")
# The first row must not have 32 tokens: a count equal to the hidden size becomes the same symbol of
# the graph, which is then compiled again.
SHAPES = [(20, 11), (5, 9), (1, 3), (30, 20), (7, 1), (3, 14)]
ONE_ROW = TokenBudget(rows=1)


@pytest.fixture(autouse=True)
def clean_start(monkeypatch):
    """Reset the counters before each test, and close the process group after it."""
    counters.clear()
    # Capturing torch's log lines of a graph in pytest takes longer than the compilation.
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    yield
    close_process_group()


@pytest.fixture
def no_graphs():
    """Drop all graphs, for tests that count new ones.

    The others share graphs with the tests before them, as models of one process do.
    """
    torch._dynamo.reset()


def make_engine(backend: str | None, family: str = "qwen2", **settings) -> TrainEngine:
    options = EngineOptions(
        device=CPU,
        optim=OptimConfig(lr=1e-2),
        grad_clip=0.5,
        use_torch_compile=backend is not None,
        compile_backend=backend or "",
        **{"shard": False, **settings},
    )
    model = tiny_model(family)
    if family == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
    return TrainEngine(PackedCausalLM(model), options, total_steps=5)


def gradient(engine: TrainEngine, shapes, budget: TokenBudget) -> torch.Tensor:
    engine.forward_backward(make_batch(shapes), budget, smooth_loss, COLUMNS)
    return flat_gradient(engine)


def relative_l2(one: torch.Tensor, other: torch.Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


@pytest.mark.slow
def test_all_layers_and_lengths_share_four_graphs(no_graphs):
    engine = make_engine("aot_eager", enable_gradient_checkpointing=True)
    counters.clear()  # of the graph that checks the backend
    gradient(engine, SHAPES[:1], ONE_ROW)
    assert counters["stats"]["unique_graphs"] == 4
    # one kind of break, counted in each frame around it
    assert len(counters["graph_break"]) == 1

    for shapes in (SHAPES, [(3, 3)], [(17, 80), (2, 2)]):
        for budget in (ONE_ROW, TokenBudget(rows=4)):
            gradient(engine, shapes, budget)

    assert counters["stats"]["unique_graphs"] == 4
    # The first layer has its own graph without gradients: its input does not require one.
    engine.infer(make_batch(SHAPES), ONE_ROW)
    assert counters["stats"]["unique_graphs"] in (8, 10)
    known = counters["stats"]["unique_graphs"]
    engine.infer(make_batch([(17, 80), (2, 2)]), TokenBudget(rows=2))
    assert counters["stats"]["unique_graphs"] == known


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "backend", "how"),
    [
        ("qwen2", "aot_eager", {"enable_gradient_checkpointing": True, "shard": True}),
        ("gemma2", "eager", {}),
        ("qwen3_moe", "aot_eager", {}),
    ],
    ids=["checkpointing and FSDP2", "gemma2", "qwen3_moe"],
)
def test_compiled_layers_give_the_same_log_probs_and_gradients(family, backend, how):
    plain = make_engine(None, family, **how)
    compiled = make_engine(backend, family, **how)
    batch = make_batch(SHAPES)
    for _ in range(2):  # the second round must read the new weights
        expected = plain.infer(batch, ONE_ROW)["log_probs"]
        torch.testing.assert_close(
            compiled.infer(batch, ONE_ROW)["log_probs"], expected, rtol=1e-4, atol=2e-4
        )
        for budget in (ONE_ROW, TokenBudget(rows=3)):
            assert (
                relative_l2(gradient(compiled, SHAPES, budget), gradient(plain, SHAPES, budget))
                <= 1e-4
            )
        plain.step(), compiled.step()


@pytest.mark.slow
@given(
    shapes=lists(tuples(integers(1, 20), integers(1, 20)), min_size=1, max_size=6),
    rows=integers(1, 6),
)
@settings(max_examples=15)
def test_gradients_do_not_depend_on_compilation(shapes, rows, engines):
    plain, compiled = engines
    budget = TokenBudget(rows=rows)
    assert relative_l2(gradient(compiled, shapes, budget), gradient(plain, shapes, budget)) <= 2e-5


@pytest.fixture(scope="module")
def engines():
    return make_engine(None), make_engine("aot_eager")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_wraps_the_compiled_layer(checkpointing):
    """Check that checkpointed layers keep only their inputs for the backward pass."""
    engine = make_engine("aot_eager", enable_gradient_checkpointing=checkpointing)
    kept: list[int] = []
    packed = PackedBatch.from_sequences([list(range(3, 40)), list(range(60, 100))])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        log_probs = engine.module(packed)["log_probs"]
    wide = [numel for numel in kept if numel == 77 * 48]  # of the MLP's intermediate width
    assert bool(wide) != checkpointing
    log_probs.sum().backward()


def test_compiled_layers_are_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger="verl"):
        engine = make_engine("eager")
        for _ in range(2):
            engine.infer(make_batch(SHAPES[:2]), ONE_ROW)
    (line,) = [
        record.getMessage() for record in caplog.records if "compiled" in record.getMessage()
    ]
    assert line.startswith("2 decoder layers are compiled (eager); the first took ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "checkpointing"),
    [("qwen2_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", True)],
)
def test_models_that_read_pictures_have_the_same_gradients(family, checkpointing, no_graphs):
    """Layers of the tower and of the language are compiled."""
    gradients = []
    for backend in (None, "aot_eager"):
        module = PackedCausalLM(tiny_vision_model(family))
        batch = packed_batch(module.model)
        if checkpointing:
            apply_checkpointing(module.model)
        if backend is not None:
            counters.clear()
            apply_compile(module, CPU, backend=backend)
        log_probs = module(batch)["log_probs"]
        parameters = [each for each in module.parameters() if each.requires_grad]
        found = torch.autograd.grad(log_probs.sum(), parameters, allow_unused=True)
        gradients.append([each for each in found if each is not None])
    assert counters["stats"]["unique_graphs"] >= 8  # four of each kind of layer
    for plain, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)


def test_missing_compiler_error_names_the_key():
    with (
        torch._inductor.config.patch(
            {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
        ),
        pytest.raises(ConfigError, match=f"{KEY}=false"),
    ):
        apply_compile(PackedCausalLM(tiny_model("qwen2")), CPU)
