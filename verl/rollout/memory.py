"""The memory terms of a rollout engine on one device, from shapes alone."""

from dataclasses import dataclass

from verl.config.rollout import RolloutConfig
from verl.utils.arithmetic import ceil_div

# Logits in fp32 that `CudaRunner.other_bytes` keeps room for: those of a first draw, of a step
# outside of a graph, and in the pool of the graphs.
_LOGITS_ON_CUDA = 3
# Tokens after a cached prefix that a decode step on CUDA takes in addition to one for each sample.
# Some 20 come between two turns of an agent, and a few samples start in a step.
_NEW_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """The work of one engine, and the model as far as memory depends on it."""

    prompts: int
    samples: int  # of all prompts
    longest: int  # tokens of the longest prompt and response together
    longest_prompt: int
    ranks: int  # that share the engine

    heads: int
    hidden: int
    intermediate: int
    vocabulary: int
    itemsize: int  # bytes of a number in weights and cache
    token_bytes: int  # keys and values of one token in all layers, on one rank
    picture_bytes: int = 0  # that a vision tower works with for each token of a picture

    on_cuda: bool
    room: float | None  # bytes that the trainer and the engine's weights leave; None: not known
    # Bytes that `gpu_memory_utilization` of the whole device has above the weights; None: not known.
    share: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Pages of the key-value cache, and the bytes that a step works with."""

    page_tokens: int
    pages_a_sample: int  # of the longest one
    pages: int
    working: int  # bytes of a prefill and of logits; without pages, of all but weights


def spare_rows(config: RolloutConfig) -> int:
    """Return the most rows of a decode step on CUDA beyond one for each sample."""
    extends = config.enable_prefix_caching and not config.deterministic
    drafts = 0 if config.speculative.method is None else config.speculative.max_rows
    return max(drafts, _NEW_TOKENS if extends else 0)


def logits_bytes(config: RolloutConfig, load: EngineLoad) -> int:
    """Return the bytes of logits that an engine keeps room for."""
    rows = config.max_num_seqs
    if load.on_cuda:
        rows = _LOGITS_ON_CUDA * (rows + spare_rows(config))
    return rows * load.vocabulary * 4


def paged_memory(config: RolloutConfig, load: EngineLoad) -> EngineMemory:
    """Return the terms of an engine with a paged cache that computes packed prompts."""
    cached = load.longest - 1  # the last token is never fed back
    pages_a_sample = ceil_div(cached, config.page_size)
    useful = pages_a_sample * min(load.samples, config.max_num_seqs) + load.prompts
    numbers_a_token = 3 * load.intermediate // load.ranks + 5 * load.hidden
    tokens = config.max_num_batched_tokens
    # The tower ends before the language model begins. A single prompt may have more tokens.
    of_pictures = min(load.prompts * load.longest_prompt, max(tokens, load.longest_prompt))
    prefill = max(
        load.itemsize * tokens * numbers_a_token,
        load.picture_bytes * of_pictures,
    )
    logits = logits_bytes(config, load)

    pages = useful
    if config.num_pages is not None:
        pages = config.num_pages
    elif load.room is not None:
        # As in the engine: prompts computed so far count as free, the logits of graphs do not.
        cache = int(config.gpu_memory_utilization * (load.room - logits))
        pages = min(useful, max(0, cache // (load.token_bytes * config.page_size)))

    return EngineMemory(
        page_tokens=config.page_size,
        pages_a_sample=pages_a_sample,
        pages=pages,
        working=prefill + logits,
    )


def padded_memory(config: RolloutConfig, load: EngineLoad) -> EngineMemory:
    """Return the terms of an engine with rows of full length side by side and eager attention.

    Eager attention keeps the scores of all prompts, also in fp32 and as a mask.
    """
    rows = min(load.samples, config.max_num_seqs)
    prefill = max(
        rows * load.heads * load.longest_prompt**2 * (2 * load.itemsize + 4),
        load.picture_bytes * rows * load.longest_prompt,
    )
    return EngineMemory(
        page_tokens=load.longest,
        pages_a_sample=1,
        pages=rows,
        working=prefill + logits_bytes(config, load),
    )
