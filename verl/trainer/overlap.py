"""Work of a step that may begin early or be left out, by the columns that its phases declare.

A phase, reward or estimator without a declaration may read and write everything. Then the phases
run in turn, and every column is computed.
"""

from typing import Any

from verl.config import RewardModelConfig, TrainConfig
from verl.rewards.manager import RewardManager
from verl.utils.phases import declared_phase, declared_phases, may_overlap


def may_score_ahead(kind: type, config: TrainConfig, reward_fn: Any) -> bool:
    """Check whether responses can be scored as they finish, while others are generated.

    Args:
        kind: class of the trainer.
        config: of the run.
        reward_fn: scores the responses.
    """
    names = ("collect", "generate", "_generate", "score", "add_rm_scores")
    if declared_phases(kind, *names) is None:
        return False
    if config.actor_rollout_ref.rollout.uses_agents:
        # The reward of an episode also reads results that its agent loop gives at the end.
        return False
    return _scores_row_by_row(config.reward_model, reward_fn)


def may_begin_passes(kind: type, config: TrainConfig, reward_fn: Any) -> bool:
    """Check whether log-probs and values can be computed while the reward is.

    Args:
        kind: class of the trainer.
        config: of the run.
        reward_fn: scores the responses.
    """
    phases = declared_phases(kind, "collect", "score", "evaluate_policies")
    if phases is None:
        return False
    collect, score, evaluate = phases
    if collect.chooses_rows or not may_overlap(score, evaluate):
        return False
    return _leaves_batch_alone(config.reward_model, reward_fn)


def may_read_old_log_probs(kind: type, estimator: Any) -> bool:
    """Check whether a user's own code between the rollout and the update may read old log-probs.

    Args:
        kind: class of the trainer.
        estimator: of advantages.
    """
    phases = declared_phases(kind, "fit", "run_step", "step", "estimate_advantages", "update")
    declared = declared_phase(estimator)
    if phases is None or declared is None:
        return True
    return any("old_log_probs" in each.reads for each in (*phases, declared))


def _scores_row_by_row(config: RewardModelConfig, reward_fn: Any) -> bool:
    """Check that a declared manager scores, and no model."""
    if config.enable or not isinstance(reward_fn, RewardManager):
        return False
    return _declares_no_change(reward_fn) and _leaves_batch_alone(config, reward_fn)


def _leaves_batch_alone(config: RewardModelConfig, reward_fn: Any) -> bool:
    """Check that a reward drops no sample, and declares that it does not write into the batch."""
    if config.on_error in ("drop", "retry"):
        return False
    if config.launch_reward_fn_async is not None:
        return config.launch_reward_fn_async
    return _declares_no_change(reward_fn)


def _declares_no_change(reward_fn: Any) -> bool:
    """Check the declarations of a reward: a function's, or those of a manager's methods."""
    if isinstance(reward_fn, RewardManager):
        phases = declared_phases(type(reward_fn), *RewardManager.DECLARED)
        return phases is not None and all(each.leaves_batch_alone for each in phases)
    declared = declared_phase(reward_fn)
    return declared is not None and declared.leaves_batch_alone
