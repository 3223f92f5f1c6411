"""Keys without effect and doubtful combinations give one line of the log each."""

import pytest

from tests.config.conftest import BASE, Load
from verl.config import load_config
from verl.utils.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
GRPO = ("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=2")


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
