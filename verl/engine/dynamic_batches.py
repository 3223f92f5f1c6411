"""Make micro-batches of nearly equal tokens by verl 0.5's functions (`seqlen_balancing`)."""

import itertools
from collections.abc import Sequence

import torch.distributed as dist
from jaxtyping import Shaped
from tensordict import TensorDict
from torch import Tensor

from verl.distributed.collectives import Axis, max_of
from verl.engine.microbatch import Plan, TokenBudget, most_tokens, plan_micro_batches, tokens_of
from verl.protocol import DataProto
from verl.single_controller.dealing import largest_differencing
from verl.utils.arithmetic import ceil_div, round_up
from verl.utils.errors import DataError


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Invert a permutation: `inverse[idx_map[i]] == i`."""
    return sorted(range(len(idx_map)), key=idx_map.__getitem__)


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[TensorDict], Plan]:
    """Cut a batch into micro-batches of at most `max_token_len` tokens; return them and their rows.

    Args:
        batch: its `attention_mask` (B, T) counts the tokens.
        dp_group: ranks that all make as many micro-batches, unless `same_micro_num_in_dp` is False;
            each must call.
        num_batches_divided_by: their number is a multiple of it.
        min_num_micro_batch: their least number.
        use_dynamic_bsz_balance: fill them evenly; otherwise the rows keep their order, as many to
            each as fit.

    Raises:
        ConfigError: a row is longer than `max_token_len`.
        DataError: there are fewer rows than micro-batches must be.
    """
    lengths = _lengths_of(batch)
    plan = _plan(lengths, max_token_len, even=use_dynamic_bsz_balance)

    count = max(len(plan), min_num_micro_batch or 0)
    if dp_group is not None and same_micro_num_in_dp:
        ranks = Axis(dist.get_world_size(dp_group), dist.get_rank(dp_group), dp_group)
        count = max_of(count, ranks)
    divisor = num_batches_divided_by or 1
    plan = _cut_into(round_up(count, divisor), plan, lengths)
    return [batch[rows] for rows in plan], plan


def prepare_dynamic_batch(data: DataProto, max_token_len: int) -> tuple[list[DataProto], Plan]:
    """Cut as `rearrange_micro_batches` does; parts keep their object columns and meta_info."""
    plan = _plan(_lengths_of(data.batch), max_token_len, even=True)
    return [data.select_idxs(rows) for rows in plan], plan


def restore_dynamic_batch(
    data: Shaped[Tensor, "B ..."], batch_idx_list: Plan
) -> Shaped[Tensor, "B ..."]:
    """Put the joined answers of micro-batches into the order of the rows before."""
    return data[get_reverse_idx(list(itertools.chain(*batch_idx_list)))]


def _lengths_of(batch: TensorDict) -> list[int]:
    return batch["attention_mask"].sum(-1).tolist()


def _plan(lengths: Sequence[int], max_tokens: int, *, even: bool) -> Plan:
    """Return the rows of each micro-batch. Raises ConfigError for a row that is too long."""
    plan = plan_micro_batches(lengths, TokenBudget(max_tokens=max_tokens, key="max_token_len"))
    if not even:
        return _in_order(lengths, max_tokens)
    return _differenced(lengths, max_tokens, below=len(plan)) or plan


def _differenced(lengths: Sequence[int], max_tokens: int, below: int) -> Plan | None:
    """Return the fewest parts by largest differencing that hold at most `max_tokens` each.

    The search starts at ceil(total / max_tokens), which no plan can undercut. None if no number of
    parts smaller than `below` fits.
    """
    weights = [max(length, 1) for length in lengths]
    fewest = max(ceil_div(sum(lengths), max_tokens), 1)
    for count in range(fewest, below):
        parts = largest_differencing(weights, count)
        if most_tokens(parts, lengths) <= max_tokens:
            return [rows for rows in parts if rows]
    return None


def _in_order(lengths: Sequence[int], max_tokens: int) -> Plan:
    plan: Plan = []
    room = 0
    for row, length in enumerate(lengths):
        if not plan or length > room:
            plan.append([])
            room = max_tokens
        plan[-1].append(row)
        room -= length
    return plan


def _cut_into(count: int, plan: Plan, lengths: Sequence[int]) -> Plan:
    """Cut the plan into `count` parts: the fullest one is halved until they suffice; none grows."""
    if count > len(lengths):
        raise DataError(
            f"{count} micro-batches were asked for, but the batch has {len(lengths)} rows. Lower "
            "min_num_micro_batch or num_batches_divided_by, or give every rank of dp_group as many "
            "rows."
        )

    plan = list(plan)
    while len(plan) < count:
        of_several = [rows for rows in plan if len(rows) > 1]
        fullest = max(of_several, key=lambda rows: tokens_of(rows, lengths))
        halves = largest_differencing([max(lengths[row], 1) for row in fullest], 2)
        plan.remove(fullest)
        for half in halves:
            plan.append([fullest[item] for item in half])
    return plan
