"""A job for the ranks of a test: train a tiny model with a frozen tower on prompts with pictures."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tests.distributed.jobs import Deal, own_rows
from tests.engine.batches import COLUMNS, gradients_of, make_batch, smooth_loss
from tests.tiny_vision_models import tiny_vision_model
from verl.config import OptimConfig
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.attention import prepare
from verl.models.packed import PackedCausalLM
from verl.models.pictures import Picture
from verl.models.vision import (
    example_picture,
    freeze_vision_tower,
    keep_features,
    picture_features,
    towers_within,
)
from verl.protocol import DataProto

SHAPES = [(20, 5), (18, 3), (22, 6), (19, 4)]


def train(deal: Deal, kept_on: Sequence[int] | None) -> dict[str, Any]:
    """Take two steps; return gradient, weights and the calls of the tower after the first pass.

    Args:
        deal: rows of each rank.
        kept_on: ranks that have the features of all pictures at the start, as after a rollout;
            None: no rank keeps any.
    """
    model = tiny_vision_model("qwen2_5_vl", dtype=torch.float64)
    freeze_vision_tower(model)
    pictures = [replace(example_picture(model, seed), key=str(seed)) for seed in range(len(SHAPES))]
    rollout = tiny_vision_model("qwen2_5_vl", dtype=torch.float64)
    prepare(rollout)  # the attention that the trainer computes the tower with
    features = [picture_features(rollout, [picture])[0].detach() for picture in pictures]

    options = EngineOptions(device=torch.device("cpu"), optim=OptimConfig(lr=1e-2))
    engine = TrainEngine(PackedCausalLM(model), options, total_steps=5)
    if kept_on is not None:
        store = keep_features(engine.hf_model)
        assert store is not None
        if engine.mesh.world.rank in kept_on:
            for picture, own in zip(pictures, features):
                store.put(picture, own[None])

    calls: list[int] = []
    towers_within(engine.hf_model)[0].register_forward_hook(lambda *_: calls.append(1))
    batch = own_rows(engine, _batch(pictures), deal)
    gradient = {}
    for _ in range(2):
        engine.infer(batch, TokenBudget(rows=1))
        engine.forward_backward(batch, TokenBudget(rows=1), smooth_loss, COLUMNS)
        gradient = gradients_of(engine)
        engine.step()
    weights = {name: value.clone() for name, value in engine.parameters_for_rollout()}
    return {"gradient": gradient, "weights": weights, "calls": len(calls)}


def _batch(pictures: Sequence[Picture]) -> DataProto:
    batch = make_batch(SHAPES)
    column = np.empty(len(SHAPES), dtype=object)
    for row, picture in enumerate(pictures):
        first = int(batch.batch["attention_mask"][row].nonzero()[0]) + 2
        ids = torch.tensor(picture.token_ids)
        batch.batch["input_ids"][row, first : first + len(ids)] = ids
        column[row] = (picture,)
    batch.non_tensor_batch["prepared_pictures"] = column
    return batch
