"""The configuration tree of `verl.trainer.main_sft`: names of verl 0.5's sft_trainer, read by the
parts of training."""

import re
from dataclasses import dataclass, field, replace
from typing import Any

from verl.config import rules
from verl.config.actor import ActorConfig
from verl.config.checkpoint import CheckpointConfig
from verl.config.data import TrainingDataConfig
from verl.config.fsdp import FSDPConfig
from verl.config.model import ModelConfig
from verl.config.optim import OptimConfig
from verl.config.rule_table import Messages
from verl.config.setting import alias, as_in, setting
from verl.config.sft_engine import SFTCheckpointConfig, SFTEngineConfig
from verl.config.shared_keys import SharedKeys
from verl.config.trainer import RayInitConfig, RunConfig, TrainerConfig
from verl.utils.arithmetic import ceil_div

AFTER_EACH_EPOCH = "after_each_epoch"
_WHOLE_NUMBER = re.compile(r"-?\d+")


@dataclass(kw_only=True, slots=True)
class SFTMultiTurnConfig:
    enable: bool = setting(
        False, "rows hold whole conversations; every turn of the assistant is learnt"
    )
    messages_key: str = setting("messages", "column with the list of messages")
    tools_key: str = setting(
        "tools", "column with the tools that the chat template gets, where there is one"
    )
    enable_thinking_key: str = setting(
        "enable_thinking",
        "column with the enable_thinking that the chat template gets, where there is one",
    )


@dataclass(kw_only=True, slots=True)
class SFTDataConfig(TrainingDataConfig):
    train_batch_size: int = setting(256, "rows an optimizer step, of all ranks together", above=0)
    val_batch_size: int | None = setting(
        None, "rows a validation batch; null: train_batch_size", above=0
    )
    micro_batch_size: Any = alias("data.micro_batch_size_per_gpu")
    micro_batch_size_per_gpu: int | None = setting(
        None, "rows a forward-backward pass; null: as many as fit max_token_len_per_gpu", above=0
    )
    use_dynamic_bsz: bool | None = as_in(ActorConfig, "use_dynamic_bsz")
    max_token_len_per_gpu: int | None = as_in(ActorConfig, "ppo_max_token_len_per_gpu")
    prompt_key: str = setting("question", "column with the prompt: a text, or a list of messages")
    response_key: str = setting("answer", "column with the answer, a text")
    prompt_dict_keys: list[str] | None = setting(
        None, "where in the prompt column: keys of nested dicts, outermost first"
    )
    response_dict_keys: list[str] | None = setting(None, "the same for the response column")
    multiturn: SFTMultiTurnConfig = field(default_factory=SFTMultiTurnConfig)
    messages_key: Any = alias(
        "data.multiturn.messages_key",
        "later name in verl; without prompt_key and response_key it turns multiturn.enable on",
    )
    tools_key: Any = alias("data.multiturn.tools_key", "later name in verl")
    enable_thinking_key: Any = alias("data.multiturn.enable_thinking_key", "later name in verl")
    max_length: int = setting(
        1024, "longest row, in tokens: prompt and answer, or the whole conversation", above=0
    )
    truncation: str = setting(
        "error",
        "treatment of a longer row; left and right name the side cut off",
        choices=("error", "left", "right"),
    )
    chat_template: Any = alias("model.custom_chat_template", "Jinja chat template")
    val_max_samples: int = setting(
        -1, "validate on so many rows, the first ones; -1: all", at_least=-1
    )
    num_workers: int | None = setting(
        None,
        "processes that read the training rows and prepare their pictures, one batch ahead, as "
        "data.dataloader_num_workers in RL; null or 0: the driver, which tokenizes all rows at the "
        "start and always reads for validation",
        at_least=0,
    )
    pad_mode: str = setting(
        "no_padding", "layout of batches", no_effect="sequences are always packed"
    )
    ignore_input_ids_mismatch: bool = setting(
        False,
        "accept templates that write a turn differently alone",
        no_effect="conversations are rendered as a whole, and a template that rewrites history is "
        "an error",
    )
    balance_dp_token: bool = setting(
        False, "even out tokens over ranks", no_effect="they always are", also=(True,)
    )


