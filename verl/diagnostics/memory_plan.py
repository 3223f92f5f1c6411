"""The memory of a run before it starts: the peak of every phase on a device and on a host, from shapes alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.config import TrainConfig
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.placement import Placement
from verl.diagnostics.roles import Passes, Role, micro_batch_of, roles_of
from verl.diagnostics.rollout_memory import RolloutPlan, plan_rollout


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The worst moment of one phase. `device`: bytes by what they are for, all roles together; `host`: bytes of one
    host beside what every process needs anyway."""

    role: str
    phase: str
    device: dict[str, int]
    host: int
    passes: Passes | None = None

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What `plan_memory` tells."""

    placement: Placement
    batch: BatchPlan
    roles: dict[str, Role]
    rollout: RolloutPlan
    phases: tuple[PhasePlan, ...]

    @property
    def worst(self) -> PhasePlan:
        """The phase that takes most of a device."""
        return max(self.phases, key=lambda phase: phase.device_bytes)

    @property
    def problems(self) -> list[str]:
        """What does not fit on a device, in words."""
        usable = self.placement.usable_bytes
        found = []
        if self.rollout.at_once < 1:
            found.append("the key-value cache has no room for a single sample of full length")
        for phase in self.phases if usable is not None else ():
            if usable is not None and phase.device_bytes > usable:
                found.append(
                    f"{phase.role}, {phase.phase}: {phase.device_bytes / 2**30:.1f} GiB of {usable / 2**30:.1f} usable"
                )
        return found

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits on a device; None where its size is not known."""
        return None if self.placement.usable_bytes is None and not self.problems else not self.problems


def plan_memory(
    config: TrainConfig, device_gib: float | str | None = None, shapes: ModelShapes | None = None
) -> MemoryPlan:
    """Plan a validated configuration for cards of `device_gib` (a size, a card's name; None: the visible device).

    Reads the models' config.json, and no weight. Give the same `shapes` to several plans to make modules once.
    Raises ModelError where a model is not there, ConfigError where ranks and rows do not divide.
    """
    return _Planner(config, Placement.of(config, device_gib), shapes or ModelShapes()).plan()


