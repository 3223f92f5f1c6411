"""Contradictions fail before weights are loaded; keys without effect give one log line."""

import ast
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import verl.config
from tests.config.conftest import BASE, Load
from verl.config import ActorConfig, TrainConfig, config_from_dict, load_config, validate
from verl.config.keys import keys_of
from verl.config.load import ROOTS
from verl.config.rule_table import KEY_IN_MESSAGE
from verl.config.validate import contradictions
from verl.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            f"data.train_batch_size=10 {ACTOR}.ppo_mini_batch_size=4",
            "divisible.*10 and 4.*8 or 12.*size 5",
        ),
        (f"{ACTOR}.ppo_mini_batch_size=16", "must not exceed data.train_batch_size.*16 and 8"),
        ("critic.ppo_mini_batch_size=3", "divisible by critic.ppo_mini_batch_size, got 8 and 3"),
        ("data.train_batch_size=0", "data.train_batch_size must be above 0 with .*sync, got 0"),
        (f"{ROLLOUT}.max_model_len=1000", r"max_model_len must hold.*512 \+ 512.*got 1000.*1024"),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            "must hold one whole sequence.*got 1000.*at least 1024",
        ),
        (
            "critic.forward_max_token_len_per_gpu=100",
            "critic.forward_max_token_len_per_gpu must hold",
        ),
        ("algorithm.adv_estimator=grpo", "grpo compares.*n of at least 2, got 1"),
        ("critic.enable=False", "gae needs a critic"),
        ("critic.rollout_n=5", "critic.rollout_n must equal .*5 and 1"),
        (
            f"algorithm.adv_estimator=grpo {ROLLOUT}.n=2 trainer.critic_warmup=3",
            "critic_warmup=3.*has none",
        ),
        (f"{ROLLOUT}.temperature=0", "samples that vary.*temperature=0"),
        (f"{ROLLOUT}.do_sample=False", "samples that vary.*do_sample=False"),
        (f"{ROLLOUT}.temperature=-1", "temperature must be at least 0"),
        (f"{ROLLOUT}.top_p=1.5", "top_p must be above 0 and at most 1, got 1.5"),
        (f"{ROLLOUT}.top_p=0", "top_p must be above 0"),
        (f"{ROLLOUT}.top_k=-2", "top_k must be at least -1"),
        (f"{ROLLOUT}.min_p=2", "min_p must be at least 0 and at most 1"),
        (f"{ROLLOUT}.val_kwargs.top_p=0", "val_kwargs.top_p must be above 0"),
        (
            f"{ROLLOUT}.gpu_memory_utilization=1.5",
            "gpu_memory_utilization must be above 0 and at most 1",
        ),
        (f"{ROLLOUT}.dtype=float8", "dtype: unknown value 'float8'"),
        (f"{ACTOR}.clip_ratio=-0.1", "clip_ratio must be at least 0"),
        (f"{ACTOR}.clip_ratio_low=1.2", "clip_ratio_low is a distance below.*1.2"),
        (f"{ACTOR}.clip_ratio_c=0.5", "clip_ratio_c must be above 1"),
        (f"{ACTOR}.policy_loss.clip_cov_lb=9", "clip_cov_lb must not exceed"),
        (f"{ACTOR}.kl_loss_type=k4", "kl_loss_type: unknown value 'k4'.*Nearest known"),
        (
            "algorithm.use_kl_in_reward=True algorithm.kl_penalty=full",
            "algorithm.kl_penalty=full needs.*low_var_kl",
        ),
        (
            f"{ACTOR}.loss_agg_mode=token_mean",
            "loss_agg_mode: unknown value 'token_mean'. Nearest known: token-mean",
        ),
        (f"{ACTOR}.kl_loss_coef=-1", "kl_loss_coef must be at least 0"),
        (
            f"{ACTOR}.ulysses_sequence_parallel_size=2",
            "actor.ulysses.* must divide the number of ranks, got 2 and 1.*to 1",
        ),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.ulysses_sequence_parallel_size=2",
            "actor.ulysses.* must divide",
        ),
        (
            f"{MODEL}.enable_activation_offload=True {MODEL}.enable_gradient_checkpointing=False",
            "inputs of checkpointed",
        ),
        (f"{ACTOR}.grad_clip=0", "grad_clip must be above 0"),
        (f"{ACTOR}.optim.lr=-1", "optim.lr must be at least 0"),
        (f"{ACTOR}.optim.lr=nan", "optim.lr must be at least 0"),
        (f"{ACTOR}.optim.betas=[0.9]", "betas must be two numbers"),
        ("critic.optim.betas=[0.9,1.0]", "critic.optim.betas must be two numbers"),
        (f"{ACTOR}.optim.warmup_style=linear", "warmup_style: unknown value 'linear'"),
        ("algorithm.kl_penalty=k9", "kl_penalty: unknown value"),
        ("algorithm.kl_ctrl.type=fixd", "kl_ctrl.type: unknown value 'fixd'. Nearest known: fixed"),
        ("algorithm.gamma=1.1", "gamma must be at least 0 and at most 1"),
        ("data.truncation=middel", "truncation: unknown value 'middel'. Nearest known: middle"),
        ("data.custom_cls.path=x.py", "custom_cls.path and data.custom_cls.name go together"),
        (
            "data.sampler.class_name=Mine",
            "sampler.class_path and data.sampler.class_name go together",
        ),
        ("data.dataset_name=toy", "both name the training data"),
        (
            "critic.model.custom_cls.path=x.py",
            "custom_cls.path and critic.model.custom_cls.name go together",
        ),
        ("reward_model.enable=True", "enable=True needs reward_model.model.path"),
        (
            "reward_model.enable=True reward_model.model.path=rm reward_model.judge.url=http://x "
            "reward_model.judge.model=m",
            "both give the score",
        ),
        ("reward_model.on_error=ignore", "on_error: unknown value 'ignore'"),
        ("reward_model.timeout_s=0", "timeout_s must be above 0"),
        (
            "custom_reward_function.path=no/such/reward.py",
            "custom_reward_function.path must be a Python file",
        ),
        ("trainer.resume_mode=always", "resume_mode: unknown value 'always'"),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        (
            "trainer.resume_from_path=some/folder",
            "is read with trainer.resume_mode=resume_path only",
        ),
        (
            "trainer.resume_mode=resume_path trainer.resume_from_path=no/such",
            "found none at 'no/such'",
        ),
        (
            f"{ACTOR}.checkpoint.save_contents=[model,optimiser]",
            f"^{ACTOR}.checkpoint.save_contents: unknown part 'optimiser'. Known: [a-z_, ]+\\.$",
        ),
        (
            f"{ACTOR}.checkpoint.load_contents=[model,optimiser]",
            f"^{ACTOR}.checkpoint.load_contents: unknown part 'optimiser'",
        ),
        ("trainer.total_epochs=null", "The run has no end"),
        ("trainer.logger=[console,wandbb]", "unknown 'wandbb'. Nearest known: wandb"),
        (
            "trainer.default_local_dir='s3://bucket/x'",
            "default_local_dir must be a local or a mounted folder",
        ),
        (
            "trainer.experiment_name=../other",
            "must not lead out of it by '..', got 'verl_examples' and '../other'",
        ),
        (f"trainer.experiment_name={'x' * 300}", "at most 255 bytes in it, got 300 in 'x{40} ...'"),
        (f"trainer.experiment_name='{'{x}' * 99}'", "at most 255 bytes in it, got 297 in '{x}"),
        (f"trainer.project_name={'é' * 128}", "at most 255 bytes in it, got 256 in 'é"),
        (f"trainer.default_local_dir=out/{'x' * 256}", "at most 255 bytes in it, got 256 in 'x"),
        ("trainer.experiment_name=''", "must not be empty, .* got 'verl_examples' and ''"),
        ("trainer.project_name=''", "must not be empty, .* got '' and"),
        ("trainer.nnodes=2", "nnodes=2 needs trainer.n_gpus_per_node"),
        (
            "trainer.n_gpus_per_node=1e9",
            "n_gpus_per_node must be above 0 and at most 1024, got 1000000000",
        ),
        (
            "trainer.n_gpus_per_node=1e30",
            r"expects a whole number or null, got 1\d+ \(int\). The largest is 922",
        ),
        (f"{ACTOR}.optim.lr=inf", "optim.lr must be at least 0 and finite, got inf"),
        (f"{ACTOR}.entropy_coeff=-inf", "entropy_coeff must be finite, got -inf"),
        (f'{ACTOR}.loss_extra=[{{"name":"a","coef":.nan}}]', "must be finite, got nan for 'a'"),
        ("algorithm.gdpo_reward_weights=[1.0,.nan]", r"weights must be a number, got \[1.0, nan\]"),
        ("trainer.val_only=-7", r"val_only expects True or False, got -7 \(int\)"),
        ("trainer.async_save=2", r"async_save expects True or False, got 2 \(int\)"),
        ("trainer.save_freq=0", "save_freq must be positive, or -1"),
        ("trainer.device=npu", "device: unknown value 'npu'"),
        (
            f"{ROLLOUT}.tensor_model_parallel_size=2",
            "must divide the number of ranks, got 2 and 1. Set it to 1",
        ),
        (f"{ACTOR}.strategy=megatron", "no Megatron backend.*fsdp.*tensor_model_parallel_size"),
        ("critic.strategy=megatron", "critic.strategy=megatron: there is no Megatron backend"),
    ],
)
def test_contradictions_are_explained(build: Load, overrides: str, message: str):
    with pytest.raises(ConfigError, match=f"(?s){message}") as error:
        build(*overrides.split())
    assert "problems in the configuration" not in str(error.value), "one mistake, one message"


