"""The critic: tells the value before each response token, and learns it."""

from typing import Any

import torch

from verl.config import CriticConfig, update_micro_batch, value_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.models.load import load_critic
from verl.models.packed import PackedValueModel
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.losses import ValueObjective
from verl.workers.trained import TrainedWorker, add_adapters, parameter_dtype
from verl.workers.updates import run_updates


class CriticWorker(TrainedWorker):
    """A language model's body under a value head.

    Args:
        config: the `critic` section.
        max_length: longest prompt and response together.
        total_steps: training steps of the run, for the learning-rate schedule.
        seed: of a new value head.
    """

    def __init__(
        self,
        config: CriticConfig,
        *,
        max_length: int,
        total_steps: int,
        device: torch.device,
        tokenizer: Any,
        seed: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.checkpoint = config.checkpoint
        assert config.model.path is not None
        # A new value head is drawn, and must be the same on every rank.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            critic = load_critic(
                config.model.path,
                dtype=parameter_dtype(config.model, device),
                trust_remote_code=config.model.trust_remote_code,
                override_config=config.model.override_config,
                external_lib=config.model.external_lib,  # which a process of its own may not have yet
                max_length=max_length,
            )
        add_adapters(critic.body, config.model, "critic.model")
        if config.model.lora_rank > 0 and device.type == "cuda":
            critic.value_head.float()  # trained in full beside the frozen bf16 body
        self.objective = ValueObjective(config.cliprange_value)
        self.engine = TrainEngine(
            PackedValueModel(critic, attention_kernel=config.model.attention_kernel),
            optim=config.optim,
            fsdp=config.model.fsdp_config,
            grad_clip=config.grad_clip,
            device=device,
            total_steps=total_steps,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            checkpointing_share=config.model.gradient_checkpointing_share,
            sequence_parallel_size=config.ulysses_sequence_parallel_size,
            activation_offload=config.model.enable_activation_offload,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` (B, R), each before its response token."""
        budget = TokenBudget(
            *value_micro_batch(self.config), key="critic.forward_max_token_len_per_gpu", phase="the pass for values"
        )
        return DataProto.from_dict(tensors=self.engine.infer(batch, budget))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """Every mini-batch of every epoch: forward, backward, step."""
        config = self.config
        return run_updates(
            self.engine,
            batch,
            self.objective,
            name="critic",
            mini_batch_rows=config.ppo_mini_batch_size and config.ppo_mini_batch_size * config.rollout_n,
            epochs=config.ppo_epochs,
            shuffle=config.shuffle,
            loss_agg_mode=config.loss_agg_mode,
            budget=TokenBudget(
                *update_micro_batch(config), key="critic.ppo_max_token_len_per_gpu", phase="the critic's update"
            ),
        )
