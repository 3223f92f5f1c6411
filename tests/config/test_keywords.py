"""Keywords of the Python interface and the keys that they set."""

import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl.config import TrainConfig
from verl.config.keys import value_at
from verl.config.keywords import assign, config_from_keywords, with_options
from verl.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
TREE = {"actor_rollout_ref": {"model": {"path": "some/model"}}, "data": {"train_batch_size": 8}}
BASE = {"actor_rollout_ref": TREE["actor_rollout_ref"], "data.train_batch_size": 8}


def made(config=BASE, **keywords) -> TrainConfig:
    return config_from_keywords(config, keywords)


@pytest.mark.parametrize(
    ("keywords", "expected"),
    [
        (
            {"actor_placement": [0, 1], "critic_placement": [2, 3], "reward_model_placement": [4]},
            {
                "trainer.placement.actor": [0, 1],
                "trainer.placement.critic": [2, 3],
                "trainer.placement.reward_model": [4],
            },
        ),
        ({"backend": "local"}, {f"{ROLLOUT}.name": "embedded"}),
        ({"backend": "hf"}, {f"{ROLLOUT}.name": "hf"}),
        (
            {"max_steps": 2, "adv_estimator": "grpo", "n": 3, "train_batch_size": 4},
            {
                "trainer.total_training_steps": 2,
                "algorithm.adv_estimator": "grpo",
                f"{ROLLOUT}.n": 3,
                "data.train_batch_size": 4,
            },
        ),
        ({"max_new_tokens": 7}, {"data.max_response_length": 7, f"{ROLLOUT}.response_length": 7}),
        ({"gradient_clip_val": 0.5}, {f"{ACTOR}.grad_clip": 0.5, "critic.grad_clip": 0.5}),
        ({"lr": 1e-4}, {f"{ACTOR}.optim.lr": 1e-4, "critic.optim.lr": 1e-5}),
        (
            {"actor_config": {"lr": 1e-4, "clip_ratio": 0.3}},
            {f"{ACTOR}.optim.lr": 1e-4, f"{ACTOR}.clip_ratio_low": 0.3},
        ),
        (
            {"rollout_config": {"backend": "local", "max_new_tokens": 9, "val_kwargs": {"n": 2}}},
            {
                f"{ROLLOUT}.name": "embedded",
                "data.max_response_length": 9,
                f"{ROLLOUT}.val_kwargs.n": 2,
            },
        ),
        (
            {
                "critic_config": {
                    "lr": 2e-4,
                    "gradient_clip_val": 0.1,
                    "model": {"path": "a/critic"},
                }
            },
            {
                "critic.optim.lr": 2e-4,
                "critic.grad_clip": 0.1,
                "critic.model.path": "a/critic",
                f"{ACTOR}.grad_clip": 1,
            },
        ),
        ({"ray_config": {"num_cpus": 3}}, {"ray_init.num_cpus": 3}),
        (
            {"trainer.max_steps": 5, "data": {"train_files": "a.parquet"}},
            {"trainer.total_training_steps": 5},
        ),
        (
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "rollout_config": {"n": 4}},
            {
                f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2,
                f"{ACTOR}.ppo_mini_batch_size": 2,
                "critic.ppo_micro_batch_size_per_gpu": 2,
                "critic.forward_micro_batch_size_per_gpu": 2,
                "critic.ppo_mini_batch_size": 2,
            },
        ),
        (
            # The critic has two ranks for the actor's four, which are pairs along the sequence.
            {
                "micro_batch_size": 3,
                "gradient_accumulation_steps": 2,
                "rollout_config": {"n": 3},
                "actor_config": {"ulysses_sequence_parallel_size": 2},
                "actor_placement": [0, 1, 2, 3],
                "critic_placement": [4],
            },
            {f"{ACTOR}.ppo_mini_batch_size": 4, "critic.ppo_mini_batch_size": 2},
        ),
        (
            {"micro_batch_size": 2},
            {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 2, f"{ACTOR}.ppo_mini_batch_size": None},
        ),
        (
            {"amp": True},
            {
                f"{ACTOR}.fsdp_config.compute_dtype": "bfloat16",
                "critic.model.fsdp_config.compute_dtype": "bfloat16",
            },
        ),
        (
            {"amp": False},
            {
                f"{ACTOR}.fsdp_config.compute_dtype": "float32",
                "actor_rollout_ref.model.dtype": "float32",
            },
        ),
        ({"amp": None, "enable_hybrid_engine": None}, {f"{ACTOR}.fsdp_config.compute_dtype": None}),
    ],
)
def test_keyword_sets_its_keys(keywords, expected):
    config = made(**keywords)
    assert {path: value_at(config, path) for path in expected} == expected


