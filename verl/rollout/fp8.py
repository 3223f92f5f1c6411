"""Matrices in eight bits (float8_e4m3fn) with one scale for each row.

Pages of keys and values are kept in the same way, with a row for each token and head.

A row x is kept as v = x / s with the scale s = max |x| / 448, so its largest number becomes the
format's largest. A product needs one multiplication for each number of its output:
y_ij = a_i b_j sum_k v_ik w_jk.

Scales for blocks of 128 x 128 weights would cost more than they save. A scale for a row of 3,584
weights adds 0.11 % to their bytes, one for a block 0.02 %. But with blocks, every sum of 128
products is multiplied by itself in fp32. At an H100's peak speeds (67 and 1,979 TFLOP/s) this takes
23 % of the time of the products. Nor are finer scales more exact: the format has an exponent, so
numbers down to 2^-14 of a row's largest keep their relative precision of 2^-4.
"""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.vision import text_body
from verl.utils.errors import ConfigError

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of the format
SCALE_BYTES = 4  # of a row
CACHE_DTYPES = {"fp8": FP8}  # of keys and values, by rollout.kv_cache_dtype other than auto
SMALLEST_ROW = 1e-12  # the largest number of a row counts at least as this: zeros have a scale, too
LONGEST_WITH_BIAS = 16_384
MULTIPLE = 16  # products of eight-bit matrices need sizes that are multiples of this
# Tensor cores of Hopper add up eight-bit products with 14 bits. Moving their sums to fp32 registers
# every 128 products costs a part of the speed, and the numbers themselves are rounded to 4 bits.
FAST_ACCUMULATION = True


class Rows(NamedTuple):
    """A matrix (M, K) that is `values * scales`."""

    values: Tensor  # (M, K) float8_e4m3fn
    scales: Tensor  # (M, 1) float32

    @classmethod
    def empty(cls, shape: Sequence[int], device: torch.device) -> "Rows":
        """Allocate a matrix."""
        values = torch.empty(shape, dtype=FP8, device=device)
        return cls(values, torch.empty(shape[0], 1, dtype=torch.float32, device=device))

    def wide(self) -> Tensor:
        """Return the matrix in float32."""
        return self.values.float() * self.scales


class Unscaled(NamedTuple):
    """A product (M, N) that is `values * rows * columns.T`. Its reader multiplies."""

    values: Tensor  # (M, N)
    rows: Tensor  # (M, 1) float32
    columns: Tensor  # (N, 1) float32


def quantize(x: Tensor, out: Rows | None = None) -> Rows:
    """Round the rows of x (M, K) to eight bits."""
    rows = Rows.empty(x.shape, x.device) if out is None else out
    if x.is_cuda:
        # Triton exists only with CUDA.
        kernels = importlib.import_module("verl.rollout.embedded.kernels.fp8")
        return kernels.quantize_rows(x, rows)

    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_ROW)
    rows.scales.copy_(largest / LARGEST)
    # LARGEST / largest would be largest.reciprocal() * LARGEST, rounded twice.
    factor = torch.tensor(LARGEST) / largest
    scaled = (wide * factor).clamp(-LARGEST, LARGEST)
    rows.values.copy_(scaled.to(FP8))
    return rows


def cached_bytes(numbers: int, dtype: torch.dtype) -> int:
    """Return the bytes of the key and the value of a token and head, `numbers` together.

    In eight bits, each of the two has a scale.
    """
    scales = 2 * SCALE_BYTES if dtype == FP8 else 0
    return numbers * dtype.itemsize + scales


def product(x: Rows, weight: Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x W^T + b (M, N) of x (M, K), W (N, K) and b (N,), rounded to `dtype`."""
    if bias is not None and x.values.shape[1] > LONGEST_WITH_BIAS:
        # cuBLAS refuses K = 18,944 with a bias, which no known family has.
        return product(x, weight, None, dtype) + bias
    return torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=x.scales,
        scale_b=weight.scales.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )


def unscaled_product(x: Rows, weight: Rows, one: Tensor, dtype: torch.dtype) -> Unscaled:
    """Return x W^T (M, N) of x (M, K) and W (N, K) in `dtype`, with their scales apart.

    `one` () is a 1 in fp32 on their device. cuBLAS does not cut K where rows have scales: on an
    H200, the last product of a 7B layer takes 47 us with 16 to 256 rows, and in bfloat16 38 to 54.
    Without scales it takes 21 to 31 us.
    """
    values = torch._scaled_mm(
        x.values,
        weight.values.t(),
        scale_a=one,
        scale_b=one,
        out_dtype=dtype,
        use_fast_accum=FAST_ACCUMULATION,
    )
    return Unscaled(values, x.scales, weight.scales)


class Fp8Linear(nn.Linear):
    """A linear layer with its weight in eight bits; it rounds its inputs by itself."""

    scales: Tensor  # of the weight, (N, 1)

    @property
    def rows(self) -> Rows:
        """Return the weight."""
        return Rows(self.weight, self.scales)

    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., K) times the transposed weight, (..., N), in the input's dtype."""
        rows = quantize(input.reshape(-1, input.shape[-1]))
        out = product(rows, self.rows, self.bias, input.dtype)
        return out.view(*input.shape[:-1], -1)


def replace_linears(module: PreTrainedModel) -> dict[str, Fp8Linear]:
    """Replace the linear layers within the decoder layers of a module on meta.

    Returns them by the names of their weights. Embeddings, norms and the head stay.
    """
    replaced: dict[str, Fp8Linear] = {}
    body: Any = text_body(module)
    prefix = next(name for name, part in module.named_modules() if part is body)
    for path, linear in list(body.layers.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue

        name = ".".join(part for part in (prefix, "layers", path) if part)
        sizes = (linear.in_features, linear.out_features)
        if any(size % MULTIPLE for size in sizes):
            raise ConfigError(
                "actor_rollout_ref.rollout.quantization=fp8 needs linear layers with sizes that "
                f"are multiples of {MULTIPLE}, got {sizes[0]} inputs and {sizes[1]} outputs in '{name}'."
                " Set it to null."
            )

        mine = Fp8Linear(*sizes, bias=linear.bias is not None, device="meta")
        module.set_submodule(name, mine)
        replaced[f"{name}.weight"] = mine
    return replaced
