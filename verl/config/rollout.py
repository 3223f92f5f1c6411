"""Generation of responses."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import ENGINE_DTYPES
from verl.config.multi_turn import AgentConfig, MultiTurnConfig
from verl.config.ref import FrozenPassConfig
from verl.config.setting import alias, as_in, setting

_OWN_MEMORY = "vllm and sglang are servers here, which manage their own memory"
_ONE_COPY = "the engine takes its weights straight from the trainer's module"


@dataclass(kw_only=True, slots=True)
class SamplingValConfig:
    """How validation samples. `do_sample=False` is greedy, whatever the temperature."""

    top_k: int = setting(-1, "sample among the k likeliest tokens; -1: all", at_least=-1)
    top_p: float = setting(
        1.0, "sample among the likeliest tokens that make up this probability", above=0, at_most=1
    )
    min_p: float = setting(
        0.0, "drop tokens below this share of the likeliest one", at_least=0, at_most=1
    )
    temperature: float = setting(0.0, "0 is greedy", at_least=0)
    n: int = setting(1, "responses a prompt", above=0)
    do_sample: bool = setting(False, "False: greedy")


@dataclass(kw_only=True, slots=True)
class EngineKwargsConfig:
    vllm: dict[str, Any] = setting(
        {}, "flags of vLLM servers that the run starts; in process, arguments of AsyncEngineArgs"
    )
    sglang: dict[str, Any] = setting({}, "flags of SGLang servers that the run starts")


@dataclass(kw_only=True, slots=True)
class SpeculativeConfig:
    """Drafts of tokens, under the names of vLLM's speculative decoding."""

    method: str | None = setting(
        None,
        "ngram: draft tokens that followed the same ones in the prompt, the response or its group, "
        "and verify several a step; changes no token; null: no drafts",
        choices=("ngram",),
    )
    num_speculative_tokens: int = setting(4, "most drafted tokens a sample and step", above=0)
    prompt_lookup_max: int = setting(4, "last tokens that a draft continues, at most", above=0)
    prompt_lookup_min: int = setting(2, "last tokens that a draft continues, at least", above=0)
    max_rows: int = setting(
        32,
        "draft only where drafts and samples together are at most so many tokens a step",
        above=0,
    )


@dataclass(kw_only=True, slots=True)
class TraceConfig:
    backend: str | None = setting(
        None, "where rollouts are traced to", planned="rollouts are not traced yet"
    )
    token2text: bool = setting(
        False, "decode traced tokens", no_effect="read together with trace.backend only"
    )


@dataclass(kw_only=True, slots=True)
class EngineConfig:
    """The keys of any engine, also of one whose model is not trained."""

    name: str = setting(
        "embedded",
        "registered engine: embedded, vllm or sglang (servers, or vllm in process), or hf (slow "
        "reference)",
    )
    server_urls: Any = setting(
        [],
        "address (or list of addresses) of vLLM or SGLang servers that you have started",
        many=True,
    )
    server_python: str | None = setting(
        None,
        "interpreter of an environment with vLLM or SGLang: the run starts servers with it; null: "
        "its own",
        is_path=True,
    )
    num_servers: int = setting(1, "servers that the run starts", above=0)
    server_timeout_s: float = setting(
        600.0,
        "wait so long for a server or an engine in process to start, or for a server to come back "
        "when none answers",
        above=0,
    )
    stop_token_ids: list[int] = setting(
        [], "tokens that end a response, in addition to the model's own"
    )
    dtype: str | None = setting(
        None,
        "dtype of the weights; null: bfloat16 on CUDA, float32 on CPU",
        choices=ENGINE_DTYPES,
    )
    gpu_memory_utilization: float = setting(
        0.85,
        "share of the memory left free by the weights that key-value pages may fill",
        above=0,
        at_most=1,
    )
    page_size: int = setting(16, "tokens a page of the key-value cache", above=0)
    num_pages: int | None = setting(
        None, "pages of the key-value cache; null: as many as the memory allows", above=0
    )
    enable_prefix_caching: bool = setting(
        True,
        "keep the pages of prompts and responses for later prompts that begin with them, while "
        "weights last; not with deterministic=true",
    )
    max_num_batched_tokens: int = setting(8192, "prompt tokens taken in one prefill step", above=0)
    enforce_eager: bool = setting(
        False, "on CUDA, decode without CUDA graphs, and leave vision towers uncompiled"
    )
    deterministic: bool = setting(
        False,
        (
            "the same tokens, to the last bit of their log-probs, whatever else is in the batch; "
            "slower"
        ),
    )


@dataclass(kw_only=True, slots=True)
class DrawConfig(EngineConfig):
    """The keys of an engine that draws responses to prompts of a data set."""

    mode: str = setting(
        "sync", "async: every row goes through an agent loop", choices=("sync", "async")
    )
    seed: int = setting(
        0,
        "seed of the sampling noise; with step, sample and position it fixes every draw",
        at_least=0,
        follows="trainer.seed",
    )
    seed_samples: bool = setting(
        True,
        "vllm, sglang: send a seed with each sample, so that a run can be repeated; False: engines "
        "draw by noise of their own, which costs them less",
    )
    n: int = setting(1, "G: responses a prompt", above=0)
    do_sample: bool = setting(True, "False: greedy")
    temperature: float = setting(1.0, "divides the logits, in every log-prob too", at_least=0)
    top_k: int = as_in(SamplingValConfig, "top_k")
    top_p: float = as_in(SamplingValConfig, "top_p")
    min_p: float = as_in(SamplingValConfig, "min_p")
    stop: Any = setting([], "text (or list of texts) that ends a response and is kept", many=True)
    ignore_eos: bool = setting(False, "go on after the end-of-sequence token")
    prompt_length: int = setting(512, "P", alias_of="data.max_prompt_length")
    response_length: int = setting(512, "R", alias_of="data.max_response_length")
    max_new_tokens: Any = alias("data.max_response_length", "R")
    max_model_len: int | None = setting(None, "longest sequence; null: prompt + response", above=0)
    max_num_seqs: int = setting(1024, "sequences generated at once", above=0)
    enable_chunked_prefill: bool = setting(
        True, "split long prompts over prefill steps", no_effect="the scheduler decides"
    )
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)