@pytest.mark.parametrize(
    "override",
    [
        f"{ROLLOUT}.multi_turn.completion_callback=mine.Callback",
        "reward_model.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.hybrid_engine=False",
        "data.datagen.path=gen.py",
        "trainer.default_hdfs_dir=hdfs://x",
    ],
)
def test_unavailable_features_are_refused_with_an_alternative(build: Load, override: str):
    key = override.partition("=")[0]
    with pytest.raises(
        ConfigError, match=f"(?s){key}.*not available in this version.*Set {key}="
    ) as error:
        build(override)
    assert "problems in the configuration" not in str(error.value)


def test_cispo_may_be_without_a_lower_bound(build: Load):
    config = build(f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=10", *GRPO)
    assert config.actor_rollout_ref.actor.clip_ratio_low == 10


def test_several_problems_give_one_error(load: Load):
    missing = "actor_rollout_ref.hybrid_engine=False"
    with pytest.raises(
        ConfigError, match="(?s)3 problems.*- .*hdfs.*- .*hybrid|3 problems.*hybrid.*hdfs"
    ):
        load("trainer.default_hdfs_dir=hdfs://x", missing, "trainer.test_freq=3")


def test_model_and_data_must_be_named():
    with pytest.raises(ConfigError, match="(?s)model.path is not set.*'toy'.*No training data"):
        load_config([])
    with pytest.raises(ConfigError, match="model.path has an empty path"):  # from an unset $MODEL
        load_config(["actor_rollout_ref.model.path=", "data.train_files=a"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("multi_turn.enable=True", "multi_turn.enable=True needs something that answers"),
        (
            "agent.environment.name=number_guessing multi_turn.tool_config_path=tools.yaml",
            "tools and interactions would never be reached. Leave either out",
        ),
        (
            "agent.default_agent_loop=single_turn_agent multi_turn.function_tool_path=tools.py",
            "Set it to tool_agent, or leave it out",
        ),
        ("agent.replay_path=a agent.record_path=b", "or record anew"),
        ("agent.record_path=a", "record_path=a needs tools, got none. Set multi_turn.tool"),
    ],
)
def test_unanswered_turns_are_an_error(build: Load, overrides: str, message: str):
    with pytest.raises(ConfigError, match=message):
        build(*(f"{ROLLOUT}.{override}" for override in overrides.split()))


def with_judge(**judge: Any) -> dict[str, Any]:
    policies = {"player": {"trained": True}, "judge": judge}
    agent = {"policies": policies, "environment": {"name": "debate.py:Debate"}}
    return {
        "actor_rollout_ref": {"model": {"path": "a/model"}, "rollout": {"agent": agent}},
        "data": {"train_files": "train.parquet", "train_batch_size": 8},
    }


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        ({"trained": True, "url": "http://h"}, "a server's policy is not trained"),
        ({"trained": True, "path": "self"}, "path=self, which is a frozen copy. Leave path out"),
        ({"path": "a/b", "lr": 1e-6}, "judge.lr=1e-06 needs trained=true and a path"),
        ({}, "judge needs one of trained=true .*, got none"),
        ({"path": "a/b", "url": "http://h"}, "needs one of .*, got path and url"),
        ({"url": "http://h"}, "needs the name that the server has for its model"),
        ({"path": "a/b", "model": "m"}, "read together with url only"),
        ({"path": "self"}, "belong together, got path=self and update_freq=None"),
        ({"path": "a/b", "update_freq": 2}, "belong together, got path=a/b and update_freq=2"),
        ({"path": "a/b", "top_p": 0}, r"policies.judge.top_p must be above 0.*got 0.0"),
        ({"path": "a/b", "max_new_tokens": 0}, "judge.max_new_tokens must be above 0, got 0"),
        ({"paths": "a/b"}, "policies expects {role: .* with the keys trained, path"),
    ],
)
def test_policies_of_roles_that_cannot_play_are_an_error(judge: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(with_judge(**judge))


def test_copies_of_the_actor_need_whole_weights_and_matching_checkpoints():
    given = with_judge(path="self", update_freq=3)
    given["trainer"] = {"save_freq": 6, "mode": "one_step_off"}
    with pytest.raises(ConfigError, match=r"trainer.mode=one_step_off does not.*Set it to sync"):
        config_from_dict(given)
    given["trainer"] = {"save_freq": 4}
    with pytest.raises(ConfigError, match=r"update_freq=3 must divide trainer.save_freq=4"):
        config_from_dict(given)
    given["trainer"] = {"save_freq": 6}
    config_from_dict(given)


def test_policies_without_a_loop_or_a_trained_role_are_an_error():
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["agent"].pop("environment")
    with pytest.raises(ConfigError, match="policies needs an agent loop with roles"):
        config_from_dict(given)
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["agent"]["policies"].pop("player")
    with pytest.raises(ConfigError, match="names no role that the actor plays, got judge"):
        config_from_dict(given)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("trainer", "mode", "one_step_off"),
        ("algorithm", "adv_estimator", "reinforce_plus_plus"),
        ("algorithm", "use_kl_in_reward", True),
        ("algorithm", "use_pf_ppo", True),
        ("critic", "enable", True),
    ],
)
def test_a_second_trained_policy_names_the_features_that_it_lacks(
    section: str, key: str, value: Any
):
    given = with_judge(trained=True, path="a/b", lr=1e-6)
    given["actor_rollout_ref"]["rollout"]["n"] = 2
    given["algorithm"] = {"adv_estimator": "grpo"}
    config_from_dict(given)
    given.setdefault(section, {})[key] = value
    message = rf"second trained policy, which does not support {section}.{key}={value}. Set it to"
    with pytest.raises(ConfigError, match=message):
        config_from_dict(given)


