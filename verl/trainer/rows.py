"""The rows of a batch: which of them count, how long they are, and which prompt they answer."""

import torch

from verl.algorithms.group_advantages import group_ids
from verl.protocol import DataProto


def counted_rows(batch: DataProto) -> torch.Tensor:
    """Mark (B,) rows with a token to learn from. A dropped sample has none left."""
    return batch.batch["response_mask"].bool().any(-1)


def response_lengths(batch: DataProto) -> torch.Tensor:
    """Return (B,) lengths of the responses in tokens, those of tools among them."""
    width = batch.batch["responses"].shape[1]
    return batch.batch["attention_mask"][:, -width:].sum(-1)


def group_numbers(batch: DataProto) -> torch.Tensor:
    """Return (B,) int64 numbers of the prompts that rows answer.

    A dropped row stands alone, so it shifts no other row's baseline.
    """
    group = group_ids(batch.non_tensor_batch["uid"])
    return torch.where(counted_rows(batch), group, len(group) + torch.arange(len(group)))


def prompts_of(batch: DataProto) -> list[str]:
    """Return the prompt of every row: its `uid`, without the role of agents behind a slash."""
    return [str(uid).partition("/")[0] for uid in batch.non_tensor_batch["uid"]]


def num_prompts(batch: DataProto) -> int:
    return len(set(prompts_of(batch)))
