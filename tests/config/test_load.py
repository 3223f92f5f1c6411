"""Command line and YAML: accepted forms and error messages."""

import json
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.config.conftest import BASE, Load
from verl.config import (
    ExtraLossConfig,
    TrainConfig,
    build,
    config_from_dict,
    config_to_dict,
    load_config,
    log_prob_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.config import compose as composition
from verl.config.build import SchemaNode, fill, resolve, typed_tree
from verl.config.command_line import parse_command_line
from verl.config.keys import keys_of, nest, value_at
from verl.config.load import ROOTS
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


@pytest.mark.parametrize("folder", ["config", "./config", "recipe/dapo/config"])
@pytest.mark.parametrize("name", ["ppo_trainer", "dapo_trainer", "one_step_off_ppo_trainer.yaml"])
def test_files_that_verl_keeps_next_to_its_programs_stand_for_the_schema(
    load: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
    folder: str,
    name: str,
):
    monkeypatch.chdir(tmp_path)
    options = [f"--config-path={folder}", f"--config-name={name}"]
    assert load(*options, "data.max_prompt_length=3").data.max_prompt_length == 3
    assert f"No folder '{folder}' here" in log.text

    bare = name.removesuffix(".yaml")
    for mistake in (["--config-path=config", "--config-name=mine"], [f"{folder}/{bare}.yaml"]):
        with pytest.raises(ConfigError, match="--config-path must be an existing folder"):
            load(*mistake)

    _write(tmp_path / folder, bare, "data: {max_prompt_length: 5}\n")
    assert load(*options).data.max_prompt_length == 5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["runs/a.yaml", "b.yml"], "runs/a.yaml and b.yml. Name the second one in"),
        (["a.yaml", "--config-name=b"], "--config-name=b and a.yaml"),
    ],
)
def test_a_second_yaml_file_is_refused(load: Load, arguments: list[str], named: str):
    with pytest.raises(ConfigError, match=f"one YAML file, got {named}"):
        load(*arguments)


def _write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(text)
    return folder


USERS_YAML = """
hydra:
  searchpath:
    - SEARCHPATH
defaults:
  - ppo_trainer
  - _self_
data:
  max_prompt_length: 77
  train_batch_size: 16
actor_rollout_ref:
  hybrid_engine: True
  model: {path: some/model}
  rollout: {n: 2, max_model_len: "${data.max_prompt_length}"}
"""


@pytest.mark.parametrize("search", ["file://verl/trainer/config", "pkg://verl.trainer.config"])
@pytest.mark.parametrize(
    "form",
    [
        "--config-path={folder} --config-name={name}",
        "--config-path {folder} -cn {name}.yaml",
        "{folder}/{name}.yaml",
    ],
)
def test_user_yaml_ranks_between_defaults_and_overrides(tmp_path: Path, form: str, search: str):
    folder = _write(tmp_path / "config", "mine", USERS_YAML.replace("SEARCHPATH", search))
    argv = form.format(folder=folder, name="mine").split()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(
            [
                *argv,
                "data.train_files=a",
                "data.train_batch_size=4",
                "~actor_rollout_ref.rollout.max_model_len",
            ]
        )

    assert config.data.max_prompt_length == 77
    assert config.data.train_batch_size == 4
    assert config.data.max_response_length == 512
    assert config.actor_rollout_ref.rollout.max_model_len is None


@pytest.mark.parametrize(
    ("root", "defaults"),
    [
        ("sft_trainer", "[{engine: fsdp}, {model@model: hf_model}, {optim@optim: fsdp}, _self_]"),
        ("ppo_trainer", "[ppo_trainer, {model_engine: dp}, _self_]"),
        ("ppo_trainer", "[{actor@actor_rollout_ref.actor: dp_actor}, {data@data: legacy_data}]"),
    ],
)
def test_groups_of_verls_defaults_are_read_over(tmp_path: Path, root: str, defaults: str):
    text = f"defaults: {defaults}\ndata: {{train_batch_size: 32}}\n"
    folder = _write(tmp_path, "mine", text)
    argv = [f"--config-path={folder}", "--config-name=mine", "data.train_files=a"]
    argv.append("model.path=toy" if root == "sft_trainer" else "actor_rollout_ref.model.path=toy")
    assert load_config(argv, root=root).data.train_batch_size == 32


