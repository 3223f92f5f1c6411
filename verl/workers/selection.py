"""Select tokens of a mini-batch for a policy loss that depends on the whole of it."""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.policy_losses import SelectionInputs
from verl.distributed.collectives import Axis, gather_objects
from verl.protocol import DataProto
from verl.workers.objective import Columns


def select_tokens(
    mini_batch: DataProto,
    infer: Callable[[], Columns],
    data: Axis,
    selection: Callable[[SelectionInputs], Tensor],
) -> Tensor:
    """Return 1 for the selected response tokens of this rank, else 0, (B, R).

    `selection` gets the tokens of all ranks along `data`; each must make this call.
    """
    columns = mini_batch.batch
    mask = columns["response_mask"].bool()
    log_probs = infer()["log_probs"]
    old = columns["old_log_probs"] if "old_log_probs" in columns.keys() else log_probs
    read = (log_probs, old, columns["advantages"], token_noise(mini_batch))
    mine = [column[mask].cpu() for column in read]

    by_rank = gather_objects(mine, data)
    whole = SelectionInputs(*map(torch.cat, zip(*by_rank)))
    chosen = selection(whole)

    first = sum(len(pieces[0]) for pieces in by_rank[: data.rank])
    selected = torch.zeros(mask.shape)
    selected[mask] = chosen[first : first + len(mine[0])].float()
    return selected


def token_noise(batch: DataProto) -> Tensor:
    """Draw uniform numbers in [0, 1) for the response tokens, (B, R).

    They are a function of uid (which includes the step), response and position, so they do not
    depend on the rank that has the row, nor on the other rows.
    """
    mask = batch.batch["response_mask"].bool()
    tokens = batch.batch["input_ids"][:, -mask.shape[1] :]
    uids = batch.non_tensor_batch.get("uid", np.full(len(mask), "", dtype=object))
    noise = []
    for uid, row, own in zip(uids, tokens, mask):
        response = row[own].cpu().numpy().tobytes()
        key = [zlib.crc32(str(uid).encode()), zlib.crc32(response)]
        noise.append(np.random.default_rng(key).random(mask.shape[1]))
    return torch.from_numpy(np.stack(noise))