def test_config_is_a_tree_a_hydra_tree_or_a_file(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_placement: [0, 1]\nenable_hybrid_engine: True\nlr: 1e-4\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 2\nrollout_config: {tensor_model_parallel_size: 2, n: 4}\n"
        "actor_rollout_ref: {model: {path: some/model}}\ndata: {train_batch_size: 8}\n"
        "trainer: {project_name: mine, experiment_name: '${trainer.project_name}_1'}\n"
    )

    config = made(file)
    assert value_at(config, "trainer.placement.actor") == [0, 1]
    assert value_at(config, f"{ACTOR}.optim.lr") == 1e-4
    assert value_at(config, f"{ACTOR}.ppo_mini_batch_size") == 2
    assert value_at(config, "trainer.experiment_name") == "mine_1"
    assert made(str(file), lr=1e-3, micro_batch_size=4).actor_rollout_ref.actor.optim.lr == 1e-3
    file.write_text("data.train_batch_size: 8\nactor_rollout_ref:\n  model: {path: some/model}\n")
    assert made(file) == made() == made(made()) == made(OmegaConf.create(TREE))

    assert made(OmegaConf.create({**TREE, "lr": 1e-3})) == made(lr=1e-3)


def test_keywords_replace_values_and_their_followers():
    start = made(rollout_config={"n": 4}, max_new_tokens=5)
    config = made(start, rollout_config={"n": 8, "response_length": 6})
    assert (config.critic.rollout_n, config.data.max_response_length) == (8, 6)
    assert (start.critic.rollout_n, start.data.max_response_length) == (4, 5)


def test_assign_updates_sections_in_place():
    config = made()
    section = config.actor_rollout_ref.actor.optim
    assign(config, made(lr=1e-3))
    assert section.lr == 1e-3
    assert config == made(lr=1e-3)


def test_numbers_of_numpy_count_as_pythons_own():
    config = made(
        {**BASE, "data": {"seed": np.int64(3)}},
        lr=np.float32(0.5),
        max_steps=np.arange(1, 4)[1],
        actor_placement=np.array([0]),
        critic_placement=[np.int64(0)],
        rollout_config={"n": np.int32(4)},
        micro_batch_size=np.int64(2),
    )
    assert (config.data.seed, config.trainer.total_training_steps) == (3, 2)
    assert type(config.trainer.total_training_steps) is int
    assert config.actor_rollout_ref.actor.optim.lr == 0.5
    assert config.trainer.placement.actor == config.trainer.placement.critic == [0]
    assert config.actor_rollout_ref.rollout.n == 4
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 2


def test_empty_options_return_the_same_configuration():
    config = made()
    assert with_options(config, {"amp": None}) is config