class _Planner:
    def __init__(self, config: TrainConfig, placement: Placement, shapes: ModelShapes) -> None:
        self.config = config
        self.placement = placement
        self.batch = BatchPlan.of(config, placement.ranks)
        self.roles = roles_of(config, placement, shapes)
        self.plain = shapes.policy(config.actor_rollout_ref.model, placement.device, is_trained=False)
        self.rollout = self._rollout()

    def plan(self) -> MemoryPlan:
        return MemoryPlan(
            placement=self.placement,
            batch=self.batch,
            roles=self.roles,
            rollout=self.rollout,
            phases=tuple(self._phases()),
        )

    def _phases(self) -> Iterator[PhasePlan]:
        """In the order of a run."""
        config, rollout = self.config, self.rollout
        yield from self._loading()
        yield self._phase("actor", "rollout", rollout.parts, {})
        rows = self.batch.rows // self.batch.data_ranks
        if reads_old_log_probs(config):
            yield self._passes("actor", "old log-probs", rows)
        if config.needs_reference:
            yield self._passes("reference" if "reference" in self.roles else "actor", "reference log-probs", rows)
        if config.needs_critic:
            yield self._passes("critic", "values", rows)
            yield self._passes("critic", "critic update", self.batch.rows_a_rank)
        yield self._passes("actor", "actor update", self.batch.rows_a_rank)
        actor = self.roles["actor"].footprint
        # Shards are gathered a bucket at a time; sums with an adapter are made in fp32, one parameter after the other.
        gathered = 0
        if config.actor_rollout_ref.model.lora_rank > 0:
            gathered = 2 * actor.largest_whole
        elif self.placement.ranks > 1:
            bucket = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
            gathered = max(bucket, actor.largest_whole)
        yield self._phase(
            "actor", "weights to the rollout", {"rollout weights": rollout.weights, "gathered": gathered}, {},
            brings_parameters=True,
        )  # fmt: skip
        if config.trainer.save_freq > 0:
            for name in ("actor", "critic"):
                if name in self.roles:
                    yield self._checkpoint(self.roles[name])

    # ---------------------------------------------------------------- phases

    def _loading(self) -> Iterator[PhasePlan]:
        """Every process reads the whole model of a role on its host, then keeps its shards on the device."""
        before: dict[str, int] = {}
        for name, role in self.roles.items():
            footprint = role.footprint
            parts = {**before, f"{name} parameters": footprint.load()}
            kept = footprint.setup.param_offload or footprint.setup.offload_policy
            before[f"{name} parameters"] = 0 if kept else footprint.parameters
            if name == "actor":
                before["rollout weights"] = self.rollout.weights
                if not kept:
                    parts["rollout weights"] = self.rollout.weights
            whole = role.full_bytes if self.placement.on_cuda or footprint.setup.shards else 0
            beside = 0 if self.placement.on_cuda else sum(parts.values())
            host = self.placement.ranks_a_host * (whole + beside)
            yield PhasePlan(role=name, phase="load", device=_present(parts), host=host)

    def _passes(self, name: str, phase: str, rows: int) -> PhasePlan:
        role = self.roles[name]
        trains = phase.endswith("update")
        predict = role.footprint.update if trains else role.footprint.forward
        beside = self._beside(name, brings_parameters=True, brings_moments=trains)
        usable = self.placement.usable_bytes
        room = None if usable is None else usable - sum(beside.values()) - self._awake()
        passes = Passes.of(micro_batch_of(self.config, phase), role, self.batch, predict, room, rows)
        parts = predict(passes.tokens, passes.predictions)
        return self._phase(
            name, phase, {**parts, "rollout, awake": self._awake()}, {}, brings_parameters=True, brings_moments=trains,
            passes=passes,
        )  # fmt: skip

    def _checkpoint(self, role: Role) -> PhasePlan:
        """Shards with their moments on the device, one parameter whole after the other; copies of them on the host."""
        footprint = role.footprint
        copies = footprint.parameters + footprint.moments
        return self._phase(
            role.name, "checkpoint", {"one parameter": footprint.largest_whole}, {"copies": copies},
            brings_parameters=True, brings_moments=True,
        )  # fmt: skip

    # ---------------------------------------------------------------- terms

    def _phase(
        self, role: str, phase: str, parts: dict[str, int], host: dict[str, int], *, brings_parameters: bool = False,
        brings_moments: bool = False, passes: Passes | None = None,
    ) -> PhasePlan:  # fmt: skip
        beside = self._beside(role, brings_parameters=brings_parameters, brings_moments=brings_moments)
        device = _present({**beside, **parts})
        on_host = sum(each.footprint.on_host for each in self.roles.values()) + sum(host.values())
        if not self.placement.on_cuda:
            on_host += sum(device.values())
        return PhasePlan(
            role=role, phase=phase, device=device, host=self.placement.ranks_a_host * on_host, passes=passes
        )

    def _beside(self, role: str, *, brings_parameters: bool, brings_moments: bool) -> dict[str, int]:
        """Parameters and moments of all roles that lie on the device in a phase of `role`."""
        parts: dict[str, int] = {}
        for name, each in self.roles.items():
            footprint, setup, own = each.footprint, each.footprint.setup, name == role
            if not setup.offload_policy:
                if not setup.param_offload or (own and brings_parameters):
                    parts[f"{name} parameters"] = footprint.parameters
                if not setup.optimizer_offload or (own and brings_moments):
                    parts[f"{name} moments"] = footprint.moments
        return parts

    def _awake(self) -> int:
        """Of the rollout engine while others compute."""
        if self.config.actor_rollout_ref.rollout.free_cache_engine:
            return 0
        return self.rollout.weights + self.rollout.page_memory

    def _rollout(self) -> RolloutPlan:
        setup = self.roles["actor"].footprint.setup
        beside = self._beside("actor", brings_parameters=False, brings_moments=False)
        usable = self.placement.usable_bytes
        rollout = self.config.actor_rollout_ref.rollout
        return plan_rollout(
            rollout,
            self.plain,
            self.batch,
            on_cuda=self.placement.on_cuda,
            aliases=not self.placement.on_cuda
            and not setup.shards
            and self.config.actor_rollout_ref.model.lora_rank == 0,
            room=None if usable is None else usable - sum(beside.values()),
        )


def reads_old_log_probs(config: TrainConfig) -> bool:
    """As `PPOTrainer.needs_old_log_probs`, for a trainer that nobody has changed."""
    actor = config.actor_rollout_ref.actor
    one_update = actor.ppo_epochs == 1 and actor.ppo_mini_batch_size in (None, config.data.train_batch_size)
    return config.algorithm.use_kl_in_reward or not one_update


def _present(parts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in parts.items() if count}
