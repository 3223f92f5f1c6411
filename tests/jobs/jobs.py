"""Programs of ranks for the tests of the merger: train a little, then save, each its shards."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.distributed import jobs
from tests.engine.batches import COLUMNS, make_batch, smooth_loss
from tests.tiny_models import tiny_tokenizer
from verl.engine.base import TrainEngine

SHAPES = [(5, 9), (2, 3), (12, 20), (7, 1)]


def new_engine(setup: jobs.Setup) -> TrainEngine:
    return jobs.new_engine(replace(setup, double=False))


def train_and_save(setup: jobs.Setup, folder: Path) -> dict[str, Any]:
    """Train two steps and write a checkpoint in the background while all weights change.

    Returns the state that should be saved, and how many tensors were gathered for it.
    """
    engine = new_engine(setup)
    share = len(SHAPES) // engine.mesh.data.size
    for seed in range(2):
        first = share * engine.mesh.data.rank
        batch = make_batch(SHAPES, seed=seed)[list(range(first, first + share))]
        engine.forward_backward(batch, jobs.WHOLE, smooth_loss, COLUMNS)
        engine.step()

    saved = jobs.state_of(engine)
    gathered = []
    with pytest.MonkeyPatch.context() as patch:
        whole = DTensor.full_tensor
        patch.setattr(
            DTensor,
            "full_tensor",
            lambda tensor, **kwargs: gathered.append(1) or whole(tensor, **kwargs),
        )
        engine.save(folder, tokenizer=tiny_tokenizer(), in_background=True)

    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.add_(1.0)

    assert engine.is_saved(wait=True)
    return {**saved, "gathered": len(gathered)}


def load(setup: jobs.Setup, folder: Path) -> dict[str, Any]:
    """Load the saved state on the current ranks."""
    engine = new_engine(setup)
    engine.load(folder)
    return jobs.state_of(engine)
