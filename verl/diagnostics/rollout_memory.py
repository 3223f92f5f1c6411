"""Plan the rollout engine's memory on one device: weights, key-value pages, working memory."""

from dataclasses import dataclass

from verl.config import RolloutConfig
from verl.diagnostics.batch import BatchPlan
from verl.engine.model_shape import ModelShape
from verl.rollout.twin import ROLLOUT_DTYPES

# Logits in fp32 that `CudaRunner.other_bytes` keeps room for: of a first draw, of a step outside of
# a graph, and in the pool of the graphs.
_LOGITS = 3


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Bytes of one device, and the samples that fit."""

    itemsize: int  # of weights and pages
    weights: int
    page_bytes: int
    pages: int
    page_tokens: int
    pages_a_sample: int  # of the longest one
    samples: int  # that this engine has to generate
    most_at_once: int
    working: int

    @property
    def page_memory(self) -> int:
        return self.pages * self.page_bytes

    @property
    def at_once(self) -> int:
        """Samples that run at the same time at full length."""
        return min(self.samples, self.most_at_once, self.pages // self.pages_a_sample)

    @property
    def parts(self) -> dict[str, int]:
        return {
            "rollout weights": self.weights,
            "pages": self.page_memory,
            "prefill and logits": self.working,
        }

    def __str__(self) -> str:
        return (
            f"{self.pages} pages of {self.page_tokens} tokens, {self.page_bytes / 2**20:.2f} MiB "
            f"each; {self.at_once} of {self.samples} samples run at once at full length"
        )


def plan_rollout(
    config: RolloutConfig,
    shape: ModelShape,
    batch: BatchPlan,
    *,
    on_cuda: bool,
    aliases: bool,
    ranks: int,
    room: float | None,
) -> RolloutPlan:
    """Plan the engine of one device.

    Args:
        config: of the rollout.
        shape: of the plain model.
        batch: of a step.
        on_cuda: whether the device is a GPU.
        aliases: whether the engine uses the trainer's weights as they are.
        ranks: number that generates.
        room: bytes that the trainer leaves free; None: unknown.
    """
    itemsize = (
        ROLLOUT_DTYPES[config.dtype].itemsize
        if config.dtype
        else 2
        if on_cuda
        else shape.weights[0].itemsize
    )
    parts = config.tensor_model_parallel_size
    # Matrices of the layers are cut; embeddings, norms and head are whole on every rank.
    numel = sum(
        w.numel() // (parts if w.in_layer and len(w.shape) > 1 else 1) for w in shape.weights
    )
    weights = 0 if aliases else numel * itemsize
    token_bytes = shape.layers * shape.cached // parts * itemsize
    longest = config.max_model_len or batch.longest
    engines = max(1, ranks // parts)
    prompts = -(-batch.prompts // engines)
    samples = prompts * batch.samples
    logits = (_LOGITS if on_cuda else 1) * config.max_num_seqs * shape.vocabulary * 4
    if config.name == "hf":
        # Rows of full length side by side, and eager attention: the scores of all prompts, also in
        # fp32 and as a mask.
        page_tokens, a_sample, useful = longest, 1, min(samples, config.max_num_seqs)
        prompt = round(longest * batch.prompt_share)
        prefill = useful * shape.heads * prompt**2 * (2 * itemsize + 4)
    else:
        page_tokens = config.page_size
        a_sample = -(-(longest - 1) // page_tokens)  # the last token is never fed back
        useful = a_sample * min(samples, config.max_num_seqs) + prompts
        prefill = (
            itemsize
            * config.max_num_batched_tokens
            * (3 * shape.intermediate // parts + 5 * shape.hidden)
        )
    page_bytes = token_bytes * page_tokens
    pages = useful
    if config.name != "hf" and config.num_pages is not None:
        pages = config.num_pages
    elif config.name != "hf" and room is not None:
        # As the engine does: prompts computed so far count as free, graphs' logits do not.
        pages = min(
            useful,
            max(0, int(config.gpu_memory_utilization * (room - weights - logits)) // page_bytes),
        )
    return RolloutPlan(
        itemsize=itemsize,
        weights=weights,
        page_bytes=page_bytes,
        pages=pages,
        page_tokens=page_tokens,
        pages_a_sample=a_sample,
        samples=samples,
        most_at_once=config.max_num_seqs,
        working=prefill + logits,
    )
