"""The keys and values of running samples in rows, which a CPU reads without gathering pages."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.models.alibi import KeyBias
from verl.models.attention import Facts
from verl.rollout.embedded.attention import LayerPages, Paging, add_bias, attend_keys
from verl.rollout.embedded.samples import IntArray
from verl.rollout.embedded.scheduler import STEPS_AT_ONCE, Scheduler

# Columns for tokens to come when rows get memory: so many, or half the length of the longest row,
# where any sample may come to need them.
SPARE_COLUMNS = 128
# A softmax over fewer numbers than a CPU computes at once takes ten times as long as one over
# these.
FEWEST_COLUMNS = 16
# How dimensions of (n, R, Hk, C, D) lie in memory.
_BY_ROW = (0, 1, 2, 3, 4)
_BY_COLUMN = (0, 3, 1, 2, 4)


class _Stack(NamedTuple):
    """Rows of n layers of one shape, and the pages that they copy.

    Keys are (n, R, Hk, C, D), values (n, R, Hk, C, Dv).
    """

    keys: Tensor
    values: Tensor
    pages: list[LayerPages]


class _LayerRows(NamedTuple):
    """The tensors of one layer in a step: places of new tokens, and b * Hk matrices of all."""

    new_keys: Tensor  # (b, Hk, D)
    new_values: Tensor  # (b, Hk, Dv)
    keys: Tensor  # (b * Hk, L, D)
    values: Tensor  # (b * Hk, L, Dv)


class RowArrays(NamedTuple):
    """The rows of n layers of one shape, as numpy arrays."""

    keys: NDArray  # (n, C, R, Hk, D)
    values: NDArray  # (n, C, R, Hk, Dv)
    starts: IntArray  # column of each row's first token, (b,)
    column: int  # where the next token goes


class KeyRows:
    """A second copy of the running samples' keys and values, contiguous for each sample.

    Without it a decode step would gather them from the pages for every token. All rows end at one
    column, whatever their lengths: a step writes to one column, and a sliding window is the same
    columns for all. The columns before a row's first token are masked. A page gets its tokens when
    it is full, which is before it can be found by `PageAllocator.find`.
    """

    def __init__(self, paging: Paging) -> None:
        self.paging = paging
        self._slots: IntArray = np.empty(0, np.int64)  # slot of each row, (b,)
        self._epochs: IntArray = np.empty(0, np.int64)
        self._starts: IntArray = np.empty(0, np.int64)  # column of each row's first token
        self._first = 0  # column of the longest row's first token
        self._end = 0  # column of the next token
        self._num_rows = self._num_columns = 0
        self._by_column = False
        self._stacks: list[_Stack] = []
        self._layers: dict[int, _LayerRows] = {}  # by id of the layer's pages
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all rows."""
        return sum(stack.keys.nbytes + stack.values.nbytes for stack in self._stacks)

    def clear(self) -> None:
        """Drop all samples."""
        self._slots = self._epochs = self._starts = np.empty(0, np.int64)
        self._first = self._end = 0

    def release(self) -> None:
        """Drop all samples and free the memory."""
        self.clear()
        self._num_rows = self._num_columns = 0
        self._stacks.clear()
        self._layers.clear()
        self._masks.clear()

    def arrange(
        self, scheduler: Scheduler, slots: IntArray, steps: int, *, by_column: bool
    ) -> IntArray:
        """Provide a row for each of `slots` (b,), and columns for the next `steps` tokens.

        Reads the row of a new sample from its pages. Returns the slots in the order of their rows.
        With `by_column`, memory holds one column of all rows after the other, as `arrays` returns
        them; otherwise one row after the other, which is fastest for `attend`.
        """
        if by_column != self._by_column:
            self._by_column = by_column
            for number, stack in enumerate(self._stacks):
                keys = self._zeros(stack.keys.shape, stack.keys.dtype).copy_(stack.keys)
                values = self._zeros(stack.values.shape, stack.values.dtype).copy_(stack.values)
                self._stacks[number] = _Stack(keys, values, stack.pages)
        stays = scheduler.epoch[self._slots] == self._epochs
        if len(stays) == len(slots) and stays.all():
            self._reserve(scheduler, len(slots), self._end - self._first, steps)
        else:
            self._seat(scheduler, slots, np.flatnonzero(stays), steps)
        return self._slots

    def lay_out(self) -> None:
        """Prepare the tensors that `attend` reads in this step."""
        rows = len(self._slots)
        last = self._end
        first = min(self._first, last + 1 - FEWEST_COLUMNS)
        used = slice(first, last + 1)

        for stack in self._stacks:
            keys = stack.keys[:, :rows]
            values = stack.values[:, :rows]
            layers = zip(
                stack.pages,
                keys[:, :, :, last].unbind(),
                values[:, :, :, last].unbind(),
                keys.flatten(1, 2)[:, :, used].unbind(),
                values.flatten(1, 2)[:, :, used].unbind(),
            )
            for pages, *mine in layers:
                self._layers[id(pages)] = _LayerRows(*mine)

    def arrays(self) -> RowArrays:
        """Return the rows for steps by column, which replace `lay_out` and `attend`."""
        (stack,) = self._stacks
        keys = stack.keys.permute(_BY_COLUMN).numpy()
        values = stack.values.permute(_BY_COLUMN).numpy()
        return RowArrays(keys, values, self._starts, self._end)

    def attend(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, facts: Facts) -> Tensor:
        """Implement `Step.attend`."""
        new_keys, new_values, keys, values = self._layers[id(pages)]
        new_keys.copy_(k.transpose(0, 1))
        new_values.copy_(v.transpose(0, 1))

        if facts.window is not None and facts.window < keys.shape[1]:
            keys = keys[:, -facts.window :]
            values = values[:, -facts.window :]

        seen = slice(self._end + 1 - keys.shape[1], self._end + 1)
        return attend_keys(
            q,
            keys,
            values,
            facts,
            visible=lambda: self._mask(1, torch.float32)[:, 0, seen] == 0,
            offset=lambda dtype: self._mask(k.shape[0], dtype, facts.bias)[:, :, seen],
        )

    def advance(self, scheduler: Scheduler, steps: int) -> Callable[[slice], None]:
        """Note that the next `steps` tokens of every row are computed, which the scheduler does not
        know yet. Gives a function that fills the pages of some rows that are full then: to be
        called once for each row, when its keys are there."""
        rows = pages = ends = np.empty(0, np.int64)
        size = scheduler.page_size
        if scheduler.prefix_caching:
            number, offset = np.divmod(scheduler.cached[self._slots], size)
            rows = np.flatnonzero(offset + steps >= size)
            pages = scheduler.table[self._slots[rows], number[rows]]
            ends = self._end + size - offset[rows]
        self._end += steps

        def fill_pages(part: slice) -> None:
            among = (part.start <= rows) & (rows < part.stop)
            if not among.any():
                return
            columns = ends[among, None] + np.arange(-size, 0)
            for cache, mine in self._caches():
                full = mine[rows[among, None], :, columns]  # (n, page_size, Hk, D)
                cache[pages[among]] = full.swapaxes(1, 2)

        return fill_pages

    def _caches(self) -> Iterator[tuple[NDArray, NDArray]]:
        """Yield pages (num_pages, Hk, page_size, D) and rows (R, Hk, C, D).

        They are the keys and then the values of every layer.
        """
        for stack in self._stacks:
            for layer, *mine in zip(stack.pages, stack.keys, stack.values):
                for pages, rows in zip(layer.tensors, mine):
                    yield words(pages), words(rows)

    def _seat(self, scheduler: Scheduler, slots: IntArray, kept: IntArray, steps: int) -> None:
        """Assign the rows to `slots`. Rows numbered `kept` still have their sample."""
        new = slots[~np.isin(slots, self._slots[kept])]
        lengths = scheduler.cached[new]
        if not kept.size:
            self.clear()

        longest_kept = self._end - self._starts[kept].min(initial=self._end)
        longest = max(longest_kept, lengths.max(initial=0))
        num_rows = max(len(slots), 1 + kept.max(initial=-1))
        self._reserve(scheduler, num_rows, int(longest), steps)

        # Rows are the first b: the last ones move to where others have left.
        stays = kept[kept < len(slots)]
        moves = kept[kept >= len(slots)]

        free = np.setdiff1d(np.arange(len(slots)), stays)
        targets = free[: len(moves)]
        rest = free[len(moves) :]
        if moves.size:
            self._move(moves, targets)
        if new.size:
            self._fill(rest, scheduler.table[new], lengths, scheduler.page_size)

        before = np.stack([self._slots, self._starts])
        seats = np.empty((2, len(slots)), np.int64)
        seats[:, stays] = before[:, stays]
        seats[:, targets] = before[:, moves]
        seats[:, rest] = np.stack([new, self._end - lengths])

        self._slots, self._starts = seats
        self._epochs = scheduler.epoch[self._slots]
        self._first = int(self._starts.min())
        self._masks.clear()

    def _reserve(self, scheduler: Scheduler, rows: int, length: int, steps: int) -> None:
        """Provide `rows` rows, and columns for the next `steps` tokens and `length` before them.

        Rows keep up to `length` of their columns.
        """
        length = max(length, FEWEST_COLUMNS - 1)
        if not self._end and rows <= self._num_rows and length + steps <= self._num_columns:
            self._end = length  # nothing is there
        if rows <= self._num_rows and length <= self._end <= self._num_columns - steps:
            return
        if scheduler.waiting:
            self._num_rows = len(scheduler.epoch)
        elif rows > self._num_rows or 2 * rows < self._num_rows:
            self._num_rows = rows  # agents leave and come back: a few rows more stay for them
        # Where an agent comes back with more tokens than any row, the next one may have more again.
        is_longer = 0 < self._end < length
        roomy = length + _spare_columns(length) * (2 if is_longer else 1)
        longest = scheduler.table.shape[1] * scheduler.page_size
        self._num_columns = max(length + steps, min(roomy, longest))
        end = length
        if is_longer:
            end += (self._num_columns - length - steps) // 2
        self._renew(rows, length, end)

    def _renew(self, rows: int, length: int, end: int) -> None:
        """Get new memory, in which the next token goes to column `end`.

        The first `rows` rows keep up to `length` of their columns.
        """
        kept = slice(self._end - min(length, self._end), self._end)
        old = self._stacks
        self._stacks = self._empty_stacks()

        for fresh, stale in zip(self._stacks, old):
            for target, source in zip(fresh[:2], stale[:2]):
                held = source[:, :rows, :, kept]
                target[:, : held.shape[1], :, end - held.shape[3] : end] = held

        shift = end - self._end
        self._starts = self._starts + shift
        # The longest row may be one that leaves: then its first columns were not kept.
        self._first = max(0, self._first + shift)
        self._end = end
        self._masks.clear()

    def _empty_stacks(self) -> list[_Stack]:
        groups: dict[Any, list[LayerPages]] = {}
        for pages in self.paging.layers.values():
            groups.setdefault((pages.keys.shape, pages.values.shape), []).append(pages)
        stacks = []
        for alike in groups.values():
            empty = []
            for cache in alike[0].tensors:
                heads = cache.shape[1]
                dim = cache.shape[3]
                shape = (len(alike), self._num_rows, heads, self._num_columns, dim)
                empty.append(self._zeros(shape, cache.dtype))
            keys, values = empty
            stacks.append(_Stack(keys, values, alike))
        return stacks

    def _zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # Not empty: a masked position has weight 0, and 0 times the NaN of fresh memory would be
        # NaN.
        order = _BY_COLUMN if self._by_column else _BY_ROW
        return torch.empty_permuted(shape, order, dtype=dtype).zero_()

    def _move(self, rows: IntArray, targets: IntArray) -> None:
        used = slice(self._first, self._end)
        for _, mine in self._caches():
            mine[targets, :, used] = mine[rows, :, used]

    def _fill(
        self,
        rows: IntArray,
        table: IntArray,
        lengths: IntArray,
        size: int,
    ) -> None:
        """Read sequences of `lengths` (n,), with the pages `table` (n, W), into `rows` (n,)."""
        longest = int(lengths.max())
        # Before a sequence its first token is repeated: these columns are masked, but have to be
        # finite.
        tokens = (np.arange(-longest, 0) + lengths[:, None]).clip(min=0)
        numbers = np.take_along_axis(table, tokens // size, axis=1)
        offsets = tokens % size

        used = slice(self._end - longest, self._end)
        for pages, mine in self._caches():
            heads = pages.shape[1]
            pages_of_heads = numbers[:, None] * heads + np.arange(heads)[:, None]
            places = pages_of_heads * size + offsets[:, None]  # (n, Hk, L)
            tokens_of_heads = pages.reshape(-1, pages.shape[3])
            mine[rows, :, used] = tokens_of_heads.take(places, axis=0)

    def _mask(self, heads: int, dtype: torch.dtype, bias: KeyBias | None = None) -> Tensor:
        """Return (b * heads, 1, C): -inf before a row's first token, else 0.

        With a bias, it is (b * heads, G, C).
        """
        key = (heads, dtype)
        if key not in self._masks:
            position = torch.arange(self._num_columns) - torch.from_numpy(self._starts)[:, None]
            before = position < 0
            mask = torch.zeros(before.shape, dtype=dtype).masked_fill_(before, float("-inf"))
            if bias is not None:
                self._masks[key] = add_bias(mask, bias, position.clamp(min=0), heads)
            else:
                self._masks[key] = mask.repeat_interleave(heads, dim=0)[:, None]
        return self._masks[key]


def _spare_columns(length: int) -> int:
    return max(SPARE_COLUMNS, length // 2)


def most_bytes(scheduler: Scheduler, page_bytes: int) -> int:
    """Return the most bytes that the rows of all slots can take."""
    num_slots, width = scheduler.table.shape
    columns = max(width * scheduler.page_size, FEWEST_COLUMNS - 1 + STEPS_AT_ONCE)
    return num_slots * columns * page_bytes // scheduler.page_size


def words(tensor: Tensor) -> NDArray:
    """Return the memory of a tensor as integers of the same size.

    numpy copies faster than torch, and has no bfloat16.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.itemsize]).numpy()
