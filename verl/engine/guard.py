"""Find the rows that made an update fail; runs only after a failure."""

from collections.abc import Callable, Sequence

import numpy as np

from verl.distributed.collectives import ALONE, Axis, gather_objects, sum_of
from verl.distributed.mesh import Mesh

MOST_OFFENDERS = 8  # that are looked for on a rank


def find_offenders(
    groups: Sequence[Sequence[int]], is_finite: Callable[[Sequence[int]], bool]
) -> list[int]:
    """Find rows without finite loss or gradient, about MOST_OFFENDERS, by halving groups.

    A group that fails although both its halves pass (their sum overflows) is returned whole. Costs
    about 2 log2(group size) passes per offender.
    """
    found: list[int] = []

    def search(failing: Sequence[int]) -> None:
        if len(found) >= MOST_OFFENDERS:
            return
        if len(failing) == 1:
            found.append(failing[0])
            return
        middle = len(failing) // 2
        worse = [half for half in (failing[:middle], failing[middle:]) if not is_finite(half)]
        for half in worse:
            search(half)
        if not worse:
            found.extend(failing)

    for group in groups:
        if len(found) < MOST_OFFENDERS and not is_finite(group):
            search(group)
    return found


def find_offenders_in_turns(
    groups: Sequence[Sequence[int]], is_finite: Callable[[Sequence[int]], bool], mesh: Mesh
) -> list[int]:
    """Find this rank's offenders where every pass needs all ranks and adds up their gradients.

    Ranks with rows of their own search one after the other, while the others take part in each pass
    with no rows at all: a value that is not finite then belongs to the rank that searches.
    `is_finite` must give all ranks the same answer.
    """
    found: list[int] = []
    for turn in range(mesh.data.size):
        if turn == mesh.data.rank:

            def announced(rows: Sequence[int]) -> bool:
                sum_of(1, mesh.world)
                return is_finite(rows)

            found = find_offenders(groups, announced)
            sum_of(0, mesh.world)
        else:
            while sum_of(0, mesh.world):
                is_finite([])
    return found


def row_name(row: int, uids: np.ndarray | None, data: Axis = ALONE) -> str:
    """Return the name of a row in messages, with its rank where it is not alone along `data`."""
    uid = "" if uids is None else f" (uid {uids[row]})"
    place = "" if data.size == 1 else f" of data-parallel rank {data.rank}"
    return f"row {row}{uid}{place}"


def names_on_all_ranks(rows: Sequence[int], uids: np.ndarray | None, data: Axis) -> list[str]:
    """Return the names of the rows of all ranks along `data`. Every rank must call it."""
    mine = [row_name(row, uids, data) for row in rows]

    names: list[str] = []
    for found in gather_objects(mine, data):
        names += found
    return names
