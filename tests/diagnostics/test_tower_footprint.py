"""Predicted memory of vision towers against real ones, counted tensor by tensor on a CPU."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.diagnostics.live_bytes import LiveBytes, taken_by
from tests.engine.batches import COLUMNS, make_batch, smooth_loss
from tests.tiny_vision_models import FAMILIES, IMAGE, wide_vision_model
from verl.config import FSDPConfig, OptimConfig
from verl.distributed.mesh import close_process_group
from verl.engine.base import TrainEngine
from verl.engine.budget import AutomaticBudgets
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.engine.tower_footprint import TowerFootprint
from verl.engine.tower_shape import TowerShape
from verl.models.attention import apply_checkpointing
from verl.models.packed import PackedCausalLM
from verl.models.pictures import Picture
from verl.models.vision import (
    example_picture,
    freeze_vision_tower,
    picture_features,
)
from verl.protocol import DataProto

BF16 = FSDPConfig(compute_dtype="bfloat16")
RESPONSE = 40


@pytest.fixture(autouse=True)
def process_group():
    yield
    close_process_group()


def large_pictures(model: Any, count: int) -> list[Picture]:
    """Make pictures of random pixels; those of Qwen-VL have 96 tokens, of 384 patches."""
    pictures = [example_picture(model, seed) for seed in range(count)]
    if pictures[0].grid is None:
        return pictures

    large = []
    for number, picture in enumerate(pictures):
        width = picture.inputs["pixel_values"].shape[1]
        pixels = torch.randn(16 * 24, width, generator=torch.Generator().manual_seed(number))
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 16, 24]])}
        large.append(replace(picture, inputs=inputs, grid=(8, 12), token_ids=(IMAGE,) * 96))
    return large


def saved_bytes(model: Any, pictures: list[Picture]) -> int:
    """Add up the storages that autograd saves while the tower runs, without the parameters."""
    parameters = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in parameters:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        picture_features(model, pictures)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def footprint_of(model: Any, *, recomputing: int = 0) -> TowerFootprint:
    shape = TowerShape.of(model)
    assert shape is not None
    return TowerFootprint(
        shape=shape,
        itemsize=next(model.parameters()).itemsize,
        compiled=False,
        on_cuda=False,
        recomputing=recomputing,
    )


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_of_a_tower_are_predicted(family: str, dtype: torch.dtype):
    model = wide_vision_model(family, dtype)
    PackedCausalLM(model)  # joins the windows of the tower
    pictures = large_pictures(model.train(), 6)
    tokens = sum(picture.num_tokens for picture in pictures)
    footprint = footprint_of(model)
    # Of LLaVA's pictures in tiles a few tokens end rows, which the plan takes for features.
    tolerance = 0.07 if family == "llava_onevision" else 0.02
    assert footprint.kept(tokens) == pytest.approx(saved_bytes(model, pictures), rel=tolerance)

    with torch.no_grad():
        features: list[Any] = []  # live on, as for the language model
        taken = taken_by(
            lambda: features.append(picture_features(model, pictures)), model.parameters()
        )
    tolerance = 0.15 if family == "llava_onevision" else 0.1
    assert footprint.forward(tokens) == pytest.approx(taken, rel=tolerance)

    apply_checkpointing(model)
    recomputing = footprint_of(model, recomputing=4)
    # Tables of positions are arguments of recomputed layers, which autograd does not save.
    assert recomputing.kept(tokens) == pytest.approx(saved_bytes(model, pictures), rel=0.12)

    freeze_vision_tower(model)
    frozen = footprint_of(model)
    if family.startswith("qwen"):
        assert frozen.kept(tokens) == saved_bytes(model, pictures) == 0
    else:
        assert 0 < frozen.kept(tokens) < recomputing.kept(tokens)


def make_engine(
    family: str, *, intermediate: int = 256, freezes: bool = False, **settings: Any
) -> tuple[TrainEngine, list[Picture]]:
    """Make an engine, and a few pictures."""
    model = wide_vision_model(family, torch.float32, intermediate=intermediate)
    # by its tower, before that is sharded
    pictures = large_pictures(model, 2 if family.startswith("qwen") else 12)
    if freezes:
        freeze_vision_tower(model)
    options = EngineOptions(
        device=torch.device("cpu"),
        optim=OptimConfig(),
        share_prompts=False,
        fsdp_config=BF16,
        **settings,
    )
    return TrainEngine(PackedCausalLM(model), options, total_steps=5), pictures


def batch_of(pictures: list[Picture], rows: int) -> DataProto:
    """Make two prompts with half of the pictures each, and `rows` rows of each prompt."""
    half = len(pictures) // 2
    own = [tuple(pictures[:half])] * rows + [tuple(pictures[half:])] * rows
    tokens = half * pictures[0].num_tokens
    batch = make_batch([(4 + tokens, RESPONSE)] * len(own))
    ids = batch.batch["input_ids"]
    ids[ids == IMAGE] = 7
    ids[:, 2 : 2 + tokens] = IMAGE

    column = np.empty(len(own), dtype=object)
    column[:] = own
    batch.non_tensor_batch["prepared_pictures"] = column
    return batch


@pytest.mark.parametrize(
    ("family", "rows", "settings"),
    [
        pytest.param("qwen3_vl", 2, {}, marks=pytest.mark.slow),
        ("qwen2_5_vl", 1, {"enable_gradient_checkpointing": True}),
        pytest.param(
            "qwen2_5_vl",
            1,
            {"enable_gradient_checkpointing": True, "freezes": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["all kept", "recomputed", "frozen"],
)
def test_peak_memory_of_passes_with_pictures_is_predicted(
    family: str, rows: int, settings: dict[str, Any]
):
    """Compare passes in bf16 with FSDP2 and uncompiled layers over pictures of two prompts.

    Where layers recompute, the language model is so narrow that the tower takes most.
    """
    intermediate = 256 if rows == 2 else 48
    engine, pictures = make_engine(family, intermediate=intermediate, **settings)
    batch = batch_of(pictures, rows)
    budget = TokenBudget(rows=rows)
    # Of one pass: rows with the same pictures.
    tokens = rows * int(batch.batch["attention_mask"][0].sum())
    predictions = rows * RESPONSE
    of_pictures = sum(picture.num_tokens for picture in pictures) // 2

    def update() -> None:
        engine.forward_backward(batch, budget, smooth_loss, COLUMNS)

    update()
    engine.step()
    assert engine.optimizer is not None
    states = engine.optimizer.state.values()
    moments = [value for state in states for value in state.values()]
    there = [
        tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for tensor in (*engine.module.parameters(), *moments)
    ]

    taken = taken_by(update, there)
    predicted = engine.footprint.update(tokens, predictions, of_pictures)
    assert sum(predicted.values()) == pytest.approx(taken, rel=0.05)
    assert predicted["vision tower"] > 0.3 * taken

    engine.optimizer.zero_grad()
    taken = taken_by(lambda: engine.infer(batch, budget), there)
    predicted = engine.footprint.forward(tokens, predictions, of_pictures)
    assert sum(predicted.values()) == pytest.approx(taken, rel=0.1)
    assert predicted["vision tower"] > 0.3 * taken


def test_first_passes_leave_room_for_pictures():
    engine, pictures = make_engine("qwen2_5_vl")
    batch = batch_of(pictures, 2)
    meter = LiveBytes(room=1 << 30)
    predicted = []

    class Budgets(AutomaticBudgets):
        def begin(self, budget: TokenBudget, lengths: Any, predict: Any) -> TokenBudget:
            predicted.append([predict(size) for size in (64, 1024)])
            return super().begin(budget, lengths, predict)

    engine.sizes.budgets = Budgets(meter, engine.mesh.world)
    engine.infer(batch, TokenBudget(key="key"))
    del batch.non_tensor_batch["prepared_pictures"]
    engine.infer(batch, TokenBudget(key="other"))

    forward = engine.footprint.forward
    # The tokens of two pictures are all that the larger pass could have.
    of_pictures = [sum(forward(64, 64, 64).values()), sum(forward(1024, 1024, 192).values())]
    of_text = [sum(forward(size, size).values()) for size in (64, 1024)]
    assert predicted == [of_pictures, of_text]
    assert of_pictures[0] > of_text[0]
