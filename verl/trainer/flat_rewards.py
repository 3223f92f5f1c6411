"""A warning where rewards give a policy nothing to learn from."""

import torch

from verl.algorithms.group_advantages import group_max
from verl.config import TrainConfig
from verl.protocol import DataProto
from verl.trainer.rows import counted_rows, group_numbers, response_lengths
from verl.utils.logging import logger

# Steps in a row; the next warnings come after twice as many each, also where a lucky step lies
# between: a model that has learned its task meets flat steps for the rest of the run.
_FIRST_WARNING = 3
# Estimators that compare a response with all others of the batch, not with those of its prompt.
_OVER_THE_BATCH = ("gae", "reinforce_plus_plus", "remax")


class FlatRewards:
    """Counts steps in a row without two scores to prefer one over the other."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.steps_in_a_row = 0
        self.warn_at = _FIRST_WARNING

    def watch(self, batch: DataProto, step: int) -> None:
        """Look at the scores of a step; log a warning when too many in a row were flat."""
        if self.config.distillation.is_whole_loss:
            return  # nothing scores the responses, and the teacher gives something to learn
        scores = batch.batch["token_level_scores"].sum(-1)
        counted = counted_rows(batch)
        group = group_numbers(batch)
        if self.config.algorithm.adv_estimator in _OVER_THE_BATCH:
            group = torch.zeros_like(group)

        if not is_flat(scores[counted], group[counted]):
            self.steps_in_a_row = 0
            return
        self.steps_in_a_row += 1
        if self.steps_in_a_row >= self.warn_at:
            self.warn_at *= 2
            logger.warning("%s", self._message(batch, scores[counted], step))

    def _message(self, batch: DataProto, scores: torch.Tensor, step: int) -> str:
        low = scores.min().item()
        high = scores.max().item()
        fact = "no prompt has responses of different scores"
        if low == high:
            fact = f"all responses score {low:g}"
        is_cut = response_lengths(batch) == batch.batch["responses"].shape[1]

        return (
            f"Nothing to learn from in the last {self.steps_in_a_row} steps, to step {step}: "
            f"{fact}. Possible causes: answers are not in the form that the reward reads; the "
            "reward rule does not fit data_source (`verl reward check` tries it); prompts are too "
            "hard or too easy for the model, or rollout.n is too small; responses are cut "
            f"({is_cut.float().mean():.0%} fill data.max_response_length="
            f"{self.config.data.max_response_length}). Look at samples with "
            "trainer.rollout_data_dir=FOLDER."
        )


def is_flat(scores: torch.Tensor, group: torch.Tensor) -> bool:
    """Check whether the scores (B,) are equal within every group (B,); groups of one are compared
    with each other."""
    if len(scores) == 0:
        return False
    if len(group.unique()) == len(group):
        return bool((scores == scores[0]).all())
    lowest = -group_max(-scores, group)
    return bool((lowest == group_max(scores, group)).all())
