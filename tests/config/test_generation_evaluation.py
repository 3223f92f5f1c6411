"""Generation and evaluation: names of verl 0.5, training defaults, and refused settings."""

import pytest

from verl.config.generation import PLACE_AND_SPEED, SHARED, GenerationConfig
from verl.config.keys import keys_of
from verl.config.load import config_from_dict, config_to_dict, load_config
from verl.config.train import TrainConfig
from verl.utils.errors import ConfigError

NAMED = ["data.path=in.parquet", "data.output_path=out.parquet", "model.path=toy"]


def load(*overrides: str) -> GenerationConfig:
    return load_config([*NAMED, *overrides], root="generation")


def test_verl_0_5_script_is_read_unchanged(caplog):
    config = load(
        "data.prompt_key=prompt",
        "data.batch_size=1024",
        "data.n_samples=8",
        "+model.trust_remote_code=True",
        "rollout.temperature=0.6",
        "rollout.top_k=50",
        "rollout.top_p=0.95",
        "rollout.prompt_length=2048",
        "rollout.response_length=1024",
        "rollout.tensor_model_parallel_size=2",
        "rollout.gpu_memory_utilization=0.8",
        "rollout.max_num_batched_tokens=65536",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=2",
        "actor.fsdp_config.fsdp_size=-1",
        "ray_init.num_cpus=null",
    )
    assert not caplog.records, "every key has an effect"

    train = SHARED.as_train_config(config)
    rollout = train.actor_rollout_ref.rollout
    assert (rollout.temperature, rollout.top_k, rollout.top_p) == (0.6, 50, 0.95)
    assert (rollout.prompt_length, rollout.response_length, rollout.n) == (2048, 1024, 8)
    assert train.data.max_prompt_length == 2048, "two names of one setting"
    assert train.actor_rollout_ref.model.trust_remote_code
    assert (train.trainer.n_gpus_per_node, train.needs_critic, train.needs_reference) == (
        2,
        False,
        False,
    )


def test_shared_keys_have_the_defaults_of_training():
    training = keys_of(TrainConfig)
    differ = {"rollout.gpu_memory_utilization", "rollout.n"}
    for path, key in keys_of(GenerationConfig).items():
        twin = training.get(f"actor_rollout_ref.{path}")
        if twin is not None and key.setting.no_effect is None and path not in differ:
            assert key.default == twin.default, path


def test_rollout_seed_follows_the_trainer():
    assert load("trainer.seed=5").rollout.seed == 5
    assert load("trainer.seed=5", "rollout.seed=6").rollout.seed == 6


def test_place_and_speed_prefixes_match_keys():
    for prefix in PLACE_AND_SPEED:
        assert any(path.startswith(prefix) for path in keys_of(GenerationConfig)), prefix


@pytest.mark.parametrize("root", ["generation", "evaluation"])
def test_configuration_survives_its_dictionary(root):
    given = {
        "path": "in.parquet",
        **({"output_path": "out.parquet"} if root == "generation" else {}),
    }
    model = {"model": {"path": "toy"}} if root == "generation" else {}
    config = config_from_dict({"data": given, **model}, root=root)
    assert config_from_dict(config_to_dict(config), root=root) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.temprature=1"],
            "Unknown key 'rollout.temprature'. Nearest known: rollout.temperature",
        ),
        (["data.n_samples=0"], "data.n_samples must be above 0"),
        (["data.output_path=out.csv"], "data.output_path must name the .parquet file"),
        (["data.output_path=in.parquet"], "is also read as data.path"),
        (["data.output_path=./folder/../in.parquet"], "is also read as data.path"),
        (["model.path=null"], "model.path is not set"),
        (
            ["trainer.n_gpus_per_node=3", "rollout.tensor_model_parallel_size=2"],
            "must divide the number of ranks",
        ),
        (["rollout.max_model_len=8"], "rollout.max_model_len must hold a prompt and its response"),
        (["rollout.n=3", "data.n_samples=4"], "two names of one setting"),
    ],
)
def test_errors_use_the_key_names_of_generation(overrides, message):
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert message in str(error.value)
    assert "actor_rollout_ref" not in str(error.value)


@pytest.mark.parametrize("section", ["multi_turn.enable", "agent.environment.name"])
@pytest.mark.parametrize("prefix", ["rollout", "actor_rollout_ref.rollout"])
def test_keys_of_agents_name_the_program_that_has_them(prefix, section):
    with pytest.raises(ConfigError) as error:
        load(f"{prefix}.{section}=True")
    message = str(error.value)
    assert message.startswith(f"Unknown key '{prefix}.{section}': this program draws one turn")
    assert "`verl train` with trainer.val_only=True" in message


def test_evaluation_errors_name_the_problem():
    with pytest.raises(ConfigError, match="data.path is not set"):
        load_config([*NAMED, "data.path=null"], root="generation")
    with pytest.raises(ConfigError, match="data.path is not set"):
        load_config([], root="evaluation")
    with pytest.raises(ConfigError, match="is also read as data.path"):
        load_config(["data.path=out.parquet", "data.output_path=./out.parquet"], root="evaluation")
    with pytest.raises(ConfigError, match="custom_reward_function.path must be a Python file"):
        load_config(
            ["data.path=in.parquet", "custom_reward_function.path=nowhere.py"], root="evaluation"
        )
    with pytest.raises(ConfigError, match="Nearest known: data.response_key"):
        load_config(["data.path=in.parquet", "data.responses_key=r"], root="evaluation")


@pytest.mark.parametrize(("root", "command"), [("generation", "generate"), ("evaluation", "eval")])
def test_help_and_configuration_are_printed(root, command, capsys):
    with pytest.raises(SystemExit):
        load_config(["--help"], root=root)
    assert f"usage: verl {command} " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        load_config(["--cfg", "job"], root=root)
    assert "  path: null\n" in capsys.readouterr().out