def test_settings_that_a_policy_does_not_read_have_no_effect(log: pytest.LogCaptureFixture):
    given = with_judge(path="a/b", temperature=0.5, timeout_s=10)
    policies = given["actor_rollout_ref"]["rollout"]["agent"]["policies"]
    policies["player"] |= {"temperature": 0.5, "max_new_tokens": 8, "update_freq": 2}
    config_from_dict(given)
    assert "policies.player: temperature, max_new_tokens, update_freq without effect" in log.text
    assert "policies.judge: timeout_s without effect" in log.text


@pytest.mark.parametrize("role", ["", "a/b", "a b"])
def test_a_second_trained_policy_has_a_role_that_can_name_a_folder(role: str):
    given = with_judge(path="a/b")
    given["actor_rollout_ref"]["rollout"]["n"] = 2
    given["algorithm"] = {"adv_estimator": "grpo"}
    policies = given["actor_rollout_ref"]["rollout"]["agent"]["policies"]
    policies[role] = {"trained": True, "path": "a/b"}
    with pytest.raises(ConfigError, match=f"got '{role}'. Use letters, digits, _ and - alone"):
        config_from_dict(given)


def test_a_reward_model_next_to_scores_of_agents_is_an_error(build: Load):
    with pytest.raises(ConfigError, match="would replace the scores that agent loops"):
        build(
            f"{ROLLOUT}.agent.environment.name=number_guessing",
            "reward_model.enable=True",
            "reward_model.model.path=a/model",
        )