@dataclass(kw_only=True, slots=True)
class SFTFSDPConfig(FSDPConfig):
    model_dtype: str = setting("fp32", "dtype of the parameters", no_effect="model.dtype says it")
    cpu_offload: Any = alias("model.fsdp_config.offload_policy", "FSDP1's name")
    offload_params: bool = setting(
        False, "part of cpu_offload", no_effect="cpu_offload moves parameters too", also=(True,)
    )


@dataclass(kw_only=True, slots=True)
class SFTModelConfig(ModelConfig):
    partial_pretrain: str | None = setting(
        None, "verl's name of path", alias_of="model.path", is_path=True
    )
    tokenizer_path: str | None = setting(
        None, "later name in verl", alias_of="data.tokenizer", is_path=True
    )
    strategy: str = as_in(ActorConfig, "strategy")
    use_torch_compile: bool | None = as_in(ActorConfig, "use_torch_compile")
    freeze_vision_tower: bool = as_in(ActorConfig, "freeze_vision_tower")
    fsdp_config: SFTFSDPConfig = field(default_factory=SFTFSDPConfig)


@dataclass(kw_only=True, slots=True)
class SFTOptimConfig(OptimConfig):
    warmup_steps_ratio: Any = alias("optim.lr_warmup_steps_ratio", "verl's name")
    lr_scheduler: Any = alias("optim.warmup_style", "verl's name")
    optimizer_impl: str = setting(
        "torch.optim",
        "package of the optimizer",
        planned="optim.optimizer chooses among AdamW, AdamW8bit and Muon",
    )
    override_optimizer_config: dict[str, Any] = setting(
        {},
        "arguments of the optimizer",
        planned="its arguments are keys: optim.betas, optim.eps, optim.weight_decay",
    )
    clip_grad: float = as_in(ActorConfig, "grad_clip")


def _optim() -> SFTOptimConfig:
    return SFTOptimConfig(
        lr=1e-5, betas=[0.9, 0.95], lr_warmup_steps_ratio=0.1, warmup_style="cosine"
    )


