"""How far generation may run ahead of training."""

import math
from dataclasses import dataclass

from verl.config.setting import setting

_NO_LENDING = "ranks keep their roles for the whole run"


@dataclass(kw_only=True, slots=True)
class AsyncTrainingConfig:
    """Read with `trainer.mode=fully_async`."""

    staleness_threshold: float = setting(
        1.0,
        (
            "prompts that may be generated ahead, as a share of those learned from between two "
            "hand-overs of weights; 0: none, as in synchronous training"
        ),
        at_least=0,
        at_most=1000,
    )
    max_staleness: int | None = setting(
        None,
        (
            "most versions between the weights that drew a token and those that learn from it; "
            "null: staleness_threshold, rounded up"
        ),
        at_least=0,
    )
    on_stale: str = setting(
        "wait",
        (
            "batches wait for prompts that would exceed max_staleness (wait: none does); or their "
            "tokens beyond it are left out (mask) or weigh 1 / (1 + excess) (reweight), or the "
            "prompts that have such tokens are dropped (drop)"
        ),
        choices=("wait", "mask", "reweight", "drop"),
    )
    trigger_parameter_sync_step: int = setting(
        1, "training steps between two hand-overs of weights", above=0
    )
    require_batches: int | None = setting(
        None,
        (
            "mini-batches (actor.ppo_mini_batch_size) of a step; null: as data.train_batch_size "
            "says, with which it must agree"
        ),
        above=0,
    )
    partial_rollout: bool = setting(
        True,
        "unfinished responses are frozen and go on with the new weights; False: they end first",
    )
    keep_kv_cache: bool = setting(
        False,
        (
            "frozen responses keep the keys and values of the old weights; False: they are "
            "computed anew with the new weights"
        ),
    )
    use_trainer_do_validate: bool = setting(
        False, "the trainer's ranks validate", no_effect="the rollout's ranks validate"
    )
    use_dynamic_resource_scheduling: bool = setting(
        False, "lend ranks of the trainer to the rollout", planned=_NO_LENDING
    )
    dynamic_schedule_policy: str = setting("default", "when to lend", no_effect=_NO_LENDING)
    dynamic_schedule_deactivate_ratio: float = setting(
        0.3, "when to end lending", no_effect=_NO_LENDING
    )
    dynamic_schedule_enable_rebalance: bool = setting(
        True, "deal requests again after lending", no_effect=_NO_LENDING
    )
    concurrent_samples_per_replica: int = setting(
        16,
        "requests at work in an engine",
        no_effect="actor_rollout_ref.rollout.max_num_seqs says it",
    )

    @property
    def bound(self) -> int:
        """Return the bound on staleness, in versions."""
        if self.max_staleness is not None:
            return self.max_staleness
        return math.ceil(self.staleness_threshold)

    def most_started(self, groups_per_step: int) -> int:
        """Return how many prompts may have started and not be learned from."""
        between_syncs = self.trigger_parameter_sync_step * groups_per_step
        return max(groups_per_step, math.floor((1 + self.staleness_threshold) * between_syncs))
