"""Mixtures of experts in training: a grouped product over all experts, and no scattered sums.

transformers sorts (token, expert) pairs by expert and multiplies each group with its expert's
weights by `torch.nn.functional.grouped_mm`. Its gathers have scattered sums as gradients, which
sort their indices again and add rows one by one. Here a gather and a sum over the k pairs of a
token are each other's gradient, as pairs are a permutation of tokens x k: neither adds in an order
that varies. Scores weight the activations in front of the last product instead of its results,
which is the same sum with less to keep: I numbers a pair instead of H.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import PreTrainedModel
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    _grouped_linear,
    grouped_mm_experts_forward,
)

IMPLEMENTATION = "verl_grouped"


def use_grouped_experts(model: PreTrainedModel) -> bool:
    """Let the experts of `model` be computed here where transformers would group them, too.

    Returns whether they are. A second call changes nothing.
    """
    config = model.config.get_text_config()
    if config._experts_implementation == IMPLEMENTATION:
        return True
    experts = any(hasattr(module, "gate_up_proj") for module in model.modules())
    if not experts or config._experts_implementation != "grouped_mm":
        return False
    model.set_experts_implementation(IMPLEMENTATION)
    return True


def grouped_experts(experts: Any, states: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """Mix experts for states (N, H) by ids (N, k) and scores (N, k); return (N, H)."""
    # Not every release of transformers 5 has the last two.
    others = (
        experts.has_bias,
        getattr(experts, "_is_expert_parallel", False),
        getattr(experts, "has_post_expert_norm", False),
    )
    if not experts.has_gate or any(others):
        return grouped_mm_experts_forward(experts, states, ids, scores)

    top_k = ids.shape[1]
    chosen, pairs = torch.sort(ids.reshape(-1), stable=True)
    places = torch.empty_like(pairs)
    places[pairs] = torch.arange(len(pairs), device=pairs.device)
    numbers = torch.arange(experts.num_experts, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)

    rows = _Gather.apply(states, pairs // top_k, places, top_k)
    columns = _grouped_linear(rows, experts.gate_up_proj, ends, is_transposed=experts.is_transposed)
    active = experts._apply_gate(columns)
    sorted_scores = _Gather.apply(scores.reshape(-1), pairs, places, 1)
    weighted = (active * sorted_scores.unsqueeze(1)).to(active.dtype)
    outputs = _grouped_linear(
        weighted, experts.down_proj, ends, is_transposed=experts.is_transposed
    )
    return _Sum.apply(outputs, pairs // top_k, places, top_k)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, grouped_experts)


def _sum_pairs(rows: Tensor, places: Tensor, top_k: int) -> Tensor:
    """Sum the k rows of each token: sorted (N * k, ...) -> (N, ...)."""
    if not torch.compiler.is_compiling() or top_k == 1:
        return rows[places].unflatten(0, (-1, top_k)).sum(1)
    # Element by element, k loads each: a compiled reduction over rows so far apart took 0.97 ms for
    # 196,608 x 2,048 on an H200, five times as long as reading them.
    dtype = rows.dtype
    total = rows[places[::top_k]].to(torch.promote_types(dtype, torch.float32))
    for number in range(1, top_k):
        total = total + rows[places[number::top_k]]
    return total.to(dtype)


class _Gather(torch.autograd.Function):
    """Copy the rows (N, ...) of tokens to their sorted pairs (N * k, ...)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, tokens: Tensor, places: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.top_k = top_k  # pyright: ignore[reportAttributeAccessIssue]
        return rows[tokens]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return _sum_pairs(gradients[0], places, ctx.top_k), None, None, None


class _Sum(torch.autograd.Function):
    """Sum sorted pairs (N * k, H) over the k pairs of each token, (N, H)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, tokens: Tensor, places: Tensor, top_k: int
    ) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum_pairs(rows, places, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens,) = ctx.saved_tensors
        return gradients[0][tokens], None, None, None
