"""Split the arguments of a call into shares, one for each rank or data rank, and join the answers.

All are pure functions. A split gets `(num_shares, args, kwargs)`, and returns the arguments of each
share with the data that joining the answers needs to undo it.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl.protocol import DataProto
from verl.single_controller.dealing import (
    MASK,
    Dealt,
    Rows,
    balanced,
    contiguous,
    in_windows,
    token_counts,
    with_masked_rows,
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Arguments = tuple[Args, Kwargs]
Split = Callable[[int, Args, Kwargs], tuple[list[Arguments], Any]]
Collect = Callable[[list[Any], Any], Any]


def each_argument(change: Callable[[Any], Any], args: Args, kwargs: Kwargs) -> Arguments:
    """Apply `change` to every argument."""
    return tuple(map(change, args)), {name: change(value) for name, value in kwargs.items()}


def same_for_all(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    return [(args, kwargs)] * num_shares, None


def one_entry_each(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    """Split arguments that are lists with one entry per rank."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ValueError(
                f"Expected one entry per rank ({num_shares}), got {type(value).__name__}."
            )
        if len(value) != num_shares:
            raise ValueError(f"Expected one entry per rank ({num_shares}), got {len(value)}.")

    per_rank = []
    for rank in range(num_shares):
        per_rank.append(each_argument(operator.itemgetter(rank), args, kwargs))
    return per_rank, None


def lists_or_same(num_shares: int, args: Args, kwargs: Kwargs) -> tuple[list[Arguments], None]:
    """Split the arguments if all are lists, with one entry per rank; otherwise all go to all."""
    if all(isinstance(value, list | tuple) for value in (*args, *kwargs.values())):
        return one_entry_each(num_shares, args, kwargs)
    return same_for_all(num_shares, args, kwargs)


@dataclass(frozen=True)
class Order:
    """The share of every row of a batch.

    Rows from `rows_of_caller` on were added so that every share has some.
    """

    shares: Rows
    rows_of_caller: int


def _deal(batch: DataProto, num_shares: int) -> Rows:
    """Deal equally many tokens to each share, if a mask counts them; keep prompts together."""
    lengths = token_counts(batch)
    if lengths is None:
        return contiguous(len(batch), num_shares)
    uids = batch.non_tensor_batch.get("uid")
    groups = None if uids is None else uids.tolist()
    return balanced(lengths, num_shares, groups)


def _deal_windows(batch: DataProto, num_shares: int) -> Rows:
    """Deal equally many rows to each share, so that mini-batches are those of one process."""
    return in_windows(token_counts(batch) or [1] * len(batch), num_shares)


def _split_batches(
    num_shares: int,
    args: Args,
    kwargs: Kwargs,
    deal: Callable[[DataProto, int], Rows],
    pad: Callable[[DataProto, int], DataProto],
) -> tuple[list[Arguments], Order | None]:
    """Deal the rows of every batch alike; other arguments go to all."""
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto | Dealt)]
    if num_shares == 1 or not given:
        return [each_argument(_undealt, args, kwargs)] * num_shares, None

    sizes = {len(_undealt(value)) for value in given}
    if len(sizes) > 1:
        raise ValueError(
            f"All batches of one call must have the same number of rows, got {sorted(sizes)}."
        )
    rows = _rows_dealt_before(given, num_shares)

    batches: dict[int, DataProto] = {}
    for value in given:
        batch = _undealt(value)
        batches[id(value)] = pad(batch, num_shares) if rows is None else batch
    if rows is None:
        rows = deal(batches[id(given[0])], num_shares)

    chunks: dict[int, list[DataProto]] = {}
    for key, batch in batches.items():
        chunks[key] = [_rows(batch, share) for share in rows]
    return shares_of_each(args, kwargs, chunks), Order(rows, sizes.pop())


def _rows_dealt_before(values: Sequence[DataProto | Dealt], num_shares: int) -> Rows | None:
    """Return the rows of each share that the caller chose, the same for all; None if not any."""
    orders = [value.rows for value in values if isinstance(value, Dealt)]
    if not orders:
        return None

    first = orders[0]
    are_alike = all(order == first for order in orders)
    if len(first) != num_shares or not are_alike:
        raise ValueError(
            f"Rows must be dealt alike in all batches, to {num_shares} shares; got {orders}."
        )
    return first


