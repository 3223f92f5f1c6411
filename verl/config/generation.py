"""The configuration tree of `verl.trainer.main_generation`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.config.batch_rules import ranks_can_be_divided, sequences_fit
from verl.config.data import DataConfig
from verl.config.file_rules import output_is_no_input
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.config.rules import is_greedy
from verl.config.setting import as_in, setting
from verl.config.shared_keys import SharedKeys
from verl.config.trainer import MachinesConfig, RayInitConfig

_NO_TRAINING = "nothing is trained here"
_NO_PASS = "log-probs come with the tokens; no pass computes them again"


@dataclass(kw_only=True, slots=True)
class GenerationDataConfig:
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
    prompt_key: str = as_in(DataConfig, "prompt_key")
    response_key: str = setting("responses", "column to write: the list of responses to a prompt")
    reward_fn_key: str = as_in(DataConfig, "reward_fn_key")
    batch_size: int = setting(
        128, "prompts that are generated, and kept on the disk, at a time", above=0
    )
    n_samples: int = setting(5, "responses a prompt", above=0)
    max_prompt_length: int = as_in(DataConfig, "max_prompt_length")
    max_response_length: int = as_in(DataConfig, "max_response_length")
    filter_overlong_prompts: bool = as_in(DataConfig, "filter_overlong_prompts")
    truncation: str = as_in(DataConfig, "truncation")
    tokenizer: str | None = as_in(DataConfig, "tokenizer")
    custom_chat_template: str | None = setting(
        None, "Jinja chat template", alias_of="model.custom_chat_template"
    )
    trust_remote_code: bool = as_in(DataConfig, "trust_remote_code")


@dataclass(kw_only=True, slots=True)
class LoadedModelConfig:
    """The keys of a model that is not trained."""

    path: str | None = as_in(ModelConfig, "path")
    custom_chat_template: str | None = as_in(ModelConfig, "custom_chat_template")
    external_lib: Any = setting(
        None,
        "Python module or .py file imported at start: the place to register a rollout engine",
        many=True,
        is_path=True,
    )
    override_config: dict[str, Any] = as_in(ModelConfig, "override_config")
    trust_remote_code: bool = as_in(ModelConfig, "trust_remote_code")


@dataclass(kw_only=True, slots=True)
class GenerationModelConfig(LoadedModelConfig):
    use_shm: bool = as_in(ModelConfig, "use_shm")


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The keys of an engine whose model is not trained."""

    name: str = as_in(RolloutConfig, "name")
    server_urls: Any = as_in(RolloutConfig, "server_urls")
    server_python: str | None = as_in(RolloutConfig, "server_python")
    num_servers: int = as_in(RolloutConfig, "num_servers")
    server_timeout_s: float = as_in(RolloutConfig, "server_timeout_s")
    stop_token_ids: list[int] = as_in(RolloutConfig, "stop_token_ids")
    dtype: str | None = setting(
        None,
        "dtype of the weights; null: bfloat16 on CUDA, float32 on CPU",
        choices=("float32", "bfloat16", "float16", "float64"),
    )
    gpu_memory_utilization: float = setting(
        0.85,
        "share of the memory left free by the weights that key-value pages may fill",
        above=0,
        at_most=1,
    )
    page_size: int = as_in(RolloutConfig, "page_size")
    num_pages: int | None = as_in(RolloutConfig, "num_pages")
    enable_prefix_caching: bool = as_in(RolloutConfig, "enable_prefix_caching")
    max_num_batched_tokens: int = as_in(RolloutConfig, "max_num_batched_tokens")
    enforce_eager: bool = as_in(RolloutConfig, "enforce_eager")
    deterministic: bool = as_in(RolloutConfig, "deterministic")


@dataclass(kw_only=True, slots=True)
class GenerationRolloutConfig(EngineConfig):
    mode: str = as_in(RolloutConfig, "mode")
    seed: int = as_in(RolloutConfig, "seed")
    seed_samples: bool = as_in(RolloutConfig, "seed_samples")
    n: int = setting(5, "responses a prompt", alias_of="data.n_samples")
    do_sample: bool = as_in(RolloutConfig, "do_sample")
    temperature: float = as_in(RolloutConfig, "temperature")
    top_k: int = as_in(RolloutConfig, "top_k")
    top_p: float = as_in(RolloutConfig, "top_p")
    min_p: float = as_in(RolloutConfig, "min_p")
    stop: Any = as_in(RolloutConfig, "stop")
    ignore_eos: bool = as_in(RolloutConfig, "ignore_eos")
    prompt_length: int = as_in(RolloutConfig, "prompt_length")
    response_length: int = as_in(RolloutConfig, "response_length")
    max_new_tokens: int | None = as_in(RolloutConfig, "max_new_tokens")
    max_model_len: int | None = as_in(RolloutConfig, "max_model_len")
    max_num_seqs: int = as_in(RolloutConfig, "max_num_seqs")
    tensor_model_parallel_size: int = setting(
        1, "neighbouring ranks that share one engine, each with a slice of its weights", above=0
    )
    enable_chunked_prefill: bool = as_in(RolloutConfig, "enable_chunked_prefill")
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
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


def files_and_model_are_named(config: GenerationConfig) -> Iterator[str]:
    if config.model.path is None:
        yield (
            "model.path is not set. Give a folder or hub name of a Hugging Face causal LM, or "
            "'toy'."
        )

    if not config.data.path:
        yield "data.path is not set. Give a file with prompts (Parquet, JSON lines), or 'toy'."
    output = config.data.output_path
    if output is None or not output.endswith(".parquet"):
        yield f"data.output_path must name the .parquet file to write, got {output}."


RULES = (
    files_and_model_are_named,
    output_is_no_input,
    *map(SHARED.rule_here, (ranks_can_be_divided, sequences_fit)),
)


def doubtful(config: GenerationConfig) -> Iterator[str]:
    """Yield combinations that run, but are rarely intended."""
    rollout: Any = config.rollout
    if config.data.n_samples > 1 and is_greedy(rollout):
        yield (
            f"Greedy generation gives data.n_samples={config.data.n_samples} equal responses a "
            "prompt."
        )
