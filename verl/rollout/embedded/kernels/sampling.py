"""Draw tokens on CUDA as `verl.rollout.sampling.sample` does, in fused kernels.

No probability, no noise and no sorted copy is written.

Without filters one pass over the logits is enough: each program keeps, of one row's chunk of the
vocabulary, the largest logit, the sum of exponentials and the best Gumbel score, and a second
kernel merges the chunks. With top-k, top-p or min-p the sums come first, then one program a row
finds the smallest logit kept, then the draw passes over the logits again. Top-k and top-p are a
search, not a sort: the number of tokens, or their weight, at or above a logit only falls as the
logit rises.

The cut of a row into chunks and blocks depends on the vocabulary alone, so the bits of a row do not
depend on the batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from verl.rollout.embedded.kernels import sampling_kernels, threshold_kernels
from verl.rollout.sampling import column_hashes

# a kernel is launched as kernel[grid](...), which no type checker follows
_kernels: Any = sampling_kernels
_threshold_kernels: Any = threshold_kernels


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The cut of a row by the kernels: a program scans `chunk` columns, `block` at a time.

    It is one warp, so that a reduction over a block needs no barrier. A chunk has many blocks, so
    that most of them come after a good score was found (see `scan_and_draw`). Small blocks leave
    registers for more programs.
    """

    chunk: int = 4096
    block: int = 256
    search_block: int = 8192
    search_warps: int = 16


@dataclass(frozen=True, kw_only=True)
class DrawState:
    """The inputs of a draw of b rows, except the logits, and its outputs.

    All are on the device, at fixed addresses.
    """

    slots: Tensor  # (b,) int32: the slot of each row, an index into `keys` and `drawn`
    keys: Tensor  # (S,) int64: the samples' uint64 keys, reinterpreted
    # (S,) int32: the response position of this draw, that is, the number of tokens drawn before
    drawn: Tensor
    settings: Tensor  # (4,) fp32: temperature, top_p, min_p, top_k (0 or less: off)
    tokens: Tensor  # (b,) int64, written
    log_probs: Tensor  # (b,) fp32, written


class Workspace:
    """Scratch memory for draws of up to `max_rows` rows of `vocabulary` logits.

    It also holds the hash of every token id.
    """

    def __init__(
        self, max_rows: int, vocabulary: int, device: torch.device, tuning: Tuning | None = None
    ) -> None:
        self.max_rows = max_rows
        self.vocabulary = vocabulary
        self.tuning = tuning or Tuning()
        self.num_chunks = triton.cdiv(vocabulary, self.tuning.chunk)
        self.hashes = column_hashes(vocabulary, device)[0]
        per_chunk = (max_rows, self.num_chunks)
        self.largest = torch.empty(per_chunk, dtype=torch.float32, device=device)
        self.totals = torch.empty(per_chunk, dtype=torch.float32, device=device)
        self.scores = torch.empty(per_chunk, dtype=torch.float32, device=device)
        self.columns = torch.empty(per_chunk, dtype=torch.int32, device=device)
        # The numbers of a row: the largest logit, the sum of exponentials, and the smallest logit
        # that top-k and top-p keep.
        self.rows = torch.empty(max_rows, 3, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Count the bytes of device memory, without the hashes that `sampling` shares."""
        parts = (self.largest, self.totals, self.scores, self.columns, self.rows)
        return sum(part.nbytes for part in parts)


def draw(
    logits: Tensor, state: DrawState, workspace: Workspace, *, filtered: bool, greedy: bool
) -> None:
    """Draw one token a row into `state.tokens` and `state.log_probs`.

    `logits` (b, V) are bf16, fp16 or fp32. The numbers are those of `verl.rollout.sampling.sample`:
    the same noise, the same tokens kept, and the log-prob of log_softmax(logits / temperature) over
    the whole vocabulary. With `greedy` neither settings nor keys are read, and the log-prob is that
    of temperature 1. Without `filtered` top_p, min_p and top_k are not read. A row with a NaN, with
    +inf, or with nothing but -inf gets a log-prob that is not finite, and some token id below V.

    Nothing is allocated and nothing waits for the device, so that a call can be captured in a CUDA
    graph.
    """
    rows, vocabulary = logits.shape
    assert logits.stride(1) == 1
    assert vocabulary == workspace.vocabulary
    assert rows <= workspace.max_rows
    assert state.slots.shape == state.tokens.shape == state.log_probs.shape == (rows,)
    assert state.tokens.dtype == state.keys.dtype == torch.int64
    assert state.drawn.dtype == state.slots.dtype == torch.int32
    work = workspace

    tuning = workspace.tuning
    source = (logits, logits.stride(0), state.settings)
    parts = (work.largest, work.totals, work.scores, work.columns)
    noise = (work.hashes, state.slots, state.keys, state.drawn)
    cut = {"VOCABULARY": vocabulary, "CHUNK": tuning.chunk, "BLOCK": tuning.block, "num_warps": 1}
    chunks = {"NUM_CHUNKS": work.num_chunks, "CHUNKS": triton.next_power_of_2(work.num_chunks)}
    grid = (rows, work.num_chunks)
    if greedy or filtered:
        _kernels.scan[grid](*source, *parts, GREEDY=greedy, **cut)

    if filtered and not greedy:
        _threshold_kernels.find_threshold[(rows,)](
            *source,
            work.largest,
            work.totals,
            work.rows,
            VOCABULARY=vocabulary,
            **chunks,
            BLOCK=tuning.search_block,
            DROPPED_BITS=_dropped_bits(logits.dtype),
            num_warps=tuning.search_warps,
        )

    if not greedy:
        _kernels.scan_and_draw[grid](*source, *noise, work.rows, *parts, FILTERED=filtered, **cut)
    _kernels.merge[(rows,)](
        *source,
        *parts,
        work.rows,
        state.tokens,
        state.log_probs,
        VOCABULARY=vocabulary,
        GREEDY=greedy,
        FILTERED=filtered and not greedy,
        num_warps=1,
        **chunks,
    )


def _dropped_bits(dtype: torch.dtype) -> int:
    """Return how many low bits are zero in every logit of this type as fp32."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]