def test_groups_of_the_users_files_and_other_backends_in_defaults(tmp_path: Path):
    _write(tmp_path / "engine", "fsdp", "# @package model\nstrategy: fsdp\npath: mine\n")
    folder = _write(tmp_path, "mine", "defaults: [{engine: fsdp}, _self_]\n")
    argv = [f"--config-path={folder}", "--config-name=mine", "data.train_files=a"]
    assert load_config(argv, root="sft_trainer").model.path == "mine"

    _write(tmp_path, "mine", "defaults: [{engine: megatron}, _self_]\n")
    with pytest.raises(ConfigError, match="engine=megatron is not available: .* engine=fsdp"):
        load_config(argv, root="sft_trainer")


def test_yaml_composes_other_files(tmp_path: Path):
    _write(
        tmp_path / "more" / "experiment",
        "small",
        "# @package _global_\ndata: {train_batch_size: 2}\n",
    )
    _write(
        tmp_path / "main",
        "mine",
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {model: {path: toy}}\n",
    )

    argv = [
        f"--config-path={tmp_path / 'main'}",
        "--config-name=mine",
        f"--config-dir={tmp_path / 'more'}",
    ]
    config = load_config([*argv, "data.train_files=a", "+experiment=small"])
    assert config.data.train_batch_size == 2


def test_config_group_is_read_from_a_folder(tmp_path: Path):
    _write(tmp_path / "experiment", "small", "# @package _global_\ndata: {train_batch_size: 2}\n")
    assert (
        load_config(
            [f"--config-dir={tmp_path}", *BASE[:2], "+experiment=small"]
        ).data.train_batch_size
        == 2
    )


def test_digits_with_underscores_are_read_as_they_are_meant():
    threshold = "algorithm.rollout_correction.rollout_is_threshold"
    config = load_config(
        [*BASE, "trainer.experiment_name=2024_05", "trainer.max_steps=1_000", f"{threshold}=0.5_2"]
    )
    assert config.trainer.experiment_name == "2024_05"
    assert config.trainer.max_steps == 1000
    correction = config.algorithm.rollout_correction
    assert (correction.rollout_is_threshold_lower, correction.rollout_is_threshold) == (0.5, 2.0)


