"""Attention over packed sequences, registered with transformers as `verl_packed`.

transformers calls the function below once per layer, with queries, keys and values of one row of N
packed tokens. The bounds of the sequences are in the `PackingSlot` of the model: one object per
model, an attribute of each of its modules, so two models in one process never see each other's
batch.

On CUDA in bf16 or fp16, `torch.nn.attention.varlen` computes it. On other devices, and if that
kernel lacks a feature of the layer (soft cap, sinks, odd head sizes), sequences of similar length
form right-padded blocks. Causal attention then needs no padding mask, because padding comes after
every real token.

A prompt that several responses share is in the batch once (`Layout.shared`), and each response sees
it as its own prefix. Tokens of a picture may see one another (`Layout.ahead`).
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import isgenerator
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.distributed.sequence_parallel import SequenceParallel
from verl.models.alibi import KeyBias, route_attention, set_attention
from verl.models.kernels.attention import choose_kernel, packed_kernel_takes, torch_attention
from verl.models.layout import Layout
from verl.models.shared_prompts import joined_attention
from verl.models.vision import language_parts, towers_within
from verl.models.vision_attention import join_windows
from verl.utils.errors import ModelError

IMPLEMENTATION = "verl_packed"
_SLOT = "verl_packing"


class Facts(NamedTuple):
    """The parameters of one layer's attention."""

    scale: float
    window: int | None  # keys that a query sees; None: all
    cap: float | None  # soft cap of the scores
    sinks: Tensor | None
    latent: bool = False  # values are a part of the keys (MLA); only in decode steps of the engine
    bias: KeyBias | None = None  # added after the cap

    @property
    def is_plain(self) -> bool:
        """Return whether scores are only scaled products."""
        return self.cap is None and self.sinks is None and self.bias is None


class PackingSlot:
    """The batch that one model currently computes."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        # A list while the check at load records the layers' parameters.
        self.seen: list[Facts] | None = None
        self.kernel = "auto"  # see `kernels.attention.choose_kernel`
        # Set if the model computes a part of the tokens.
        self.sequence_parallel: SequenceParallel | None = None
        # Of `verl.models.routing`: layers with watched routers, and the ids (N, k) that they choose
        # by number of the layer, while a caller records them.
        self.routes_layers = 0
        self.recorded: dict[int, Tensor] | None = None

    def holding(self, layout: Layout | None) -> "_Holding":
        """Return a context in which the model's layers compute on `layout`."""
        return _Holding(self, layout)

    def checkpoint_contexts(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        """Return the contexts of forward and recompute for `torch.utils.checkpoint`.

        The recompute sees the layout of its own forward, even if the model has computed other
        batches in between.
        """
        return nullcontext(), self.holding(self.layout)


class _Holding:
    """The context of `PackingSlot.holding`.

    It is a class instead of a generator, because it is entered more than once if a kept graph is
    recomputed.
    """

    def __init__(self, slot: PackingSlot, layout: Layout | None) -> None:
        self.slot = slot
        self.layout = layout
        self.previous: list[Layout | None] = []

    def __enter__(self) -> None:
        self.previous.append(self.slot.layout)
        self.slot.layout = self.layout

    def __exit__(self, *exception: object) -> None:
        self.slot.layout = self.previous.pop()


def prepare(model: nn.Module) -> PackingSlot:
    """Give every module of `model` one slot and switch the model to `verl_packed`.

    A second call changes nothing.
    """
    slot = getattr(model, _SLOT, None) or PackingSlot()
    route_attention(model)
    for tower in towers_within(model):
        join_windows(tower)
    for module in model.modules():
        setattr(module, _SLOT, slot)
    for part in language_parts(model):
        if part.config._attn_implementation != IMPLEMENTATION:
            set_attention(part, IMPLEMENTATION)
    return slot


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Run `model` with transformers' eager attention within this context, and switch back."""
    previous = model.config._attn_implementation or "eager"
    set_attention(model, "eager")
    try:
        yield
    finally:
        set_attention(model, previous)


def apply_checkpointing(module: nn.Module, *, share: float = 1.0) -> None:
    """Recompute decoder layers in the backward pass (non-reentrant).

    Args:
        module: a model of transformers, or a module around one.
        share: of the layers, from the first one on.
    """
    model = next(part for part in module.modules() if isinstance(part, PreTrainedModel))
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"The family '{model.config.model_type}' does not support gradient checkpointing in "
            "transformers. Set model.enable_gradient_checkpointing=false."
        )

    contexts = prepare(model).checkpoint_contexts
    # transformers 5 introduced the newer name, transformers 6 removes the older one.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False, "context_fn": contexts})
    if share < 1:
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        if not layers:
            raise ModelError(
                f"The family '{model.config.model_type}' recomputes all of its layers or none, got "
                f"gradient_checkpointing_share={share}. Set it to 1."
            )
        for layer in layers[math.ceil(share * len(layers)) :]:
            layer.gradient_checkpointing = False


