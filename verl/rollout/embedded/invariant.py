"""Batch-invariant computation: the bits of a row depend on that row and the weights alone.

On CPU a BLAS chooses its kernel, and with it the order of its sums, by the shape of a product. So
every product here is cut into blocks of one shape, the last one padded, and every element-wise
function runs on whole vectors, never on the scalar loop that ends an array. On CUDA products and
sums go through our own kernels, with an order that does not depend on the number of rows. Results
may still differ between devices, numbers of threads and versions of torch.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from verl.models.attention import Facts, Layout, block_attention, seen_keys, varlen_can
from verl.models.kernels.attention import VARLEN_GQA
from verl.models.logprobs import Head
from verl.rollout.embedded.audit import SETTING, is_last, trusted
from verl.rollout.sampling import CHUNK_LOGITS, sample
from verl.rollout.types import SamplingParams
from verl.utils.arithmetic import ceil_div, round_up
from verl.utils.errors import ConfigError
from verl.utils.signatures import declares

# Rows of one product on CPU. Padding costs at one row, blocks at a thousand: of a large weight, 32
# rows take 5 times a single one and 1,024 rows 1.7 times one product; small products are all
# overhead, so they get more rows.
BLOCK_ROWS = 32
BLOCK_ROWS_SMALL = 64
SMALL_WEIGHT = 1 << 16
BLOCK_PRODUCTS = 32  # of one batched product on CPU: the BLAS spreads threads by their number
BLOCK_KEYS = 64  # keys of one partial sum; these are added up in the order of the keys
# Elements of one call of an element-wise function on CPU: fewer than torch divides among threads
# (2**15), because a thread's share may end within a vector. _VECTOR is a multiple of the
# numbers that any CPU computes at once.
PIECE = 1 << 14
_VECTOR = 64
_ALIGNMENT = 64  # bytes; a BLAS may treat the ends of unaligned rows in another way
# A product over a multiple of so many numbers has no unaligned rows (with 37, AVX2 code sums by a
# row's place).
_INNER = 16
# From torch 2.12 on, keys are divided by the longest sequence of the batch by default.
_ONE_SPLIT: dict[str, Any] = {"num_splits": 1} if declares(varlen_attn, "num_splits") else {}


@functools.cache
def _kernels() -> Any:
    # Triton is available with CUDA only
    return importlib.import_module("verl.rollout.embedded.kernels.linear")


@trusted
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return x W^T + b, (..., N), in `out_dtype` or the dtype of x, without gradients.

    x is (..., K), weight (N, K) with any strides, bias (N,).
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        result = _kernels().linear(rows, weight, bias, out_dtype=out_dtype)
    else:
        result = _blocked_linear(rows, weight, bias).to(out_dtype or x.dtype)
    return result.view(*x.shape[:-1], weight.shape[0])


def _blocked_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if odd := -x.shape[1] % _INNER:
        x = F.pad(x, (0, odd))
        weight = F.pad(weight, (0, odd))
    rows = x.shape[0]
    columns = weight.shape[0]
    size = BLOCK_ROWS_SMALL if weight.numel() <= SMALL_WEIGHT else BLOCK_ROWS
    out = x.new_empty(round_up(rows, size), columns)
    transposed = weight.t()
    for block, target in zip(_blocks_of(x, size), out.split(size)):
        if bias is None:
            torch.mm(block, transposed, out=target)
        else:
            torch.addmm(bias, block, transposed, out=target)
    return out[:rows]


def _blocks_of(x: Tensor, size: int) -> list[Tensor]:
    """Split x (n, ...) into aligned, contiguous blocks (size, ...), the last padded with zeros."""
    x = x.contiguous()
    if x.data_ptr() % _ALIGNMENT:
        x = x.clone()
    blocks = list(x.split(size)) if len(x) else []
    if blocks and blocks[-1].shape[0] < size:
        padded = x.new_zeros(size, *x.shape[1:])
        padded[: blocks[-1].shape[0]] = blocks[-1]
        blocks[-1] = padded
    return blocks


@trusted
def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function`, which maps each element by itself, to x in whole vectors."""
    if x.is_cuda:
        return function(x)  # the same code computes every element there
    flat = x.reshape(-1)
    count = flat.numel()
    if count % _VECTOR:
        flat = F.pad(flat, (0, -count % _VECTOR))
    parts = [function(piece) for piece in flat.split(PIECE)]
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[:count].view(x.shape)


@trusted
def head_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    """Return logits (m, V) of states (m, H), as `verl.models.logprobs.head_logits` does."""
    logits = linear(hidden, weight, out_dtype=torch.promote_types(hidden.dtype, torch.float32))
    if bias is not None:
        logits = logits.add_(bias)
    if head.cap is None:
        return logits if head.scale == 1.0 else logits.mul_(head.scale)
    logits.mul_(head.scale / head.cap)
    return elementwise(torch.tanh, logits).mul_(head.cap)


