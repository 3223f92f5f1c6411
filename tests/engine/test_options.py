"""Engine options: each has a configuration key, and each role reads its own sections."""

from dataclasses import fields

import pytest
import torch

from verl.config import FSDPConfig, TrainConfig
from verl.engine.options import EngineOptions

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
WITHOUT_KEY = {"device", "compile_backend", "shard"}


@pytest.fixture
def config() -> TrainConfig:
    """Return a configuration with different values in every section."""
    config = TrainConfig()
    policy = config.actor_rollout_ref
    policy.model.enable_gradient_checkpointing = True
    policy.model.gradient_checkpointing_share = 0.25
    policy.model.enable_activation_offload = True
    policy.actor.optim.lr = 0.5
    policy.actor.grad_clip = 2.0
    policy.actor.share_prompts = False
    policy.actor.use_torch_compile = True
    policy.actor.fsdp_config.param_offload = True
    policy.ref.use_torch_compile = False
    policy.ref.ulysses_sequence_parallel_size = 2

    config.critic.grad_clip = 3.0
    config.critic.optim.lr = 0.25
    config.critic.model.enable_gradient_checkpointing = False
    config.critic.model.fsdp_config.optimizer_offload = True
    config.distillation.use_torch_compile = True
    config.distillation.ulysses_sequence_parallel_size = 4
    return config


def test_every_option_has_a_key(config: TrainConfig):
    sections = (config.actor_rollout_ref.actor, config.actor_rollout_ref.model)
    keys = {key.name for section in sections for key in fields(section)}
    assert {option.name for option in fields(EngineOptions)} - keys == WITHOUT_KEY


def test_actor_reads_its_section_and_the_model_section(config: TrainConfig):
    policy = config.actor_rollout_ref
    assert EngineOptions.of(policy.actor, CPU, policy=policy) == EngineOptions(
        device=CPU,
        fsdp_config=policy.actor.fsdp_config,
        use_torch_compile=True,
        use_fused_kernels=policy.model.use_fused_kernels,
        share_prompts=False,
        optim=policy.actor.optim,
        grad_clip=2.0,
        enable_gradient_checkpointing=True,
        gradient_checkpointing_share=0.25,
        enable_activation_offload=True,
    )


def test_frozen_roles_share_policy_settings_without_an_optimizer(config: TrainConfig):
    policy = config.actor_rollout_ref
    assert EngineOptions.of(policy.ref, CPU, policy=policy) == EngineOptions(
        device=CPU,
        fsdp_config=policy.ref.fsdp_config,
        use_torch_compile=False,
        use_fused_kernels=policy.model.use_fused_kernels,
        ulysses_sequence_parallel_size=2,
        share_prompts=False,
    )

    teacher = EngineOptions.of(config.distillation, CPU, policy=policy)
    assert (teacher.use_torch_compile, teacher.ulysses_sequence_parallel_size) == (True, 4)
    assert (teacher.share_prompts, teacher.learns, teacher.checkpointing_share) == (False, False, 0)

    scorer = EngineOptions.of(config.reward_model, CPU)
    assert (scorer.use_torch_compile, scorer.learns, scorer.grad_clip) == (False, False, None)


def test_critic_reads_no_policy_settings(config: TrainConfig):
    critic = config.critic
    assert EngineOptions.of(critic, CPU) == EngineOptions(
        device=CPU,
        fsdp_config=critic.model.fsdp_config,
        optim=critic.optim,
        grad_clip=3.0,
        gradient_checkpointing_share=critic.model.gradient_checkpointing_share,
        enable_activation_offload=critic.model.enable_activation_offload,
    )


@pytest.mark.parametrize(
    ("asked", "device", "family", "compiles"),
    [
        (True, CPU, "opt", True),
        (False, CUDA, "qwen2", False),
        (None, CUDA, "qwen2", True),
        (None, CPU, "qwen2", False),
        (None, CUDA, "gpt_oss", False),
    ],
)
def test_layers_compile(asked: bool | None, device: torch.device, family: str, compiles: bool):
    assert EngineOptions(device=device, use_torch_compile=asked).compiles(family) is compiles


@pytest.mark.parametrize(
    ("device", "fsdp", "ranks", "expected"),
    [
        (CPU, FSDPConfig(), 1, None),
        (CPU, FSDPConfig(compute_dtype="float32"), 1, None),
        (CPU, FSDPConfig(compute_dtype="bfloat16"), 1, 1),
        (CUDA, FSDPConfig(), 1, 1),
        (CPU, FSDPConfig(), 4, 4),
        (CUDA, FSDPConfig(fsdp_size=2), 4, 2),
        (CUDA, FSDPConfig(fsdp_size=8), 4, 4),
    ],
)
def test_ranks_that_hold_one_copy(device: torch.device, fsdp: FSDPConfig, ranks: int, expected):
    """Check the ranks that hold one copy of fp32 parameters."""
    options = EngineOptions(device=device, fsdp_config=fsdp)
    assert options.shard_ranks(ranks, parameter_itemsize=4) == expected
