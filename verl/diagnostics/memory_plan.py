"""The memory of a run before it starts: the peak of every phase on a device and on a host, from
shapes alone."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from verl.checkpoint.hf import MAX_FILE_BYTES
from verl.config import TrainConfig
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.roles import Passes, Role, roles_of, work_of
from verl.diagnostics.rollout_memory import RolloutPlan, as_planned, plan_rollout
from verl.engine.model_shape import ModelShape
from verl.utils.units import GIB


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The worst moment of one phase. `device`: bytes by what they are for, of all roles on the
    devices of `role`;
    `host`: bytes of the fullest host beside what every process needs anyway."""

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
    def host_bytes(self) -> int:
        """The most that a host takes, beside the processes themselves."""
        return max(phase.host for phase in self.phases)

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
                    f"{phase.role}, {phase.phase}: {phase.device_bytes / GIB:.1f} GiB of "
                    f"{usable / GIB:.1f} usable"
                )
        return found

    @property
    def fits(self) -> bool | None:
        """Whether every phase fits on a device; None where its size is not known."""
        return (
            None if self.placement.usable_bytes is None and not self.problems else not self.problems
        )


def plan_memory(
    config: TrainConfig, device_gib: float | str | None = None, shapes: ModelShapes | None = None
) -> MemoryPlan:
    """Plan a validated configuration for cards of `device_gib` (a size, a card's name; None: the
    visible device).

    Reads the models' config.json, and no weight. Give the same `shapes` to several plans to make
    modules once. Raises ModelError where a model is not there, ConfigError where ranks do not
    divide rows or a model's heads.
    """
    return _Planner(config, Placement.of(config, device_gib), shapes or ModelShapes()).plan()


