"""The segments of a packed batch, and the padded blocks or kernel calls of their attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from verl.models.kernels.varlen import Sequences
from verl.models.shared_prompts import AheadPart, Calls, SharedParts
from verl.utils.arithmetic import ceil_div
from verl.utils.devices import send

# Cost of one token apart from its attention, in attended tokens. It keeps very short sequences in
# one block.
_LINEAR_COST = 64
# Largest ratio of the work of a padded block to the work of its real tokens.
_MAX_WASTE = 1.4
# Largest s * L * L of a block of more than one sequence, which bounds the score matrix of explicit
# attention.
_MAX_BLOCK = 2**24
# Response tokens that share one copy of the keys of their prompt.
_PIECE = 1024


class Block(NamedTuple):
    """s segments padded on the right to L, after the C tokens of their shared prompt (0: none).

    `index` (s * L,) and `keys` (s * (C + L),) are the packed tokens of queries and keys.
    """

    index: Tensor
    keys: Tensor
    rows: int
    length: int
    context: int


@dataclass(frozen=True)
class Layout:
    """The bounds of S packed segments. `lengths` are positive and sum to N.

    `cu_seqlens` is (S+1,) int32. A segment is a whole sequence unless prompts are shared. `shared`
    has the number of responses of each shared prompt. The last segments are the shared prompts,
    followed by their responses in the same order.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    shared: tuple[int, ...] = ()
    # (N, C) experts that the tokens of this pass are routed to (`verl.models.routing`); None: free
    routes: Tensor | None = None
    # (N,) int64 on the host, how many later tokens of its segment each token sees; None: none
    ahead: Tensor | None = None
    _bands: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    _bands_ahead: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    _calls: dict[int | None, Calls] = field(default_factory=dict)
    _keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def starts(self) -> list[int]:
        """Return the S+1 numbers of `cu_seqlens` on the host."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def prompts(self) -> list[tuple[int, range]]:
        """Return the segment of each shared prompt, and the segments of its responses."""
        first_response = len(self.lengths) - sum(self.shared)
        first_prompt = first_response - len(self.shared)
        prompts: list[tuple[int, range]] = []
        start = first_response
        for number, count in enumerate(self.shared):
            prompts.append((first_prompt + number, range(start, start + count)))
            start += count
        return prompts

    @cached_property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence, including its prompt."""
        longest = max(self.lengths)
        for prompt, responses in self.prompts:
            longest_response = max(self.lengths[i] for i in responses)
            longest = max(longest, self.lengths[prompt] + longest_response)
        return longest

    @cached_property
    def parts(self) -> SharedParts:
        """Return the kernel calls for shared prompts."""
        first_prompt = self.prompts[0][0]
        first_response = self.prompts[-1][0] + 1
        prompts = self.lengths[first_prompt:first_response]

        # Tokens of the responses of each prompt, which are cut into `pieces` pieces each.
        counts: list[int] = []
        for _, responses in self.prompts:
            counts.append(sum(self.lengths[i] for i in responses))
        pieces = ceil_div(max(counts), _PIECE)
        queries: list[int] = []
        for count in counts:
            cuts = [count * i // pieces for i in range(pieces + 1)]
            queries += [stop - start for start, stop in pairwise(cuts)]

        keys: list[int] = []
        copied: list[Tensor] = []
        copies: list[Tensor] = []
        for start, length in zip(accumulate(prompts, initial=0), prompts):
            keys += [length] * pieces
            copied.append(torch.arange(start, start + length).repeat(pieces))
            # Copy i of token t of this prompt, after the copies of `start` earlier tokens.
            copy = torch.arange(pieces)[:, None]
            copies.append(pieces * start + copy * length + torch.arange(length))

        return SharedParts(
            across=Sequences(
                self._offsets(queries),
                self._offsets(keys),
                max(queries),
                max(prompts),
                causal=False,
            ),
            prompts=slice(self.starts[first_prompt], self.starts[first_response]),
            responses=slice(self.starts[first_response], self.starts[-1]),
            copied=self._send(torch.cat(copied)),
            copies=self._send(torch.cat(copies, dim=1).flatten()),
        )

    @cached_property
    def ahead_part(self) -> AheadPart | None:
        """Return the kernel call for tokens that see later ones; None if there are none."""
        assert self.ahead is not None
        sees = self.ahead > 0
        begins = sees.clone()
        begins[1:] &= ~sees[:-1]
        starts = begins.nonzero().squeeze(1)
        if not len(starts):
            return None

        # A run of r + 1 tokens has r queries: its last but one token sees one key, its first r.
        counts = self.ahead[starts]
        ends = counts.cumsum(0)
        place = torch.arange(int(ends[-1])) - (ends - counts).repeat_interleave(counts)
        keys = (starts + counts).repeat_interleave(counts) - place
        offsets = self._offsets(counts.tolist())
        longest = int(counts.max())
        sequences = Sequences(offsets, offsets, longest, longest, causal=True)
        return AheadPart(sequences, self._send(keys - 1), self._send(keys))

    def calls(self, window: int | None) -> Calls:
        """Return all kernel calls; a window is not for shared prompts."""
        if window not in self._calls:
            longest = max(self.lengths)
            ends = self.cu_seqlens
            own = Sequences(ends, ends, longest, longest, causal=True, window=window)
            shared = self.parts if self.shared else None
            assert shared is None or window is None
            ahead = None if self.ahead is None else self.ahead_part
            self._calls[window] = Calls(own, shared, ahead)
        return self._calls[window]

    def keys_within(self, window: int) -> tuple[Tensor, Tensor]:
        """Return the packed tokens that each segment sees, and the offset of each segment in them.

        Before its own tokens, a response sees the last `window - 1` tokens of its prompt. The
        offsets are (S+1,) int32.
        """
        if window in self._keys:
            return self._keys[window]

        contexts = [range(0)] * len(self.lengths)
        for prompt, responses in self.prompts:
            start, stop = self.starts[prompt : prompt + 2]
            for response in responses:
                contexts[response] = range(max(start, stop - window + 1), stop)

        keys: list[Tensor] = []
        counts: list[int] = []
        for context, (start, stop) in zip(contexts, pairwise(self.starts)):
            keys.append(torch.arange(context.start, context.stop))
            keys.append(torch.arange(start, stop))
            counts.append(len(context) + stop - start)

        self._keys[window] = self._send(torch.cat(keys)), self._offsets(counts)
        return self._keys[window]

    def _offsets(self, counts: Iterable[int]) -> Tensor:
        return self._send(segment_bounds(counts))

    def _send(self, tensor: Tensor) -> Tensor:
        return send(tensor, self.cu_seqlens.device)

    @cached_property
    def _members(self) -> list[tuple[range, list[int]]]:
        """Return the prompt tokens of each block, and its segments, longest first."""
        families = [(range(0), range(len(self.lengths) - sum(self.shared)))]
        for prompt, responses in self.prompts:
            families.append((range(*self.starts[prompt : prompt + 2]), responses))

        blocks: list[tuple[range, list[int]]] = []
        for context, segments in families:
            lengths = [self.lengths[segment] for segment in segments]
            for members in group_by_length(lengths, len(context)):
                blocks.append((context, [segments[number] for number in members]))
        return blocks

    @cached_property
    def blocks(self) -> list[Block]:
        """Return padded blocks of segments of falling length; padding adds less than 40 % work."""
        blocks = []
        for prompt, members in self._members:
            rows = len(members)
            length = self.lengths[members[0]]
            start = torch.tensor([self.starts[member] for member in members])[:, None]
            last = torch.tensor([self.lengths[member] - 1 for member in members])[:, None]
            # Padding repeats the segment's own last token, so its values are finite, and no other
            # segment is visible.
            index = start + torch.arange(length)[None, :].minimum(last)
            prompt_keys = torch.arange(prompt.start, prompt.stop).expand(rows, -1)
            keys = torch.cat([prompt_keys, index], dim=1)
            index = self._send(index.flatten())
            keys = self._send(keys.flatten())
            blocks.append(Block(index, keys, rows, length, context=len(prompt)))

        return blocks

    @cached_property
    def restore(self) -> Tensor:
        """Return the index (N,) int64 of each packed token in the concatenated blocks."""
        restore = torch.empty(self.starts[-1], dtype=torch.int64)
        offset = 0
        for _, members in self._members:
            for member in members:
                start = self.starts[member]
                count = self.lengths[member]
                restore[start : start + count] = torch.arange(offset, offset + count)
                offset += self.lengths[members[0]]
        return self._send(restore)

    def band(self, length: int, context: int, window: int) -> Tensor:
        """Return a mask (L, C + L) of the keys that a query sees: its own and `window - 1` more."""
        name = (length, context, window)
        if name not in self._bands:
            key = torch.arange(context + length, device=self.cu_seqlens.device)
            distance = key[context:, None] - key[None, :]
            self._bands[name] = (distance >= 0) & (distance < window)
        return self._bands[name]

    @cached_property
    def _sent_ahead(self) -> Tensor:
        assert self.ahead is not None
        return self._send(self.ahead)

    def band_ahead(self, number: int, window: int) -> Tensor:
        """Return a mask (s, 1, L, C + L) of the keys that the queries of block `number` see.

        A window limits earlier keys only: `ahead` counts the later ones.
        """
        assert self.ahead is not None
        name = (number, window)
        if name not in self._bands_ahead:
            index, _, rows, length, context = self.blocks[number]
            key = torch.arange(context + length, device=self.cu_seqlens.device)
            distance = key[context:, None] - key[None, :]
            later = self._sent_ahead[index].view(rows, 1, length, 1)
            self._bands_ahead[name] = (distance >= -later) & (distance < window)
        return self._bands_ahead[name]


def segment_bounds(lengths: Iterable[int]) -> Tensor:
    """Return where each of S packed segments begins, and the end: (S+1,) int32 on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def group_by_length(lengths: Sequence[int], context: int = 0) -> list[list[int]]:
    """Group segment numbers by falling length, without too much padding or too large groups.

    Each token of a segment also sees `context` tokens before the segment.
    """
    groups: list[list[int]] = []
    real = 0
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        work = lengths[number] * (lengths[number] + context + _LINEAR_COST)
        if groups:
            longest = lengths[groups[-1][0]]
            count = len(groups[-1]) + 1
            fits = count * longest * (longest + context) <= _MAX_BLOCK
            padded_work = count * longest * (longest + context + _LINEAR_COST)
            if fits and padded_work < _MAX_WASTE * (real + work):
                groups[-1].append(number)
                real += work
                continue

        groups.append([number])
        real = work

    return groups
