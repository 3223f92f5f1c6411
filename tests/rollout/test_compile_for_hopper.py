"""Kernels compile for a Hopper GPU, on a machine without one.

The interpreter of the other tests takes other branches than the compiler: it knows no assembly.
"""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.cases import cases
from verl.rollout.eight_bits import DTYPES, Rows
from verl.rollout.embedded.kernels import paged_attention, shared_prefix
from verl.rollout.embedded.kernels.decode_launch import split_workspace
from verl.rollout.embedded.kernels.int8_product import int8_product
from verl.rollout.embedded.kernels.layers import add_rms_norm, swiglu
from verl.rollout.embedded.kernels.narrow_swiglu import gated_product
from verl.rollout.embedded.kernels.paged_attention import Fresh, decode_attention
from verl.rollout.embedded.kernels.rounding import quantize_rows
from verl.rollout.embedded.kernels.shared_prefix import SharedPrefixes, program_bytes

CPU = torch.device("cpu")
PAGE_SIZE = 16


class Hopper:
    """The driver of a device for which kernels are compiled, and on which none runs."""

    def __init__(self, target: GPUTarget | None = None) -> None:
        self._target = target or GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch) -> Iterator[list[Any]]:
    """Compile each kernel in place of its launch, and collect the results."""
    kernels: list[Any] = []
    used = set[JITFunction]()

    def launcher(kernel: JITFunction, grid: Any) -> Any:
        used.add(kernel)
        return lambda *args, **options: kernels.append(kernel.warmup(*args, grid=grid, **options))

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "__getitem__", launcher)
    yield kernels
    for kernel in used:
        kernel.device_caches.clear()  # the machine's own device may be another one


def assembly_of(compiled: list[Any]) -> str:
    """Return the PTX of the only kernel, of which there is machine code as well."""
    (kernel,) = compiled
    assert len(kernel.asm["cubin"]) > 1000
    return kernel.asm["ptx"]


def compile_attention(dim: int, dtype: torch.dtype, small: torch.dtype | None) -> None:
    """Compile decode attention of fresh tokens, cut into two splits."""
    rows, heads, kv_heads, pages = 2, 14, 2, 8
    stacked = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = stacked.split([heads, kv_heads, kv_heads], dim=1)
    cache = torch.zeros(2, pages, kv_heads, PAGE_SIZE, dim, dtype=small or dtype)
    scales: Any = {}
    if small is not None:
        scales = dict.fromkeys(("key_scales", "value_scales"), torch.zeros(cache.shape[1:-1]))
    rotary = torch.zeros(2, pages * PAGE_SIZE, dim, dtype=dtype)

    decode_attention(
        q,
        *cache,
        torch.zeros(rows, pages // rows, dtype=torch.int32),
        torch.arange(rows, dtype=torch.int32),
        torch.full([rows], 20, dtype=torch.int32),
        torch.empty(rows, heads, dim, dtype=dtype),
        **scales,
        scale=1.0,
        num_splits=2,
        workspace=split_workspace(rows, heads, dim, 2, CPU),
        fresh=Fresh(k, v, *rotary, None, None, 0.0),
    )


@pytest.mark.parametrize(
    ("dim", "dtype", "small"),
    cases(
        [64, 128, 256],
        [torch.bfloat16, torch.float32],
        [None, *DTYPES.values()],
        quick=lambda *case: case == (128, torch.bfloat16, torch.int8),
    ),
)
def test_attention_of_fresh_tokens_in_splits(compiled, dim, dtype, small):
    compile_attention(dim, dtype, small)
    assembly = assembly_of(compiled)
    if small == torch.int8 and dtype == torch.bfloat16:
        assert "sub.f16x2" in assembly, "integers are converted one by one"


def compile_shared_prefix(group: int, dim: int, small: torch.dtype | None) -> None:
    """Compile attention to shared pages and to the rest of each row, for two key heads."""
    rows = 8
    cache = torch.zeros(2, 8, 2, PAGE_SIZE, dim, dtype=small or torch.bfloat16)
    scales: Any = {}
    if small is not None:
        scales = dict.fromkeys(("key_scales", "value_scales"), torch.zeros(cache.shape[1:-1]))
    decode_attention(
        torch.zeros(rows, 2 * group, dim, dtype=torch.bfloat16),
        *cache,
        torch.zeros(rows, 4, dtype=torch.int32),
        torch.arange(rows, dtype=torch.int32),
        torch.full([rows], 20, dtype=torch.int32),
        torch.empty(rows, 2 * group, dim, dtype=torch.bfloat16),
        **scales,
        scale=1.0,
        prefixes=SharedPrefixes.allocate(rows, CPU)[0],
    )


def test_three_programs_of_attention_fit_on_a_multiprocessor(compiled):
    compile_attention(128, torch.bfloat16, None)
    (kernel,) = compiled
    assert kernel.metadata.shared <= 227 * 1024 // 3
    assert ".maxnreg 168" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("dim", "small"),
    cases([64, 128], [None, *DTYPES.values()], quick=lambda *case: case == (128, None)),
)
def test_shared_pages_are_read_while_the_rest_begins(compiled, monkeypatch, dim, small):
    for module in (shared_prefix, paged_attention):
        monkeypatch.setattr(module, "overlaps", lambda device: True)
    compile_shared_prefix(7, dim, small)

    blocks, rest = (kernel.asm["ptx"] for kernel in compiled)
    assert "griddepcontrol.launch_dependents" in blocks
    # Before the wait, partial results may be those of an earlier layer.
    begin, end = rest.split("griddepcontrol.wait")
    assert "ld.global.cg" in end
    assert "ld.global.cg" not in begin
    assert "st.global" not in begin
    assert "wgmma.mma_async" in blocks, "64 queries fill the tensor cores"


