"""Which processes the workers live in: this one, the ranks of torchrun, or actors of Ray. All give
the same numbers."""

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl.config import TrainConfig
from verl.config.placement import number_of_ranks, ranks_of_roles
from verl.single_controller import Worker, WorkerGroup, spmd
from verl.single_controller.spmd import ResourcePool
from verl.utils.errors import ConfigError
from verl.utils.imports import require
from verl.utils.launcher import launched_ranks
from verl.utils.logging import logger

# At most so long ranks wait for each other at start, and for a driver that does not answer.
_PATIENCE_S = 300.0


class PlacedPools:
    """Pools of disjoint ranks as one, which starts every role in its own; implements
    `ResourcePool`."""

    def __init__(self, pools: Mapping[str, ResourcePool]) -> None:
        self.pools = pools
        each_once = {id(pool): pool for pool in pools.values()}
        self.world_size = sum(pool.world_size for pool in each_once.values())

    def start(
        self, role: str, worker_class: type[Worker], *args: Any, **kwargs: Any
    ) -> WorkerGroup:
        """Start a role in its pool; a role without a place goes to the actor's."""
        return self.pools.get(role, self.pools["actor"]).start(role, worker_class, *args, **kwargs)

    def shutdown(self) -> None:
        """End the processes of all pools."""
        for pool in self.pools.values():
            pool.shutdown()


def join_pool(config: TrainConfig, device: torch.device) -> ResourcePool:
    """Return the processes that workers start in.

    Ranks of torchrun where they were launched (every rank but 0 serves in here and never returns),
    this process alone for one rank, and Ray for more; each role on the ranks of its placement.

    Raises ConfigError where the ranks launched are not those asked for.
    """
    trainer = config.trainer
    ranks = number_of_ranks(config)
    launched = launched_ranks()
    if launched > 1 and ranks != launched:
        raise ConfigError(
            f"torchrun launched {launched} ranks, but trainer.nnodes={trainer.nnodes} and "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node} ask for {ranks}. Leave "
            "n_gpus_per_node unset, or launch as many."
        )

    placed = {role: tuple(own) for role, own in ranks_of_roles(config).items()}
    parts = list(dict.fromkeys(placed.values()))
    pools: Sequence[ResourcePool]

    if launched > 1 or ranks == 1:
        if asked := _asked_of_ray(config):
            why = "torchrun has launched the ranks" if launched > 1 else "one rank needs no Ray"
            logger.info(f"ray_init.{', ray_init.'.join(asked)} without effect: {why}.")
        patience_s = min(trainer.deadline_s, _PATIENCE_S)
        pools = spmd.join(patience_s, patience_s).split(parts)
    else:
        pools = _ray_pools(config, parts, device)

    if len(pools) == 1:
        return pools[0]
    return PlacedPools({role: pools[parts.index(part)] for role, part in placed.items()})


def _ray_pools(
    config: TrainConfig, parts: Sequence[tuple[int, ...]], device: torch.device
) -> list[ResourcePool]:
    ranks = number_of_ranks(config)
    require("ray", f"Training on {ranks} ranks without torchrun", "pip install 'ray>=2.40'")
    backend: Any = importlib.import_module("verl.single_controller.ray")
    backend.connect(**_asked_of_ray(config))
    per_node = config.trainer.n_gpus_per_node or ranks

    pools = []
    for part in parts:
        ranks_on_node = Counter(rank // per_node for rank in part)
        counts = list(ranks_on_node.values())
        pools.append(backend.RayResourcePool(counts, use_gpu=device.type == "cuda", run_ranks=part))
    return pools


def _asked_of_ray(config: TrainConfig) -> dict[str, Any]:
    """Return the user's settings of `ray_init`."""
    asked = {}
    for name in ("address", "namespace", "num_cpus", "runtime_env"):
        value = getattr(config.ray_init, name)
        if value is not None:
            asked[name] = value
    return asked
