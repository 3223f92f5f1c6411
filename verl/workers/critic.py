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
from verl.workers.trained import TrainedWorker
from verl.workers.updates import run_updates


class CriticWorker(TrainedWorker):
    """A language model's body under a value head.

    Args:
        config: the `critic` section.
        max_length: longest prompt and response together.
        total_steps: training steps of the run, for the learning-rate schedule.
    """

    def __init__(
        self, config: CriticConfig, *, max_length: int, total_steps: int, device: torch.device, tokenizer: Any
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        assert config.model.path is not None
        critic = load_critic(
            config.model.path,
            dtype=config.model.dtype or torch.float32,
            trust_remote_code=config.model.trust_remote_code,
            override_config=config.model.override_config,
            max_length=max_length,
        )
        self.objective = ValueObjective(config.cliprange_value)
        self.engine = TrainEngine(
            PackedValueModel(critic),
            optim=config.optim,
            fsdp=config.model.fsdp_config,
            grad_clip=config.grad_clip,
            device=device,
            total_steps=total_steps,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """`values` (B, R), each before its response token."""
        return DataProto.from_dict(tensors=self.engine.infer(batch, TokenBudget(*value_micro_batch(self.config))))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """Every mini-batch of every epoch: forward, backward, step."""
        config = self.config
        return run_updates(
            self.engine,
            batch,
            self.objective,
            name="critic",
            mini_batch_rows=(config.ppo_mini_batch_size or len(batch)) * config.rollout_n,
            epochs=config.ppo_epochs,
            shuffle=config.shuffle,
            loss_agg_mode=config.loss_agg_mode,
            budget=TokenBudget(*update_micro_batch(config), key="critic.ppo_max_token_len_per_gpu"),
        )
