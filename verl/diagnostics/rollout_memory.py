"""Plan the rollout engine's memory on one device: weights, key-value pages, working memory."""

from dataclasses import dataclass, replace

from verl.config import RolloutConfig
from verl.diagnostics.batch import BatchPlan
from verl.engine.model_shape import ModelShape
from verl.engine.tower_footprint import TowerFootprint
from verl.models.load import torch_dtype
from verl.rollout import check_engine, rollout_engines
from verl.rollout.base import capabilities_of, plan_engine
from verl.rollout.eight_bits import DTYPES, SCALE_BYTES, cached_bytes
from verl.rollout.memory import EngineLoad
from verl.utils.arithmetic import ceil_div

# Tokens of pictures over which the bytes of one are averaged.
_MANY_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """Bytes of one device, and the samples that fit."""

    itemsize: int  # of weights, and of pages unless these have eight bits
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
    def kept(self) -> dict[str, int]:
        """Return the bytes by purpose of an engine that does not sleep while others compute."""
        if not self.page_tokens:
            return {"rollout weights": self.weights, "rest of the engine's share": self.working}
        return {"rollout weights": self.weights, "pages": self.page_memory}

    @property
    def parts(self) -> dict[str, int]:
        """Return bytes by purpose during generation."""
        if not self.page_tokens:
            return self.kept
        return {**self.kept, "prefill and logits": self.working}

    def __str__(self) -> str:
        if self.page_tokens == 0:
            place = "the engine's share of the device" if self.working else "the memory of servers"
            return f"in {place}; {self.at_once} of {self.samples} samples at once"
        return (
            f"{self.pages} pages of {self.page_tokens} tokens, {self.page_bytes / 2**20:.2f} MiB "
            f"each; {self.at_once} of {self.samples} samples run at once at full length"
        )


def as_planned(config: RolloutConfig) -> RolloutConfig:
    """Return the section with a registered engine.

    An engine of the user's, whose code is not loaded, is planned as the default one. Raises
    ConfigError for a setting that the engine does not support.
    """
    if config.name not in rollout_engines:
        config = replace(config, name=RolloutConfig().name)
    check_engine(config)
    return config


def plan_rollout(
    config: RolloutConfig,
    shape: ModelShape,
    batch: BatchPlan,
    *,
    on_cuda: bool,
    aliases: bool,
    ranks: int,
    room: float | None,
    device_bytes: int | None = None,
) -> RolloutPlan:
    """Plan the engine of one device.

    Args:
        config: of the rollout.
        shape: of the plain model.
        batch: of a step.
        on_cuda: whether the device is a GPU.
        aliases: whether the trainer's weights can serve as they are.
        ranks: number that generates.
        room: bytes that the trainer leaves free; None: unknown.
        device_bytes: of the whole device; None: unknown.
    """
    parts = config.tensor_model_parallel_size
    itemsize = _itemsize(config, shape, on_cuda)
    capabilities = capabilities_of(config.name)
    is_elsewhere = capabilities.external and not config.in_process
    is_copy = not (is_elsewhere or (aliases and capabilities.aliases_weights))
    weights = _weight_bytes(config, shape, parts, itemsize) if is_copy else 0
    share = None
    if device_bytes is not None:
        share = max(int(config.gpu_memory_utilization * device_bytes) - weights, 0)
    token_bytes = _token_bytes(config, shape, parts, itemsize)

    longest = config.max_model_len or batch.longest
    engines = max(1, ranks // parts)
    prompts = ceil_div(batch.prompts, engines)
    samples = prompts * batch.samples

    load = EngineLoad(
        prompts=prompts,
        samples=samples,
        longest=longest,
        longest_prompt=round(longest * batch.prompt_share),
        picture_bytes=_picture_bytes(shape, itemsize, on_cuda),
        ranks=parts,
        heads=shape.heads,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        itemsize=itemsize,
        token_bytes=token_bytes,
        on_cuda=on_cuda,
        room=None if room is None else room - weights,
        share=share,
    )
    memory = plan_engine(config, load)

    return RolloutPlan(
        itemsize=itemsize,
        weights=weights,
        page_bytes=token_bytes * memory.page_tokens,
        pages=memory.pages,
        page_tokens=memory.page_tokens,
        pages_a_sample=memory.pages_a_sample,
        samples=samples,
        most_at_once=config.max_num_seqs,
        working=memory.working,
    )


def _picture_bytes(shape: ModelShape, itemsize: int, on_cuda: bool) -> int:
    """Return the bytes that the vision tower works with for each token of a picture."""
    if shape.tower is None:
        return 0
    # The embedded engine compiles the layers of its towers on CUDA, see `compile_towers`.
    tower = TowerFootprint(shape=shape.tower, itemsize=itemsize, compiled=on_cuda, on_cuda=on_cuda)
    return ceil_div(tower.forward(_MANY_TOKENS), _MANY_TOKENS)


def _itemsize(config: RolloutConfig, shape: ModelShape, on_cuda: bool) -> int:
    """Return the bytes of a number in the engine's weights and cache."""
    if config.dtype:
        return torch_dtype(config.dtype).itemsize
    return 2 if on_cuda else shape.weights[0].itemsize


def _token_bytes(config: RolloutConfig, shape: ModelShape, parts: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of a token in the cache of one rank."""
    if config.kv_cache_dtype == "auto":
        return shape.layers * shape.cached // parts * itemsize
    key_heads = shape.key * shape.heads // shape.query
    head_bytes = cached_bytes(shape.cached // key_heads, DTYPES[config.kv_cache_dtype])
    return shape.layers * key_heads * head_bytes // parts


def _weight_bytes(config: RolloutConfig, shape: ModelShape, parts: int, itemsize: int) -> int:
    """Add up the weights of one rank: layers' matrices are cut; embeddings, norms, head are not."""
    total = 0
    for weight in shape.weights:
        numbers = weight.numel()
        if not weight.in_layer or len(weight.shape) < 2:
            total += numbers * itemsize
        elif config.quantization is not None:
            total += numbers + SCALE_BYTES * weight.shape[0]
        else:
            total += numbers // parts * itemsize
    return total
