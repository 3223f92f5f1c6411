"""Predict the memory of fine-tuning: an actor that learns from rows of data, without a rollout."""

from collections.abc import Iterator
from dataclasses import replace

from verl.config import update_micro_batch
from verl.config.keys import value_at
from verl.config.sft import RULES, SFTConfig, as_train_config
from verl.diagnostics.advice import MORE_RANKS, Advice, Change, find_advice, smaller_passes
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.memory_plan import MemoryPlan, PhasePlan, Planner
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.picture_memory import PictureMemory
from verl.diagnostics.roles import Work, roles_of
from verl.utils.arithmetic import ceil_div


def plan_fine_tuning(
    config: SFTConfig, device_gib: float | str | None = None, shapes: ModelShapes | None = None
) -> MemoryPlan:
    """Plan a validated configuration of fine-tuning, as `plan_memory` plans training."""
    return FineTuningPlanner(config, device_gib, shapes or ModelShapes()).plan()


def advise_fine_tuning(config: SFTConfig, plan: MemoryPlan, shapes: ModelShapes) -> list[Advice]:
    """Find the fewest changes after which every phase fits, see `advise`."""
    return find_advice(config, plan, shapes, _moves(config, plan), plan_fine_tuning, RULES)


class FineTuningPlanner(Planner):
    """Plan the phases of `SFTTrainer`."""

    rollout = None

    def __init__(
        self, config: SFTConfig, device_gib: float | str | None, shapes: ModelShapes
    ) -> None:
        self.sft = config
        self.config = as_train_config(config)
        placement = Placement.of(self.config, device_gib)
        self.placement = replace(placement, roles={"actor": tuple(range(placement.ranks))})
        self.batch = _batch(config, placement.ranks)
        self.roles = roles_of(self.config, self.placement, shapes)
        # Its worker keeps no features.
        self.pictures = replace(PictureMemory.of(self.batch, self.roles["actor"]), kept=0)

    def _phases(self) -> Iterator[PhasePlan]:
        yield from self._loading()
        yield self._passes("actor", "update")
        if self.sft.data.val_files:
            yield self._passes("actor", "validation")
        if str(self.sft.trainer.save_freq) != "-1":
            yield from self._checkpoints()

    def _work(self, phase: str) -> Work:
        data = self.sft.data
        rows = data.train_batch_size
        if phase == "validation":
            rows = data.val_batch_size or rows
        return Work(
            section="data",
            tokens_key="max_token_len_per_gpu",
            rows_key="micro_batch_size_per_gpu",
            micro_batch=update_micro_batch(self.config.actor_rollout_ref.actor),
            rows=rows,
            longest=data.max_length,
            # The number of learnt tokens stands in the data alone: all may be, and so may pictures.
            predictions=data.max_length,
            prompts=rows,
            longest_prompt=data.max_length,
        )


def _batch(config: SFTConfig, ranks: int) -> BatchPlan:
    rows = config.data.train_batch_size
    data_ranks = max(1, ranks // config.ulysses_sequence_parallel_size)
    return BatchPlan(
        prompts=rows,
        samples=1,
        rows=rows,
        longest=config.data.max_length,
        prompt_share=1.0,
        mini_batches=1,
        epochs=1,
        updates=1,
        ranks=ranks,
        data_ranks=data_ranks,
        rows_a_rank=ceil_div(rows, data_ranks),
    )


def _moves(config: SFTConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Yield single changes that save memory, the cheapest first."""
    checkpointing = "model.enable_gradient_checkpointing"
    for key in (
        checkpointing,
        "model.fsdp_config.optimizer_offload",
        "model.fsdp_config.param_offload",
    ):
        if not value_at(config, key):
            yield ((key, True),)

    yield from smaller_passes(config, plan)
    if not config.model.enable_activation_offload:
        keys = (checkpointing, "model.enable_activation_offload")
        yield tuple((key, True) for key in keys if not value_at(config, key))
    if plan.placement.ranks == 1 and config.optim.optimizer == "AdamW":
        yield (("optim.optimizer", "AdamW8bit"),)

    for factor in MORE_RANKS:
        if config.trainer.n_gpus_per_node is not None:
            yield (("trainer.nnodes", config.trainer.nnodes * factor),)
        elif plan.placement.ranks == 1:
            yield (("trainer.n_gpus_per_node", factor),)
    if not config.model.fsdp_config.offload_policy:
        yield (("model.fsdp_config.offload_policy", True),)