def test_turn_settings_without_agents_have_no_effect(build: Load, log: pytest.LogCaptureFixture):
    build(f"{ROLLOUT}.multi_turn.max_assistant_turns=5")
    assert "multi_turn.max_assistant_turns=5 has no effect" in log.text
    build(f"{ROLLOUT}.mode=async", f"{ROLLOUT}.multi_turn.max_parallel_calls=4")
    assert "multi_turn.max_parallel_calls=4 has no effect: no tools are configured" in log.text


@pytest.mark.parametrize(
    ("root", "override", "message"),
    [
        ("sft_trainer", "optim.lr_scheduler=linear", "^optim.lr_scheduler: unknown value 'linear'"),
        ("sft_trainer", "optim.warmup_steps_ratio=2", "^optim.warmup_steps_ratio must be at least"),
        ("sft_trainer", "optim.warmup_style=linear", "^optim.warmup_style: unknown value"),
        (
            "sft_trainer",
            "engine.ulysses_sequence_parallel_size=2",
            "^engine.ulysses_sequence_parallel_size must divide",
        ),
        (
            "ppo_trainer",
            f"{ACTOR}.optim.lr_scheduler_type=linear",
            f"^{ACTOR}.optim.lr_scheduler_type: unknown",
        ),
    ],
)
def test_an_error_names_the_key_that_the_user_wrote(root: str, override: str, message: str):
    base = BASE if root == "ppo_trainer" else ("model.path=toy", "data.train_files=x.parquet")
    arguments = [*base, override]
    with pytest.raises(ConfigError, match=message):
        load_config(arguments, root=root)

    values = OmegaConf.to_container(OmegaConf.from_dotlist(arguments))
    with pytest.raises(ConfigError, match=message):
        config_from_dict(values, root=root)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("asked", ["trainer.val_only=True", "trainer.test_freq=5"])
