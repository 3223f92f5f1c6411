"""The element-wise parts of `token_log_probs` in Triton.

They read logits (m, V) once in the forward and once in the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 8
_LOG2_E = tl.constexpr(1.4426950408889634)


def row_statistics(
    y: Tensor, targets: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `verl.models.logprobs.row_statistics`. y has contiguous rows in fp32."""
    rows, vocabulary = y.shape
    results = torch.empty(3, rows, dtype=torch.float32, device=y.device)
    normalizers, chosen, entropies = results.unbind()
    if rows:
        _row_statistics[(rows,)](
            y,
            y.stride(0),
            targets,
            normalizers,
            chosen,
            entropies,
            vocabulary,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )

    return normalizers, chosen, entropies if entropy else None


def grad_linear(
    y: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    slope: float,
    bound: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `verl.models.logprobs.grad_linear`. y has contiguous rows in fp32."""
    rows, vocabulary = y.shape
    grad = torch.empty(rows, vocabulary, dtype=dtype, device=y.device)
    if rows:
        _grad_linear[(rows,)](
            y,
            y.stride(0),
            targets,
            normalizers,
            entropies,
            grad_log_probs,
            grad_entropies,
            grad,
            vocabulary,
            slope,
            bound,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )

    return grad


@triton.jit
def _row_statistics(
    Y, y_row, TARGETS, NORMALIZERS, CHOSEN, ENTROPIES, vocabulary, BLOCK: tl.constexpr
):
    """Compute a running log-sum-exp of one row, and the sum of exp(y) * y for its entropy."""
    row = tl.program_id(0).to(tl.int64)
    source = Y + row * y_row
    columns = tl.arange(0, BLOCK)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    weighted = tl.zeros([], tl.float32)

    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        y = tl.load(source + first + columns, mask=inside, other=0.0)
        new_m = tl.maximum(m, tl.max(tl.where(inside, y, float("-inf")), 0))
        # Measure from the maximum, so that no large numbers cancel in a sum.
        distance = y - new_m
        weight = tl.where(inside, tl.exp2(distance * _LOG2_E), 0.0)
        moved = m - new_m
        alpha = tl.exp2(moved * _LOG2_E)
        before = tl.where(total > 0, alpha * (weighted + moved * total), 0.0)
        weighted = before + tl.sum(weight * distance, 0)
        total = total * alpha + tl.sum(weight, 0)
        m = new_m

    log_total = tl.log2(total) / _LOG2_E
    tl.store(NORMALIZERS + row, m + log_total)
    tl.store(CHOSEN + row, tl.load(source + tl.load(TARGETS + row)))
    tl.store(ENTROPIES + row, log_total - weighted / total)


@triton.jit
def _grad_linear(
    Y,
    y_row,
    TARGETS,
    NORMALIZERS,
    ENTROPIES,
    GRAD_LOG_PROBS,
    GRAD_ENTROPIES,
    GRAD,
    vocabulary,
    slope,
    bound,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    source = Y + row * y_row
    result = GRAD + row * vocabulary
    columns = tl.arange(0, BLOCK)
    target = tl.load(TARGETS + row)
    normalizer = tl.load(NORMALIZERS + row)
    grad_log_prob = 0.0
    if GRAD_LOG_PROBS is not None:
        grad_log_prob = tl.load(GRAD_LOG_PROBS + row)

    for first in range(0, vocabulary, BLOCK):
        inside = first + columns < vocabulary
        y = tl.load(source + first + columns, mask=inside, other=0.0)
        log_p = y - normalizer
        outgoing = -grad_log_prob + tl.zeros([BLOCK], tl.float32)
        if GRAD_ENTROPIES is not None:
            outgoing -= tl.load(GRAD_ENTROPIES + row) * (log_p + tl.load(ENTROPIES + row))
        grad = tl.exp2(log_p * _LOG2_E) * outgoing
        grad += tl.where(first + columns == target, grad_log_prob, 0.0)
        if bound is not None:
            grad *= 1 - (y / bound) * (y / bound)
        tl.store(result + first + columns, (grad * slope).to(GRAD.dtype.element_ty), mask=inside)
