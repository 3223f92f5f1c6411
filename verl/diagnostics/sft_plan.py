"""Predict the memory of fine-tuning: an actor that learns from rows of data, without a rollout."""

from collections.abc import Iterator
from dataclasses import replace

from verl.config.keys import keys_of
from verl.config.sft import RULES, SHARED, SFTConfig, as_train_config
from verl.diagnostics.advice import Advice, Change, find_advice, moves
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.memory_plan import Planner
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.phase_plan import MemoryPlan, PhasePlan
from verl.diagnostics.picture_memory import PictureMemory
from verl.diagnostics.roles import Work, roles_of, work_of


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
        self.config.data.max_prompt_length = config.data.max_length
        self.config.data.max_response_length = 0
        placement = Placement.of(self.config, device_gib)
        self.placement = replace(placement, roles={"actor": tuple(range(placement.ranks))})
        self.batch = BatchPlan.of(self.config, placement.ranks)
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
        # The number of learnt tokens stands in the data alone: all may be, and so may pictures.
        work = work_of(self.config, self.batch, "actor update")
        return work._replace(rows=rows, prompts=rows, predictions=data.max_length)


def _moves(config: SFTConfig, plan: MemoryPlan) -> Iterator[Change]:
    """Yield those changes of training that fine-tuning has keys for, under the names there."""
    known = keys_of(SFTConfig)
    for change in moves(as_train_config(config), plan):
        renamed = {SHARED.names_here(key): value for key, value in change}
        if renamed.keys() <= known.keys():
            yield tuple(renamed.items())