HYBRID = {"rollout_config": {"n": 2}, "actor_placement": [0, 1]}
APART = HYBRID | {"critic_placement": [2, 3]}


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"actor_placment": [0]},
            "Unknown keyword 'actor_placment'. Nearest known: actor_placement",
        ),
        ({"learning_rate": 1e-6}, "Unknown keyword 'learning_rate'. Nearest known: lr"),
        ({"dataset": "toy"}, "'dataset'. Nearest known: data.dataset_name, data.train_files"),
        ({"reward_funcs": len}, "'reward_funcs'. Nearest known: custom_reward_function.path"),
        ({"compute_score": len}, "'compute_score'. Nearest known: custom_reward_function.path"),
        ({"steps": 5}, "Unknown keyword 'steps'. Nearest known: max_steps"),
        ({"model": "toy"}, "Nearest known: actor_rollout_ref.model.path"),
        ({"rewrd_fn": len}, "Unknown keyword 'rewrd_fn'. Nearest known: reward_fn"),
        ({"max_step": 2}, "Unknown keyword 'max_step'. Nearest known: trainer.max_steps"),
        (
            {"mode": "sync"},
            re.escape(
                f"Keyword 'mode' may be trainer.mode or {ROLLOUT}.mode. Give one of them: "
                """RLTrainer(**{"trainer.mode": 'sync'})."""
            ),
        ),
        (
            {"trainer.max_step": 2},
            "Unknown key 'trainer.max_step'. Nearest known: trainer.max_steps",
        ),
        (
            {"rollout_config": {"temprature": 2}},
            f"Unknown key '{ROLLOUT}.temprature'. Nearest known: {ROLLOUT}.temper",
        ),
        ({"rollout_config": {"lr": 2}}, f"Unknown key '{ROLLOUT}.lr'"),
        ({"critic_config": [1]}, "critic_config must be a mapping of keys of critic"),
        (
            {"lr": 1.0, "actor_config": {"lr": 2.0}},
            f"'actor_config: lr' sets {ACTOR}.optim.lr=2.0, which is 1.0 already",
        ),
        ({"lr": "fast"}, f"{ACTOR}.optim.lr expects a number, got 'fast'"),
        ({"lr": float("nan")}, rf"{ACTOR}.optim.lr must be .*, got nan\."),
        ({"amp": "yes"}, "amp must be True or False, got 'yes'"),
        ({"enable_hybrid_engine": 3}, "enable_hybrid_engine must be True or False, got 3"),
        (
            HYBRID | {"enable_hybrid_engine": True},
            r"actor_placement=\[0, 1\] would load the model 2 times .* Set rollout_config={'tensor_model_par.*: 2}",
        ),
        (
            {"enable_hybrid_engine": False},
            r"but critic would be on the actor's ranks \[0\]\. Set rollout_placement, critic",
        ),
        (
            HYBRID | {"enable_hybrid_engine": False, "algorithm": {"adv_estimator": "grpo"}},
            "the actor is alone with its rollout",
        ),
        (
            {"gradient_accumulation_steps": 2},
            "counts passes of micro_batch_size responses, which is not set",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size must be a whole number above 0, got 0"),
        ({"micro_batch_size": 2.5}, "micro_batch_size must be a whole number above 0, got 2.5"),
        (
            {"micro_batch_size": 2, "gradient_accumulation_steps": 4, "rollout_config": {"n": 5}},
            r"multiple of .*rollout.n=5 .*got 2 \* 4 \* 1 = 8. Set gradient_accumulation_steps=5",
        ),
        (
            {"micro_batch_size": 8, "gradient_accumulation_steps": 2},
            "must not exceed data.train_batch_size",
        ),
        (
            {"micro_batch_size": 2, "actor_config": {"use_dynamic_bsz": True}},
            "use_dynamic_bsz=True fills passes by token",
        ),
        (
            {"amp": True, "actor_rollout_ref.model.dtype": "bfloat16"},
            "over parameters in float32, got .*dtype=bfloat16",
        ),
    ],
)
def test_invalid_keywords_are_errors(keywords, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        made(**keywords)


def test_hybrid_engine_and_separate_models_are_accepted(log):
    made(
        **HYBRID
        | {
            "enable_hybrid_engine": True,
            "rollout_config": {"n": 2, "tensor_model_parallel_size": 2},
        }
    )
    made(**APART, enable_hybrid_engine=False)
    assert re.search(
        r"enable_hybrid_engine=False: .*critic.*\[2, 3\].* the rollout engine on \[0, 1\]",
        log.text,
    )


def test_wrong_config_type_or_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="a mapping or the path of a YAML file, got list"):
        made([1])
    with pytest.raises(ConfigError, match=r"No 'nothing.yaml' in .*Found there: no YAML file"):
        made(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"must end in .yaml, got 'run.yml'. Rename it"):
        made("run.yml")
    for text in ("Qwen/Qwen2.5-0.5B", "data.dataset_name=toy"):
        with pytest.raises(ConfigError, match=f"path of a YAML file, got '{text}'. Give settings"):
            made(text)


def test_servers_are_keywords():
    config = config_from_keywords(
        None,
        {
            "backend": "sglang",
            "sglang_endpoint": "http://h:1",
            "actor_rollout_ref.model.path": "toy",
        },
    )
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.server_urls) == ("sglang", ["http://h:1"])
