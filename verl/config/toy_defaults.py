"""Defaults of `data.dataset_name=toy`: ten prompts, a tiny model, two CPU cores."""

from collections.abc import Mapping
from typing import Any

from verl.utils.logging import logger

TOY = "toy"

# For the ten prompts, whatever model answers them.
TOY_DATA_DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.actor.use_kl_loss": True,  # so that the step line has a KL to show
    "actor_rollout_ref.model.path": TOY,
    "actor_rollout_ref.rollout.n": 32,
    "data.train_batch_size": 8,
    "data.max_prompt_length": 64,
    "data.max_response_length": 16,
    # Sampled, as in training: the most likely answer of the packaged model is that it has no idea.
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.n": 8,
    "trainer.test_freq": 10,
    "trainer.project_name": "toy",
    "trainer.experiment_name": "toy",
    "trainer.total_training_steps": 10,
}
# For the packaged model alone: a learning rate that would wreck a large one.
TOY_MODEL_DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    # as fast as two when they have the machine to themselves, and not slower when not
    "trainer.num_threads": 1,
}


def with_toy_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` (flat, aliases renamed), over the toy defaults if it asks for the toy set.

    One line of the log counts the defaults.
    """
    if given.get("data.dataset_name") != TOY:
        return dict(given)
    defaults = dict(TOY_DATA_DEFAULTS)
    if given.get("actor_rollout_ref.model.path", TOY) == TOY:
        defaults |= TOY_MODEL_DEFAULTS
    if "trainer.total_epochs" in given:
        del defaults["trainer.total_training_steps"]
    applied = {path: value for path, value in defaults.items() if path not in given}
    if applied:
        logger.info(
            "data.dataset_name=toy sets %d keys that you left unset (--cfg job prints them).",
            len(applied),
        )
    return {**applied, **given}
