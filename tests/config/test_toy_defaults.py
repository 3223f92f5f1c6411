"""`data.dataset_name=toy` alone is a complete run, and the user's settings override it."""

import pytest

from verl.config import TrainConfig, load_config
from verl.config.keys import keys_of, value_at
from verl.config.toy_defaults import (
    CALCULATOR_DATA_DEFAULTS,
    TOY_DATA_DEFAULTS,
    TOY_MODEL_DEFAULTS,
)
from verl.utils.errors import ConfigError

TOY_DEFAULTS = {**TOY_DATA_DEFAULTS, **TOY_MODEL_DEFAULTS}
CALCULATOR_DEFAULTS = {**CALCULATOR_DATA_DEFAULTS, **TOY_MODEL_DEFAULTS}


def test_toy_dataset_is_a_complete_configuration(log: pytest.LogCaptureFixture):
    config = load_config(["data.dataset_name=toy"])
    assert {path: value_at(config, path) for path in TOY_DEFAULTS} == TOY_DEFAULTS
    line = next(
        record.message for record in log.records if "dataset_name=toy sets" in record.message
    )
    assert f"sets {len(TOY_DEFAULTS)} keys that you left unset (--cfg job prints them)" in line
    assert len(line) < 100, "the line precedes every error"


def test_user_settings_override_toy_defaults(log: pytest.LogCaptureFixture):
    config = load_config(
        ["data.dataset_name=toy", "algorithm.adv_estimator=gae", "data.train_batch_size=4"]
    )
    assert config.algorithm.adv_estimator == "gae"
    assert config.data.train_batch_size == 4
    assert config.needs_critic
    assert f"sets {len(TOY_DEFAULTS) - 2} keys" in log.text


def test_alias_counts_as_set():
    config = load_config(
        [
            "data.dataset_name=toy",
            "trainer.max_steps=3",
            "actor_rollout_ref.rollout.max_new_tokens=9",
        ]
    )
    assert config.trainer.total_training_steps == 3
    assert config.data.max_response_length == 9


def test_epochs_replace_the_toy_step_count():
    assert (
        load_config(
            ["data.dataset_name=toy", "trainer.num_train_epochs=2"]
        ).trainer.total_training_steps
        is None
    )


def test_other_model_keeps_the_usual_learning_rate():
    config = load_config(
        ["data.dataset_name=toy", "actor_rollout_ref.model.path=facebook/opt-125m"]
    )
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.model.path == "facebook/opt-125m"


@pytest.mark.parametrize("value", ["[toy]", "{toy: 1}"])
def test_dataset_name_that_is_no_text_is_reported(value: str):
    with pytest.raises(ConfigError, match="data.dataset_name expects text or null, got "):
        load_config([f"data.dataset_name={value}"])


def test_default_tables_name_existing_keys():
    assert set(TOY_DEFAULTS) <= set(keys_of(TrainConfig))
    assert set(CALCULATOR_DEFAULTS) <= set(keys_of(TrainConfig))


def test_calculator_dataset_has_its_own_defaults():
    config = load_config(["data.dataset_name=calculator", "data.train_batch_size=4"])
    expected = {**CALCULATOR_DEFAULTS, "data.train_batch_size": 4}
    assert {path: value_at(config, path) for path in expected} == expected
    other = load_config(
        ["data.dataset_name=calculator", "actor_rollout_ref.model.path=facebook/opt-125m"]
    )
    assert other.actor_rollout_ref.actor.optim.lr == 1e-6


def test_a_misspelt_task_is_named_where_its_model_is_missing():
    with pytest.raises(ConfigError, match=r"one of toy, calculator, shapes; got 'toi'\."):
        load_config(["data.dataset_name=toi"])
    with pytest.raises(ConfigError, match=r"'toy' for the packaged one\.$"):
        load_config([f"data.dataset_name={__file__}"])
    with pytest.raises(ConfigError, match=r"'toy' for the packaged one\.$"):
        load_config(["data.dataset_name=toy", "actor_rollout_ref.model.path=null"])
