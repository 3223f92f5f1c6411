"""The schedule and the split of ranks that the first steps of a run propose."""

from verl.config import TrainConfig
from verl.config.placement import rollout_is_apart
from verl.diagnostics.proposal import MeasuredSteps
from verl.protocol import DataProto
from verl.trainer.rows import response_lengths
from verl.utils.commands import verl_command
from verl.utils.logging import logger

PROPOSAL_STEPS = 10  # after which a run proposes a schedule


class ScheduleProposer:
    """Measures the first steps of this process, and logs a proposal.

    Only synchronous steps of all ranks show the times of generation and update.
    """

    def __init__(self, config: TrainConfig, ranks: int) -> None:
        self._is_whole = config.trainer.mode == "sync" and not rollout_is_apart(config)
        self._staleness = config.async_training.staleness_threshold
        is_recorded = config.trainer.record.enable
        self._record = config.trainer.default_local_dir if is_recorded else None
        self._lengths: list[int] = []  # of the last step's responses, in tokens
        self._measured = MeasuredSteps(
            prompts=config.data.train_batch_size,
            samples=config.actor_rollout_ref.rollout.n,
            ranks=ranks,
        )

    def note_lengths(self, batch: DataProto) -> None:
        """Note the lengths of a step's responses."""
        self._lengths = response_lengths(batch).tolist()

    def note_metrics(self, metrics: dict[str, float]) -> None:
        """Note the metrics of that step; log the proposal when enough steps are measured."""
        is_over = len(self._measured.steps) == PROPOSAL_STEPS
        if is_over or not self._is_whole or "rollout/decode_steps" not in metrics:
            return
        self._measured.add(metrics, self._lengths)
        if len(self._measured.steps) == PROPOSAL_STEPS:
            proposal = self._measured.proposal(self._staleness)
            logger.info("%s", proposal.line())
            if proposal.best != "sync" and self._record is not None:
                logger.info("See all schedules: %s", verl_command("plan", "--run", self._record))
