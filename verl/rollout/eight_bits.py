"""Matrices in eight bits (float8_e4m3fn or int8) with one scale for each row.

Pages of keys and values are kept in the same way, with a row for each token and head.

A row x is kept as v = x / s with the scale s = max |x| / 448 (int8: 127), so its largest number
becomes the format's largest. A product needs one multiplication for each number of its output:
y_ij = a_i b_j sum_k v_ik w_jk.

A float8_e4m3fn is off by up to 1/16 of itself, an int8 by up to 1/254 of the row's largest number.
Where numbers are distributed like a Gaussian, int8 is nearer: the root of their mean square is a
quarter of the largest of some thousand. The inputs of products have longer tails: a few channels
are much larger than the others, and silu(gate) * up is a product itself. `rotate` brings both
nearer to Gaussians, as QuaRot does (Ashkboos et al. 2024, section 4): products of rotated inputs
and rotated weights are those of the originals.

Scales for blocks of 128 x 128 weights would cost more than they save. A scale for a row of 3,584
weights adds 0.11 % to their bytes, one for a block 0.02 %. But with blocks, every sum of 128
products is multiplied by itself in fp32. At an H100's peak speeds (67 and 1,979 TFLOP/s) this takes
23 % of the time of the products. Nor are finer scales more exact for float8_e4m3fn: the format has
an exponent, so numbers down to 2^-14 of a row's largest keep their relative precision of 2^-4.
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
LARGEST = {FP8: 448.0, torch.int8: 127.0}  # of the formats
# by rollout.quantization, for weights, and rollout.kv_cache_dtype, for keys and values
DTYPES = {"fp8": FP8, "int8": torch.int8}
SCALE_BYTES = 4  # of a row
SMALLEST_ROW = 1e-12  # the largest number of a row counts at least as this: zeros have a scale, too
LONGEST_WITH_BIAS = 16_384
MULTIPLE = 16  # products of eight-bit matrices need sizes that are multiples of this
ROTATED = 8  # adjacent numbers of a row that `rotate` mixes; a thread of a kernel loads as many
# Tensor cores of Hopper add up eight-bit products with 14 bits. Moving their sums to fp32 registers
# every 128 products costs a part of the speed, and the numbers themselves are rounded to 4 bits.
FAST_ACCUMULATION = True


class Rows(NamedTuple):
    """A matrix (M, K) that is `values * scales`."""

    values: Tensor  # (M, K) float8_e4m3fn or int8
    scales: Tensor  # (M, 1) float32

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "Rows":
        """Allocate a matrix."""
        values = torch.empty(shape, dtype=dtype, device=device)
        return cls(values, torch.empty(shape[0], 1, dtype=torch.float32, device=device))

    def wide(self) -> Tensor:
        """Return the matrix in float32."""
        return self.values.float() * self.scales


class Unscaled(NamedTuple):
    """A product (M, N) that is `values * rows * columns.T`. Its reader multiplies."""

    values: Tensor  # (M, N)
    rows: Tensor  # (M, 1) float32
    columns: Tensor  # (N, 1) float32


def rotates(dtype: torch.dtype) -> bool:
    """Return whether weights and inputs of linear layers in `dtype` are rotated first."""
    return dtype == torch.int8


def quantize(
    x: Tensor, *, dtype: torch.dtype = FP8, out: Rows | None = None, rotated: bool = False
) -> Rows:
    """Round the rows of x (M, K), or of `rotate(x)`, to eight bits.

    They go to `out`, or to new memory in `dtype`.
    """
    rows = Rows.empty(x.shape, dtype, x.device) if out is None else out
    if x.is_cuda:
        # Triton exists only with CUDA.
        kernels = importlib.import_module("verl.rollout.embedded.kernels.rounding")
        return kernels.quantize_rows(x, rows, rotated=rotated)

    format_largest = LARGEST[rows.values.dtype]
    wide = rotate(x.float()) if rotated else x.float()
    largest = wide.abs().amax(-1, keepdim=True).clamp(min=SMALLEST_ROW)
    rows.scales.copy_(largest / format_largest)
    # A number through a tensor would be the tensor's reciprocal times the number, rounded twice.
    factor = torch.tensor(format_largest) / largest
    scaled = (wide * factor).clamp(-format_largest, format_largest)
    if rows.values.dtype == torch.int8:
        scaled = (scaled + 0.5).floor()
    rows.values.copy_(scaled.to(rows.values.dtype))
    return rows


def rotate(x: Tensor) -> Tensor:
    """Multiply each `ROTATED` adjacent numbers of x (..., K) by a Hadamard matrix of ones and -1.

    Twice gives `ROTATED` times x.
    """
    for distance in (1, 2, 4):
        first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
    return x


def cached_bytes(numbers: int, dtype: torch.dtype) -> int:
    """Return the bytes of the key and the value of a token and head, `numbers` together.

    In eight bits, each of the two has a scale.
    """
    scales = 2 * SCALE_BYTES if dtype in LARGEST else 0
    return numbers * dtype.itemsize + scales


def product(
    x: Rows, weight: Rows, bias: Tensor | None, dtype: torch.dtype, *, may_split: bool = False
) -> Tensor:
    """Return x W^T + b (M, N) of x (M, K), W (N, K) and b (N,), rounded to `dtype`.

    x and W are in one format. With `may_split` and no bias, a product of int8 may be S parts
    (S, M, N) in fp32, whose sum it is.
    """
    if not x.values.is_cuda:
        return _plain_product(x, weight, bias, dtype)
    if x.values.dtype == torch.int8:
        kernels = importlib.import_module("verl.rollout.embedded.kernels.int8_product")
        return kernels.int8_product(x, weight, bias, dtype, may_split=may_split)
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


def _plain_product(x: Rows, weight: Rows, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return `product` on a CPU, where torch 2.11 takes no scales of rows."""
    # Sums of 127 * 127 * K are exact in float64.
    exact = x.values.double() @ weight.values.double().t()
    wide = exact.float() * x.scales * weight.scales.t()
    if bias is not None:
        wide += bias.float()
    return wide.to(dtype)


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


