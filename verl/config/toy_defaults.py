"""Defaults of the packaged tasks, `data.dataset_name=toy` and `calculator`: a tiny model, two CPU
cores."""

from pathlib import Path

from verl.config.keys import Values
from verl.utils.logging import logger

TOY = "toy"
CALCULATOR = "calculator"
SHAPES = "shapes"
_TOOL = Path(__file__).parents[1] / "agents" / "tools" / "calculator.py"

# For the ten prompts, whatever model answers them.
TOY_DATA_DEFAULTS: Values = {
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
# For a packaged model alone: a learning rate that would wreck a large one.
TOY_MODEL_DEFAULTS: Values = {
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.optim.lr": 5e-4,
    # as fast as two when they have the machine to themselves, and not slower when not
    "trainer.num_threads": 1,
}

# For the products, whatever model answers them.
CALCULATOR_DATA_DEFAULTS: Values = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": CALCULATOR,
    "actor_rollout_ref.rollout.n": 16,
    "data.train_batch_size": 8,
    "data.max_prompt_length": 64,
    "data.max_response_length": 96,  # call, result and answer together
    "actor_rollout_ref.rollout.multi_turn.enable": True,
    "actor_rollout_ref.rollout.multi_turn.function_tool_path": str(_TOOL),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.n": 4,
    "trainer.test_freq": 20,
    "trainer.project_name": "calculator",
    "trainer.experiment_name": "calculator",
    "trainer.total_training_steps": 60,
}
# For the shapes, whatever model answers them.
SHAPES_DATA_DEFAULTS: Values = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.model.path": SHAPES,
    "actor_rollout_ref.rollout.n": 8,
    "data.train_batch_size": 32,
    "data.max_prompt_length": 64,
    "data.max_response_length": 4,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
    "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    "actor_rollout_ref.rollout.val_kwargs.n": 4,
    "trainer.test_freq": 20,
    "trainer.project_name": "shapes",
    "trainer.experiment_name": "shapes",
    "trainer.total_training_steps": 100,
}
# Data set and its packaged model have the same name.
_DATA_DEFAULTS = {
    TOY: TOY_DATA_DEFAULTS,
    CALCULATOR: CALCULATOR_DATA_DEFAULTS,
    SHAPES: SHAPES_DATA_DEFAULTS,
}
PACKAGED_TASKS = tuple(_DATA_DEFAULTS)


def with_toy_defaults(given: Values) -> Values:
    """Return `given` (flat, aliases renamed), over the defaults of the packaged set it asks for.

    One line of the log counts the defaults.
    """
    name = given.get("data.dataset_name")
    if not isinstance(name, str) or name not in _DATA_DEFAULTS:
        return dict(given)

    defaults = dict(_DATA_DEFAULTS[name])
    if given.get("actor_rollout_ref.model.path", name) == name:
        defaults |= TOY_MODEL_DEFAULTS
    if "trainer.total_epochs" in given:
        del defaults["trainer.total_training_steps"]
    applied = {path: value for path, value in defaults.items() if path not in given}
    if applied:
        logger.info(
            "data.dataset_name=%s sets %d keys that you left unset (--cfg job prints them).",
            name,
            len(applied),
        )
    return {**applied, **given}
