"""How the rows of a batch are dealt to the ranks that learn from them."""

from typing import Any

from verl.protocol import DataProto
from verl.single_controller.dealing import Dealt, in_windows, token_counts
from verl.trainer.episodes import mini_batch_rows


def dealt_for_update(
    batch: DataProto, group: Any, *, played: DataProto, mini_prompts: int | None, samples: int
) -> tuple[Any, int | None]:
    """Return the batch dealt by prompts, and the rows of a mini-batch; see `mini_batch_rows`.

    Args:
        batch: the rows that are learned from.
        group: the workers that learn.
        played: all trajectories of the step.
        mini_prompts: prompts of a mini-batch.
        samples: of a prompt.
    """
    mini = mini_batch_rows(played, len(batch), mini_prompts, samples, group)
    return dealt_by_prompts(batch, group, samples), mini


def dealt_by_prompts(batch: DataProto, group: Any, samples: int) -> Any:
    """Deal all samples of a prompt to one rank, where every rank then has as many rows.

    The rows of a prompt share computation. Mini-batches stay those of one process.
    """
    shares = group.num_shares
    if shares == 1 or len(batch) % (shares * samples):
        return batch
    lengths = token_counts(batch)
    if lengths is None:
        return batch
    return Dealt(batch, in_windows(lengths, shares, unit_rows=samples))