@dataclass(kw_only=True, slots=True)
class RolloutConfig(DrawConfig):
    sglang_endpoint: Any = alias("actor_rollout_ref.rollout.server_urls")
    in_process: bool = setting(
        False,
        "vllm: one engine for each rank, on its device and in the run's own environment, in place "
        "of servers",
    )
    allow_untested_servers: bool = setting(
        False, "use servers of vLLM or SGLang that are newer than the versions that were tested"
    )
    server_weights_dir: str | None = setting(
        None,
        "folder for new weights, under the same path for all servers; null: in shared memory of "
        "this machine",
        is_path=True,
    )
    dtype: str | None = setting(
        None,
        "dtype of the engine's weights; null: bfloat16 on CUDA, the trainer's on CPU",
        choices=ENGINE_DTYPES,
    )
    quantization: str | None = setting(
        None,
        "on Hopper, the embedded engine keeps linear layers in eight bits, rounded at each "
        "hand-over; responses are then of a policy slightly off the trainer's; int8 is nearer to it, "
        "fp8 faster",
        choices=("fp8", "int8"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "on CUDA, the embedded engine keeps keys and values in eight bits with a scale for each "
        "token and head (fp8: from Ada on); responses are then of a policy slightly off the "
        "trainer's; auto: in rollout.dtype",
        choices=("auto", "fp8", "int8"),
    )
    gpu_memory_utilization: float = setting(
        0.5,
        "share of the memory left free by weights and trainer that key-value pages may fill; vllm "
        "and sglang: share of the whole GPU",
        above=0,
        at_most=1,
    )
    free_cache_engine: bool = setting(True, "give the engine's memory back while training")
    enable_rollout_routing_replay: bool = setting(
        False,
        "record the experts of every drawn token that is fed back, for "
        "actor_rollout_ref.actor.router_replay.mode=R3",
    )
    tensor_model_parallel_size: int = setting(
        1,
        (
            "neighbouring ranks that share one engine, each with a slice of its weights, however "
            "training is sharded"
        ),
        above=0,
    )
    weight_transport: str | None = setting(
        None,
        "how a rollout on ranks of its own, or a server, gets the weights; null: chosen by where they are",
        choices=("broadcast", "disk", "host", "ipc"),
    )
    lora_weights: str | None = setting(
        None,
        "LoRA with servers; adapter: they load the model themselves, and get the adapters alone; "
        "merged: they get whole weights that contain the adapters; null: adapter on vLLM servers "
        "that the run starts",
        choices=("adapter", "merged"),
    )
    log_prob_micro_batch_size: Any = alias(
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    )
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        None,
        "responses a forward pass for old log-probs; null: as many as fit the token budget",
        above=0,
    )
    log_prob_use_dynamic_bsz: bool | None = as_in(FrozenPassConfig, "log_prob_use_dynamic_bsz")
    log_prob_max_token_len_per_gpu: int | None = setting(
        None,
        "tokens a forward pass for old log-probs; null: as many as fit the GPU",
        above=0,
        follows="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )
    calculate_log_probs: bool = setting(
        True,
        "return log-probs of the sampled tokens",
        no_effect="they are always returned",
        also=(False,),
    )
    disable_log_stats: bool = setting(
        True, "no engine statistics", no_effect="statistics are metrics of each step"
    )
    multi_stage_wake_up: bool = setting(
        False, "wake weights and cache apart", no_effect=_OWN_MEMORY
    )
    update_weights_bucket_megabytes: int = setting(
        512,
        ("weights are gathered for the engine this much at a time; two such buckets are in memory"),
        above=0,
    )
    fingerprint_interval: int = setting(
        20,
        (
            "hand-overs of weights from one that fingerprints prove to the next; 0: the first "
            "alone is proved"
        ),
        at_least=0,
    )
    load_format: str = setting("dummy_dtensor", "how the engine loads weights", no_effect=_ONE_COPY)
    layered_summon: bool = setting(False, "gather weights layer by layer", no_effect=_ONE_COPY)
    engine_kwargs: EngineKwargsConfig = field(default_factory=EngineKwargsConfig)
    val_kwargs: SamplingValConfig = field(default_factory=SamplingValConfig)
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a prompt and its response together."""
        return self.max_model_len or self.prompt_length + self.response_length

    @property
    def uses_agents(self) -> bool:
        """Return whether rows are played by agent loops."""
        turns = self.multi_turn
        is_asked = any(turns.answers) or any(self.agent.loops)
        return turns.enable or self.mode == "async" or is_asked

    @property
    def agent_loop(self) -> str:
        """Name of the agent loop of rows that name none."""
        agent = self.agent
        if agent.default_agent_loop is not None:
            return agent.default_agent_loop
        if agent.environment.name is not None:
            return "environment_agent"
        if agent.gateway.path is not None or agent.gateway.command is not None:
            return "gateway_agent"
        has_tools = any((*self.multi_turn.answers, agent.replay_path))
        return "tool_agent" if has_tools else "single_turn_agent"

    @property
    def scores_itself(self) -> bool:
        """Return whether agent loops give the scores, so that no reward function is needed."""
        return self.agent.gives_reward or self.agent.environment.name is not None
