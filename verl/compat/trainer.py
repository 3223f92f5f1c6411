"""Roles and pools of verl 0.5's `ray_trainer`, for recipes that place their own workers."""

from dataclasses import dataclass, field
from enum import Enum

import ray

from verl.single_controller.ray import RayResourcePool
from verl.single_controller.worker import Worker
from verl.utils.errors import ConfigError

WorkerType = type[Worker]


class Role(Enum):
    """The role of a worker."""

    Actor = 0
    Rollout = 1
    ActorRollout = 2
    Critic = 3
    RefPolicy = 4
    RewardModel = 5
    ActorRolloutRef = 6


@dataclass
class ResourcePoolManager:
    """Pools by name, and the pool of each role.

    `resource_pool_spec` is {pool: processes of each node}, `mapping` is {role: pool}. The trainer
    makes its own pool from these; `create_resource_pool` is for recipes that start further groups.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)

    def create_resource_pool(self) -> None:
        """Create the pools. Raises ConfigError if Ray's cluster has too few GPUs."""
        self._check_resource_available()
        for name, process_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes, use_gpu=True, max_colocate_count=1, name_prefix=name
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role.

        Raises ConfigError if it has none, or there are no pools yet.
        """
        if role not in self.mapping:
            known = ", ".join(map(str, self.mapping)) or "no role"
            raise ConfigError(
                f"{role} has no pool; the mapping has {known}. Add it to the mapping."
            )

        name = self.mapping[role]
        if name not in self.resource_pool_spec:
            raise ConfigError(
                f"The mapping names the pool '{name}' for {role}, but resource_pool_spec has "
                f"{', '.join(self.resource_pool_spec)}. Add the pool, or correct its name."
            )
        if name not in self.resource_pool_dict:
            raise ConfigError(f"The pool '{name}' is not made yet. Call create_resource_pool().")
        return self.resource_pool_dict[name]

    def get_n_gpus(self) -> int:
        """Return the number of GPUs of all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())

    def _check_resource_available(self) -> None:
        available = ray.cluster_resources().get("GPU", 0)
        if available < self.get_n_gpus():
            raise ConfigError(
                f"The pools need {self.get_n_gpus()} GPUs, and Ray's cluster has {available:g}. "
                "Lower resource_pool_spec, or start more nodes (`ray start --address=...`)."
            )
