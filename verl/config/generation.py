"""The configuration tree of `verl.trainer.main_generation`."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.batch_rules import ranks_can_be_divided, sequences_fit
from verl.config.data import DataConfig, PromptsConfig
from verl.config.file_rules import output_is_no_input
from verl.config.model import LoadedModelConfig, ModelConfig
from verl.config.rollout import DrawConfig
from verl.config.rule_table import Messages, Rows, table
from verl.config.rules import is_greedy
from verl.config.setting import alias, as_in, setting
from verl.config.shared_keys import SharedKeys
from verl.config.trainer import MachinesConfig, RayInitConfig

_NO_TRAINING = "nothing is trained here"
_NO_PASS = "log-probs come with the tokens; no pass computes them again"


@dataclass(kw_only=True, slots=True)
class GenerationDataConfig(PromptsConfig):
    path: Any = setting(
        None,
        (
            "file or list of files with the prompts: Parquet, JSON lines, folder; 'toy': the ten "
            "packaged ones"
        ),
        many=True,
        is_path=True,
    )
    output_path: str | None = setting(
        None, "Parquet file to write: all columns of the input and the responses", is_path=True
    )
    response_key: str = setting("responses", "column to write: the list of responses to a prompt")
    reward_fn_key: str = as_in(DataConfig, "reward_fn_key")
    batch_size: int = setting(
        128, "prompts that are generated, and kept on the disk, at a time", above=0
    )
    n_samples: int = setting(5, "responses a prompt", above=0)
    max_prompt_length: int = as_in(DataConfig, "max_prompt_length")
    max_response_length: int = as_in(DataConfig, "max_response_length")
    filter_overlong_prompts: bool = as_in(DataConfig, "filter_overlong_prompts")
    custom_chat_template: Any = alias("model.custom_chat_template", "Jinja chat template")


@dataclass(kw_only=True, slots=True)
class ServedModelConfig(LoadedModelConfig):
    """The keys of a model that is not trained."""

    custom_chat_template: str | None = as_in(ModelConfig, "custom_chat_template")
    external_lib: Any = setting(
        None,
        "Python module or .py file imported at start: the place to register a rollout engine",
        many=True,
        is_path=True,
    )


@dataclass(kw_only=True, slots=True)
class GenerationModelConfig(ServedModelConfig):
    use_shm: bool = as_in(ModelConfig, "use_shm")


@dataclass(kw_only=True, slots=True)
class GenerationRolloutConfig(DrawConfig):
    n: int = setting(5, "responses a prompt", alias_of="data.n_samples")
    tensor_model_parallel_size: int = setting(
        1, "neighbouring ranks that share one engine, each with a slice of its weights", above=0
    )
    disable_log_stats: bool = setting(
        True, "no engine statistics", no_effect="progress lines have tokens per second"
    )
    calculate_log_probs: bool = setting(
        False, "return log-probs", no_effect="responses are written as text"
    )
    free_cache_engine: bool = setting(
        True, "give memory back between phases", no_effect=_NO_TRAINING, also=(False,)
    )
    load_format: str = setting(
        "dummy_dtensor", "how the engine loads weights", no_effect="it loads them once, whole"
    )
    log_prob_micro_batch_size: int | None = setting(None, "old name", no_effect=_NO_PASS)
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None, "responses a forward pass", no_effect=_NO_PASS
    )


@dataclass(kw_only=True, slots=True)
class GenerationFSDPConfig:
    fsdp_size: int = setting(-1, "ranks that share one copy of the weights", no_effect=_NO_TRAINING)
    forward_prefetch: bool = setting(False, "gather the next layer early", no_effect=_NO_TRAINING)


@dataclass(kw_only=True, slots=True)
class GenerationActorConfig:
    strategy: str = setting("fsdp", "how weights are sharded", no_effect=_NO_TRAINING)
    ulysses_sequence_parallel_size: int = setting(
        1, "ranks that share one sequence", no_effect=_NO_TRAINING
    )
    entropy_from_logits_with_chunking: bool = setting(
        False, "entropy in chunks", no_effect=_NO_TRAINING
    )
    entropy_checkpointing: bool = setting(False, "recompute the entropy", no_effect=_NO_TRAINING)
    fsdp_config: GenerationFSDPConfig = field(default_factory=GenerationFSDPConfig)


@dataclass(kw_only=True, slots=True)
class GenerationTrainerConfig(MachinesConfig):
    seed: int = setting(0, "seed of the sampling noise", at_least=0)
    resume_mode: str = setting(
        "auto",
        "auto: go on where a killed run of the same configuration stopped; disable: start "
        "anew, and replace data.output_path",
        choices=("auto", "disable"),
    )


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    data: GenerationDataConfig = field(default_factory=GenerationDataConfig)
    model: GenerationModelConfig = field(default_factory=GenerationModelConfig)
    rollout: GenerationRolloutConfig = field(default_factory=GenerationRolloutConfig)
    actor: GenerationActorConfig = field(default_factory=GenerationActorConfig)
    trainer: GenerationTrainerConfig = field(default_factory=GenerationTrainerConfig)
    ray_init: RayInitConfig = field(default_factory=RayInitConfig)


# Keys that change where and how fast responses are generated, but not their distribution.
PLACE_AND_SPEED = (
    "actor.",
    "ray_init.",
    "trainer.",
    "data.output_path",
    "rollout.gpu_memory_utilization",
    "rollout.num_pages",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.enforce_eager",
    "rollout.enable_prefix_caching",
    "rollout.tensor_model_parallel_size",
    "rollout.server_",
    "rollout.num_servers",
    "rollout.speculative.",
)


SHARED = SharedKeys(
    (("model.", "actor_rollout_ref.model."), ("rollout.", "actor_rollout_ref.rollout."))
)


@table
def files_and_model_are_named(config: GenerationConfig) -> Rows:
    output = config.data.output_path

    return (
        (
            config.model.path is None,
            "model.path is not set. Give a folder or hub name of a Hugging Face causal LM, or "
            "'toy'.",
        ),
        (
            not config.data.path,
            "data.path is not set. Give a file with prompts (Parquet, JSON lines), or 'toy'.",
        ),
        (
            output is None or not output.endswith(".parquet"),
            "data.output_path must name the .parquet file to write, got {data.output_path}.",
        ),
    )


RULES = (
    files_and_model_are_named,
    output_is_no_input,
    *map(SHARED.rule_here, (ranks_can_be_divided, sequences_fit)),
)


def doubtful(config: GenerationConfig) -> Messages:
    """Yield combinations that run, but are rarely intended."""
    rollout: Any = config.rollout
    if config.data.n_samples > 1 and is_greedy(rollout):
        yield (
            f"Greedy generation gives data.n_samples={config.data.n_samples} equal responses a "
            "prompt."
        )