def test_command_line_validation_needs_files(asked: str, load: Load, build: Load):
    with pytest.raises(
        ConfigError, match=f"{asked} asks for validation, but data.val_files is not set"
    ):
        load(asked)
    build(asked)


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        ("data.filter_overlong_prompts_workers=8", True),
        ("data.filter_overlong_prompts_workers=1", False),
        ("data.dataloader_num_workers=8", False),
        (f"{MODEL}.use_remove_padding=True", False),
        (f"{MODEL}.use_remove_padding=False", True),
        ("data.return_raw_chat=True", False),
        (f"{ACTOR}.checkpoint.save_contents=[model]", False),
        (f"{ROLLOUT}.load_format=safetensors", True),
        (f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4", False),
        (f"{ROLLOUT}.calculate_log_probs=True", False),
        (f"{ACTOR}.use_torch_compile=True", False),
        ("trainer.balance_batch=False", True),
        ("trainer.worker_nsight_options={trace: nvtx}", True),
        ("ray_init.num_cpus=8", False),
    ],
)
def test_changed_key_without_effect_gives_one_line(
    build: Load, log: pytest.LogCaptureFixture, override: str, warned: bool
):
    build(override)
    lines = [record.message for record in log.records if "has no effect" in record.message]
    assert len(lines) == int(warned)
    assert all(line.startswith(override.partition("=")[0][:40]) for line in lines)


@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_an_empty_file_is_reported_with_the_configuration(build: Load, tmp_path: Path, key: str):
    file = tmp_path / "empty.parquet"
    file.touch()
    with pytest.raises(ConfigError, match=rf"data\.{key}: '.*empty\.parquet' is empty \(0 bytes\)"):
        build(f"data.{key}=[{file}]")
    with pytest.raises(ConfigError, match=r"is empty \(0 bytes\)"):
        load_config([f"data.{key}={file}", "model.path=toy"], root="sft_trainer")


