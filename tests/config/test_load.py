"""Command line: accepted forms, values, aliases and error messages."""

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.config.conftest import BASE, Load
from verl.config import (
    ExtraLossConfig,
    TrainConfig,
    config_from_dict,
    config_to_dict,
    load_config,
    log_prob_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.config.keys import nest
from verl.utils.errors import ConfigError
from verl.utils.logging import configure_logging, logger


@pytest.mark.parametrize("form", ["{}", "+{}", "++{}", "--{}", "-{}"])
def test_every_override_form_sets_the_value(load: Load, form: str):
    assert (
        load(form.format("actor_rollout_ref.actor.optim.lr=3e-5")).actor_rollout_ref.actor.optim.lr
        == 3e-5
    )


def test_values_keep_their_types(load: Load):
    config = load(
        'trainer.logger=["console","wandb"]',
        "data.train_files=['a.parquet','b.parquet']",
        "data.truncation='left'",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "data.train_batch_size=1e1",
        "trainer.max_steps=1e3",
        "trainer.experiment_name=7",
        "actor_rollout_ref.rollout.stop='\n\n'",
        "+actor_rollout_ref.model.override_config.num_hidden_layers=2",
        "actor_rollout_ref.actor.loss_extra=[{name: sft, coef: 0.1}]",
        "actor_rollout_ref.rollout.max_model_len=null",
    )
    assert config.trainer.logger == ["console", "wandb"]

    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.data.truncation == "left"
    assert config.actor_rollout_ref.actor.entropy_coeff == 0.0
    assert config.data.train_batch_size == 10
    assert config.trainer.total_training_steps == 1000
    assert config.trainer.experiment_name == "7"
    assert config.actor_rollout_ref.rollout.stop == ["\n\n"]
    assert config.actor_rollout_ref.model.override_config == {"num_hidden_layers": 2}

    assert config.actor_rollout_ref.actor.loss_extra == [ExtraLossConfig(name="sft", coef=0.1)]


def test_one_file_becomes_a_list_and_tilde_is_expanded(load: Load):
    config = load("data.train_files=~/data/train.parquet", "trainer.default_local_dir=~/out")
    assert config.data.train_files == [str(Path.home() / "data/train.parquet")]
    assert config.trainer.default_local_dir == str(Path.home() / "out")


@pytest.mark.parametrize(
    ("value", "loaded"), [("[a,b.py]", ["a", "b.py"]), ("'a,b.py'", ["a,b.py"]), ("null", None)]
)
def test_a_role_may_import_several_modules(load: Load, value: str, loaded: list | None):
    config = load(f"actor_rollout_ref.model.external_lib={value}")
    assert config.actor_rollout_ref.model.external_lib == loaded
    assert config.critic.model.external_lib == loaded


def test_null_list_is_empty(load: Load):
    config = load(
        "trainer.logger=null", "actor_rollout_ref.rollout.stop=null", "data.val_files=null"
    )
    assert (
        config.trainer.logger,
        config.actor_rollout_ref.rollout.stop,
        config.data.val_files,
    ) == ([], [], None)


def test_keys_follow_others_as_in_verl(load: Load):
    config = load(
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.actor.clip_ratio=0.1",
        "trainer.project_name=p",
        "critic.ppo_max_token_len_per_gpu=7000",
        "data.max_response_length=100",
    )
    assert config.critic.ppo_mini_batch_size == 4

    assert config.critic.rollout_n == 3
    assert config.critic.forward_max_token_len_per_gpu == 7000
    assert config.critic.model.path == "some/model"
    assert config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 5000
    assert config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 5000
    assert config.actor_rollout_ref.rollout.response_length == 100
    assert config.actor_rollout_ref.actor.clip_ratio_high == 0.1
    assert config.trainer.default_local_dir == "checkpoints/p/gsm8k"


def test_following_key_can_be_set_separately(load: Load):
    config = load("actor_rollout_ref.actor.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=8")
    assert (
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
        config.critic.ppo_mini_batch_size,
    ) == (4, 8)


def test_null_keeps_a_key_following(load: Load):
    actor = load(
        "actor_rollout_ref.actor.clip_ratio=0.3", "actor_rollout_ref.actor.clip_ratio_low=null"
    )
    assert actor.actor_rollout_ref.actor.clip_ratio_low == 0.3
    assert load("critic.optim.min_lr_ratio=null").critic.optim.min_lr_ratio == 0.0


def test_user_interpolations_are_resolved(load: Load):
    config = load(
        "trainer.experiment_name='${data.train_batch_size}-${actor_rollout_ref.rollout.n}'"
    )
    assert config.trainer.experiment_name == "8-1"


@pytest.mark.parametrize(
    ("alias", "main"),
    [
        ("trainer.max_steps", "trainer.total_training_steps"),
        ("trainer.num_train_epochs", "trainer.total_epochs"),
        ("actor_rollout_ref.rollout.max_new_tokens", "data.max_response_length"),
        ("actor_rollout_ref.rollout.response_length", "data.max_response_length"),
        ("actor_rollout_ref.rollout.prompt_length", "data.max_prompt_length"),
        ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
        ),
    ],
)
def test_alias_sets_the_main_key(load: Load, alias: str, main: str):
    config = load(f"{alias}=6")
    assert OmegaConf.select(OmegaConf.create(config_to_dict(config)), main) == 6
    assert load(f"{alias}=6", f"{main}=6") == config
    with pytest.raises(ConfigError, match=f"{alias} and {main} are two names"):
        load(f"{alias}=6", f"{main}=7")


