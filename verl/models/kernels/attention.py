"""Choose the kernel of causal attention over packed sequences on CUDA.

There are three exact ones: flash-attn-4 if it is installed, cuDNN for long sequences on devices
where it is fast, and PyTorch's own for all other cases. On an H200, 4 sequences of 4,096 tokens
with 12 query heads and 2 key heads of 128 took, forward and backward: flash-attn-4 0.36 + 1.07 ms,
cuDNN 0.38 + 1.19, PyTorch's own 0.73 + 3.38.
"""

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

from verl.utils.arithmetic import round_up
from verl.utils.errors import ModelError
from verl.utils.imports import is_installed, require
from verl.utils.logging import logger
from verl.utils.signatures import declares

# (q (N, Hq, D), k (N, Hk, D), v (N, Hk, D), lengths, offsets (S+1,) int32, scale) -> (N, Hq, D)
CausalKernel = Callable[[Tensor, Tensor, Tensor, Sequence[int], Tensor, float], Tensor]

# cuDNN builds a plan for every shape, which takes 0.1 s. Therefore lengths are rounded up, and
# shorter sequences go to another kernel.
CUDNN_TILE = 128
CUDNN_SHORTEST = 2048
# From torch 2.12 on, this argument is required for fewer key heads than query heads.
VARLEN_GQA: dict[str, Any] = {}
if declares(varlen_attn, "enable_gqa"):
    VARLEN_GQA["enable_gqa"] = True


def packed_kernel_takes(q: Tensor) -> bool:
    """Return whether PyTorch's variable-length attention takes queries (..., D) like these."""
    head_dim = q.shape[-1]
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and is_half and head_dim % 8 == 0 and head_dim <= 256


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
    """Call PyTorch's variable-length attention.

    A query sees `window` keys including its own (None: all). With `key_offsets`, keys may begin
    before the queries; the last query and key of a sequence are aligned.
    """
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
    """Call flash-attn-4, which compiles for a shape of heads on its first call: about 5 s."""
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
    """Compute long sequences by cuDNN's dense kernel, those below CUDNN_SHORTEST by `short`.

    If the length of a sequence is no multiple of CUDNN_TILE, its block includes the next packed
    tokens. Its own tokens do not see them, and their outputs are dropped.
    """
    outputs = []
    for first, count, start, length in _runs(lengths):
        if length < CUDNN_SHORTEST:
            own_lengths = lengths[first : first + count]
            ends = offsets[first : first + count + 1] - offsets[first]
            part = slice(start, start + sum(own_lengths))
            outputs.append(short(q[part], k[part], v[part], own_lengths, ends, scale))
            continue

        rounded = round_up(length, CUDNN_TILE)
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
    """Yield runs of sequences that one call computes: short ones, or equal ones without padding.

    A run is (number of the first sequence, number of sequences, first token, longest length).
    """
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
    """Return tokens from `start` on as (count, length, H, D), with zeros after the last token."""
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
    """Return the kernel for one shape of heads, and log the choice once.

    For "auto", this is the fastest available one that agrees with PyTorch's own. Raises ModelError
    if the kernel `asked` for does not agree.
    """
    shape = f"{heads} query and {key_heads} key heads of {head_dim}"
    if asked not in ("auto", "torch"):
        difference = _difference(_FUNCTIONS[asked], device, dtype, heads, key_heads, head_dim)
        if difference > _TOLERANCE[dtype]:
            raise ModelError(
                f"The attention kernel '{asked}' differs from PyTorch's own by {difference:.1e} "
                f"({shape}, {dtype}). Set actor_rollout_ref.model.attention_kernel=torch."
            )
        logger.info("attention: %s for %s, as configured", asked, shape)
        return _FUNCTIONS[asked]

    candidates = _candidates(device) if asked == "auto" else ()
    for name in candidates:
        try:
            difference = _difference(_FUNCTIONS[name], device, dtype, heads, key_heads, head_dim)
        except Exception as error:  # noqa: BLE001 - the compiler of a kernel may raise anything
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


# Largest ratio of the norm of the difference to the norm, of outputs and of gradients. Rounding to
# the dtype explains so much.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _candidates(device: torch.device) -> Iterator[str]:
    """Yield the kernels that are faster than PyTorch's own, the fastest first."""
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
    """Compute the difference of a kernel from PyTorch's own, on three sequences.

    This is the largest relative difference of the output and the three gradients.
    """
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

    # Use a thread of its own: the first call may come within inference_mode, or within a
    # checkpointed layer, which would treat tensors that are saved here as its own.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(compute).result()

    differences: list[Tensor] = []
    for theirs, ours in zip(*results):
        exact = theirs.double()
        differences.append((ours.double() - exact).norm() / exact.norm())
    worst = torch.stack(differences).max().item()
    return worst if worst == worst else float("inf")  # NaN counts as infinite