@dataclass(kw_only=True, slots=True)
class SFTTrainerConfig(RunConfig):
    total_epochs: int | None = setting(
        4, "epochs; not read where total_training_steps is given", above=0
    )
    seed: int = setting(
        1, "seed of everything that is drawn: the order of rows follows it", at_least=0
    )
    project_name: str = setting("gsm8k-sft", "project, for trackers and folders")
    experiment_name: str = setting("test", "experiment, for trackers and folders")
    test_freq: int | str = setting(
        -1, f"steps between validations, or {AFTER_EACH_EPOCH}; -1: none"
    )
    val_before_train: bool = setting(
        False, "validate before the first step, where there are validation files"
    )
    save_freq: int | str = setting(
        -1, f"steps between checkpoints, or {AFTER_EACH_EPOCH}; -1: none"
    )
    max_ckpt_to_keep: int | None = as_in(TrainerConfig, "max_actor_ckpt_to_keep")
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: SFTModelConfig = field(default_factory=SFTModelConfig)
    engine: SFTEngineConfig = field(default_factory=SFTEngineConfig)
    optim: SFTOptimConfig = field(default_factory=_optim)
    ulysses_sequence_parallel_size: int = as_in(ActorConfig, "ulysses_sequence_parallel_size")
    use_remove_padding: bool = setting(
        False, "compute on packed sequences", no_effect="sequences are always packed", also=(True,)
    )
    trainer: SFTTrainerConfig = field(default_factory=SFTTrainerConfig)
    checkpoint: SFTCheckpointConfig = field(default_factory=SFTCheckpointConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


SHARED = SharedKeys(
    (
        ("model.fsdp_config.", "actor_rollout_ref.actor.fsdp_config."),
        ("model.strategy", "actor_rollout_ref.actor.strategy"),
        ("model.use_torch_compile", "actor_rollout_ref.actor.use_torch_compile"),
        ("model.freeze_vision_tower", "actor_rollout_ref.actor.freeze_vision_tower"),
        ("model.", "actor_rollout_ref.model."),
        ("optim.clip_grad", "actor_rollout_ref.actor.grad_clip"),
        ("optim.", "actor_rollout_ref.actor.optim."),
        ("data.micro_batch_size_per_gpu", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("data.max_token_len_per_gpu", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
        ("data.use_dynamic_bsz", "actor_rollout_ref.actor.use_dynamic_bsz"),
        ("data.chat_template", "data.custom_chat_template"),
        ("trainer.checkpoint.", "actor_rollout_ref.actor.checkpoint."),
        ("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
        (
            "ulysses_sequence_parallel_size",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
        ),
    )
)


# The same run for the parts of training: an actor without rollout.
as_train_config = SHARED.as_train_config


def model_is_named(config: SFTConfig) -> Messages:
    if config.model.path is None:
        yield (
            "model.path (partial_pretrain) is not set. Give a folder or hub name of a causal LM, "
            "or 'toy'."
        )


def training_data_is_named(config: SFTConfig) -> Messages:
    if not config.data.train_files:
        yield (
            "data.train_files is not set. Give Parquet or JSON lines with prompts and responses, "
            "or with messages."
        )


def frequencies_are_known(config: SFTConfig) -> Messages:
    for key in ("test_freq", "save_freq"):
        value = getattr(config.trainer, key)
        if value == AFTER_EACH_EPOCH:
            continue
        if not _WHOLE_NUMBER.fullmatch(str(value)) or int(value) < -1:
            yield (
                f"trainer.{key} must be a number of steps, {AFTER_EACH_EPOCH}, or -1 for never, "
                f"got {value!r}."
            )


def in_steps(config: SFTConfig, steps_an_epoch: int) -> SFTConfig:
    """Return the configuration with validations and checkpoints counted in steps."""
    trainer = config.trainer
    counted = {}
    for key in ("test_freq", "save_freq"):
        value = getattr(trainer, key)
        # An interpolation, as of an environment's variable, gives a text.
        counted[key] = steps_an_epoch if value == AFTER_EACH_EPOCH else int(value)
    return replace(config, trainer=replace(trainer, **counted))


def a_row_fits(config: SFTConfig) -> Messages:
    data = config.data
    ranks = config.ulysses_sequence_parallel_size
    if (
        data.max_token_len_per_gpu is not None
        and data.max_token_len_per_gpu * ranks < data.max_length
    ):
        yield (
            "data.max_token_len_per_gpu must hold one whole row "
            f"(data.max_length={data.max_length}), got {data.max_token_len_per_gpu}. Set it to at "
            f"least {ceil_div(data.max_length, ranks)}."
        )


RULES = (
    model_is_named,
    a_row_fits,
    frequencies_are_known,
    rules.data_files_are_not_empty,
    *map(
        SHARED.rule_here,
        (
            rules.own_classes_have_names,
            rules.ranks_can_be_divided,
            rules.activations_are_checkpointed,
            rules.losses_make_sense,
            rules.adapters_can_be_trained,
            rules.run_has_an_end_and_a_start,
            rules.folder_has_short_names,
            rules.checkpoint_parts_are_known,
            rules.loggers_are_known,
        ),
    ),
)
# A command line must name the training set and the validation set; a program may give them as
# objects.
RULES_OF_FILES = (training_data_is_named, SHARED.rule_here(rules.validation_has_data))
# Yields combinations that run, but are rarely intended.
doubtful = SHARED.rule_here(rules.doubtful)
