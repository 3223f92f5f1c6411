"""Which kernel computes causal attention over packed sequences on CUDA.

Three are known, all exact: flash-attn-4 where it is installed, cuDNN for long sequences on the
cards that it is fast on, PyTorch's own for everything else. On an H200, 4 sequences of 4,096 tokens
with 12 query heads and 2 key heads of 128 took, forward and backward: flash-attn-4 0.36 + 1.07 ms,
cuDNN 0.38 + 1.19, PyTorch's own 0.73 + 3.38.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from verl.utils.errors import ModelError
from verl.utils.imports import is_installed, require
from verl.utils.logging import logger

# (q (N, Hq, D), k (N, Hk, D), v (N, Hk, D), lengths, offsets (S+1,) int32, scale) -> (N, Hq, D)
CausalKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], Tensor, float], Tensor]

# cuDNN builds a plan of 0.1 s for every shape: lengths are rounded up, and shorter sequences are
# left to one kernel.
CUDNN_TILE = 128
CUDNN_SHORTEST = 2048
# From torch 2.12 on, fewer key heads than query heads must be announced; 2.11 counts them itself.
VARLEN_GQA: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    offsets: Tensor,
    scale: float,
    *,
    window: int | None = None,
    key_offsets: Tensor | None = None,
) -> Tensor:
    """PyTorch's variable-length attention; a query sees `window` keys (None: all), itself among
    them. With offsets of their own keys may begin before the queries: the last ones of a sequence
    are aligned."""
    longest = max(lengths)
    left = -1 if window is None else window - 1
    grouped: dict[str, Any] = VARLEN_GQA if q.shape[1] != k.shape[1] else {}
    ends = offsets if key_offsets is None else key_offsets
    out = varlen_attn(
        q, k, v, offsets, ends, longest, longest, scale=scale, window_size=(left, 0), **grouped
    )
    assert isinstance(out, Tensor)
    return out


def flash4_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], offsets: Tensor, scale: float
) -> Tensor:
    """flash-attn-4, which compiles itself for a shape of heads at its first call: about 5 s."""
    flash4 = require(
        "flash_attn.cute",
        "The attention kernel 'flash4'",
        "pip install 'flash-attn-4[cu13]>=4.0.0b36'",
    )
    longest = max(lengths)
    out = flash4.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        softmax_scale=scale,
        causal=True,
    )

    return out[0] if isinstance(out, tuple) else out


def cudnn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    offsets: Tensor,
    scale: float,
    *,
    short: CausalKernel = torch_attention,
    backend: SDPBackend = SDPBackend.CUDNN_ATTENTION,
) -> Tensor:
    """Long sequences by cuDNN's dense kernel, those shorter than CUDNN_SHORTEST by `short`.

    A sequence whose length is no multiple of CUDNN_TILE goes on into what is packed behind it: no
    token of its own sees that, and what comes out there is left.
    """
    outputs = []
    for first, count, start, length in _runs(lengths):
        if length < CUDNN_SHORTEST:
            stop = start + sum(lengths[first : first + count])
            ends = offsets[first : first + count + 1] - offsets[first]
            part = slice(start, stop)
            outputs.append(
                short(q[part], k[part], v[part], lengths[first : first + count], ends, scale)
            )
            continue
        rounded = -(-length // CUDNN_TILE) * CUDNN_TILE
        q_block, k_block, v_block = (
            _block(tensor, start, count, rounded).transpose(1, 2) for tensor in (q, k, v)
        )
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q_block,
                k_block,
                v_block,
                is_causal=True,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outputs.append(out.transpose(1, 2)[:, :length].flatten(0, 1))

    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(number of the first sequence, how many, first token, longest) of neighbours that one call
    computes: short ones, or equal ones without padding."""
    starts = [0, *accumulate(lengths)]
    first = 0
    while first < len(lengths):
        length = lengths[first]
        stop = first + 1
        if length < CUDNN_SHORTEST:
            while stop < len(lengths) and lengths[stop] < CUDNN_SHORTEST:
                stop += 1
        elif length % CUDNN_TILE == 0:
            while stop < len(lengths) and lengths[stop] == length:
                stop += 1
        yield first, stop - first, starts[first], max(lengths[first:stop])
        first = stop


