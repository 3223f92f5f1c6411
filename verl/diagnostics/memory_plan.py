"""Predict the peak memory of every phase of a run, on devices and hosts, from shapes alone."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial

from verl.checkpoint.hf import MAX_FILE_BYTES
from verl.config import TrainConfig
from verl.config.policies import SELF, partner_role
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.phase_plan import MemoryPlan, PhasePlan
from verl.diagnostics.picture_memory import PictureMemory
from verl.diagnostics.roles import Parts, Passes, Work, roles_of, work_of
from verl.diagnostics.rollout_memory import RolloutPlan, as_planned, plan_rollout
from verl.engine.model_shape import ModelShape
from verl.models.load import torch_dtype

_ENGINE = ("parameters", "moments")  # those that an update brings back from the host


def plan_memory(
    config: TrainConfig, device_gib: float | str | None = None, shapes: ModelShapes | None = None
) -> MemoryPlan:
    """Plan a validated configuration. Reads the models' config.json, and no weight.

    Args:
        config: the run.
        device_gib: memory of a device, or the name of a card; None: the visible device.
        shapes: shared by several plans, so that modules are made once.

    Raises:
        ModelError: a model is missing.
        ConfigError: ranks do not divide rows or a model's heads.
    """
    return Planner(config, Placement.of(config, device_gib), shapes or ModelShapes()).plan()


class Planner:
    """Plan training with a rollout; see `FineTuningPlanner` for a run without one."""

    rollout: RolloutPlan | None

    def __init__(self, config: TrainConfig, placement: Placement, shapes: ModelShapes) -> None:
        self.config = config
        self.placement = placement
        self.batch = BatchPlan.of(config, len(placement.roles["actor"]))
        self.roles = roles_of(config, placement, shapes)
        self.pictures = PictureMemory.of(self.batch, self.roles["actor"])

        model = config.actor_rollout_ref.model
        self._rollout_config = as_planned(config.actor_rollout_ref.rollout)
        shapes.check_rollout(model, self._rollout_config, placement.device)
        plain = shapes.policy(model, placement.device, is_trained=False)
        self._frozen_numbers = _frozen_numbers(config, plain, shapes)
        self._partner_numbers = 0
        for role in config.actor_rollout_ref.rollout.agent.partners:
            self._partner_numbers += self.roles[partner_role(role)].footprint.shape.numel
        self.rollout = self._rollout(plain)

    def plan(self) -> MemoryPlan:
        """Plan every phase."""
        return MemoryPlan(
            placement=self.placement,
            batch=self.batch,
            roles=self.roles,
            rollout=self.rollout,
            pictures=self.pictures,
            phases=tuple(self._phases()),
        )

    def _phases(self) -> Iterator[PhasePlan]:
        """Yield the phases in the order of a run."""
        config = self.config
        yield from self._loading()
        generates = "rollout" if self._is_apart else "actor"
        others = self._other_engines if self.placement.on_cuda else 0
        yield self._phase(generates, "rollout", {**self._engine.parts, "other policies": others})

        if "reward_model" in self.roles:
            yield self._passes("reward_model", "scores")
        if config.needs_old_log_probs:
            yield self._passes("actor", "old log-probs")
        if config.needs_reference:
            reference = "reference" if "reference" in self.roles else "actor"
            yield self._passes(reference, "reference log-probs")
        if config.distillation.enabled:
            yield self._passes("teacher", "teacher log-probs")
        if config.needs_critic:
            yield self._passes("critic", "values")
            yield self._passes("critic", "critic update")
        yield self._passes("actor", "actor update", self._divergences())
        for role in config.actor_rollout_ref.rollout.agent.partners:
            yield self._passes(partner_role(role), "actor update")

        parts = {**self._handed_over("actor"), "gathered": self._gathered()}
        yield self._phase("actor", "weights to the rollout", parts, brings=("parameters",))
        if self._is_apart:
            parts = {**self._handed_over("rollout"), "buckets": self._buckets()}
            yield self._phase("rollout", "weights from the actor", parts)
        if config.trainer.save_freq > 0:
            yield from self._checkpoints()

    # ---------------------------------------------------------------- phases

    def _loading(self) -> Iterator[PhasePlan]:
        """Plan the loading of one role after the other.

        The first process of a role reads the whole model on its host, and all cut their shards from
        it on the device. A user's class of critic is read by every process.
        """
        there: dict[str, Parts] = {}  # bytes of earlier roles on their devices
        on_host = dict.fromkeys(self.roles, 0)

        for name, role in self.roles.items():
            footprint = role.footprint
            kept = footprint.setup.param_offload or footprint.setup.offload_policy
            parts: Parts = {}
            for other in self._colocated_engines(name):
                parts.update(there.get(other, {}))
            parts[f"{name} parameters"] = footprint.load()
            there[name] = {f"{name} parameters": 0 if kept else footprint.parameters}
            if "rollout" in self.placement.colocated(name) and name == "actor":
                there[name]["rollout weights"] = self._engine.weights
                parts["rollout weights"] = 0 if kept else self._engine.weights

            held = dict(on_host)
            reads_whole = self.placement.on_cuda or footprint.setup.shards
            first = role.full_bytes if reads_whole else 0
            if name == "critic" and self.config.critic.model.custom_cls.path is not None:
                held[name] += first
                first = 0
            host = self._host(name, parts, held, there) + first
            yield PhasePlan(role=name, phase="load", device=_present(parts), host=host)
            on_host[name] = footprint.parameters if kept else 0

        if self._is_apart:
            yield self._phase("rollout", "load", {"rollout weights": self._engine.weights})

    def _passes(
        self, name: str, phase: str, compared: dict[str, ModelShape] | None = None
    ) -> PhasePlan:
        """Plan the passes of a phase.

        Args:
            name: the role that computes.
            phase: of the step.
            compared: frozen models that whole distributions are compared with.
        """
        role = self.roles[name]
        trains = phase.endswith("update")
        predict = role.footprint.update if trains else role.footprint.forward
        if compared:
            predict = partial(role.footprint.update_with_divergences, compared)

        awake = 0
        if self.rollout is not None and name in self.placement.colocated("rollout"):
            awake = self._awake()
        brings = _ENGINE if trains else ("parameters",)
        resident = self._resident(name, brings)
        usable = self.placement.usable_bytes
        room = None if usable is None else usable - sum(resident.values()) - awake
        passes = Passes.of(self._work(phase), role, predict, room)
        parts = {**passes.taken(predict), "rollout, awake": awake}
        return self._phase(name, phase, parts, brings=brings, passes=passes)

    def _work(self, phase: str) -> Work:
        """Return the rows of a phase with passes."""
        return work_of(self.config, self.batch, phase)

    def _checkpoints(self) -> Iterator[PhasePlan]:
        """Plan the saving of checkpoints.

        Shards with their moments come to the device, and to the host one after the other. With
        `trainer.async_save`, copies of all of them stay on the host until they are written.
        """
        actor = self.config.actor_rollout_ref
        critic = self.config.critic
        saved = [("actor", actor.model.lora_rank, actor.actor.checkpoint)]
        if self.config.needs_critic:
            saved.append(("critic", critic.model.lora_rank, critic.checkpoint))

        held = dict.fromkeys(self.roles, 0)
        for name, lora_rank, checkpoint in saved:
            footprint = self.roles[name].footprint
            contents = checkpoint.save_contents
            moments = footprint.moments if "optimizer" in contents else 0
            # Adapters are written at once.
            copies = moments + (0 if lora_rank > 0 else footprint.parameters)
            largest = footprint.largest_whole // footprint.setup.shard_ranks
            held[name] = copies if self.config.trainer.async_save else largest

            parts = self._handed_over(name)
            once = 0
            # Whole parameters, one after the other; the first rank writes them into files.
            if "hf_model" in contents:
                parts["one parameter"] = footprint.largest_whole
                once = 2 * min(MAX_FILE_BYTES, 4 * footprint.shape.numel)
            yield self._phase(name, "checkpoint", parts, held, once, brings=_ENGINE)
            if not self.config.trainer.async_save:
                held[name] = 0

    # ---------------------------------------------------------------- terms

    @property
    def _engine(self) -> RolloutPlan:
        assert self.rollout is not None, "fine-tuning has no phase with a rollout"
        return self.rollout

    @property
    def _is_apart(self) -> bool:
        """Whether the rollout has ranks of its own."""
        actor = self.placement.roles["actor"]
        return self.placement.roles.get("rollout", actor) != actor

    @property
    def _sleeps(self) -> bool:
        """Whether the rollout gives its memory back to an actor on the same devices."""
        return self.config.actor_rollout_ref.rollout.free_cache_engine and not self._is_apart

    def _colocated_engines(self, role: str) -> list[str]:
        """Return the training engines on the devices of `role`, without the rollout."""
        return [name for name in self.placement.colocated(role) if name in self.roles]

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
        parts: Parts,
        on_host: Mapping[str, int] | None = None,
        once_on_host: int = 0,
        *,
        brings: Collection[str] = (),
        passes: Passes | None = None,
    ) -> PhasePlan:
        """Plan one phase of `role`.

        Args:
            role: the role that computes.
            phase: of the step.
            parts: bytes of the phase itself on each device.
            on_host: bytes of each process of a role, without those that are off-loaded.
            once_on_host: bytes of one process alone.
            brings: those of "parameters" and "moments" that the role brings to its devices.
            passes: the size of the passes.
        """
        device = _present({**self._resident(role, brings), **parts})

        held = {}
        others = {}
        for name, each in self.roles.items():
            held[name] = each.footprint.on_host + (on_host or {}).get(name, 0)
            others[name] = {"": each.footprint.resident}
        if self.rollout is not None:
            held["rollout"] = self._itemsize * self._frozen_numbers
            others["rollout"] = {"rollout": self._awake()}
        held["actor"] += self.pictures.kept
        if role in held and (passes is not None or phase == "rollout"):
            held[role] += self.pictures.prepared_a_rank
            once_on_host += self.pictures.prepared
        host = self._host(role, device, held, others) + once_on_host
        return PhasePlan(role=role, phase=phase, device=device, host=host, passes=passes)

    def _host(
        self,
        role: str,
        device: Mapping[str, int],
        held: Mapping[str, int],
        there: Mapping[str, Mapping[str, int]],
    ) -> int:
        """Return the bytes of the fullest host.

        A CPU's devices are its hosts, which then also hold the roles of other ranks (`there`).
        """
        total = Counter(held)
        if not self.placement.on_cuda:
            total[role] += sum(device.values())
            for name in there.keys() - self.placement.colocated(role):
                total[name] += sum(there[name].values())
        return self.placement.fullest_host(total)

    def _resident(self, role: str, brings: Collection[str] = ()) -> Parts:
        """Return the parameters and moments on the devices of `role` in one of its phases."""
        parts: Parts = {}
        for name in self._colocated_engines(role):
            footprint = self.roles[name].footprint
            setup = footprint.setup
            if setup.offload_policy:
                continue
            brought = brings if name == role else ()
            if not setup.param_offload or "parameters" in brought:
                parts[f"{name} parameters"] = footprint.parameters
            if not setup.optimizer_offload or "moments" in brought:
                parts[f"{name} moments"] = footprint.moments

        if role in self.placement.colocated("actor"):
            for name, shape in self._divergences().items():
                width = shape.weights[0].itemsize
                parts[f"head of the {name}"] = width * shape.vocabulary * shape.hidden
        return parts

    @property
    def _itemsize(self) -> int:
        """Return the bytes of a number in the engines of policies next to the actor."""
        config = self.config.actor_rollout_ref.rollout
        if config.dtype:
            return torch_dtype(config.dtype).itemsize
        return 2 if self.placement.on_cuda else 4

    @property
    def _other_engines(self) -> int:
        """Return the bytes of weights, during generation, of the policies next to the actor."""
        return self._itemsize * (self._frozen_numbers + self._partner_numbers)

    def _gathered(self) -> int:
        """Return the bytes of gathered weights in a hand-over.

        Those are two buckets (`verl.weight_sync.shards`). With adapters it is the one weight that
        they are merged into, in fp32, and on several ranks its frozen part as well.
        """
        footprint = self.roles["actor"].footprint
        several = footprint.setup.shard_ranks > 1
        if self.config.actor_rollout_ref.model.lora_rank > 0:
            largest = max(each.numel() for each in footprint.shape.weights if each.in_layer)
            return (2 if several else 1) * 4 * largest
        return self._buckets() if several or self._is_apart else 0

    def _buckets(self) -> int:
        """Return the bytes of two buckets of whole tensors in the engine's dtype."""
        footprint = self.roles["actor"].footprint
        width = self._engine.itemsize
        largest = width * footprint.shape.largest_numel
        bucket = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes << 20
        return 2 * min(max(bucket, largest), width * footprint.shape.numel)

    def _awake(self) -> int:
        """Return the rollout engine's bytes while others compute.

        An engine that sleeps keeps its weights on a CPU only.
        """
        if self._sleeps:
            return 0 if self.placement.on_cuda else self._engine.weights
        return sum(self._engine.kept.values())

    def _handed_over(self, role: str) -> Parts:
        """Return the rollout engine's bytes in a phase between hand-over and generation."""
        if self.rollout is None or role not in self.placement.colocated("rollout"):
            return {}
        if self._sleeps:
            return {"rollout weights": self.rollout.weights}
        return self.rollout.kept

    def _rollout(self, plain: ModelShape) -> RolloutPlan:
        """Plan the rollout engine; `plain` is the policy without adapters."""
        roles = self.config.actor_rollout_ref
        on_cuda = self.placement.on_cuda
        is_whole = not self.roles["actor"].footprint.setup.shards
        resident = self._resident("rollout")
        usable = self.placement.usable_bytes

        return plan_rollout(
            self._rollout_config,
            plain,
            self.batch,
            on_cuda=on_cuda,
            aliases=not on_cuda and is_whole and roles.model.lora_rank == 0 and not self._is_apart,
            ranks=len(self.placement.roles["rollout"]),
            room=None if usable is None else usable - sum(resident.values()) - self._other_engines,
            device_bytes=self.placement.device_bytes,
        )


def _frozen_numbers(config: TrainConfig, actor: ModelShape, shapes: ModelShapes) -> int:
    """Count the parameters of the models that play frozen roles of agents on a device."""
    total = 0
    for policy in config.actor_rollout_ref.rollout.agent.policies.values():
        if policy.path == SELF:
            total += actor.numel
        elif policy.path is not None and not policy.trained:
            total += shapes.frozen_policy(policy).numel
    return total


def _present(parts: Parts) -> Parts:
    return {name: count for name, count in parts.items() if count}
