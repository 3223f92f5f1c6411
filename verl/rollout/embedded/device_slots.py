"""The state that decode steps on CUDA read at fixed addresses: every slot's, and the slots to feed.

A row of a step feeds one slot. Samples own the first slots. Behind them are spare slots, for more
tokens of a sample in one step: such a row has the page table of its sample and a place of its own.
The last slot belongs to no sample; rows that pad a batch feed it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from verl.rollout.embedded.cuda_decoder import Slots
from verl.rollout.embedded.kernels.shared_prefix import (
    BLOCK_ROWS,
    FEWEST_ROWS,
    SharedPrefixes,
)
from verl.rollout.embedded.kernels.slots import feed
from verl.rollout.embedded.prefix_blocks import prefix_blocks
from verl.rollout.embedded.samples import IntArray
from verl.rollout.embedded.scheduler import Scheduler
from verl.rollout.embedded.several import Fed
from verl.utils.devices import send

_NONE = np.empty(0, np.int64)


class DeviceSlots:
    """The slots of `samples` samples and `spare` further tokens.

    Args:
        samples: most samples at once.
        spare: most tokens in a step beyond one for each sample.
        width: pages of the longest sequence.
        page_size: tokens of a page.
        device: of all tensors.
        shifts: whether rotary positions differ from places; see `Group.shift`.
    """

    def __init__(
        self,
        samples: int,
        spare: int,
        *,
        width: int,
        page_size: int,
        device: torch.device,
        shifts: bool,
    ) -> None:
        self.most_rows = samples + spare
        self.state = Slots.allocate(self.most_rows + 1, width, device)
        # the slot of each row of the next step
        self.rows = torch.full((self.most_rows,), self.most_rows, dtype=torch.int32, device=device)
        self.prefixes, self._blocks = SharedPrefixes.allocate(self.most_rows, device)
        self.saved_tokens = 0.0  # see `PrefixBlocks`
        self.device = device
        self._first_spare = samples
        self._page_size = page_size

        # ids, positions, pages and offsets of the rows of the next step
        self._fed = tuple(
            torch.zeros(self.most_rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._shifts: Tensor | None = None
        if shifts:
            self._shifts = torch.zeros(self.most_rows + 1, dtype=torch.int64, device=device)
        self._shown = _NONE  # the slots that `rows` names now
        self._shown_prompts = _NONE  # (2, b), the prompts that `prefixes` is for

    @property
    def num_bytes(self) -> int:
        """Return the bytes on the device."""
        tensors = (*self.state, *self._fed, self.rows, self._blocks)
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def has_shifts(self) -> bool:
        """Return whether rotary positions differ from places."""
        return self._shifts is not None

    def spare(self, count: int) -> IntArray:
        """Return the first `count` spare slots."""
        return self._first_spare + np.arange(count)

    def set_padding(self, page: int) -> None:
        """Let rows that pad a batch write to `page`."""
        self.state.table[-1] = page
        self.state.positions[-1] = 0

    def forget(self) -> None:
        """Show all slots again at the next `show`."""
        self._shown = self._shown_prompts = _NONE

    @contextmanager
    def only_padding(self) -> Iterator[None]:
        """Feed the padding slot in all rows meanwhile, which changes no sample."""
        shown = self.rows.clone()
        blocks = self._blocks.clone()
        self.rows.fill_(self.most_rows)
        self._blocks.zero_()
        yield
        # Not after an error: the device may refuse, and the next rollout shows its slots anyway.
        self.rows.copy_(shown)
        self._blocks.copy_(blocks)

    def show(
        self,
        scheduler: Scheduler,
        slots: IntArray,
        owners: IntArray = _NONE,
        *,
        blocks: bool = False,
    ) -> None:
        """Name the slots of the next step, and copy the entries of page tables that it needs.

        Args:
            scheduler: of the samples in these slots.
            slots: (b,) of the first rows.
            owners: samples whose pages the further rows read, each a spare slot.
            blocks: whether the step reads `prefixes` and `saved_tokens`.
        """
        spare = self.spare(len(owners))
        named = np.concatenate([slots, spare])
        parts: dict[str, IntArray] = {}
        if not np.array_equal(named, self._shown):
            self._shown = named
            parts["named"] = np.full(self.most_rows, self.most_rows, np.int64)
            parts["named"][: len(named)] = named

        table = self.state.table
        changed, places = scheduler.take_changed()
        if changed.size:
            parts["entries"] = changed * table.shape[1] + places
            parts["pages"] = scheduler.table[changed, places]
        if spare.size:
            parts["spare"] = spare
            parts["owners"] = owners
        new_blocks = self._new_blocks(scheduler, slots) if blocks else None
        if new_blocks is not None:
            parts["blocks"] = new_blocks
        if not parts:
            return

        # One copy for all, because the cost of a copy is its launch.
        flat = np.concatenate([array.ravel() for array in parts.values()])
        arrived = send(torch.from_numpy(flat.astype(np.int32)), self.device)
        pieces = arrived.split([array.size for array in parts.values()])
        news = dict(zip(parts, pieces, strict=True))
        if "named" in news:
            self.rows.copy_(news["named"])
        if "entries" in news:
            table.view(-1).index_copy_(0, news["entries"].long(), news["pages"])
        if "spare" in news:
            table.index_copy_(0, news["spare"].long(), table.index_select(0, news["owners"]))
        if "blocks" in news:
            self._blocks.copy_(news["blocks"])

    def _new_blocks(self, scheduler: Scheduler, slots: IntArray) -> IntArray | None:
        """Return all numbers of `prefixes` for these rows; None: it has them already."""
        ends = scheduler.prompt_ends[slots]
        tokens = scheduler.prompt_tokens[slots] // self._page_size * self._page_size
        prompts = np.stack([ends, tokens])
        if np.array_equal(prompts, self._shown_prompts):
            return None
        self._shown_prompts = prompts

        blocks = prefix_blocks(ends, tokens, fewest=FEWEST_ROWS, most=BLOCK_ROWS)
        self.saved_tokens = blocks.saved
        flat = np.zeros(len(self._blocks), np.int64)
        begin = 0
        for numbers, tensor in zip(blocks, self.prefixes):
            flat[begin : begin + len(numbers)] = numbers
            begin += len(tensor)
        return flat

    def place(self, scheduler: Scheduler, fed: Fed, slots: IntArray | None = None) -> None:
        """Set the next tokens (n,) of `slots` (n,); None: of the slots of their samples."""
        targets = fed.slots if slots is None else slots
        if not targets.size:
            return

        keys = scheduler.keys[fed.slots].view(np.int64)
        shifts = scheduler.shifts[fed.slots]
        columns = np.stack([targets, fed.ids, fed.positions, fed.drawn, keys, shifts])
        arrived = send(torch.from_numpy(columns), self.device)
        index, ids, positions, drawn, noise, own_shifts = arrived

        state = self.state
        state.tokens.index_copy_(0, index, ids)
        state.positions.index_copy_(0, index, positions.int())
        state.drawn.index_copy_(0, index, drawn.int())
        state.keys.index_copy_(0, index, noise)
        if self._shifts is not None:
            self._shifts.index_copy_(0, index, own_shifts)

    def feed(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, rotary positions, pages and offsets (b,) of the first `rows` rows."""
        state = self.state
        slots = self.rows[:rows]
        ids, positions, pages, offsets = (fed[:rows] for fed in self._fed)
        out = (ids, positions, pages, offsets)
        feed(slots, state.tokens, state.positions, state.table, self._page_size, out)
        if self._shifts is not None:
            positions = positions + self._shifts.index_select(0, slots)
        return ids, positions, pages, offsets