def shares_of_each(
    args: Args, kwargs: Kwargs, split: Mapping[int, Sequence[Any]]
) -> list[Arguments]:
    """Return the arguments of every share.

    Args:
        split: the shares of some values, by the `id` of the value; other values go to all.
    """
    num_shares = len(next(iter(split.values())))

    def value_of(share: int, value: Any) -> Any:
        return split[id(value)][share] if id(value) in split else value

    arguments = []
    for share in range(num_shares):
        arguments.append(each_argument(functools.partial(value_of, share), args, kwargs))
    return arguments


def _undealt(value: Any) -> Any:
    return value.batch if isinstance(value, Dealt) else value


def _rows(batch: DataProto, rows: list[int]) -> DataProto:
    """Return a view if the rows are contiguous, else a copy of them."""
    if rows:
        start = rows[0]
        end = start + len(rows)
        if rows == list(range(start, end)):
            return batch.slice(start, end)
    return batch.select_idxs(np.asarray(rows, dtype=np.int64))


def _repeated(batch: DataProto, num_shares: int) -> DataProto:
    """Repeat rows until each share has one: every rank must join the collectives."""
    if len(batch) >= num_shares:
        return batch
    return batch.select_idxs(np.arange(num_shares) % _at_least_one(batch))


def _unpadded(batch: DataProto, _: int) -> DataProto:
    """Leave some shares without rows if there are fewer rows than shares."""
    _at_least_one(batch)
    return batch


def _masked(batch: DataProto, num_shares: int) -> DataProto:
    """Add masked rows until each share has equally many.

    Added rows must not count, so a batch without a mask is dealt unevenly.
    """
    missing = -_at_least_one(batch) % num_shares
    if batch.batch is not None and MASK in batch.batch.keys():
        return with_masked_rows(batch, missing) if missing else batch

    if len(batch) < num_shares:
        raise ValueError(
            f"A batch without '{MASK}' needs at least one row for each of {num_shares} shares, got "
            f"{len(batch)}: copies of rows would count."
        )
    return batch


def _at_least_one(batch: DataProto) -> int:
    if not len(batch):
        raise ValueError("A batch without rows cannot be dealt to several ranks.")
    return len(batch)


def join_protos(outputs: list[Any], order: Order | None) -> Any:
    """Join all answers in the caller's order.

    A row may have several answers (n samples of a prompt).
    """
    joined = concatenated(outputs, None)
    if order is None:
        return joined

    rows = list(itertools.chain(*order.shares))
    if rows == list(range(order.rows_of_caller)):
        return joined

    answers = len(joined) // len(rows)
    answers_of_shares = list(map(len, outputs))
    rows_of_shares = list(map(len, order.shares))
    expected = [count * answers for count in rows_of_shares]
    if answers_of_shares != expected:
        raise ValueError(
            "Answers come back in the order of the rows, so there must be equally many to each; "
            f"got {answers_of_shares} to {rows_of_shares} rows."
        )

    place = np.argsort(rows)[: order.rows_of_caller]
    first_answer = place[:, None] * answers
    answer_rows = first_answer + np.arange(answers)
    return joined.select_idxs(answer_rows.reshape(-1))


def concatenated(outputs: list[Any], _: Any) -> Any:
    """Join answers that have rows of their own, in the order of the shares."""
    if len(outputs) == 1:
        return outputs[0]
    wrong = {type(output).__name__ for output in outputs if not isinstance(output, DataProto)}
    if wrong:
        raise TypeError(
            "A method whose answers are joined (Dispatch.DP_COMPUTE_PROTO) must return a DataProto "
            f"on every rank, got {', '.join(sorted(wrong))}. Return the batch, or register the "
            "method with Dispatch.ONE_TO_ALL or DP_COMPUTE, which give a list of all answers."
        )
    return DataProto.concat(outputs)


def first_answer(outputs: list[Any], _: Any) -> Any:
    return outputs[0]


def all_answers(outputs: list[Any], _: Any) -> Any:
    return outputs


split_protos = functools.partial(_split_batches, deal=_deal, pad=_repeated)
split_any_rows = functools.partial(_split_batches, deal=_deal, pad=_unpadded)
split_for_metrics = functools.partial(_split_batches, deal=_deal_windows, pad=_masked)
