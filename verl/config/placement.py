"""The ranks of each role, as `trainer.placement` says, and contradictions among them."""

import os
from itertools import chain

from verl.config.keys import value_at
from verl.config.policies import partner_role
from verl.config.rule_table import Messages
from verl.config.train import TrainConfig
from verl.utils.launcher import LAUNCHED_RANKS, launched_ranks

# The roles that `trainer.placement` has keys for.
ROLES = ("actor", "rollout", "critic", "reference", "reward_model", "teacher")
# The section with `fsdp_config` of each role; the rollout shards nothing.
SHARDED = {
    "actor": "actor_rollout_ref.actor",
    "reference": "actor_rollout_ref.ref",
    "critic": "critic.model",
    "reward_model": "reward_model.model",
    "teacher": "distillation",
}


def number_of_ranks(config: TrainConfig) -> int:
    """Return the number of ranks: as asked for, else as launched, else as placed."""
    trainer = config.trainer
    if trainer.n_gpus_per_node is not None:
        return trainer.nnodes * trainer.n_gpus_per_node
    launched = int(os.environ.get(LAUNCHED_RANKS) or launched_ranks())
    named = chain([0], *_given(config).values())
    return launched if launched > 1 else max(named) + 1


def ranks_of_roles(config: TrainConfig) -> dict[str, list[int]]:
    """Return the ranks of every role that has a model of its own, in ascending order."""
    given = {role: sorted(ranks) for role, ranks in _given(config).items()}
    others = [ranks for role, ranks in given.items() if role != "actor"]
    taken = set(chain.from_iterable(others))
    everyone = range(number_of_ranks(config))
    free = [rank for rank in everyone if rank not in taken]
    actor = given.get("actor") or free or list(everyone)
    placed = {role: given.get(role, actor) for role in ("actor", *_active(config))}
    for role in config.actor_rollout_ref.rollout.agent.partners:
        placed[partner_role(role)] = actor
    return placed


def rollout_is_apart(config: TrainConfig) -> bool:
    """Return whether the rollout has ranks of its own."""
    ranks = ranks_of_roles(config)
    return ranks["rollout"] != ranks["actor"]


def _active(config: TrainConfig) -> list[str]:
    """Return the active roles other than the actor.

    With LoRA the reference is the actor without its adapters.
    """
    has_reference = config.needs_reference and config.actor_rollout_ref.model.lora_rank == 0
    has = {
        "rollout": True,
        "critic": config.needs_critic,
        "reference": has_reference,
        "reward_model": config.reward_model.enable,
        "teacher": config.distillation.enabled,
    }
    return [role for role, is_there in has.items() if is_there]


def _given(config: TrainConfig) -> dict[str, list[int]]:
    roles = ("actor", *_active(config))
    placed = {role: getattr(config.trainer.placement, role) for role in roles}
    return {role: ranks for role, ranks in placed.items() if ranks is not None}


def roles_are_placed(config: TrainConfig) -> Messages:
    """Check that each role's ranks exist, and that roles share all of their ranks or none."""
    ranks = number_of_ranks(config)
    is_sound = True
    trainer = config.trainer

    if trainer.nnodes > 1 and trainer.n_gpus_per_node is None and "WORLD_SIZE" not in os.environ:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs trainer.n_gpus_per_node, the ranks of each, "
            "for Ray to start them; or start this command by torchrun on every node."
        )

    for role, numbers in _given(config).items():
        if (
            not numbers
            or len(set(numbers)) < len(numbers)
            or min(numbers) < 0
            or max(numbers) >= ranks
        ):
            is_sound = False
            yield (
                f"trainer.placement.{role} must list different ranks from 0 to {ranks - 1}, got "
                f"{numbers}. Name others, or ask for more ranks with trainer.n_gpus_per_node and "
                "trainer.nnodes."
            )

    if not is_sound:
        return
    placed = list(ranks_of_roles(config).items())
    for number, (role, ranks_of_role) in enumerate(placed):
        for other, ranks_of_other in placed[:number]:
            if ranks_of_role != ranks_of_other and not set(ranks_of_role).isdisjoint(
                ranks_of_other
            ):
                yield (
                    "Two roles of trainer.placement share all their ranks or none, got "
                    f"{ranks_of_other} for {other} and {ranks_of_role} for {role}. Give them the "
                    "same ranks, or different ones."
                )


def placement_doubts(config: TrainConfig) -> Messages:
    """Yield ranks without work, places without a role, and shares larger than a role."""
    idle = set(range(number_of_ranks(config))).difference(*ranks_of_roles(config).values())
    if idle:
        yield f"trainer.placement gives no role to the ranks {sorted(idle)}: they stay idle."
    active = ("actor", *_active(config))

    for role in ROLES:
        ranks = getattr(config.trainer.placement, role)
        if ranks is not None and role not in active:
            yield (
                f"trainer.placement.{role}={ranks} has no effect: this run has no {role} with a "
                "model of its own."
            )

    for role, ranks in ranks_of_roles(config).items():
        if role not in SHARDED:
            continue
        key = f"{SHARDED[role]}.fsdp_config.fsdp_size"
        size = value_at(config, key)
        if size > len(ranks):
            yield (
                f"{key}={size} has no effect: the role has {len(ranks)} ranks, which all hold one "
                "copy of the weights together."
            )
        elif size == 0 or size < -1:
            yield f"{key}={size} is taken as -1: all ranks hold one copy of the weights."


def trained_sections(config: TrainConfig) -> list[str]:
    """Return the sections of the models that the run trains: the actor's, and a critic's."""
    sections = ["actor_rollout_ref.actor"]
    if config.needs_critic:
        sections.append("critic")
    return sections


def inactive_sections(config: TrainConfig) -> tuple[str, ...]:
    """Return sections that nothing reads in this run; their values contradict nothing."""
    is_read = {
        "critic.": config.needs_critic,
        "actor_rollout_ref.ref.": config.needs_reference,
        "reward_model.model.": config.reward_model.enable,
        "distillation.": config.distillation.enabled,
    }
    return tuple(section for section in is_read if not is_read[section])