def test_a_batch_of_zero_is_the_one_that_fully_asynchronous_training_requires(build: Load):
    script = ["data.train_batch_size=0", "data.gen_batch_size=1", f"{ACTOR}.ppo_mini_batch_size=8"]
    mode = "trainer.mode=fully_async"
    assert build(*script, mode).data.train_batch_size == 8
    required = build(*script, mode, "async_training.require_batches=4")
    assert required.data.train_batch_size == 32

    with pytest.raises(ConfigError, match="above 0 with trainer.mode=sync, got 0"):
        build(*script)
    with pytest.raises(ConfigError, match="must be whole numbers, got 1 and None"):
        build(*script[:2], mode)


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([f"{ACTOR}.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], "counts twice"),
        ([f"{ACTOR}.kl_loss_coef=0.5"], "kl_loss_coef=0.5 has no effect"),
        (
            ["async_training.staleness_threshold=0.5"],
            "staleness_threshold=0.5 has no effect: it is read with trainer.mode=fully_async only",
        ),
        (["algorithm.kl_ctrl.kl_coef=0.5"], "read with algorithm.use_kl_in_reward=True only"),
        (["algorithm.filter_groups.metric=acc"], "filter_groups.metric=acc has no effect"),
        (["reward_model.overlong_buffer.len=4"], "overlong_buffer.len=4 has no effect"),
        (
            [*GRPO, "algorithm.gamma=0.9"],
            "algorithm.gamma=0.9 has no effect: it is read with algorithm.adv_estimator=gae, "
            "reinforce_plus_plus or turn_rloo only.",
        ),
        ([*GRPO, "algorithm.lam=0.95"], "it is read with algorithm.adv_estimator=gae only."),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "adv_estimator=grpo or grpo_passk only."),
        ([f"{ACTOR}.policy_loss.loss_mode=gpg", f"{ACTOR}.clip_ratio_c=5"], "clip_ratio_c=5.0 has"),
        (["reward_model.max_length=64"], "it is read with reward_model.enable=True only."),
        ([f"{ACTOR}.optim.num_cycles=2"], f"with {ACTOR}.optim.warmup_style=cosine or wsd only."),
        (["critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio=0.1 has no effect"),
        ([f"{ACTOR}.checkpoint.save_contents=[model]"], "leaves out optimizer and extra"),
        (
            ["reward_model.model.path=rm"],
            "has no effect: it is read with reward_model.enable=True only",
        ),
        (["custom_reward_function.name=mine"], "no effect without custom_reward_function.path"),
        (
            [
                "reward_model.enable=True",
                "reward_model.model.path=rm",
                "custom_reward_function.path=math",
            ],
            "reward model's scores (rm_scores) stand",
        ),
        ([f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0"], "KL does not enter the loss"),
        (
            ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0"],
            "KL does not enter the reward",
        ),
        ([f"{ROLLOUT}.val_kwargs.temperature=0.6"], "validation is greedy"),
        ([f"{ROLLOUT}.val_kwargs.n=4"], "4 equal responses"),
        (
            [f"{ACTOR}.fsdp_config.{key}=True" for key in ("offload_policy", "param_offload")],
            "param_offload and",
        ),
        (
            ["trainer.placement.critic=[0]", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"],
            "this run has no critic",
        ),
        (["trainer.placement.reference=[0]"], "trainer.placement.reference=[0] has no effect"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=2"], "fsdp_size=2 has no effect: the role has 1 ranks"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=0"], "fsdp_size=0 is taken as -1"),
        (["critic.model.fsdp_config.fsdp_size=8"], "critic.model.fsdp_config.fsdp_size=8 has no"),
        ([f"{CORRECTION}.rollout_token_veto_threshold=2"], "nearly every one: nothing is learned"),
        (
            [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0.5"],
            "leaves out a ratio of 1",
        ),
        (
            [f"{CORRECTION}.rollout_rs=token", f"{CORRECTION}.rollout_rs_threshold_lower=1.5"],
            "leaves out a ratio of 1",
        ),
        (
            [
                *("reward_model.overlong_buffer.enable=True", "reward_model.reward_manager=dapo"),
                *("reward_model.overlong_buffer.len=64", "data.max_response_length=64"),
            ],
            "every response is punished",
        ),
        (["trainer.critic_warmup=5", "trainer.max_steps=5"], "the actor learns nothing"),
        ([f"{ACTOR}.optim.lr_warmup_steps=9", "trainer.max_steps=8"], "never comes to"),
        (["trainer.profile_steps=[3]", "trainer.max_steps=2"], "profile_steps=[3] are no steps"),
        (
            [
                *("trainer.mode=one_step_off", "trainer.placement.rollout=[1]"),
                *("trainer.dynamic_validation=True", "trainer.test_freq=-1"),
            ],
            "dynamic_validation=True has no effect with trainer.test_freq=-1",
        ),
        (
            [
                *(f"{ROLLOUT}.mode=async", f"{ROLLOUT}.multi_turn.max_tokens_per_turn=65"),
                "data.max_response_length=64",
            ],
            "multi_turn.max_tokens_per_turn=65 has no effect: all turns of an episode share "
            "data.max_response_length=64 tokens",
        ),
    ],
)
def test_doubtful_combinations_give_a_warning(
    build: Load, log: pytest.LogCaptureFixture, overrides: list[str], line: str
):
    build(*overrides)
    assert line in log.text
    log.clear()
    build()
    assert not log.records


def test_usual_thresholds_give_no_warning(build: Load, log: pytest.LogCaptureFixture):
    build(
        *(f"{CORRECTION}.rollout_token_veto_threshold=1e-4", f"{CORRECTION}.rollout_is=token"),
        *("trainer.max_steps=5", "trainer.critic_warmup=4", "trainer.profile_steps=[1,5]"),
        *(f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.fsdp_config.fsdp_size=1"),
        *(f"{ROLLOUT}.mode=async", f"{ROLLOUT}.multi_turn.max_tokens_per_turn=64"),
        "data.max_response_length=64",
    )
    assert not log.records


@pytest.mark.parametrize("section", [MODEL, "critic.model"])
def test_oversized_lora_rank_is_rejected(build: Load, section: str):
    with pytest.raises(ConfigError, match=r"lora_rank must be at least 0 and at most 65536"):
        build(f"{section}.lora_rank=999999999999")


def test_unused_sections_are_not_validated(build: Load):
    grpo = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4")
    config = build(
        *grpo, "critic.ulysses_sequence_parallel_size=2", "critic.ppo_max_token_len_per_gpu=1"
    )
    assert not config.needs_critic
    build("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2")
    with pytest.raises(ConfigError, match="ref.ulysses_sequence_parallel_size"):
        build("actor_rollout_ref.ref.ulysses_sequence_parallel_size=2", f"{ACTOR}.use_kl_loss=True")


def test_group_sizes_divide_the_launched_ranks(build: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    # Two ranks share a micro-batch, so a budget of half a sequence each is enough.
    build(
        f"{ulysses}=2", f"{ACTOR}.fsdp_config.fsdp_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=512"
    )
    build(f"{ACTOR}.fsdp_config.fsdp_size=8")  # capped at the number of ranks
    with pytest.raises(
        ConfigError, match="(?s)got 3 and 4.*Set it to 2.*fsdp_size must divide.*got 3 and 4"
    ):
        build(f"{ulysses}=3", f"{ACTOR}.fsdp_config.fsdp_size=3")
    with pytest.raises(ConfigError, match="must hold one whole sequence.*got 511.*at least 512"):
        build(f"{ulysses}=2", f"{ACTOR}.ppo_max_token_len_per_gpu=511")


def test_mini_batches_divide_over_the_launched_ranks(build: Load, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    odd = (f"{ROLLOUT}.n=3", "data.train_batch_size=6")
    mini = f"{ACTOR}.ppo_mini_batch_size"
    build(*odd, f"{mini}=2")
    build(f"{ROLLOUT}.n=3", "data.train_batch_size=3", f"{mini}=3")  # the whole batch is padded
    with pytest.raises(ConfigError, match="by the 2 ranks .* got 3 . 3 = 9. Set .*_size=2, or"):
        build(*odd, f"{mini}=3")
    with pytest.raises(ConfigError, match="critic.ppo_mini_batch_size .* got 1 . 1 = 1. Leave it"):
        build(
            "algorithm.adv_estimator=gae",
            f"{ROLLOUT}.n=1",
            "data.train_batch_size=3",
            f"{mini}=3",
            "critic.ppo_mini_batch_size=1",
        )


def test_row_micro_batches_need_no_token_budget(build: Load):
    rows = ("ppo_micro_batch_size_per_gpu=2", "ppo_max_token_len_per_gpu=100")
    with pytest.raises(ConfigError, match="rollout.log_prob_max_token_len_per_gpu must hold"):
        build(*(f"{ACTOR}.{row}" for row in rows))
    build(*(f"{ACTOR}.{row}" for row in rows), f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2")


def test_greedy_sampling_is_accepted_without_training(build: Load):
    build("trainer.val_only=True", "data.val_files=val.parquet", f"{ROLLOUT}.temperature=0")


def test_user_trackers_and_reward_files(build: Load, tmp_path: Path):
    build("trainer.logger=[mine]", f"{MODEL}.external_lib=my_trackers")
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    for path in (str(reward), f"file://{reward}"):
        assert build(f"custom_reward_function.path={path}").custom_reward_function.path == path


def test_resume_from_a_folder(build: Load, tmp_path: Path):
    config = build("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}")
    assert config.trainer.resume_from_path == str(tmp_path)


def test_a_missing_checkpoint_names_those_next_to_it(build: Load, tmp_path: Path):
    for step in (4, 10):
        (tmp_path / f"global_step_{step}").mkdir()
    asked = f"trainer.resume_from_path={tmp_path}/global_step_5"
    with pytest.raises(ConfigError, match=r"Found there: global_step_4, global_step_10\."):
        build("trainer.resume_mode=resume_path", asked)


@pytest.mark.parametrize("braces", ["{x}", "{trainer.mode}", "{", "{0}"])
def test_braces_in_the_names_of_files_stay_as_they_are(build: Load, tmp_path: Path, braces: str):
    (tmp_path / f"global_step_{braces}").mkdir()
    asked = f"trainer.resume_from_path={tmp_path}/none"
    with pytest.raises(ConfigError) as error:
        build("trainer.resume_mode=resume_path", asked)
    assert f"Found there: global_step_{braces}." in str(error.value)


def test_configuration_built_in_code_is_validated():
    config = TrainConfig()
    config.actor_rollout_ref.model.path = "toy"
    config.data.train_files = ["a"]
    validate(config)
    config.actor_rollout_ref.actor = ActorConfig(ppo_mini_batch_size=3)
    with pytest.raises(ConfigError, match="divisible"):
        validate(config)


def test_defaults_are_within_their_bounds(build: Load, log: pytest.LogCaptureFixture):
    assert build() == load_config(list(BASE))
    assert not log.records
    assert len(keys_of(TrainConfig)) > 270


LONG_SCRIPT = """
algorithm.adv_estimator=grpo data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=1024
data.filter_overlong_prompts=True data.truncation='error' data.return_raw_chat=True
actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.model.use_remove_padding=True
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.n=16
actor_rollout_ref.rollout.gpu_memory_utilization=0.5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]'
trainer.n_gpus_per_node=8 trainer.nnodes=1
trainer.save_freq=-1 trainer.test_freq=20 data.val_files=test.parquet trainer.total_epochs=15
actor_rollout_ref.rollout.update_weights_bucket_megabytes=512
"""
UNAVAILABLE = (
    "actor_rollout_ref.rollout.multi_turn.completion_callback=mine.Callback",
    "actor_rollout_ref.hybrid_engine=False",
)


def test_long_script_gives_no_warning_or_names_unavailable_features(
    log: pytest.LogCaptureFixture,
):
    script = [*BASE, *(word for word in LONG_SCRIPT.replace("'[", "[").replace("]'", "]").split())]
    config = load_config(script)
    assert config.data.truncation == "error"
    assert not log.records
    with pytest.raises(ConfigError, match="2 problems") as error:
        load_config([*script, *UNAVAILABLE])
    assert all(override in str(error.value) for override in UNAVAILABLE)


def test_unavailable_features_give_one_line_each_in_plans(log: pytest.LogCaptureFixture):
    load_config(
        [
            *BASE,
            *UNAVAILABLE,
            "trainer.n_gpus_per_node=2",
            f"{ROLLOUT}.tensor_model_parallel_size=2",
        ],
        only_to_plan=True,
    )
    lines = [
        record.getMessage()
        for record in log.records
        if "not available in this version" in record.getMessage()
    ]

    assert {line.split(" is not ")[0] for line in lines} == set(UNAVAILABLE)
    assert len(lines) == len(UNAVAILABLE)
    assert not any("\n" in line for line in lines)
    with pytest.raises(ConfigError, match="divisible"):
        load_config([*BASE, *UNAVAILABLE, f"{ACTOR}.ppo_mini_batch_size=3"], only_to_plan=True)


def test_program_may_set_a_mapping_to_none():
    config = TrainConfig()
    config.data.dataset_name = "toy"
    before = contradictions(config)
    config.reward_model.rule_kwargs = None
    assert contradictions(config) == before


def test_messages_of_tables_name_keys_that_exist():
    known = {path for root in ROOTS.values() for path in keys_of(root.schema)}
    named = set[str]()
    for file in Path(verl.config.__file__).parent.glob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef) and is_table(function):
                texts_of_rows = set[str]()
                for node in ast.walk(function):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str):
                        named |= {path for path, _ in KEY_IN_MESSAGE.findall(node.value)}
                    elif isinstance(node, ast.Dict):
                        texts_of_rows |= {ast.literal_eval(key) for key in node.keys if key}
                named -= texts_of_rows
    assert len(named) > 20
    assert named <= known


def is_table(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator) == "table" for decorator in function.decorator_list)
