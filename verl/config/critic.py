"""The value model and its update."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.actor import ActorConfig
from verl.config.checkpoint import CheckpointConfig
from verl.config.choices import DTYPES, LOSS_AGGREGATIONS
from verl.config.fsdp import FSDPConfig
from verl.config.model import TrainedModelConfig
from verl.config.optim import OptimConfig
from verl.config.profiler import ProfilerConfig
from verl.config.setting import alias, as_in, setting


@dataclass(kw_only=True, slots=True)
class CriticClassConfig:
    path: str | None = setting(
        None, "file or module of your own subclass of CriticModel", is_path=True
    )
    name: str | None = setting(None, "name of your own subclass of CriticModel")


@dataclass(kw_only=True, slots=True)
class CriticModelConfig(TrainedModelConfig):
    path: str | None = setting(
        None,
        "folder or hub name; null: the actor's",
        follows="actor_rollout_ref.model.path",
        is_path=True,
    )
    tokenizer_path: str | None = setting(
        None,
        "tokenizer of the critic",
        follows="actor_rollout_ref.model.path",
        no_effect="the critic reads the actor's token ids",
        is_path=True,
    )
    external_lib: Any = setting(
        None,
        "module imported at start",
        follows="actor_rollout_ref.model.external_lib",
        many=True,
        is_path=True,
    )
    dtype: str | None = setting(
        None,
        "dtype of the trained parameters; null: float32",
        choices=DTYPES,
        follows="actor_rollout_ref.model.dtype",
    )
    trust_remote_code: bool = setting(
        False,
        "run Python code that comes with a model",
        follows="actor_rollout_ref.model.trust_remote_code",
    )
    use_shm: bool = setting(
        False, "copy weights to /dev/shm first", no_effect="weights are read once a process"
    )
    use_remove_padding: bool = setting(
        True,
        "compute on packed sequences",
        no_effect="rows are packed, unless custom_cls has a forward of its own",
    )
    custom_cls: CriticClassConfig = field(default_factory=CriticClassConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


def _critic_optim() -> OptimConfig:
    return OptimConfig(lr=1e-5)


@dataclass(kw_only=True, slots=True)
class CriticConfig:
    enable: bool | None = setting(
        None, "train a critic; null: only where adv_estimator=gae needs one"
    )
    rollout_n: int = setting(1, "G", follows="actor_rollout_ref.rollout.n")
    strategy: str = as_in(ActorConfig, "strategy")
    optim: OptimConfig = field(default_factory=_critic_optim)
    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    ppo_mini_batch_size: int | None = setting(
        None,
        "prompts an optimizer step; null: the whole batch",
        above=0,
        follows="actor_rollout_ref.actor.ppo_mini_batch_size",
    )
    ppo_micro_batch_size: Any = alias("critic.ppo_micro_batch_size_per_gpu")
    ppo_micro_batch_size_per_gpu: int | None = as_in(ActorConfig, "ppo_micro_batch_size_per_gpu")
    forward_micro_batch_size: Any = alias("critic.forward_micro_batch_size_per_gpu")
    forward_micro_batch_size_per_gpu: int | None = setting(
        None, "responses a forward pass", above=0, follows=".ppo_micro_batch_size_per_gpu"
    )
    use_dynamic_bsz: bool | None = setting(
        None,
        "micro-batches by tokens; null: unless their rows are given",
        follows="actor_rollout_ref.actor.use_dynamic_bsz",
    )
    ppo_max_token_len_per_gpu: int | None = as_in(ActorConfig, "ppo_max_token_len_per_gpu")
    forward_max_token_len_per_gpu: int | None = setting(
        None,
        "tokens a forward pass; null: as many as fit the GPU",
        above=0,
        follows=".ppo_max_token_len_per_gpu",
    )
    ppo_epochs: int = setting(
        1, "passes over a batch", above=0, follows="actor_rollout_ref.actor.ppo_epochs"
    )
    shuffle: bool = setting(
        False,
        "new order of rows in each pass over a batch",
        follows="actor_rollout_ref.actor.shuffle",
    )
    cliprange_value: float = setting(
        0.5, "largest move of a value from the old one that is rewarded", above=0
    )
    loss_agg_mode: str = setting(
        "token-mean",
        "how token losses become one number",
        choices=LOSS_AGGREGATIONS,
        follows="actor_rollout_ref.actor.loss_agg_mode",
    )
    grad_clip: float = as_in(ActorConfig, "grad_clip")
    ulysses_sequence_parallel_size: int = as_in(ActorConfig, "ulysses_sequence_parallel_size")
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