@pytest.mark.parametrize(
    ("in_file", "on_line"),
    [("max_steps", "total_training_steps"), ("total_training_steps", "max_steps")],
)
def test_alias_on_the_command_line_overrides_the_file(
    load: Load, tmp_path: Path, capsys, in_file: str, on_line: str
):
    (tmp_path / "mine.yaml").write_text(f"trainer: {{{in_file}: 7}}\n", encoding="utf-8")
    arguments = (f"--config-path={tmp_path}", "--config-name=mine", f"trainer.{on_line}=3")
    trainer = load(*arguments).trainer
    assert (trainer.total_training_steps, trainer.max_steps) == (3, 3)
    with pytest.raises(SystemExit):
        load(*arguments, "--cfg=job")
    assert "total_training_steps: 3\n" in capsys.readouterr().out


def test_conflicting_aliases_are_an_error(load: Load):
    with pytest.raises(ConfigError, match="two names of one setting"):
        load(
            "actor_rollout_ref.rollout.max_new_tokens=5",
            "actor_rollout_ref.rollout.response_length=6",
        )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.max_steps=None",
            "trainer.max_steps expects a whole number or null, got 'None'.*Write null",
        ),
        (
            "data.train_batch_size=1_5",
            "expects a whole number, got '1_5'.*except between thousands",
        ),
        ("data.seed=1.5", "data.seed expects a whole number, got 1.5"),
        ("data.shuffle=maybe", "data.shuffle expects True or False, got 'maybe'"),
        ("actor_rollout_ref.actor.optim.lr=fast", "optim.lr expects a number, got 'fast'"),
        ("actor_rollout_ref.actor.optim.betas=[a,b]", "betas expects a list of numbers"),
        ("actor_rollout_ref.actor.loss_extra=[{coef: 1}]", "loss_extra.*name"),
        (
            "actor_rollout_ref.actor.loss_extra=[{name: a, weight: 1}]",
            "loss_extra expects a list of",
        ),
        (
            "actor_rollout_ref.rollout.stop=7",
            "rollout.stop expects a text or a list of texts, got 7",
        ),
        ("actor_rollout_ref.rollout.stop=[null]", "rollout.stop expects a text or a list of texts"),
        (
            "actor_rollout_ref.rollout.stop_token_ids=[[1]]",
            "stop_token_ids expects a list of whole numbers",
        ),
        ("actor_rollout_ref.actor.entropy_coeff=nan", "entropy_coeff must be a number, got nan"),
        ("actor_rollout_ref.rollout.temperature=null", "temperature expects a number, got None"),
        ("actor_rollout_ref.model.override_config=3", "override_config expects a mapping"),
        ("trainer.project_name='${data.nothing}'", "project_name=.* cannot be resolved"),
        (
            "data.train_batch_size='${actor_rollout_ref.model.path}'",
            "cannot be resolved to a whole number",
        ),
        ("trainer.project_name=a,b", "Ambiguous value.*Write a list as"),
        ("trainer.project_name=a b(c)", "Cannot read 'trainer.project_name=a b.c.'.*Quote"),
        ("trainer..seed=1", "a key is names with one dot between them"),
        ("data.train_files=", "data.train_files has an empty path, as an unset variable"),
        ("~data.shuffle", "Could not delete.*key=null"),
        ("fast", "Expected key=value, got 'fast'"),
        ("--multirun", "one run per configuration"),
        ("--cfg=hydra", "expected 'job', got 'hydra'"),
        ("--config-name", "--config-name needs a value"),
        ("--config-path=no/such/folder", "--config-path must be an existing folder"),
        ("--config-name=ppo_megatron_trainer", "no Megatron backend"),
        ("model_engine=megatron", "one backend.*Write model_engine=dp, or leave it out"),
        (
            "actor_rollout_ref.actor.megatron.seed=1",
            "no Megatron backend.*fsdp.*tensor_model_parallel_size",
        ),
    ],
)
def test_unreadable_overrides_are_explained(load: Load, override: str, message: str):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        load(override)


def test_digits_with_underscores_are_read_as_they_are_meant():
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    config = load_config(
        [*BASE, "trainer.experiment_name=2024_05", "trainer.max_steps=1_000", f"{threshold}=0.5_2"]
    )
    assert config.trainer.experiment_name == "2024_05"
    assert config.trainer.max_steps == 1000
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is_threshold_lower, correction.rollout_is_threshold) == (0.5, 2.0)