def _block(packed: Tensor, start: int, count: int, length: int) -> Tensor:
    """(count, length, H, D): tokens from `start` on, and zeros behind the last that there is."""
    part = packed[start : start + count * length]
    missing = count * length - part.shape[0]
    if missing:
        part = F.pad(part, (0, 0, 0, 0, 0, missing))
    return part.unflatten(0, (count, length))


_FUNCTIONS: dict[str, CausalKernel] = {
    "flash4": flash4_attention,
    "cudnn": cudnn_attention,
    "torch": torch_attention,
}


@cache
def choose_kernel(
    asked: str, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int
) -> CausalKernel:
    """The kernel for one shape of heads: the one `asked` for or, if that is "auto", the fastest
    that is there and gives what PyTorch's own gives. It is said in the log, once."""
    shape = f"{heads} query and {key_heads} key heads of {head_dim}"
    if asked not in ("auto", "torch"):
        difference = _difference(_FUNCTIONS[asked], device, dtype, heads, key_heads, head_dim)
        if difference > _TOLERANCE[dtype]:
            raise ModelError(
                f"The attention kernel '{asked}' differs from PyTorch's own by {difference:.1e} "
                f"({shape}, {dtype}). Set actor_rollout_ref.model.attention_kernel=torch."
            )
        logger.info("attention: %s for %s, as asked", asked, shape)
        return _FUNCTIONS[asked]

    for name in _candidates(device) if asked == "auto" else ():
        try:
            difference = _difference(_FUNCTIONS[name], device, dtype, heads, key_heads, head_dim)
        except Exception as error:  # noqa: BLE001 - a kernel that compiles itself fails in ways of its own
            logger.warning("attention: %s does not run here for %s (%s)", name, shape, error)
            continue
        if difference <= _TOLERANCE[dtype]:
            logger.info(
                "attention: %s for %s; within %.0e of PyTorch's own", name, shape, difference
            )
            return _FUNCTIONS[name]
        logger.warning(
            "attention: %s differs from PyTorch's own by %.1e for %s", name, difference, shape
        )

    logger.info("attention: PyTorch's own variable-length kernel for %s", shape)
    return torch_attention


# Norm of the difference over the norm, of outputs and of gradients: what rounding to the dtype
# explains.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _candidates(device: torch.device) -> Iterator[str]:
    """Kernels faster than PyTorch's own, the fastest first."""
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return
    if is_installed("flash-attn-4"):
        yield "flash4"
    if torch.backends.cudnn.is_available():
        yield "cudnn"


def _difference(
    kernel: CausalKernel,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    head_dim: int,
) -> float:
    """How far a kernel is from PyTorch's own: the worst of the output and the three gradients, on
    three sequences."""
    lengths = (300, CUDNN_SHORTEST + 2, 45)
    generator = torch.Generator(device).manual_seed(0)

    def draw(count: int) -> Tensor:
        return torch.randn(
            sum(lengths), count, head_dim, dtype=dtype, device=device, generator=generator
        )

    results = []

    def compute() -> None:
        q, k, v = (draw(count).requires_grad_() for count in (heads, key_heads, key_heads))
        grad = draw(heads)
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        for function in (torch_attention, kernel):
            out = function(q, k, v, lengths, offsets, head_dim**-0.5)
            results.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])

    # A thread of its own: the first call may come within inference_mode, or within a checkpointed
    # layer, which would count what is kept here for backward among its own.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compute).result()
    pairs = [(ours.double(), theirs.double()) for theirs, ours in zip(*results)]
    worst = (
        torch.stack([(ours - theirs).norm() / theirs.norm() for ours, theirs in pairs]).max().item()
    )
    return worst if worst == worst else float("inf")