class _Planner:
    def __init__(self, config: TrainConfig, placement: Placement, shapes: ModelShapes) -> None:
        self.config = config
        self.placement = placement
        self.batch = BatchPlan.of(config, len(placement.roles["actor"]))
        self.roles = roles_of(config, placement, shapes)
        model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
        self._rollout_config = as_planned(rollout)
        shapes.check_rollout(model, self._rollout_config, placement.device)
        self.rollout = self._rollout(shapes.policy(model, placement.device, is_trained=False))

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
        yield self._phase("rollout" if self._is_apart else "actor", "rollout", rollout.parts)
        if "reward_model" in self.roles:
            yield self._passes("reward_model", "scores")
        if config.needs_old_log_probs:
            yield self._passes("actor", "old log-probs")
        if config.needs_reference:
            yield self._passes(
                "reference" if "reference" in self.roles else "actor", "reference log-probs"
            )
        if config.distillation.enabled:
            yield self._passes("teacher", "teacher log-probs")
        if config.needs_critic:
            yield self._passes("critic", "values")
            yield self._passes("critic", "critic update")
        yield self._passes("actor", "actor update", self._divergences())
        parts = {**self._handed_over("actor"), "gathered": self._gathered()}
        yield self._phase("actor", "weights to the rollout", parts, brings_parameters=True)
        if self._is_apart:
            parts = {**self._handed_over("rollout"), "buckets": self._buckets()}
            yield self._phase("rollout", "weights from the actor", parts)
        if config.trainer.save_freq > 0:
            yield from self._checkpoints()

    # ---------------------------------------------------------------- phases

    def _loading(self) -> Iterator[PhasePlan]:
        """The first process of a role reads the whole model on its host, and all cut their shards
        from it on the device. A user's class of critic is read by every process."""
        there: dict[str, dict[str, int]] = {}  # what the roles before have on their devices
        on_host = dict.fromkeys(self.roles, 0)
        for name, role in self.roles.items():
            footprint, on_cuda = role.footprint, self.placement.on_cuda
            kept = footprint.setup.param_offload or footprint.setup.offload_policy
            beside = [there[other] for other in self._engines_beside(name) if other in there]
            parts = {part: count for each in beside for part, count in each.items()}
            parts[f"{name} parameters"] = footprint.load()
            there[name] = {f"{name} parameters": 0 if kept else footprint.parameters}
            if "rollout" in self.placement.beside(name) and name == "actor":
                there[name]["rollout weights"] = self.rollout.weights
                parts["rollout weights"] = 0 if kept else self.rollout.weights
            held, first = dict(on_host), role.full_bytes if on_cuda or footprint.setup.shards else 0
            if name == "critic" and self.config.critic.model.custom_cls.path is not None:
                held[name], first = held[name] + first, 0
            host = self._host(name, parts, held, there) + first
            yield PhasePlan(role=name, phase="load", device=_present(parts), host=host)
            on_host[name] = footprint.parameters if kept else 0
        if self._is_apart:
            yield self._phase("rollout", "load", {"rollout weights": self.rollout.weights})

    def _passes(
        self, name: str, phase: str, compared: dict[str, ModelShape] | None = None
    ) -> PhasePlan:
        """`compared`: frozen models that whole distributions are compared with."""
        role = self.roles[name]
        trains = phase.endswith("update")
        predict = role.footprint.update if trains else role.footprint.forward
        if compared:
            predict = partial(role.footprint.update_with_divergences, compared)
        awake = self._awake() if name in self.placement.beside("rollout") else 0
        beside = self._beside(name, brings_parameters=True, brings_moments=trains)
        usable = self.placement.usable_bytes
        room = None if usable is None else usable - sum(beside.values()) - awake
        passes = Passes.of(work_of(self.config, self.batch, phase), role, predict, room)
        parts = {**predict(passes.tokens, passes.predictions), "rollout, awake": awake}
        return self._phase(
            name, phase, parts, brings_parameters=True, brings_moments=trains, passes=passes
        )

    def _checkpoints(self) -> Iterator[PhasePlan]:
        """Shards with their moments come to the device, and to the host one after the other; or
        copies of all of them, which stay until they are written (`trainer.async_save`)."""
        actor, critic = self.config.actor_rollout_ref, self.config.critic
        saved = [("actor", actor.model.lora_rank, actor.actor.checkpoint)]
        if self.config.needs_critic:
            saved.append(("critic", critic.model.lora_rank, critic.checkpoint))
        held = dict.fromkeys(self.roles, 0)
        for name, lora_rank, checkpoint in saved:
            footprint, contents = self.roles[name].footprint, checkpoint.save_contents
            moments = footprint.moments if "optimizer" in contents else 0
            # Adapters are written at once.
            copies = moments + (0 if lora_rank > 0 else footprint.parameters)
            largest = footprint.largest_whole // footprint.setup.shard_ranks
            held[name] = copies if self.config.trainer.async_save else largest
            parts, once = self._handed_over(name), 0
            # one parameter whole after the other; the first rank writes files of them
            if "hf_model" in contents:
                parts["one parameter"] = footprint.largest_whole
                once = 2 * min(MAX_FILE_BYTES, 4 * footprint.shape.numel)
            yield self._phase(
                name, "checkpoint", parts, held, once, brings_parameters=True, brings_moments=True
            )
            if not self.config.trainer.async_save:
                held[name] = 0

    # ---------------------------------------------------------------- terms

    @property
    def _is_apart(self) -> bool:
        """Whether the rollout has ranks of its own."""
        return self.placement.roles["rollout"] != self.placement.roles["actor"]

    @property
    def _sleeps(self) -> bool:
        """Whether the rollout gives its memory back to an actor on the same devices."""
        return self.config.actor_rollout_ref.rollout.free_cache_engine and not self._is_apart

    def _engines_beside(self, role: str) -> list[str]:
        """The training engines on the devices of `role`; the rollout's terms are its own."""
        return [name for name in self.placement.beside(role) if name in self.roles]

    def _divergences(self) -> dict[str, ModelShape]:
        """Return the frozen models that the actor's loss compares whole distributions with."""
        found = {}
        if self.config.actor_rollout_ref.actor.needs_exact_kl:
            role = self.roles.get("reference", self.roles["actor"])
            found["reference"] = role.footprint.shape
        if self.config.distillation.is_exact and not self.config.distillation.is_reward:
            found["teacher"] = self.roles["teacher"].footprint.shape
        return found

    def _phase(
        self,
        role: str,
        phase: str,
        parts: dict[str, int],
        on_host: Mapping[str, int] | None = None,
        once_on_host: int = 0,
        *,
        brings_parameters: bool = False,
        brings_moments: bool = False,
        passes: Passes | None = None,
    ) -> PhasePlan:
        """`parts`: on each device of the role beside what lies there; `on_host`: of each process of
        a role, beside what is off-loaded."""
        beside = self._beside(
            role, brings_parameters=brings_parameters, brings_moments=brings_moments
        )
        device = _present({**beside, **parts})
        held = {
            name: each.footprint.on_host + (on_host or {}).get(name, 0)
            for name, each in self.roles.items()
        }
        others = {name: {"": each.footprint.resident} for name, each in self.roles.items()}
        others["rollout"] = {"rollout": self._awake()}
        host = self._host(role, device, held, others) + once_on_host
        return PhasePlan(role=role, phase=phase, device=device, host=host, passes=passes)

    def _host(
        self,
        role: str,
        device: Mapping[str, int],
        held: Mapping[str, int],
        there: Mapping[str, Mapping[str, int]],
    ) -> int:
        """Of the fullest host. A CPU's devices are its hosts: also what the roles on other ranks
        have `there`."""
        total = Counter(held)
        if not self.placement.on_cuda:
            total[role] += sum(device.values())
            for name in there.keys() - self.placement.beside(role):
                total[name] += sum(there[name].values())
        return self.placement.fullest_host(total)

    def _beside(
        self, role: str, *, brings_parameters: bool, brings_moments: bool
    ) -> dict[str, int]:
        """Parameters and moments of all roles that lie on the devices of `role` in one of its
        phases."""
        parts: dict[str, int] = {}
        for name in self._engines_beside(role):
            footprint, own = self.roles[name].footprint, name == role
            setup = footprint.setup
            if not setup.offload_policy:
                if not setup.param_offload or (own and brings_parameters):
                    parts[f"{name} parameters"] = footprint.parameters
                if not setup.optimizer_offload or (own and brings_moments):
                    parts[f"{name} moments"] = footprint.moments
        if role in self.placement.beside("actor"):
            for name, shape in self._divergences().items():
                width = shape.weights[0].itemsize
                parts[f"head of the {name}"] = width * shape.vocabulary * shape.hidden
        return parts

    def _gathered(self) -> int:
        """Two buckets of whole tensors in the engine's dtype (`verl.weight_sync.shards`); or the
        one weight that adapters are merged into, in fp32, and on several ranks what it is made
        of."""
        footprint = self.roles["actor"].footprint
        several = footprint.setup.shard_ranks > 1
        if self.config.actor_rollout_ref.model.lora_rank > 0:
            return (
                (2 if several else 1)
                * 4
                * max(each.numel() for each in footprint.shape.weights if each.in_layer)
            )
        return self._buckets() if several or self._is_apart else 0

    def _buckets(self) -> int:
        """Two buckets of whole tensors in the engine's dtype."""
        footprint = self.roles["actor"].footprint
        width = self.rollout.itemsize
        largest = width * max(weight.numel() for weight in footprint.shape.weights)
        bucket = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
        return 2 * min(max(bucket, largest), width * footprint.shape.numel)

    def _awake(self) -> int:
        """Of the rollout engine while others compute. Asleep, it keeps its weights on a CPU
        alone."""
        if self._sleeps:
            return 0 if self.placement.on_cuda else self.rollout.weights
        return self.rollout.weights + self.rollout.page_memory

    def _handed_over(self, role: str) -> dict[str, int]:
        """Of the rollout engine beside a phase of `role` from the hand-over to the next
        generation."""
        if role not in self.placement.beside("rollout"):
            return {}
        pages = 0 if self._sleeps else self.rollout.page_memory
        return {"rollout weights": self.rollout.weights, "pages": pages}

    def _rollout(self, plain: ModelShape) -> RolloutPlan:
        setup = self.roles["actor"].footprint.setup
        beside = self._beside("rollout", brings_parameters=False, brings_moments=False)
        usable = self.placement.usable_bytes
        model = self.config.actor_rollout_ref.model
        return plan_rollout(
            self._rollout_config,
            plain,
            self.batch,
            on_cuda=self.placement.on_cuda,
            aliases=(
                not self.placement.on_cuda
                and not setup.shards
                and model.lora_rank == 0
                and not self._is_apart
            ),
            ranks=len(self.placement.roles["rollout"]),
            room=None if usable is None else usable - sum(beside.values()),
        )


def _present(parts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in parts.items() if count}
