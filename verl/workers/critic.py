"""The critic role: predict the value before each response token, and learn it."""

from dataclasses import replace
from typing import Any

import torch

from verl.config import CriticConfig, CriticModelConfig, update_micro_batch, value_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.critic import CriticModel
from verl.models.packed import PackedValueModel, PaddedValueModel
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.errors import ConfigError
from verl.utils.imports import import_user_code, load_extern_type
from verl.utils.logging import say_once
from verl.workers.objective import ValueObjective
from verl.workers.trained import TrainedWorker, add_adapters, model_source, parameter_dtype
from verl.workers.updates import run_updates


class CriticWorker(TrainedWorker):
    """A language model's body under a value head.

    Args:
        config: the `critic` section.
        max_length: longest prompt and response together.
        total_steps: training steps of the run, for the learning-rate schedule.
        seed: for random numbers that a class of `custom_cls` draws, such as those of its head.
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
        import_user_code(config.model.external_lib)

        kind = critic_class(config.model)
        # A user's class may compute with the weights when it is made.
        empty: dict[str, Any] = {}
        if kind is CriticModel and not self.reads_weights:
            empty = {"weights": False}
        # A head that a user's class draws must be the same on every rank.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            critic = kind.from_pretrained(
                **model_source(config.model),
                dtype=parameter_dtype(config.model, device),
                max_length=max_length,
                **empty,
            )
        add_adapters(critic.body, config.model, "critic.model")
        if config.model.lora_rank > 0 and device.type == "cuda":
            critic.value_head.float()  # trained in full, next to the frozen bf16 body

        self.objective = ValueObjective(config.cliprange_value)
        options = EngineOptions.of(config, device)
        self.engine = TrainEngine(
            _value_module(critic, config),
            replace(options, share_prompts=not critic.computes_padded),
            total_steps=total_steps,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, batch: DataProto) -> DataProto:
        """Compute `values` (B, R), each before its response token."""
        budget = TokenBudget(
            *value_micro_batch(self.config),
            key="critic.forward_max_token_len_per_gpu",
            phase="the pass for values",
        )
        return DataProto.from_dict(tensors=self.engine.infer(batch, budget))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(
        self, batch: DataProto, mini_batch_rows: int | None = None
    ) -> dict[str, float]:
        """Run forward, backward and step for every mini-batch of every epoch.

        Args:
            mini_batch_rows: see `ActorWorker.update_actor`.
        """
        config = self.config
        if mini_batch_rows is None and config.ppo_mini_batch_size is not None:
            mini_batch_rows = config.ppo_mini_batch_size * config.rollout_n

        return run_updates(
            self.engine,
            batch,
            self.objective,
            name="critic",
            mini_batch_rows=mini_batch_rows,
            epochs=config.ppo_epochs,
            shuffle=config.shuffle,
            loss_agg_mode=config.loss_agg_mode,
            budget=TokenBudget(
                *update_micro_batch(config),
                key="critic.ppo_max_token_len_per_gpu",
                phase="the critic's update",
            ),
        )


def critic_class(config: CriticModelConfig) -> type[CriticModel]:
    """Return CriticModel, or the class that `custom_cls` names instead."""
    path = config.custom_cls.path
    name = config.custom_cls.name
    if path is None or name is None:
        return CriticModel

    kind = load_extern_type(path, name, "critic.model.custom_cls.path")
    if not (isinstance(kind, type) and issubclass(kind, CriticModel)):
        raise ConfigError(
            f"critic.model.custom_cls.name={name} must be a subclass of "
            f"verl.models.critic.CriticModel, but '{path}' has {kind!r} under that name."
        )
    return kind


def _value_module(critic: CriticModel, config: CriticConfig) -> PackedValueModel | PaddedValueModel:
    if not critic.computes_padded:
        return PackedValueModel(critic, attention_kernel=config.model.attention_kernel)
    name = type(critic).__name__
    if config.ulysses_sequence_parallel_size > 1:
        raise ConfigError(
            f"critic.ulysses_sequence_parallel_size={config.ulysses_sequence_parallel_size} shares "
            f"the tokens of rows, but {name} computes padded, by a forward of its own. Set it to "
            "1, or replace value_head alone."
        )
    say_once(
        f"The critic {name} has a forward of its own: it computes on padded rows, and pays for the "
        "padding."
    )
    return PaddedValueModel(critic)
