"""The source of scores: rules, the user's own function, a model."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import STRATEGIES, TRUNCATIONS
from verl.config.critic import CriticModelConfig
from verl.config.fsdp import FSDPConfig
from verl.config.model import LoadedModelConfig, TrainedModelConfig
from verl.config.profiler import ProfilerConfig
from verl.config.setting import alias, as_in, setting


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig:
    input_tokenizer: str | None = setting(
        None,
        "tokenizer that the actor's tokens are decoded with, for the reward model's own chat "
        "template; null: its tokens are scored as they are, if both tokenizers are the same",
        follows="actor_rollout_ref.model.path",
        is_path=True,
    )
    path: str | None = setting(
        None,
        "folder or hub name of the reward model, a sequence classifier with one label",
        is_path=True,
    )
    external_lib: Any = as_in(CriticModelConfig, "external_lib")
    trust_remote_code: bool = as_in(LoadedModelConfig, "trust_remote_code")
    use_shm: bool = as_in(CriticModelConfig, "use_shm")
    use_remove_padding: bool = as_in(TrainedModelConfig, "use_remove_padding")
    use_fused_kernels: bool = setting(
        True,
        "fused log-probs",
        follows="actor_rollout_ref.model.use_fused_kernels",
        no_effect="a reward model has no log-probs",
    )
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig:
    url: str | None = setting(
        None,
        (
            "address of a sandbox service that runs code (its `run_code`); null: the sandbox of "
            "this machine"
        ),
    )
    max_concurrent: int = setting(64, "requests to the service at once", above=0)
    memory_limit_mb: int = setting(1024, "memory of one run in the service", above=0)


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    isolation: str = setting(
        "auto",
        "how code of the model is locked in: namespaces, seccomp, auto (the first of them that "
        "this machine allows, else an error), or none (not at all: for machines that are a "
        "sandbox themselves)",
        choices=("auto", "namespaces", "seccomp", "none"),
    )
    timeout_s: float = setting(10.0, "longest run of one program", above=0)
    memory_limit_mb: int = setting(1024, "address space of one program", above=0)
    max_concurrent: int | None = setting(None, "programs at once; null: one a core", above=0)


@dataclass(kw_only=True, slots=True)
class OverlongBufferConfig:
    enable: bool = setting(False, "punish responses that come near the limit (reward_manager=dapo)")
    len: int = setting(
        0, "tokens before data.max_response_length in which the punishment grows", at_least=0
    )
    penalty_factor: float = setting(1.0, "punishment at the limit", at_least=0, finite=True)
    log: bool = setting(False, "metrics reward/overlong_reward/mean and reward/overlong/mean")


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    url: str | None = setting(
        None,
        (
            "base address of an OpenAI-style service with a model that judges responses, such as "
            "http://host:8000/v1"
        ),
    )
    model: str | None = setting(None, "name of the judging model at that service")
    prompt: str | None = setting(
        None,
        "prompt of the judge, with {question} (extra_info.question), {ground_truth} and "
        "{response}; null: a plain request for a number from 0 to 10",
    )
    score_pattern: str = setting(
        r"Score:\s*(-?\d+(?:[.,]\d+)?)",
        "regular expression; the first group of its last match is the score, 7.5 or 7,5",
    )
    score_scale: float = setting(10.0, "the parsed number is divided by this", above=0)
    api_key_env: str | None = setting(None, "environment variable that holds the service's key")
    temperature: float = setting(0.0, "of the judge's answer", at_least=0)
    max_tokens: int = setting(512, "longest answer of the judge", above=0)
    max_concurrent: int = setting(16, "requests at once", above=0)


@dataclass(kw_only=True, slots=True)
class RequestsConfig:
    timeout_s: float = setting(60.0, "longest wait for an answer of a reward service", above=0)
    max_retries: int = setting(
        5, "further tries after a lost connection or a status 429, 500, 502, 503, 504", at_least=0
    )
    backoff_s: float = setting(
        0.5,
        "wait before the first retry of an answered request, doubled each time; after a lost "
        "connection the first retry is immediate; Retry-After is honoured",
        at_least=0,
    )


@dataclass(kw_only=True, slots=True)
class RewardFunctionConfig:
    """How responses are scored by a rule or a function, in training and afterwards."""

    reward_manager: str = setting("naive", "registered manager that turns responses into scores")
    timeout_s: float | None = setting(
        60.0, "longest a score may take, per response; null: no limit", above=0
    )
    on_error: str = setting(
        "stop",
        "a reward function that raises or is too slow: stop the run, score 0, drop the "
        "response, or retry: call it again, and drop the sample if it still fails",
        choices=("stop", "zero", "drop", "retry"),
    )
    max_retries: int = setting(2, "further calls for a response under on_error=retry", at_least=0)
    rule_kwargs: dict[str, Any] = setting(
        {}, "options of the rules, such as {method: flexible} of gsm8k"
    )
    reward_kwargs: dict[str, Any] = setting(
        {}, "further arguments of the manager's class, such as num_processes of prime"
    )
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    requests: RequestsConfig = field(default_factory=RequestsConfig)
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)


@dataclass(kw_only=True, slots=True)
class RewardModelConfig(RewardFunctionConfig):
    preflight: bool = setting(True, "try the reward on a few rows before the first step")
    images: bool = setting(
        False,
        "reward functions get the images of a row, those of the prompt and then those of tools, as "
        "extra_info['images'], a list of PNG files (bytes)",
    )
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    launch_reward_fn_async: bool | None = setting(
        None,
        "score responses during generation and during passes for log-probs and values; null: "
        "where the manager declares that it leaves the batch as it is, as ours do; never with "
        "on_error=drop",
    )
    enable: bool = setting(
        False,
        "score responses by the reward model instead of a rule; validation rows with a ground "
        "truth (and not of the style 'model') keep their rule",
    )
    strategy: str = setting("fsdp", "how weights are sharded", choices=STRATEGIES)
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size: Any = alias("reward_model.micro_batch_size_per_gpu")
    micro_batch_size_per_gpu: int | None = setting(
        None,
        "responses a forward pass; null: as many as fit forward_max_token_len_per_gpu",
        above=0,
    )
    max_length: int | None = setting(
        None,
        "longest input, in tokens of the reward model; null: as many as it has positions for",
        above=0,
    )
    truncation: str = setting(
        "error",
        "treatment of a longer input; left and right name the side cut off",
        choices=TRUNCATIONS,
    )
    use_dynamic_bsz: bool | None = setting(
        None,
        "micro-batches by tokens; null: unless their rows are given",
        follows="critic.use_dynamic_bsz",
    )
    forward_max_token_len_per_gpu: int | None = setting(
        None,
        "tokens a forward pass; null: as many as fit the GPU",
        above=0,
        follows="critic.forward_max_token_len_per_gpu",
    )
    ulysses_sequence_parallel_size: int = setting(
        1, "ranks that share one sequence", planned="every rank scores whole sequences"
    )
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig:
    path: str | None = setting(None, "Python file of your reward function", is_path=True)
    name: str = setting("compute_score", "name of the function in it")
    reward_kwargs: dict[str, Any] = setting({}, "further keyword arguments of every call of it")