@pytest.mark.parametrize(
    ("capability", "group", "dim", "small"),
    cases(
        [80, 90, 100, 120],
        [8, 16],
        [64, 128],
        [None, torch.int8],
        quick=lambda *case: case in ((80, 16, 128, None), (90, 16, 128, None)),
    ),
)
def test_programs_of_shared_pages_take_the_memory_that_is_counted(
    compiled, monkeypatch, capability, group, dim, small
):
    """More than a device has would be an error at the launch."""
    monkeypatch.setattr(driver, "_active", Hopper(GPUTarget("cuda", capability, 32)))
    compile_shared_prefix(group, dim, small)
    blocks, _ = compiled
    counted = program_bytes(8 * group, dim, from_shared_memory=capability in (90, 100))
    slack = 1024  # barriers, and sums over warps
    assert blocks.metadata.shared <= counted + slack
    if small is None:
        assert counted <= 1.5 * blocks.metadata.shared, "few programs are refused for nothing"


def test_attention_takes_no_option_that_amd_lacks(compiled, monkeypatch):
    monkeypatch.setattr(driver, "_active", Hopper(GPUTarget("hip", "gfx942", 64)))
    compile_shared_prefix(4, 64, None)
    assert len(compiled) == 2


@pytest.mark.slow
@pytest.mark.parametrize("small", DTYPES.values())
@pytest.mark.parametrize("part", ["rows", "swiglu", "norm"])
def test_rounding(compiled, small, part):
    rows = Rows.empty((2, 8960), small, CPU)
    x = torch.zeros(2, 8960, dtype=torch.bfloat16)
    rotated = small == torch.int8
    if part == "rows":
        quantize_rows(x, rows, rotated=rotated)
    elif part == "swiglu":
        swiglu(torch.cat([x, x], -1), rows=rows, rotated=rotated)
    else:
        parts = [x, torch.zeros(3, *x.shape)]
        add_rms_norm(parts, x[0], 1e-6, writes_sum=True, rows=rows, rotated=rotated)
    assert "bar.sync" in assembly_of(compiled), "a row has a sum over its warps"


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "may_split"), [(64, True), (64, False), (512, False)])
def test_a_product_of_integers_runs_on_tensor_cores(compiled, rows, may_split):
    x = Rows.empty((rows, 8960), torch.int8, CPU)
    weight = Rows.empty((1536, 8960), torch.int8, CPU)
    int8_product(x, weight, None, torch.bfloat16, may_split=may_split)
    assert ".s32.s8.s8" in assembly_of(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 64])
def test_a_product_of_few_rows_runs_on_tensor_cores(compiled, rows):
    x = torch.zeros(rows, 1536, dtype=torch.bfloat16)
    gated_product(x, torch.zeros(2 * 8960, 1536, dtype=torch.bfloat16))
    assembly = assembly_of(compiled)
    assert "wgmma" in assembly
    assert "cp.async" in assembly, "weights are loaded ahead"