def _given(key: str, text: str, file: Path) -> list[str]:
    """Return the argument that gives a value in a file, or on the command line."""
    if not file.name:
        return [f"{key}={text}"]
    *sections, name = key.split(".")
    nested = f"{name}: {text}"
    for section in reversed(sections):
        nested = f"{section}: {{{nested}}}"
    file.write_text(nested)
    return [str(file)]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("data.seed", "012", 12),
        ("data.seed", "1_000", 1000),
        ("critic.optim.lr", "1_000.5", 1000.5),
        ("critic.optim.lr", "1e-5", 1e-5),
        ("trainer.experiment_name", "2024_05", "2024_05"),
        ("trainer.experiment_name", "12:30", "12:30"),
        (
            "data.apply_chat_template_kwargs",
            "{day: 24_5, of: [1_5,2, 1_000]}",
            {"day": "24_5", "of": ["1_5", 2, 1000]},
        ),
    ],
)
def test_files_and_command_lines_read_the_same_values(tmp_path, key, text, value, in_file):
    arguments = _given(key, text, tmp_path / "mine.yaml" if in_file else Path())
    assert value_at(load_config([*BASE, *arguments]), key) == value


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("data.seed", "1_5", "expects a whole number, got '1_5'.*except between thousands"),
        ("data.seed", "0x10", "expects a whole number, got '0x10'"),
        ("data.seed", "1:30", "expects a whole number, got '1:30'"),
        ("critic.optim.lr", "0.5_2", "expects a number, got '0.5_2'.*underscores"),
        ("critic.optim.betas", "[0.9, 0.99_9]", "expects a list of numbers.*underscores"),
    ],
)
def test_files_and_command_lines_refuse_the_same_numbers(tmp_path, key, text, message, in_file):
    arguments = _given(key, text, tmp_path / "mine.yaml" if in_file else Path())
    with pytest.raises(ConfigError, match=f"{key} {message}"):
        load_config([*BASE, *arguments])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {experiment_name: off}", "experiment_name expects text, got False .bool."),
        ("trainer: {experiment_name: yes}", "experiment_name expects text, got True"),
        ("algorithm: {kl_penalty: on}", "kl_penalty expects text, got True"),
        (
            "algorithm: {rollout_correction: {rollout_is: off}}",
            "rollout_is expects text or null, got False",
        ),
        (
            "actor_rollout_ref: {actor: {checkpoint: {save_contents: [model, no]}}}",
            "save_contents expects a list of texts, got ",
        ),
        (
            "actor_rollout_ref: {rollout: {stop: [off]}}",
            "stop expects a text or a list of texts, got ",
        ),
    ],
)
def test_a_text_that_yaml_reads_as_false_needs_quotes(
    load: Load, tmp_path: Path, text: str, message: str
):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(
        ConfigError, match=f"{message}.*YAML reads on, yes and true as True, and off.*in quotes"
    ):
        load(str(file))


