"""Check that the class of a trainer does all that a configuration needs."""

from typing import Any

from verl.config import TrainConfig
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.phases import declared_phases

# Classes of `verl.trainer` by `trainer.mode`.
_SCHEDULES = {
    "sync": "PPOTrainer",
    "one_step_off": "schedules.one_step_off.OneStepOffTrainer",
    "fully_async": "schedules.fully_async.FullyAsyncTrainer",
}


def check_class(config: TrainConfig, kind: Any) -> None:
    """Raise ConfigError if the class of a trainer lacks a schedule, step or policy of the run."""
    _check_mode(config, kind)
    _check_step(config, kind)
    _check_partners(config, kind)


def check_replay(config: TrainConfig, needs_old_log_probs: bool) -> None:
    """Warn where the experts of `router_replay.mode=R2` are recorded by no pass."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if mode == "R2" and not needs_old_log_probs:
        logger.warning(
            "actor_rollout_ref.actor.router_replay.mode=R2 has no effect: it records experts in "
            "the pass for old log-probs, which this run does not make. Set mode=R3 to record them "
            "in the rollout; or have several updates a batch, by a smaller "
            "actor_rollout_ref.actor.ppo_mini_batch_size or more ppo_epochs, without "
            "algorithm.rollout_correction.bypass_mode."
        )


def _check_mode(config: TrainConfig, kind: Any) -> None:
    """Check that the trainer's class has the schedule that `trainer.mode` names."""
    asked = config.trainer.mode
    if asked != kind.mode:
        raise ConfigError(
            f"trainer.mode={asked} needs verl.trainer.{_SCHEDULES[asked]} or a subclass of it, got "
            f"{kind.__name__}, which runs trainer.mode={kind.mode}."
        )


def _check_step(config: TrainConfig, kind: type) -> None:
    """Check that the class of a synchronous trainer has the step that the algorithm needs.

    Raises ConfigError where nothing in the class chooses rows: the steps of DAPO and ReMax do. An
    undeclared method may.
    """
    if config.trainer.mode != "sync":
        return  # AheadTrainer has a check of its own
    phases = declared_phases(kind, "fit", "run_step", "step", "collect")
    chooses_rows = phases is None or any(each.chooses_rows for each in phases)
    for key, asked, needed in (
        ("filter_groups.enable=True", config.algorithm.filter_groups.enable, "dapo.DAPOTrainer"),
        ("adv_estimator=remax", config.algorithm.adv_estimator == "remax", "remax.ReMaxTrainer"),
    ):
        if asked and not chooses_rows:
            raise ConfigError(
                f"algorithm.{key} needs verl.trainer.{needed} or a subclass, got {kind.__name__}. "
                "Derive yours from it, or override `collect`, `step` or `fit` to do the same."
            )


def _check_partners(config: TrainConfig, kind: Any) -> None:
    """Raise ConfigError for policies next to the actor that the trainer's class does not train."""
    partners = config.actor_rollout_ref.rollout.agent.partners
    if partners and not kind.trains_partners:
        raise ConfigError(
            "actor_rollout_ref.rollout.agent.policies names trained policies next to the actor "
            f"({', '.join(partners)}), which need verl.trainer.partners.PartnersTrainer or a "
            f"subclass, got {kind.__name__}."
        )
