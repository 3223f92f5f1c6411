"""The nearest configurations that fit: keys to change, each set of them planned again as proof."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from verl.config import RolloutConfig, TrainConfig
from verl.config.keys import keys_of, value_at, written
from verl.config.placement import SHARDED
from verl.config.rules import RULES, Rule
from verl.config.validate import contradictions
from verl.diagnostics.memory_plan import plan_memory
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.phase_plan import MemoryPlan
from verl.utils.errors import ConfigError
from verl.utils.units import GIB

# Changes made together at most, and answers given.
MOST_CHANGES = 3
MOST_ADVICE = 3
# Factors by which ranks are added, on a host and then in whole hosts.
MORE_RANKS = (2, 4, 8)
GPUS_OF_A_HOST = 8
_ROLLOUT = "actor_rollout_ref.rollout"
# Sections of the roles that are trained, and may need less memory.
_MODELS = {"actor": "actor_rollout_ref.model", "critic": "critic.model"}

Change = tuple[tuple[str, object], ...]  # keys with values that go together


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Keys of a command line, and the plan with them, which fits."""

    changes: tuple[str, ...]
    plan: MemoryPlan

    def __str__(self) -> str:
        worst = self.plan.worst
        peaks = f"peak {worst.device_bytes / GIB:.1f} GiB, {worst.name}"
        peaks += f"; host {self.plan.host_bytes / GIB:.0f} GiB"
        return f"{' '.join(self.changes)}  ({peaks})"


def advise(config: TrainConfig, plan: MemoryPlan, shapes: ModelShapes) -> list[Advice]:
    """Find the fewest changes after which every phase fits, the cheapest first.

    Returns an empty list if none is needed, and if none helps.
    """
    return find_advice(config, plan, shapes, moves(config, plan), plan_memory, RULES)


def find_advice(
    config: Any,
    plan: MemoryPlan,
    shapes: ModelShapes,
    single: Iterable[Change],
    replan: Callable[[Any, float, ModelShapes], MemoryPlan],
    rules: Sequence[Rule],
) -> list[Advice]:
    """Find the advice of `advise` for a configuration of any root.

    Args:
        config: of the run.
        plan: of `config`.
        shapes: shared by all plans.
        single: changes that save memory, the cheapest first.
        replan: plans a changed configuration on a device of so many GiB.
        rules: those that a changed configuration must keep.
    """
    if plan.placement.usable_bytes is None or plan.fits:
        return []
    assert plan.placement.device_bytes is not None
    device_gib = plan.placement.device_bytes / GIB

    def changed(pairs: Change) -> Advice | None:
        """Plan with these values; None if they contradict each other or the rest."""
        again = config
        for key, value in pairs:
            again = _changed(again, key, value)
        if contradictions(again, rules, only_to_plan=True):
            return None
        try:
            planned = replan(again, device_gib, shapes)
        except ConfigError:  # ranks that do not divide rows or heads
            return None
        changes = tuple(f"{key}={written(value)}" for key, value in pairs)
        return Advice(changes=changes, plan=planned)

    possible = [move for move in single if changed(move) is not None]
    for count in range(1, MOST_CHANGES + 1):
        found: list[Advice] = []
        # Values of a key come the smallest change first. Larger ones would hide other keys.
        answered: set[frozenset[str]] = set()
        for chosen in combinations(possible, count):
            pairs = tuple(chain.from_iterable(chosen))
            keys = frozenset(key for key, _ in pairs)
            if len(keys) < len(pairs) or keys in answered:
                continue
            advice = changed(pairs)
            if advice is not None and advice.plan.fits:
                found.append(advice)
                answered.add(keys)
                if len(found) == MOST_ADVICE:
                    return found
        if found:
            return found
    return []


def _changed(config: Any, key: str, value: object) -> Any:
    """Change a key, and those that follow it, as if the configuration were loaded with it.

    Returns a copy that shares all sections without a change.
    """
    before = value_at(config, key)
    changed = copy.copy(config)
    section: Any = changed
    *names, last = key.split(".")
    for name in names:
        inner = copy.copy(getattr(section, name))
        setattr(section, name, inner)
        section = inner
    setattr(section, last, value)

    for other in keys_of(type(config)).values():
        if other.followed == key and value_at(changed, other.path) == before:
            changed = _changed(changed, other.path, value)
    return changed


