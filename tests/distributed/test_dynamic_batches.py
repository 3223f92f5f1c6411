"""Ranks agree on the number of micro-batches."""

import torch
import torch.distributed as dist

from tests.distributed.jobs import Setup, new_engine
from tests.distributed.ranks import Ranks
from verl.engine.dynamic_batches import rearrange_micro_batches, restore_dynamic_batch
from verl.protocol import DataProto


def cut() -> tuple[int, int, list[int]]:
    """Count the micro-batches, with and without agreement between the ranks.

    Rows have 60 tokens on one rank and 10 on the other.
    """
    rank = new_engine(Setup()).mesh.world.rank
    mask = (torch.arange(60) < (60 if rank else 10)).long().repeat(4, 1)
    batch = DataProto.from_dict({"attention_mask": mask, "row": torch.arange(4)}).batch
    same, rows = rearrange_micro_batches(batch, 120, dp_group=dist.group.WORLD)
    own, _ = rearrange_micro_batches(
        batch, 120, dp_group=dist.group.WORLD, same_micro_num_in_dp=False
    )
    return (
        len(same),
        len(own),
        restore_dynamic_batch(torch.cat([part["row"] for part in same]), rows).tolist(),
    )


def test_ranks_agree_on_the_number(two_ranks: Ranks):
    assert two_ranks.call(cut) == [(2, 1, [0, 1, 2, 3]), (2, 2, [0, 1, 2, 3])]
