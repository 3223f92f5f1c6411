"""The nearest configurations that fit: keys to change, each set of them planned again as proof."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from verl.config import TrainConfig
from verl.config.keys import owner_of, value_at
from verl.diagnostics.memory_plan import MemoryPlan, plan_memory
from verl.diagnostics.model_shapes import ModelShapes
from verl.utils.errors import ConfigError

# Changes made together at most, and answers given.
MOST_CHANGES = 3
MOST_ADVICE = 3
# Factors by which ranks are added, in whole hosts.
MORE_RANKS = (2, 4, 8)

Change = tuple[tuple[str, object], ...]  # keys with values that go together


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Keys as one would give them, and the plan with them, which fits."""

    changes: tuple[str, ...]
    plan: MemoryPlan

    def __str__(self) -> str:
        worst = self.plan.worst
        return f"{' '.join(self.changes)}  (peak {worst.device_bytes / 2**30:.1f} GiB, {worst.role}, {worst.phase})"


def advise(config: TrainConfig, plan: MemoryPlan, shapes: ModelShapes) -> list[Advice]:
    """The fewest changes after which every phase fits, those that cost least first; none where none is needed, or
    where nothing helps."""
    usable = plan.placement.usable_bytes
    if usable is None or plan.fits:
        return []
    assert plan.placement.device_bytes is not None
    device_gib = plan.placement.device_bytes / 2**30
    moves = list(_moves(config, plan))
    for count in range(1, MOST_CHANGES + 1):
        found: list[Advice] = []
        for chosen in combinations(moves, count):
            pairs = [pair for change in chosen for pair in change]
            if len({key for key, _ in pairs}) < len(pairs):
                continue
            changed = copy.deepcopy(config)
            for key, value in pairs:
                setattr(*owner_of(changed, key), value)
            try:
                again = plan_memory(changed, device_gib, shapes)
            except ConfigError:  # ranks and rows that do not divide
                continue
            if again.fits:
                found.append(Advice(changes=tuple(f"{key}={value}" for key, value in pairs), plan=again))
                if len(found) == MOST_ADVICE:
                    return found
        if found:
            return found
    return []


def _moves(config: TrainConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Single changes that save memory, those that cost least first."""
    roles = config.actor_rollout_ref
    critic = "critic" in plan.roles
    switches = [("actor_rollout_ref.rollout.free_cache_engine", True)]
    models = ["actor_rollout_ref.model", *(["critic.model"] if critic else [])]
    switches += [(f"{model}.enable_gradient_checkpointing", True) for model in models]
    for section in ("actor_rollout_ref.actor.fsdp_config", *(["critic.model.fsdp_config"] if critic else [])):
        switches += [(f"{section}.optimizer_offload", True)]
    if "reference" in plan.roles:
        switches += [("actor_rollout_ref.ref.fsdp_config.param_offload", True)]
    for section in ("actor_rollout_ref.actor.fsdp_config", *(["critic.model.fsdp_config"] if critic else [])):
        switches += [(f"{section}.param_offload", True)]
    for key, value in switches:
        if value_at(config, key) != value:
            yield ((key, value),)
    yield from _smaller_passes(config, plan)
    if roles.rollout.gpu_memory_utilization > 0.3:
        yield (("actor_rollout_ref.rollout.gpu_memory_utilization", 0.3),)
    if roles.rollout.num_pages is not None:
        yield (("actor_rollout_ref.rollout.num_pages", None),)
    for model in models:
        if not value_at(config, f"{model}.enable_activation_offload"):
            keys = (f"{model}.enable_gradient_checkpointing", f"{model}.enable_activation_offload")
            yield tuple((key, True) for key in keys if not value_at(config, key))
    parts = roles.rollout.tensor_model_parallel_size
    heads = plan.roles["actor"].footprint.shape.heads
    for size in (2 * parts, 4 * parts, 8 * parts):
        if plan.placement.ranks % size == 0 and heads % size == 0:
            yield (("actor_rollout_ref.rollout.tensor_model_parallel_size", size),)
    if plan.placement.ranks == 1 and roles.actor.optim.optimizer == "AdamW" and roles.model.lora_rank == 0:
        yield (("actor_rollout_ref.actor.optim.optimizer", "AdamW8bit"),)
    if config.trainer.n_gpus_per_node is not None:
        for factor in MORE_RANKS:
            yield (("trainer.nnodes", config.trainer.nnodes * factor),)
    elif plan.placement.ranks == 1:
        for factor in MORE_RANKS:
            yield (("trainer.n_gpus_per_node", factor),)
    # The optimizer steps on the host then, which takes longest of all.
    for section in ("actor_rollout_ref.actor.fsdp_config", *(["critic.model.fsdp_config"] if critic else [])):
        if not value_at(config, f"{section}.offload_policy"):
            yield ((f"{section}.offload_policy", True),)


def _smaller_passes(config: TrainConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Half, a quarter, an eighth of the tokens that the user gave, down to a single row."""
    for phase in plan.phases:
        if phase.passes is None or phase.passes.chosen or not phase.phase.endswith("update"):
            continue
        section = "critic" if phase.role == "critic" else "actor_rollout_ref.actor"
        role = plan.roles[phase.role]
        least = -(-plan.batch.longest // role.sequence_ranks)
        sizes = {max(least, phase.passes.tokens // divisor) for divisor in (2, 4, 8)}
        for size in sorted(sizes - {phase.passes.tokens}, reverse=True):
            key = f"{section}.ppo_max_token_len_per_gpu"
            rows = value_at(config, f"{section}.ppo_micro_batch_size_per_gpu") is not None
            yield ((key, size), *([(f"{section}.ppo_micro_batch_size_per_gpu", None)] if rows else []))
