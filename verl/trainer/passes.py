"""Passes of the models over a batch before the update: log-probs and values."""

from collections.abc import Callable
from functools import partial

from verl.protocol import DataProto
from verl.single_controller import GroupFuture, start
from verl.trainer.roles import RunOfRoles


def start_passes(
    run: RunOfRoles, batch: DataProto, *, with_old_log_probs: bool
) -> dict[str, GroupFuture]:
    """Start the passes that a run needs, and return their answers to come by the names of phases.

    Args:
        run: has the models.
        batch: (B,) trajectories.
        with_old_log_probs: whether the actor computes them.
    """
    passes: dict[str, Callable[[DataProto], DataProto]] = {}
    if with_old_log_probs:
        compute = run.actor_wg.compute_log_prob
        if run.config.needs_sum_pi_squared:
            compute = partial(compute, sum_pi_squared=True)
        passes["old_log_prob"] = compute
    if run.ref_policy_wg is not None:
        passes["ref"] = run.ref_policy_wg.compute_ref_log_prob
    if run.teacher_wg is not None:
        passes["teacher"] = run.teacher_wg.compute_teacher_log_prob
    if run.critic_wg is not None:
        passes["values"] = run.critic_wg.compute_values

    return {name: start(compute, batch) for name, compute in passes.items()}