def draw(logits: Tensor, params: SamplingParams, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw as `verl.rollout.sampling.sample` does, for CPU.

    The sums of a lone row would be divided among the threads. So a row that is alone, or the only
    one of the last chunk, is computed together with a copy of itself.
    """
    rows = logits.shape[0]
    if rows % max(1, CHUNK_LOGITS // logits.shape[1]) == 1:
        logits = torch.cat([logits, logits[-1:]])
        keys = None if keys is None else torch.cat([keys, keys[-1:]])
    tokens, log_probs = sample(logits, params, keys)
    return tokens[:rows], log_probs[:rows]


@trusted
def prefill_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, facts: Facts) -> Tensor:
    """Return causal attention within each packed sequence, (N, Hq, Dv).

    q is (N, Hq, D), k (N, Hk, D), v (N, Hk, Dv). Sequences are computed one after the other, except
    by the variable-length kernel of CUDA, in which each tile belongs to one sequence.
    """
    if varlen_can(q, v, facts):
        return _varlen_attention(q, k, v, layout, facts)
    outputs = []
    start = 0
    for length in layout.lengths:
        mine = slice(start, start + length)
        alone = _layout_of_one(length, q.device)
        outputs.append(block_attention(q[mine], k[mine], v[mine], alone, facts))
        start += length
    return torch.cat(outputs)


def _varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, facts: Facts) -> Tensor:
    # The kernel must not be chosen by the neighbours: one for a longest sequence of 1 swaps queries
    # and heads, so 2 is stated at least, and a window is given also where every sequence of this
    # batch fits into it.
    longest = max(2, *layout.lengths)
    window = (-1 if facts.window is None else facts.window - 1, 0)
    grouped: dict[str, Any] = VARLEN_GQA if q.shape[1] != k.shape[1] else {}
    ends = layout.cu_seqlens
    out = varlen_attn(
        q,
        k,
        v,
        ends,
        ends,
        longest,
        longest,
        scale=facts.scale,
        window_size=window,
        **grouped,
        **_ONE_SPLIT,
    )

    assert isinstance(out, Tensor)
    return out


@functools.lru_cache(maxsize=256)
def _layout_of_one(length: int, device: torch.device) -> Layout:
    return Layout((length,), torch.tensor([0, length], dtype=torch.int32, device=device))


@trusted
def decode_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, facts: Facts) -> Tensor:
    """Return attention of one new token a row over gathered keys, (b, Hq, Dv), for CPU.

    q is (b, Hq, D), k (b, Hk, L, D), v (b, Hk, L, Dv). A row sees keys 0..position (b,), or the
    `window` newest of them. The entries behind them and their number (L) change no bit: blocks of
    BLOCK_KEYS keys are products of one shape, summed in the order of the keys, and a masked block
    adds zeros. All arithmetic is at least fp32.
    """
    precise = torch.promote_types(q.dtype, torch.float32)
    rows = k.shape[0]
    heads = k.shape[1]
    length = k.shape[2]
    groups = q.shape[1] // k.shape[1]
    blocks = ceil_div(length, BLOCK_KEYS)
    shape = (rows, heads, blocks)
    if extra := -length % BLOCK_KEYS:
        k = F.pad(k, (0, 0, 0, extra))
        v = F.pad(v, (0, 0, 0, extra))
    k = k.to(precise).reshape(-1, BLOCK_KEYS, k.shape[-1])
    v = v.to(precise).reshape(-1, BLOCK_KEYS, v.shape[-1])
    grouped = q.to(precise).view(rows, heads, 1, groups, -1)
    query = grouped.expand(*shape, groups, q.shape[-1]).reshape(-1, groups, q.shape[-1])
    scores = _products(query, k, transpose=True).mul_(facts.scale)
    if facts.cap is not None:
        scores = elementwise(torch.tanh, scores.div_(facts.cap)).mul_(facts.cap)

    seen = seen_keys(positions[:, None], blocks * BLOCK_KEYS, facts.window)
    scores = scores.view(*shape, groups, BLOCK_KEYS)
    scores.masked_fill_(~seen.view(rows, 1, blocks, 1, BLOCK_KEYS), float("-inf"))
    largest = scores.amax((2, 4), keepdim=True)  # (b, Hk, 1, G, 1)
    sinks = None
    if facts.sinks is not None:
        sinks = facts.sinks.to(precise).view(1, heads, 1, groups, 1)
        largest = largest.maximum(sinks)

    weights = elementwise(torch.exp, scores.sub_(largest))
    total = _in_order(weights.sum(-1, keepdim=True))
    if sinks is not None:
        total += elementwise(torch.exp, sinks - largest)[:, :, 0]
    values = _products(weights.view(-1, groups, BLOCK_KEYS), v, transpose=False)
    out = _in_order(values.view(*shape, groups, -1)).div_(total)
    return out.to(q.dtype).view(rows, heads * groups, -1)


def _products(a: Tensor, b: Tensor, *, transpose: bool) -> Tensor:
    """Return a (n, G, K) times b (n, K, N), or b (n, N, K) transposed: (n, G, N)."""
    count = a.shape[0]
    columns = b.shape[1] if transpose else b.shape[2]
    out = a.new_empty(round_up(count, BLOCK_PRODUCTS), a.shape[1], columns)
    left = _blocks_of(a, BLOCK_PRODUCTS)
    right = _blocks_of(b, BLOCK_PRODUCTS)
    for one, other, target in zip(left, right, out.split(BLOCK_PRODUCTS)):
        if transpose:
            other = other.transpose(1, 2)
        torch.bmm(one, other, out=target)
    return out[:count]


def _in_order(parts: Tensor) -> Tensor:
    """Sum parts (b, Hk, n, G, D) over n, one after the other: (b, Hk, G, D)."""
    total = torch.zeros_like(parts[:, :, 0])
    for part in parts.unbind(2):
        total += part
    return total


def make_invariant(model: PreTrainedModel, device: torch.device) -> None:
    """Make every module of `model`, except its attention, compute in a batch-invariant way.

    `device` is that of the model. Classes and parameters do not change, and parameters may be
    replaced by name. Experts run one after the other, which waits for the device in every layer, so
    such a model cannot be captured in a CUDA graph. Raises ConfigError for float64 on CUDA.
    `refuse_variant_operations` finds operations that still depend on the batch.
    """
    is_double = any(parameter.dtype == torch.float64 for parameter in model.parameters())
    if device.type == "cuda" and is_double:
        raise ConfigError(
            f"{SETTING} computes in bfloat16, float16 or float32 on CUDA, the engine's weights are "
            "float64. Set actor_rollout_ref.rollout.dtype to one of these."
        )

    under_mode: set[nn.Module] = set()
    for name, module in model.named_modules():
        if _is_linear(module):
            module.forward = functools.partial(_linear_forward, module)
        elif _is_activation(module):
            module.forward = functools.partial(elementwise, module.forward)
        elif not isinstance(module, (nn.Embedding, nn.LayerNorm)):
            dims = [parameter.ndim for parameter in module.parameters(recurse=False)]
            if any(dim > 1 for dim in dims):
                # A router or experts: its products are in its code, and its gate may be in that of
                # its owner.
                under_mode.add(model.get_submodule(name.rpartition(".")[0]))
            elif device.type == "cuda" and dims:
                # a norm: CUDA's sums over a row depend on the number of rows
                under_mode.add(module)

    if any(name.endswith("experts") for name, _ in model.named_modules()):
        # experts that are a list of plain layers have one implementation
        with suppress(ValueError):
            model.set_experts_implementation("eager")

    for module in under_mode:
        module.forward = functools.partial(_forward_under_mode, module.forward)


def _is_linear(module: nn.Module) -> bool:
    plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    return plain or type(module) is Conv1D


def _is_activation(module: nn.Module) -> bool:
    known = type(module).__module__ in ("torch.nn.modules.activation", "transformers.activations")
    row_wise = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)
    return known and not isinstance(module, row_wise) and not list(module.parameters())


def _linear_forward(module: Any, x: Tensor) -> Tensor:
    weight = module.weight.t() if type(module) is Conv1D else module.weight
    return linear(x, weight, module.bias)


def _forward_under_mode(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with InvariantOperations():
        return forward(*args, **kwargs)


def _matmul(x: Tensor, other: Tensor) -> Tensor:
    # Products of more than one matrix belong to attention, or are left to the audit.
    if other.ndim == 2 and x.ndim > 1:
        return linear(x, other.t())
    return torch.matmul(x, other)


def _row_reduction(
    function: Callable[..., Tensor], x: Tensor, dim: Any = None, keepdim: bool = False, **more: Any
):
    if not (x.is_cuda and is_last(dim, x) and x.dtype.is_floating_point and not more):
        if dim is None:
            return function(x, **more)
        return function(x, dim=dim, keepdim=keepdim, **more)

    total = _kernels().row_sum(x)
    if function is torch.mean:
        total = total.div_(x.shape[-1])
    total = total.to(x.dtype)
    return total.unsqueeze(-1) if keepdim else total


def _activation(function: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return elementwise(lambda piece: function(piece, *args, **kwargs), x)


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.linear: linear,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.sum, Tensor.sum), functools.partial(_row_reduction, torch.sum)),
    **dict.fromkeys((torch.mean, Tensor.mean), functools.partial(_row_reduction, torch.mean)),
    **{
        function: functools.partial(_activation, function)
        for function in (F.silu, F.gelu, F.sigmoid, F.softplus, torch.sigmoid, Tensor.sigmoid)
    },
}


class InvariantOperations(TorchFunctionMode):
    """Replace torch's products, activations and sums of a row inside the context.

    For modules that do arithmetic in their own code. Costs two microseconds for each call of torch,
    and nothing where a CUDA graph is replayed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Our own functions call with `out`: those calls stay.
        ours = None if "out" in kwargs else _REPLACED.get(func)
        return func(*args, **kwargs) if ours is None else ours(*args, **kwargs)