@pytest.mark.parametrize("name", ["x", "x.y"])
def test_a_key_below_a_list_is_explained(load: Load, name: str):
    with pytest.raises(ConfigError, match="within a list, which has numbers and no names"):
        load("data.train_files=[a]", f"data.train_files.{name}=1")
    with pytest.raises(ConfigError, match=r"train_files.5=1 does not fit the values .*range"):
        load("data.train_files=[a]", "data.train_files.5=1")


def test_interpolations_of_the_user_reach_keys_that_follow_others():
    name = {"project_name": "${trainer.experiment_name}", "experiment_name": "tea"}
    config = config_from_dict({"data": {"dataset_name": "toy"}, "trainer": name})
    assert config.trainer.default_local_dir == "checkpoints/tea/tea"


def test_lists_are_never_shared():
    """A change of a list in one configuration stays in its key and in that configuration."""
    values = {"data": {"dataset_name": "toy"}}
    one, other = config_from_dict(values), config_from_dict(values)
    contents = one.actor_rollout_ref.actor.checkpoint
    contents.save_contents.append("hf_model")
    assert "hf_model" not in contents.load_contents
    assert one != other


def test_cfg_job_prints_a_contradictory_configuration(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_info:
        load_config(["--cfg", "job", "--resolve", "data.train_batch_size=3"])
    assert exit_info.value.code == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.data.train_batch_size == 3
    assert printed.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


def test_cfg_job_prints_yaml_without_log_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
):
    monkeypatch.setattr(logger, "handlers", [])
    configure_logging()
    with pytest.raises(SystemExit):
        load_config(["--cfg", "job", "data.dataset_name=toy"])
    (tmp_path / "kept.yaml").write_text(capsys.readouterr().out)
    config = load_config(
        [f"--config-path={tmp_path}", "--config-name=kept", "trainer.total_training_steps=3"]
    )
    assert (config.actor_rollout_ref.rollout.n, config.trainer.total_training_steps) == (32, 3)


def test_help_is_short(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_info:
        load_config(["--help"])
    assert exit_info.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) < 20


VALUES = {
    "data.train_batch_size": st.sampled_from([8, 16]),
    "actor_rollout_ref.actor.optim.lr": st.floats(1e-9, 1.0),
    "actor_rollout_ref.actor.ppo_mini_batch_size": st.sampled_from([None, 4]),
    "trainer.max_steps": st.none() | st.integers(1, 99),
    "actor_rollout_ref.actor.loss_extra": st.just([{"name": "sft", "coef": 0.5}]),
    "actor_rollout_ref.rollout.agent": st.just(
        {
            "environment": {"name": "debate.py:Debate"},
            "policies": {"a": {"trained": True}, "b": {"path": "x/y", "top_p": 0.5}},
        }
    ),
    "trainer.logger": st.sampled_from(["console", ["console", "file"]]),
    "actor_rollout_ref.model.override_config": st.dictionaries(
        st.sampled_from("abc"), st.integers()
    ),
    "data.dataset_name": st.just("toy"),
}


@settings(max_examples=15)
@given(flat=st.fixed_dictionaries({}, optional=VALUES))
def test_configuration_survives_a_dictionary(flat: dict):
    if "data.dataset_name" not in flat:
        flat = {
            **flat,
            "data.train_files": "a.parquet",
            "actor_rollout_ref.model.path": "some/model",
        }
    config = config_from_dict(nest(flat))
    plain = config_to_dict(config)
    assert config_from_dict(json.loads(json.dumps(plain))) == config
    assert isinstance(config, TrainConfig)
    assert pickle.loads(pickle.dumps(config)) == config


def test_misspelled_attribute_is_an_error(load: Load):
    with pytest.raises(AttributeError):
        load().trainer.total_epoch = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_unset_micro_batch_size_gives_a_token_budget(load: Load):
    config = load()
    roles = config.actor_rollout_ref
    by_measurement = (None, None)
    assert update_micro_batch(roles.actor) == by_measurement
    assert log_prob_micro_batch(roles.ref) == log_prob_micro_batch(roles.rollout) == by_measurement
    assert value_micro_batch(config.critic) == update_micro_batch(config.critic) == by_measurement
    off = load("actor_rollout_ref.actor.use_dynamic_bsz=False")
    assert update_micro_batch(off.actor_rollout_ref.actor) == by_measurement


def test_micro_batch_size_gives_rows_unless_dynamic(load: Load):
    rows = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"
    assert update_micro_batch(load(rows).actor_rollout_ref.actor) == (None, 2)
    dynamic = load(rows, "actor_rollout_ref.actor.use_dynamic_bsz=True")
    assert update_micro_batch(dynamic.actor_rollout_ref.actor) == (None, None)
    assert value_micro_batch(load("critic.ppo_micro_batch_size=3").critic) == (None, 3)
