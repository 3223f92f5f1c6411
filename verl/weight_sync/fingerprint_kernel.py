"""Compute `fingerprints` on a GPU in Triton: one or two launches read every tensor once."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.utils.arithmetic import ceil_div
from verl.weight_sync.fingerprint import Part

_BLOCK = 2048
_STEPS = 32
_SIZE = _BLOCK * _STEPS  # elements of a program
_MULTIPLIER = tl.constexpr(-1640531535)
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def sum_of_bits(bits: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """Compute the sums that `verl.weight_sync.fingerprint.fingerprints` defines.

    Args:
        bits: flat contiguous integers on one device.
        parts: their places in the whole tensors.
    """
    device = bits[0].device
    sums = torch.zeros(len(bits), dtype=torch.int64, device=device)
    table = [(values.data_ptr(), values.numel(), *part) for values, part in zip(bits, parts)]

    # (item size, strided, full) -> number of the tensor, its first block, end of its blocks
    blocks: dict[tuple[int, bool, bool], list[tuple[int, int, int]]] = {}
    for number, (values, (address, size, _, run, _)) in enumerate(zip(bits, table)):
        # Loads are wide and not masked where blocks are whole and the address allows it.
        whole = size // _SIZE * (address % 16 == 0)
        all_of_it = ceil_div(size, _SIZE)
        for full, first, end in ((True, 0, whole), (False, whole, all_of_it)):
            if first < end:
                blocks.setdefault((values.itemsize, run > 0, full), []).append((number, first, end))
    lists = [_numbered(np.array(each)) for each in blocks.values()]

    # One copy for everything. The host waits for nothing: pageable memory is read before `to`
    # returns.
    numbers = np.concatenate(
        [np.array(table, dtype=np.int64).ravel(), *(each.ravel() for each in lists)]
    )
    on_device = torch.from_numpy(numbers).to(device, non_blocking=True)

    start = 5 * len(table)
    for (itemsize, strided, full), each in zip(blocks, lists):
        _sum_of_bits[(len(each),)](
            on_device,
            on_device[start:],
            sums,
            ELEMENT=_TYPES[itemsize],
            FULL=full,
            STRIDED=strided,
            BLOCK=_BLOCK,
            STEPS=_STEPS,
            num_warps=8,
        )
        start += each.size
    return sums


def _numbered(blocks: np.ndarray) -> np.ndarray:
    """List every block: `blocks` (n, 3), with the first block and the end of each tensor.

    Returns:
        (all blocks, 2): number of the tensor, and of the block in it.
    """
    tensors, first, end = blocks.T
    counts = end - first
    before = np.repeat(np.cumsum(counts) - counts - first, counts)
    own = np.arange(counts.sum()) - before
    return np.stack([np.repeat(tensors, counts), own], 1)


@triton.jit
def _sum_of_bits(
    TABLE,
    NUMBERS,
    SUMS,
    ELEMENT: tl.constexpr,
    FULL: tl.constexpr,
    STRIDED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Add the products of one block to its tensor's sum.

    TABLE (n, 5): address, elements, start, run, stride.
    NUMBERS (programs, 2): tensor, block in it.
    FULL: the block is whole and the address a multiple of 16: loads are wide and not masked.
    """
    program = tl.program_id(0)
    tensor = tl.load(NUMBERS + 2 * program)
    first = tl.load(NUMBERS + 2 * program + 1) * (BLOCK * STEPS)
    row = TABLE + 5 * tensor
    source = tl.load(row).to(tl.pointer_type(ELEMENT))
    if FULL:
        source = tl.multiple_of(source, 16)
    size = tl.load(row + 1)

    start = tl.load(row + 2)
    run = tl.load(row + 3)
    stride = tl.load(row + 4)
    products = tl.zeros([BLOCK], tl.int64)
    within = tl.arange(0, BLOCK)
    # In 32 bits, since instructions limit the kernel, not memory. Higher bits do not matter.
    base = (start + first).to(tl.int32) * _MULTIPLIER
    source += first

    for step in range(STEPS):
        offsets = step * BLOCK + within
        if FULL:
            bits = tl.load(source + offsets)
        else:
            bits = tl.load(source + offsets, mask=first + offsets < size, other=0)
        if STRIDED:
            places = first + offsets
            places = places // run * stride + places % run + start
            mixed = places.to(tl.int32) * _MULTIPLIER
        else:
            mixed = base + offsets * _MULTIPLIER
        mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) | 1
        products += mixed.to(tl.int64) * bits.to(tl.int64)

    tl.atomic_add(SUMS + tensor, tl.sum(products, 0))
