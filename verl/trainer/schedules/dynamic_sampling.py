"""DAPO's dynamic sampling in asynchronous schedules: rounds take groups generated ahead.

A round that leaves prompts out is followed by another one, of prompts that were generated earlier
or are generated now. Every round of a step precedes its update, so no token gets older by it.
"""

from typing import Any

from verl.protocol import DataProto
from verl.rollout.book import Group
from verl.single_controller import OnEmit
from verl.trainer.dapo import DAPOTrainer
from verl.trainer.ppo_trainer import GENERATED
from verl.trainer.rows import prompts_of
from verl.trainer.schedules.fully_async import FullyAsyncTrainer
from verl.trainer.schedules.one_step_off import OneStepOffTrainer
from verl.trainer.scored import nothing_scored
from verl.utils.arithmetic import ceil_div
from verl.utils.phases import phase


class FullyAsyncDAPOTrainer(DAPOTrainer, FullyAsyncTrainer):
    """DAPOTrainer that takes its prompts from the books.

    A further round takes the oldest groups, so many that the batch gets full if their share with
    different responses is that of the rounds before. The books start others in their place. Where
    nothing runs ahead, rounds are whole batches, and every bit is that of the synchronous run.
    """

    # A round of one prompt may be lost as a whole; a step may not.
    rounds_may_fail = True

    def __init__(self, config: Any, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._groups_of_step: list[Group] = []

    @phase(writes=GENERATED + " token_level_scores rm_scores", chooses_rows=True)
    def collect(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """Collect prompts with responses that differ, see `DAPOTrainer.collect`."""
        self._groups_of_step = []
        batch = super().collect(prompts, first_row)
        chosen_prompts = set(prompts_of(batch))
        chosen = []
        num_left_out = 0
        for group in self._groups_of_step:
            if prompts_of(group.payload)[0] in chosen_prompts:
                chosen.append(group)
            else:
                num_left_out += group.num_tokens

        self._groups_of_step = []
        self.note_batch(batch, chosen)
        if not batch.batch["response_mask"].any():
            raise nothing_scored("this step")
        self.metrics["fully_async/filtered_tokens"] = float(num_left_out)
        return batch

    @phase(writes=GENERATED)
    def generate(self, prompts: DataProto, first_row: int = 0, on_emit: OnEmit = None) -> DataProto:
        """Generate until the groups of a round are whole, and return them.

        Args:
            prompts: read in addition to those that this reads itself.
            first_row: groups of the earlier rounds of this step.
        """
        groups, batch = self.take_groups(prompts, first_row)
        self._groups_of_step += groups
        return batch

    def further_prompts(self, missing: int) -> DataProto:
        """Ask the books for further groups; see `DAPOTrainer.further_prompts`."""
        self.generation.pause()
        if not self.book.pace.is_ahead:
            self.book.reopen(self.book.pace.groups_per_step)
            return super().further_prompts(missing)
        self.book.reopen(self._size_of_round(missing))
        return DataProto()

    def _size_of_round(self, missing: int) -> int:
        """Return how many groups a further round takes: at most a batch, and no more than
        `max_num_gen_batches` leaves."""
        batch = self.book.pace.groups_per_step
        drawn = len(self._groups_of_step)
        kept = batch - missing
        size = batch
        if kept > 0:
            size = min(batch, ceil_div(missing * drawn, kept))
        most_batches = self.config.algorithm.filter_groups.max_num_gen_batches
        if most_batches > 0:
            size = min(size, most_batches * batch - drawn)
        return size


class OneStepOffDAPOTrainer(DAPOTrainer, OneStepOffTrainer):
    """DAPOTrainer whose first round was generated during the last step.

    Each round begins the next one. The last of a step is the first of the step after it.
    """

    def further_prompts(self, missing: int) -> DataProto:
        """Return none: `generate` reads the prompts of a round when it begins the one before."""
        return DataProto()
