"""Agree on the passes over a mini-batch: where ranks differ, a collective would never end."""

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from verl.distributed.collectives import gather_objects
from verl.distributed.mesh import Mesh
from verl.engine.microbatch import Plan, TokenBudget, plan_micro_batches
from verl.engine.packing import MiniBatch
from verl.utils.errors import DataError
from verl.utils.launcher import run_rank

# Activations of a pass stay nearer to the caches: on two cores, the update of a small model on
# 10,000 tokens took 0.6 s in passes of 4,096 tokens and 0.74 s in one.
CPU_PASS_TOKENS = 4096


class _Planned(NamedTuple):
    """The passes of one rank."""

    phase: str
    size: str
    passes: int
    rows: int
    tokens: int
    share: int  # ranks of one share have the same rows
    digest: int  # of the lengths and of the rows of every pass

    def __str__(self) -> str:
        return (
            f"{self.phase}: {self.passes} passes of at most {self.size} over {self.rows} rows with "
            f"{self.tokens} tokens, plan {self.digest:08x}"
        )


def plan_of_all_ranks(
    mini_batch: MiniBatch, asked: TokenBudget, current: TokenBudget, mesh: Mesh
) -> Plan:
    """Return the row numbers of each pass of this rank.

    Every rank gets as many passes as the one that needs most; those in excess are empty. On a CPU
    passes near CPU_PASS_TOKENS are faster than larger ones.

    Args:
        asked: the configured budget, which ranks compare.
        current: the most that a pass may take on one rank now.
    """
    if not len(mini_batch):
        raise DataError(
            f"Every data-parallel rank needs rows of each mini-batch, but rank {mesh.data.rank} of "
            f"{mesh.data.size} got none for {asked.phase}. Deal the rows evenly, train on fewer "
            "ranks, or leave out a batch without rows."
        )

    if current.max_tokens is not None:
        current = replace(current, max_tokens=current.max_tokens * mesh.sequence.size)
    if mesh.device.type == "cpu" and current.max_tokens is not None:
        enough = max([CPU_PASS_TOKENS, *mini_batch.lengths])
        current = replace(current, max_tokens=min(current.max_tokens, enough))

    plan = plan_micro_batches(mini_batch.lengths, current, mini_batch.prompts)
    passes = agreed_passes(plan, mini_batch.lengths, asked, mesh)
    return plan + [[]] * (passes - len(plan))


def agreed_passes(
    plan: Sequence[Sequence[int]], lengths: Sequence[int], budget: TokenBudget, mesh: Mesh
) -> int:
    """Return the number of passes of all ranks: that of the one that needs most.

    Every rank of the mesh must call this before its first pass. One gather of a few bytes, none
    where a rank is alone.

    Raises DataError, on every rank, where ranks are at different phases or sizes of passes, or
    where ranks along the sequence axis have planned other passes over the rows that they share.
    """
    size = f"{budget.size} {budget.unit}"
    agreed = (list(lengths), [list(rows) for rows in plan])
    digest = zlib.crc32(repr(agreed).encode())
    mine = _Planned(
        budget.phase, size, len(plan), len(lengths), sum(lengths), mesh.data.rank, digest
    )

    everyone = gather_objects(mine, mesh.world)
    first_of_share = {planned.share: planned for planned in reversed(everyone)}
    for rank, planned in enumerate(everyone):
        expected = first_of_share[planned.share]
        if planned[:2] != everyone[0][:2]:  # phase and size
            expected = everyone[0]
        if planned != expected:
            first = everyone.index(expected)
            raise DataError(
                f"Ranks {run_rank(first)} and {run_rank(rank)} must make the same passes, but have "
                f"planned different ones. Rank {run_rank(first)}, {expected}. Rank "
                f"{run_rank(rank)}, {planned}. Give all ranks the same configuration, code and "
                "batches, and call the same methods on all."
            )
    return max(planned.passes for planned in everyone)
