"""`fingerprints` on a GPU in Triton: every tensor is read once, all of them by one launch or two."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.weight_sync.fingerprint import Part

_BLOCK, _STEPS = 2048, 32
_SIZE = _BLOCK * _STEPS  # elements of a program
_MULTIPLIER = tl.constexpr(-1640531535)
_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


def sum_of_bits(bits: Sequence[Tensor], parts: Sequence[Part]) -> Tensor:
    """See `verl.weight_sync.fingerprint.fingerprints`. `bits`: flat contiguous integers on one device."""
    device = bits[0].device
    sums = torch.zeros(len(bits), dtype=torch.int64, device=device)
    rows = [(values.data_ptr(), values.numel(), *part) for values, part in zip(bits, parts)]
    # The host waits for nothing: pageable memory is read before `to` returns.
    table = torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
    # Where blocks are whole and the address allows it, loads are wide and not masked.
    whole = np.array([values.numel() // _SIZE * (values.data_ptr() % 16 == 0) for values in bits])
    blocks = np.array([-(-values.numel() // _SIZE) for values in bits])
    kinds = np.array([(values.itemsize, part.run > 0) for values, part in zip(bits, parts)])
    for itemsize, strided in np.unique(kinds, axis=0).tolist():
        numbers = np.flatnonzero((kinds == (itemsize, strided)).all(1))
        for full, first, end in ((True, 0 * whole, whole), (False, whole, blocks)):
            todo = _numbered(numbers, first[numbers], end[numbers] - first[numbers])
            if len(todo):
                _sum_of_bits[(len(todo),)](
                    table, torch.from_numpy(todo).to(device, non_blocking=True), sums,
                    ELEMENT=_TYPES[itemsize], FULL=full, STRIDED=bool(strided), BLOCK=_BLOCK, STEPS=_STEPS, num_warps=8,
                )  # fmt: skip
    return sums


def _numbered(tensors: np.ndarray, first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(all blocks, 2): number of the tensor, and of the block in it, for `counts` blocks of each from `first` on."""
    before = np.repeat(np.cumsum(counts) - counts - first, counts)
    return np.stack([np.repeat(tensors, counts), np.arange(counts.sum()) - before], 1)


@triton.jit
def _sum_of_bits(
    TABLE, NUMBERS, SUMS, ELEMENT: tl.constexpr, FULL: tl.constexpr, STRIDED: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """TABLE (n, 5): address, elements, start, run, stride. NUMBERS (programs, 2): tensor, block in it.

    FULL: the block is whole and the address a multiple of 16, so that loads are wide and not masked.
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
    # In 32 bits, whatever is lost above: instructions for an element are what the kernel waits for, not memory.
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
            mixed = (places // run * stride + places % run + start).to(tl.int32) * _MULTIPLIER
        else:
            mixed = base + offsets * _MULTIPLIER
        mixed = (mixed ^ ((mixed >> 15) & 0x1FFFF)) | 1
        products += mixed.to(tl.int64) * bits.to(tl.int64)
    tl.atomic_add(SUMS + tensor, tl.sum(products, 0))
