"""A fingerprint depends on every bit and every position, and fingerprints of parts add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.interpreter import interpreted
from verl.weight_sync import ProofSchedule
from verl.weight_sync.fingerprint import Part, fingerprints, parts_of, signed

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int8)


def of(tensor: torch.Tensor, part: Part | None = None) -> int:
    return fingerprints([tensor], part and [part]).item()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fingerprint_is_the_documented_sum(dtype: torch.dtype):
    tensor = drawn(5, 7, dtype=dtype)
    bits = tensor.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    ).flatten()
    total = 0
    for place, value in enumerate(bits.tolist()):
        mixed = place * 2654435761 % 2**32
        mixed ^= mixed >> 15
        mixed |= 1
        total += (mixed - 2**32 if mixed >= 2**31 else mixed) * value
    assert of(tensor) == signed(total, 64)


@settings(max_examples=50)
@given(place=st.integers(0, 40_000 - 1), bit=st.integers(0, 15))
def test_every_bit_changes_the_fingerprint(place: int, bit: int):
    tensor = drawn(200, 200)
    damaged = tensor.clone()
    damaged.view(torch.int16).view(-1)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert of(damaged) != of(tensor)


def test_every_position_changes_the_fingerprint():
    tensor = drawn(200, 100)
    rows = tensor.clone()
    rows[[3, 150]] = tensor[[150, 3]]
    columns = tensor.clone()
    columns[:, [0, 1]] = tensor[:, [1, 0]]
    others = [
        rows,
        columns,
        tensor.roll(1),
        tensor.roll(1, 0),
        tensor.view(100, 200).T.contiguous(),
        tensor.flip(0),
    ]

    seen = {of(other) for other in [tensor, *others]}
    assert len(seen) == len(others) + 1
    assert of(tensor.T) == of(tensor.T.contiguous()), "memory order instead of element order"


@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    dim=st.sampled_from([-1, -2]),
    halves=st.booleans(),
    ranks=st.integers(1, 3),
)
@settings(max_examples=60)
def test_fingerprints_of_parts_add_up_to_the_whole(
    shape: list[int], dim: int, halves: bool, ranks: int
):
    dim = -1 if len(shape) == 1 else dim
    shape[dim] *= 2 * ranks
    whole = drawn(*shape)
    total = 0
    for rank in range(ranks):

        def cut(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            pieces = [part.chunk(ranks, dim)[rank] for part in tensor.chunk(1 + halves, dim)]
            return torch.cat(pieces, dim)

        taken = cut(whole).view(-1, *(1, *cut(whole).shape)[-2:])
        found = parts_of(cut, whole.shape)
        assert sum(taken[place].numel() for place, _ in found) == taken.numel()
        total += sum(of(taken[place], part) for place, part in found)
    assert signed(total, 64) == of(whole)


@interpreted
def test_the_kernel_computes_the_same():
    import verl.weight_sync.fingerprint_kernel as kernel
    from verl.weight_sync.fingerprint import _INTEGERS

    kernel._BLOCK = 64
    kernel._STEPS = 2
    kernel._SIZE = 128
    tensors = [
        drawn(37, 11, dtype=torch.float32),
        drawn(300),
        drawn(1000)[1:],
        drawn(5, dtype=torch.float64),
    ]
    tensors += [drawn(256), drawn(7, dtype=torch.int8), drawn(0)]
    parts = [Part()] * 3 + [Part(3, 2, 9), Part(1 << 33), Part(5), Part()]
    bits = [tensor.view(_INTEGERS[tensor.itemsize]).flatten() for tensor in tensors]
    assert kernel.sum_of_bits(bits, parts).tolist() == fingerprints(tensors, parts).tolist()


@pytest.mark.parametrize(
    ("interval", "proved"), [(0, [0]), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])]
)
def test_the_interval_determines_the_verified_hand_overs(interval: int, proved: list[int]):
    schedule = ProofSchedule(interval)
    assert [number for number in range(7) if schedule.next() is not None] == proved