def moves(config: TrainConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Yield single changes that save memory, the cheapest first."""
    roles = config.actor_rollout_ref
    models = [model for role, model in _MODELS.items() if role in plan.roles]
    trained = []
    frozen = []
    for role, section in SHARDED.items():
        if role in plan.roles:
            sections = trained if role in _MODELS else frozen
            sections.append(f"{section}.fsdp_config")

    yield from _turned_on(config, f"{_ROLLOUT}.free_cache_engine")
    for model in models:
        yield from _turned_on(config, f"{model}.enable_gradient_checkpointing")
    for section in trained:
        yield from _turned_on(config, f"{section}.optimizer_offload")
    for section in (*frozen, *trained):
        yield from _turned_on(config, f"{section}.param_offload")

    yield from _smaller_passes(config, plan)
    yield from _smaller_rollout(roles.rollout)
    for model in models:
        if not value_at(config, f"{model}.enable_activation_offload"):
            keys = (f"{model}.enable_gradient_checkpointing", f"{model}.enable_activation_offload")
            yield tuple((key, True) for key in keys if not value_at(config, key))

    parts = roles.rollout.tensor_model_parallel_size
    for size in (2 * parts, 4 * parts, 8 * parts):
        yield ((f"{_ROLLOUT}.tensor_model_parallel_size", size),)
    is_plain = roles.actor.optim.optimizer == "AdamW" and roles.model.lora_rank == 0
    if plan.placement.ranks == 1 and is_plain:
        yield (("actor_rollout_ref.actor.optim.optimizer", "AdamW8bit"),)

    yield from _more_ranks(config, plan)
    # The optimizer steps on the host then, which takes longest of all.
    for section in trained:
        yield from _turned_on(config, f"{section}.offload_policy")


def _turned_on(config: TrainConfig, key: str) -> Iterator[Change]:
    """Yield True for a key that is False."""
    if not value_at(config, key):
        yield ((key, True),)


def _smaller_rollout(rollout: RolloutConfig) -> Iterator[Change]:
    """Yield less room for pages, and fewer samples at once."""
    if rollout.gpu_memory_utilization > 0.3:
        yield ((f"{_ROLLOUT}.gpu_memory_utilization", 0.3),)
    if rollout.num_pages is not None:
        yield ((f"{_ROLLOUT}.num_pages", None),)

    for most in (256, 64, 16):
        if rollout.max_num_seqs > most:
            yield ((f"{_ROLLOUT}.max_num_seqs", most),)


def _more_ranks(config: TrainConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Yield more ranks on each host, up to the GPUs of a usual one, and then more hosts."""
    trainer = config.trainer
    per_host = trainer.n_gpus_per_node
    if per_host is None and plan.placement.ranks > 1:  # launched by torchrun, which sets them
        return

    for factor in MORE_RANKS:
        ranks = (per_host or 1) * factor
        if ranks <= GPUS_OF_A_HOST:
            yield (("trainer.n_gpus_per_node", ranks),)
    if per_host is not None:
        for factor in MORE_RANKS:
            yield (("trainer.nnodes", trainer.nnodes * factor),)


def _smaller_passes(config: TrainConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Yield a half, a quarter and an eighth of the user's tokens, down to a single row."""
    for phase in plan.phases:
        if phase.passes is None or phase.passes.chosen:
            continue
        passes = phase.passes
        tokens_key = passes.work.tokens_key
        rows_key = passes.work.rows_key
        is_by_rows = value_at(config, rows_key) is not None

        sizes = {max(passes.least, passes.tokens // divisor) for divisor in (2, 4, 8)}
        sizes.discard(passes.tokens)
        for size in sorted(sizes, reverse=True):
            if is_by_rows:
                yield ((tokens_key, size), (rows_key, None))
            else:
                yield ((tokens_key, size),)
