"""What scores a response: rules, the user's own function, a model."""

from dataclasses import dataclass, field

from verl.config.choices import STRATEGIES
from verl.config.fsdp import FSDPConfig
from verl.config.profiler import ProfilerConfig
from verl.config.setting import setting

_UNREAD = "read with reward_model.enable=True only, which is not available in this version"


@dataclass(kw_only=True, slots=True)
class RewardModelModelConfig:
    input_tokenizer: str | None = setting(
        None, "tokenizer of the actor", follows="actor_rollout_ref.model.path", no_effect=_UNREAD, is_path=True
    )
    path: str | None = setting(None, "folder or hub name of the reward model", no_effect=_UNREAD, is_path=True)
    external_lib: str | None = setting(
        None, "module imported at start", follows="actor_rollout_ref.model.external_lib", no_effect=_UNREAD,
        is_path=True,
    )  # fmt: skip
    trust_remote_code: bool = setting(False, "run Python code that comes with a model", no_effect=_UNREAD)
    use_shm: bool = setting(False, "copy weights to /dev/shm first", no_effect=_UNREAD)
    use_remove_padding: bool = setting(True, "compute on packed sequences", no_effect=_UNREAD)
    use_fused_kernels: bool = setting(
        True, "fused log-probs", follows="actor_rollout_ref.model.use_fused_kernels", no_effect=_UNREAD
    )
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)


@dataclass(kw_only=True, slots=True)
class SandboxFusionConfig:
    url: str | None = setting(None, "address of a sandbox service", planned="code rewards are not built yet")
    max_concurrent: int = setting(64, "requests at once", no_effect="read together with sandbox_fusion.url only")
    memory_limit_mb: int = setting(1024, "memory of one run", no_effect="read together with sandbox_fusion.url only")


@dataclass(kw_only=True, slots=True)
class RewardModelConfig:
    reward_manager: str = setting("naive", "registered manager that turns responses into scores")
    timeout_s: float | None = setting(60.0, "longest a score may take, per response; null: no limit", above=0)
    on_error: str = setting(
        "stop", "a reward function that raises or is too slow: stop the run, score 0, or drop the response",
        choices=("stop", "zero", "drop"),
    )  # fmt: skip
    launch_reward_fn_async: bool = setting(
        False, "score beside the log-probs", no_effect="phases of one process run one after another"
    )
    sandbox_fusion: SandboxFusionConfig = field(default_factory=SandboxFusionConfig)
    enable: bool = setting(False, "score by a reward model", planned="reward models are not built yet")
    strategy: str = setting("fsdp", "how weights are sharded", choices=STRATEGIES)
    model: RewardModelModelConfig = field(default_factory=RewardModelModelConfig)
    micro_batch_size: int | None = setting(None, "responses a forward pass", no_effect=_UNREAD)
    micro_batch_size_per_gpu: int | None = setting(None, "responses a forward pass", no_effect=_UNREAD)
    max_length: int | None = setting(None, "longest input", no_effect=_UNREAD)
    use_dynamic_bsz: bool | None = setting(
        None, "micro-batches by tokens", follows="critic.use_dynamic_bsz", no_effect=_UNREAD
    )
    forward_max_token_len_per_gpu: int = setting(
        32768, "tokens a forward pass", follows="critic.forward_max_token_len_per_gpu", no_effect=_UNREAD
    )
    ulysses_sequence_parallel_size: int = setting(
        1, "ranks that share one sequence", planned="reward models are not built yet"
    )
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)


@dataclass(kw_only=True, slots=True)
class CustomRewardFunctionConfig:
    path: str | None = setting(None, "Python file of your reward function", is_path=True)
    name: str = setting("compute_score", "name of the function in it")