def test_a_quoted_text_of_yaml_stays(load: Load, tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("trainer: {experiment_name: 'off'}\nactor_rollout_ref: {rollout: {stop: 'no'}}")
    config = load(str(file))
    assert config.trainer.experiment_name == "off"
    assert config.actor_rollout_ref.rollout.stop == ["no"]


def test_other_programs_read_yaml_as_before(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("data: {seed: 012}")
    load_config([*BASE, str(file)])
    assert OmegaConf.load(file).data.seed == 10


def test_yaml_errors_are_config_errors(tmp_path: Path):
    folder = _write(
        tmp_path, "typo", "defaults: [ppo_trainer, _self_]\ndata: {train_batchsize: 3}\n"
    )
    _write(tmp_path, "broken", "data: {train_batch_size: [3}\n")
    _write(tmp_path, "badtype", "data: {train_batch_size: many}\n")

    with pytest.raises(
        ConfigError, match="Unknown key 'data.train_batchsize'.*data.train_batch_size"
    ):
        load_config([f"--config-path={folder}", "--config-name=typo", *BASE[:2]])

    with pytest.raises(
        ConfigError, match="data.train_batch_size expects a whole number, got 'many'"
    ):
        load_config([f"--config-path={folder}", "--config-name=badtype", *BASE[:2]])

    with pytest.raises(ConfigError) as raised:
        load_config([f"--config-path={folder}", "--config-name=broken", *BASE])
    assert str(raised.value) == (
        f"'{folder / 'broken.yaml'}', line 1, column 28, is not YAML: expected ',' or ']', but got "
        "'}' (while parsing a flow sequence that begins in line 1, column 26). Indent with spaces, "
        "and quote texts with special characters."
    )
    (folder / "latin.yaml").write_bytes(b"a: \xfc\n")
    with pytest.raises(ConfigError, match="not text in UTF-8: got byte 0xfc at position 3"):
        load_config([str(folder / "latin.yaml"), *BASE])
    (folder / "latin.yaml").write_bytes(b"a: \x01\n")
    with pytest.raises(ConfigError, match="latin.yaml' is not YAML: special characters are not"):
        load_config([str(folder / "latin.yaml"), *BASE])
    (folder / "latin.yaml").unlink()
    _write(tmp_path, "list", "[data, trainer]\n")
    with pytest.raises(ConfigError, match="'list.yaml' must hold keys"):
        load_config([f"--config-path={folder}", "--config-name=list", *BASE])

    with pytest.raises(
        ConfigError, match="No 'missing.yaml' in .*Found there: badtype, broken, list, typo"
    ):
        load_config([f"--config-path={folder}", "--config-name=missing", *BASE])


def test_missing_value_marker_counts_as_unset(tmp_path: Path):
    folder = _write(tmp_path, "mine", "actor_rollout_ref: {model: {path: '???'}}\n")
    with pytest.raises(ConfigError, match="actor_rollout_ref.model.path is not set"):
        load_config([f"--config-path={folder}", "--config-name=mine", "data.train_files=a"])


def test_user_hydra_program_finds_the_schema(tmp_path: Path, load: Load):
    load()  # registers the schema
    folder = _write(tmp_path, "mine", "defaults: [ppo_trainer, _self_]\ntrainer: {save_freq: 5}\n")
    with initialize_config_dir(str(folder), version_base="1.3"):
        composed = compose("mine", [*BASE, "actor_rollout_ref.rollout.n=4"])
    config = config_from_dict(composed)
    assert (config.trainer.save_freq, config.critic.rollout_n) == (5, 4)


def test_schema_is_built_when_hydra_asks_for_it():
    schema = ROOTS["serve"].schema
    node = SchemaNode("serve", schema)
    assert "node" not in vars(node)
    assert node.node is typed_tree(schema)

    for root, about in ROOTS.items():
        stored = ConfigStore.instance().load(f"{root}.yaml")
        assert OmegaConf.get_type(stored.node) is about.schema


OVERRIDE = st.tuples(
    st.sampled_from(["", "+", "++", "--"]),
    st.sampled_from(["a", "a.b", "a.b.c", "data.x", "9"]),
    st.sampled_from(
        [
            *("1", "-3", "1e-6", "inf", "0x10", "1_000", "true", "null", "", "text", "two words"),
            *("'a,b'", '"it\'s"', "a\\,b", "/tmp/a-b.c", "a=b", "[a,'b,c',null]", "[]", "{}"),
            *("{b:1,y:{z:[1,2]}}", "${a}", "${data.x}/c", "int(3)", "str(4)", "???", "[[1],2]"),
        ]
    ),
).map(lambda parts: "{}{}={}".format(*parts))


@settings(max_examples=12)
@example(arguments=["a={b:1,y:2}", "+a={b:3}", "a.c=4", "data='x,y'"])
@example(arguments=["a=[1,2]", "++a=[3]", "b=${a}", "b=5"])
@given(arguments=st.lists(OVERRIDE, max_size=4))
def test_overrides_alone_give_what_hydra_composes(arguments: list[str]):
    command = parse_command_line(arguments)
    values = composition.compose_overrides(command.overrides)
    if values is not None:
        assert repr(values) == repr(composition.compose_by_hydra(command, "ppo_trainer"))


@pytest.mark.parametrize("name", ["x", "x.y"])
def test_a_key_below_a_list_is_explained(load: Load, name: str):
    with pytest.raises(ConfigError, match="within a list, which has numbers and no names"):
        load("data.train_files=[a]", f"data.train_files.{name}=1")
    with pytest.raises(ConfigError, match=r"train_files.5=1 does not fit the values .*range"):
        load("data.train_files=[a]", "data.train_files.5=1")


@pytest.mark.parametrize(
    "override", ["a=1,2", "~a", "a@b=1", "hydra.run.dir=x", "a=${hydra:b}", "a=[1"]
)
def test_overrides_that_need_hydra_are_left_to_it(override: str):
    overrides = parse_command_line([override]).overrides
    assert composition.compose_overrides(overrides) is None


_ODD_VALUES = [
    *(None, True, False, 0, 1, -3, 2.5, 1e3, float("inf"), 10**30, b"x", Path("a/b")),
    *("", "x", "7", "1_5", "true", "null", "???", "a\\b", "$x"),
    *([], ["a"], [1, 2.5], [None], [[1]], ["???"]),
    *({}, {"a": {"b": [1, None]}}, {"a": "???"}),
    *({"p": {"trained": True}}, {"p": {"bad": 1}}, [{"name": "sft"}], [{"name": "s", "coef": 1}]),
]


@st.composite
def _values_of_keys(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    root = draw(st.sampled_from([*ROOTS]))
    keys = keys_of(ROOTS[root].schema)
    main_keys = [path for path, key in keys.items() if key.main is None]
    paths = draw(st.lists(st.sampled_from(main_keys), max_size=3))
    return root, {path: draw(st.sampled_from(_ODD_VALUES)) for path in paths}


@settings(max_examples=40)
@example(drawn=("ppo_trainer", {}))
@example(drawn=("sft_trainer", {"trainer.checkpoint.save_contents": ["model"]}))
@example(drawn=("ppo_trainer", {"trainer.project_name": 7, "trainer.seed": 3}))
@example(drawn=("ppo_trainer", {"data.tokenizer": "???"}))
@given(drawn=_values_of_keys())
def test_values_without_interpolations_become_what_omegaconf_resolves(drawn: tuple[str, dict]):
    root, values = drawn
    results = []
    for build_by in (fill, resolve):
        try:
            results.append(repr(build_by(values, ROOTS[root].schema, {})))
        except ConfigError as error:
            results.append(str(error))
    assert results[0] == results[1]


def test_the_time_of_hydra_is_resolved_with_and_without_a_file(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for resolver in ("now", "hydra", "python_version"):  # that an earlier composition has left
        OmegaConf.clear_resolver(resolver)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer]")
    name = "trainer.experiment_name=tea_${now:%Y}"

    bare = load(name).trainer.experiment_name

    assert re.fullmatch(r"tea_\d{4}", bare)
    assert load("run.yaml", name).trainer.experiment_name == bare


def test_interpolations_of_the_user_reach_keys_that_follow_others():
    name = {"project_name": "${trainer.experiment_name}", "experiment_name": "tea"}
    config = config_from_dict({"data": {"dataset_name": "toy"}, "trainer": name})
    assert config.trainer.default_local_dir == "checkpoints/tea/tea"


def test_plain_values_need_no_tree_of_the_whole_schema(load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "typed_tree", None)
    monkeypatch.setattr(build, "_pickled_tree", None)
    assert load("trainer.seed=3").actor_rollout_ref.rollout.seed == 3


def test_lists_are_never_shared():
    """A change of a list in one configuration stays in its key and in that configuration."""
    values = {"data": {"dataset_name": "toy"}}
    one, other = config_from_dict(values), config_from_dict(values)
    contents = one.actor_rollout_ref.actor.checkpoint
    contents.save_contents.append("hf_model")
    assert "hf_model" not in contents.load_contents
    assert one != other


def test_choosing_the_own_backend_changes_nothing(load: Load, tmp_path: Path):
    assert load("model_engine=dp") == load()
    folder = _write(tmp_path, "mine", "trainer: {seed: 5}\n")
    named = load(f"--config-path={folder}", "--config-name=mine", "model_engine=dp")
    assert named.trainer.seed == 5


def test_a_plain_command_line_searches_no_files(load: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(composition, "compose_by_hydra", None)
    assert load("data.val_files=[a,'b']", "trainer.seed=3").trainer.seed == 3


def test_hydra_writes_no_files(
    load: Load, log: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    load("hydra.run.dir=somewhere")
    assert list(tmp_path.iterdir()) == []
    assert "hydra.run.dir has no effect" in log.text


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