class EightBitLinear(nn.Linear):
    """A linear layer with its weight in eight bits; it rounds its inputs by itself."""

    scales: Tensor  # of the weight, (N, 1)

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype):
        super().__init__(inputs, outputs, bias=bias, device="meta")
        self.dtype = dtype

    @property
    def rows(self) -> Rows:
        """Return the weight."""
        return Rows(self.weight, self.scales)

    def take(self, weight: Tensor) -> None:
        """Round a new weight (N, K) to the memory of the old one."""
        rotated = rotates(self.dtype)
        quantize(weight / ROTATED if rotated else weight, out=self.rows, rotated=rotated)

    def forward(self, input: Tensor) -> Tensor:
        """Return input (..., K) times the transposed weight, (..., N), in the input's dtype."""
        x = input.reshape(-1, input.shape[-1])
        rows = quantize(x, dtype=self.dtype, rotated=rotates(self.dtype))
        out = product(rows, self.rows, self.bias, input.dtype)
        return out.view(*input.shape[:-1], -1)


def replace_linears(module: PreTrainedModel, quantization: str) -> dict[str, EightBitLinear]:
    """Replace the linear layers within the decoder layers of a module on meta.

    `quantization` is a key of `DTYPES`. Returns the layers by the names of their weights.
    Embeddings, norms and the head stay.
    """
    replaced: dict[str, EightBitLinear] = {}
    dtype = DTYPES[quantization]
    body: Any = text_body(module)
    prefix = next(name for name, part in module.named_modules() if part is body)
    for path, linear in list(body.layers.named_modules()):
        if not isinstance(linear, nn.Linear):
            continue

        name = ".".join(part for part in (prefix, "layers", path) if part)
        sizes = (linear.in_features, linear.out_features)
        if any(size % MULTIPLE for size in sizes):
            raise ConfigError(
                f"actor_rollout_ref.rollout.quantization={quantization} needs linear layers with "
                f"sizes that are multiples of {MULTIPLE}, got {sizes[0]} inputs and {sizes[1]} "
                f"outputs in '{name}'. Set it to null."
            )

        mine = EightBitLinear(*sizes, bias=linear.bias is not None, dtype=dtype)
        module.set_submodule(name, mine)
        replaced[f"{name}.weight"] = mine
    return replaced
