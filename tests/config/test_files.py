"""YAML files of the user: their place between defaults and command line, and their errors."""

import warnings
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from tests.config.conftest import BASE, Load
from verl.config import config_from_dict, load_config
from verl.config.keys import value_at
from verl.utils.errors import ConfigError


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


def test_choosing_the_own_backend_changes_nothing(load: Load, tmp_path: Path):
    assert load("model_engine=dp") == load()
    folder = _write(tmp_path, "mine", "trainer: {seed: 5}\n")
    named = load(f"--config-path={folder}", "--config-name=mine", "model_engine=dp")
    assert named.trainer.seed == 5
