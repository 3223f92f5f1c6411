"""Which processes the workers live in: this one, the ranks of torchrun, or actors of Ray. All give the same numbers."""

import importlib
import os
from typing import Any

import torch

from verl.config import TrainConfig
from verl.protocol import DataProto
from verl.single_controller import spmd
from verl.single_controller.dealing import Dealt, in_windows, token_counts
from verl.single_controller.spmd import ResourcePool
from verl.utils.errors import ConfigError
from verl.utils.imports import require


def join_pool(config: TrainConfig, device: torch.device) -> ResourcePool:
    """The pool that the workers start in: all ranks of torchrun where they were launched (every rank but 0 serves in
    here and never returns), this process alone where one is asked for, and Ray for more.

    Raises ConfigError where the ranks launched are not those asked for.
    """
    trainer = config.trainer
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    asked = None if trainer.n_gpus_per_node is None else trainer.nnodes * trainer.n_gpus_per_node
    if launched > 1 and asked not in (None, launched):
        raise ConfigError(
            f"torchrun launched {launched} ranks, but trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node="
            f"{trainer.n_gpus_per_node} ask for {asked}. Leave n_gpus_per_node unset, or launch as many."
        )
    if launched > 1 or asked in (None, 1):
        return spmd.join()
    require("ray", f"Training on {asked} ranks without torchrun", "pip install 'ray>=2.40'")
    backend: Any = importlib.import_module("verl.single_controller.ray")
    limits = {} if config.ray_init.num_cpus is None else {"num_cpus": config.ray_init.num_cpus}
    backend.connect(**limits)
    return backend.RayResourcePool([trainer.n_gpus_per_node] * trainer.nnodes, use_gpu=device.type == "cuda")


def dealt_by_prompts(batch: DataProto, group: Any, samples: int) -> Any:
    """`batch`, with all samples of a prompt dealt to one rank where that leaves every rank as many rows: what the rows
    of a prompt have in common is then computed once. Mini-batches stay those of one process."""
    shares = group.num_shares
    if shares == 1 or len(batch) % (shares * samples):
        return batch
    lengths = token_counts(batch)
    return batch if lengths is None else Dealt(batch, in_windows(lengths, shares, unit_rows=samples))
