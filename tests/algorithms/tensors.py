"""Random batches of float64 token columns for the tests."""

import torch
from hypothesis import strategies as st

seeds = st.integers(0, 2**31)
shapes = st.tuples(st.integers(1, 6), st.integers(1, 9))


def random_mask(seed: int, rows: int, width: int) -> torch.Tensor:
    """Response masks with holes in the middle, padding at the end and perhaps rows without any
    token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, width + 1, (rows, 1), generator=generator)
    holes = torch.rand(rows, width, generator=generator) < 0.3
    return ((torch.arange(width) < lengths) & ~holes).long()


def random_columns(seed: int, rows: int, width: int, count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return [
        torch.randn(rows, width, generator=generator, dtype=torch.float64) for _ in range(count)
    ]


def widen(column: torch.Tensor, places: torch.Tensor, fill: float) -> torch.Tensor:
    """The column with extra positions holding `fill`: column i goes to position places[i] of a
    wider one."""
    wide = torch.full((len(column), int(places[-1]) + 3), fill, dtype=column.dtype)
    wide[:, places] = column
    return wide