def end_checkpoints(error: BaseException) -> None:
    """End the hooks of checkpointed layers that `error` has left.

    Before torch 2.13 they stay until the traceback is gone, which a notebook keeps, and catch the
    tensors of all later passes.
    """
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        if frame.f_globals.get("__name__") != checkpoint.__module__:
            continue
        for value in frame.f_locals.values():
            if isgenerator(value):
                value.close()


def layer_facts(
    module: nn.Module, head_dim: int, scaling: float | None, asked: dict[str, Any]
) -> Facts:
    """Read the arguments that transformers passes to the attention of one layer."""
    if "sliding_window" in asked:
        window = asked["sliding_window"]
    else:
        # Some families (Qwen2-MoE) have the window only in the mask, which is not made here.
        layer: Any = module
        types = getattr(layer.config, "layer_types", None)
        slides = types is not None and types[layer.layer_idx] == "sliding_attention"
        window = layer.config.sliding_window if slides else None

    return Facts(
        scale=head_dim**-0.5 if scaling is None else scaling,
        window=window,
        cap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
        bias=asked.get("key_bias"),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **asked: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each packed sequence, but for `Layout.ahead`.

    query (1, Hq, N, D), key (1, Hk, N, D), value (1, Hk, N, Dv) -> (1, N, Hq, Dv), with Hq a
    multiple of Hk. Under sequence parallelism N counts this rank's tokens, and attention is over
    all tokens of this rank's heads.

    Raises ModelError for a mask, a position bias, dropout and attention to the future.
    """
    slot: PackingSlot | None = getattr(module, _SLOT, None)
    layout = slot.layout if slot else None
    if slot is None or layout is None:
        raise ModelError(
            f"Attention '{IMPLEMENTATION}' was called outside a packed forward. Run the model "
            "through PackedCausalLM or PackedValueModel (and enable checkpointing by "
            "apply_checkpointing), or inside eager_attention."
        )

    refuse_unsupported(module, attention_mask, dropout, asked)
    facts = layer_facts(module, query.shape[-1], scaling, asked)
    if slot.seen is not None:
        slot.seen.append(facts)

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if slot.sequence_parallel is not None:
        q, k, v = slot.sequence_parallel.to_heads(q, k, v)
        if facts.sinks is not None:
            facts = facts._replace(sinks=slot.sequence_parallel.own_heads(facts.sinks))
        if facts.bias is not None:
            slopes = slot.sequence_parallel.own_heads(facts.bias.slopes)
            facts = facts._replace(bias=facts.bias._replace(slopes=slopes))

    if varlen_can(q, v, facts) and not _needs_blocks(layout, facts):
        # The kernels take one head size: narrower values (MLA) get columns of zeros.
        value_dim = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - value_dim))
        out = _varlen_attention(q, k, v, layout, facts, slot.kernel)[..., :value_dim]
    else:
        out = block_attention(q, k, v, layout, facts)

    if slot.sequence_parallel is not None:
        out = slot.sequence_parallel.to_tokens(out)
    return out[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


def refuse_unsupported(
    module: nn.Module, mask: Tensor | None, dropout: float, asked: dict[str, Any]
) -> None:
    """Raise ModelError for arguments that packed attention cannot honor."""
    looks_ahead = asked.get("is_causal") is False or getattr(module, "is_causal", True) is False
    problems = {
        "an attention mask": mask is not None,
        "a position bias": asked.get("position_bias") is not None,
        "attention to the future": looks_ahead,
        "dropout": dropout > 0,
    }
    wanted = [name for name, present in problems.items() if present]
    if wanted:
        raise ModelError(
            f"{type(module).__name__} needs attention with {' and '.join(wanted)}, which packed "
            "sequences do not support. Load causal models through load_causal_lm, which zeroes "
            "dropout; other families are not supported."
        )


def seen_keys(last: Tensor, length: int, window: int | None) -> Tensor:
    """Return which of the keys 0..length - 1 a query with its own key at `last` (..., 1) sees."""
    key = torch.arange(length, device=last.device)
    seen = key <= last
    if window is not None:
        seen = seen & (key > last - window)
    return seen


def varlen_can(q: Tensor, v: Tensor, facts: Facts) -> bool:
    """Return whether a kernel for packed sequences supports this attention."""
    return packed_kernel_takes(q) and v.shape[-1] <= q.shape[-1] and facts.is_plain


def _window_of(layout: Layout, facts: Facts) -> int | None:
    """Return the window of a layer; None if it covers every sequence.

    That is plain causal attention, which has the faster kernel.
    """
    covers = facts.window is not None and facts.window >= layout.longest
    return None if covers else facts.window


def _needs_blocks(layout: Layout, facts: Facts) -> bool:
    """Check for pictures that see themselves within shared prompts and a window, all at once."""
    window = _window_of(layout, facts)
    return layout.ahead is not None and bool(layout.shared) and window is not None


def _varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, facts: Facts, kernel: str = "auto"
) -> Tensor:
    """Attend by a kernel for packed sequences: q (N, Hq, D), k and v (N, Hk, D) -> (N, Hq, D)."""
    window = _window_of(layout, facts)
    if layout.ahead is not None or (window is None and layout.shared):
        return joined_attention(q, k, v, layout.calls(window), facts.scale)
    if window is None:
        attend = choose_kernel(kernel, q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
        return attend(q, k, v, layout.lengths, layout.cu_seqlens, facts.scale)

    key_offsets = None
    if layout.shared:
        # The kernel aligns the last query of a sequence with its last key, so keys may begin before
        # the queries.
        keys, key_offsets = layout.keys_within(window)
        k = k.index_select(0, keys)
        v = v.index_select(0, keys)
    longest = (layout.longest,)
    return torch_attention(
        q, k, v, longest, layout.cu_seqlens, facts.scale, window=window, key_offsets=key_offsets
    )


def _block_of(tensor: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return (rows, H, tokens of a row, D) at `places` of a packed tensor (N, H, D)."""
    return tensor.index_select(0, places).unflatten(0, (rows, -1)).transpose(1, 2)


def block_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, facts: Facts) -> Tensor:
    """Attend block by block: q (N, Hq, D), k (N, Hk, D), v (N, Hk, Dv) -> (N, Hq, Dv)."""
    outputs = []
    for number, (index, keys, rows, length, context) in enumerate(layout.blocks):
        q_block = _block_of(q, index, rows)
        k_block = _block_of(k, keys, rows)
        v_block = _block_of(v, keys, rows)
        whole = context + length
        window = whole if facts.window is None else min(facts.window, whole)

        seen = None
        if layout.ahead is not None:
            seen = layout.band_ahead(number, window)
        elif not facts.is_plain or context or window < whole:
            seen = layout.band(length, context, window)
        out = masked_attention(q_block, k_block, v_block, seen, facts)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, layout.restore)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, facts: Facts) -> Tensor:
    """Attend with q (s, Hq, L, D) to k (s, Hk, K, D) and v (s, Hk, K, Dv); return (s, Hq, L, Dv).

    Args:
        q: queries.
        k: keys, whose positions are 0..K-1.
        v: values.
        seen: (L, K) or (s, 1, L, K) bool, the keys that each query sees. None, for plain attention
            alone: those up to its own.
        facts: parameters of the layer.
    """
    if not facts.is_plain:
        assert seen is not None
        return _explicit(q, k, v, seen, facts)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=seen,
        is_causal=seen is None,
        scale=facts.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _explicit(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, facts: Facts) -> Tensor:
    """Compute attention with soft caps, sinks and biases.

    The (s, Hq, L, K) scores are recomputed in the backward pass.
    """
    bias = None
    if facts.bias is not None:
        bias = facts.bias.at(torch.arange(k.shape[2], device=k.device))
    arguments = (q, k, v, seen, facts.scale, facts.cap, facts.sinks, bias)
    if not torch.is_grad_enabled():
        return _scores_to_values(*arguments)
    attended: Any = checkpoint(
        _scores_to_values, *arguments, use_reentrant=False, preserve_rng_state=False
    )
    return attended


def _scores_to_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute attention from its definition.

    q (s, Hq, L, D), k (s, Hk, K, D), v (s, Hk, K, Dv), seen (L, K) or (s, 1, L, K), bias (Hq, K) ->
    (s, Hq, L, Dv).
    Scores and softmax are in fp32 at least. A sink is one more score per head that takes
    probability and has no value.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    heads = (k.shape[1], q.shape[1] // k.shape[1])
    scores = (
        q.to(precise).unflatten(1, heads) @ k.to(precise).unsqueeze(2).transpose(-1, -2) * scale
    )
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    if bias is not None:
        scores = scores + bias.unflatten(0, heads).unsqueeze(2)
    if seen.dim() == 4:
        seen = seen.unsqueeze(2)  # for the query heads of a key head
    scores = scores.masked_fill(~seen, float("-inf"))

    if sinks is None:
        weights = scores.softmax(-1)
    else:
        by_head = sinks.to(precise).view(1, *heads, 1, 1)
        column = by_head.expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)
