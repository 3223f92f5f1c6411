"""Decode steps of small models on CPU in lanes: every thread takes a share of the rows all the way from their last
tokens to the next ones."""

import functools
import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from types import ModuleType
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from verl.rollout.embedded.fused import StackedDecoder, product, products
from verl.rollout.embedded.host_rows import RowArrays
from verl.rollout.sampling import sample
from verl.rollout.types import SamplingParams
from verl.utils.imports import is_installed
from verl.utils.logging import logger

# Threads take turns in Python: a third one makes the others wait longer than it helps.
MOST_LANES = 2
# Two lanes of fewer rows take longer than one, for whose products torch takes all its threads.
ROWS_PER_LANE = 64
# What torch's operations do with more threads than there are lanes, they do faster for more rows than these.
ROWS_BEFORE_MANY_THREADS = 32
# Calls that cannot generate so many tokens do not gain what a process needs to load numba: 0.6 s.
TOKENS_THAT_PAY = 4096
# A lane keeps the memory of so many logits, (row, token) pairs: 64 MiB.
LANE_LOGITS = 1 << 24

Answer = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens (b,) and their log-probs (b,)


def pay(decoder: Any, most_tokens: int) -> TypeGuard[StackedDecoder]:
    """Whether calls of up to `most_tokens` tokens go in lanes. The same in every process that makes the same call."""
    return (
        isinstance(decoder, StackedDecoder)
        and decoder.cos.dtype == torch.float32
        and most_tokens >= TOKENS_THAT_PAY
        and load_kernels() is not None
    )


def count_lanes(rows: int, threads: int) -> int:
    """How many lanes a step of so many rows goes in; 0 where torch's operations are faster."""
    if threads > MOST_LANES:
        return int(rows <= ROWS_BEFORE_MANY_THREADS)
    return max(1, min(threads, rows // ROWS_PER_LANE))


@functools.cache
def load_kernels() -> ModuleType | None:
    """The module of numba's kernels; None, and why in the log, without numba."""
    if not is_installed("numba"):
        logger.info("rollout: with numba this model would decode faster on CPU: pip install numba")
        return None
    try:
        return importlib.import_module("verl.rollout.embedded.kernels.host")
    except ImportError as error:  # numba's own, of a numpy that is too new for it
        logger.warning(f"rollout: decodes without numba, which raised: {error} Mend it: pip install -U numba")
        return None


class Lanes:
    """A `StackedDecoder` whose threads meet once a step, where those of torch meet in each of 150 operations.

    What lies between matrix products is one call of `kernels.host`, and so is a draw.
    """

    def __init__(self, decoder: StackedDecoder) -> None:
        self.decoder = decoder
        self.kernels: Any = load_kernels()
        self.turns = decoder.turns[:, 0].numpy()  # (P, D / 2)
        self.logits: dict[int, torch.Tensor] = {}  # memory for them by number of the lane
        self._lanes: list[Lane] = []

    def decode(self, rows: int, count: int, step: Callable[["Lane"], Answer]) -> Answer:
        """Have each of `count` lanes take its `step` of a batch of so many rows; gives the answers of all rows."""
        lanes = self._lanes_of(rows, count)

        def run(lane: Lane) -> Answer:
            with torch.inference_mode():
                return step(lane)

        if len(lanes) == 1:
            return run(lanes[0])  # with all of torch's threads for its products
        running = [self._pool.submit(run, lane) for lane in lanes]
        try:
            tokens, log_probs = zip(*(lane.result() for lane in running))
        finally:
            wait(running)  # none goes on when another has failed
        return np.concatenate(tokens), np.concatenate(log_probs)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return _single_threads(MOST_LANES)

    def _lanes_of(self, rows: int, count: int) -> list["Lane"]:
        if len(self._lanes) != count or self._lanes[-1].rows.stop != rows:
            bounds = [rows * i // count for i in range(count + 1)]
            shares = itertools.starmap(slice, itertools.pairwise(bounds))
            self._lanes = [Lane(self, number, share) for number, share in enumerate(shares)]
        return self._lanes


def _single_threads(count: int) -> ThreadPoolExecutor:
    """Threads in which torch's operations ask no other threads for help."""
    threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first look takes over what any thread has set last

    pool = ThreadPoolExecutor(count, "verl-lane", initializer=begin)
    all_there = Barrier(count)
    wait([pool.submit(all_there.wait) for _ in range(count)])
    torch.set_num_threads(threads)  # which threads to come take over
    return pool


class Lane:
    """The rows of one thread, and memory for them that every step uses again."""

    def __init__(self, owner: Lanes, number: int, rows: slice) -> None:
        self.owner = owner
        self.number = number
        self.rows = rows
        decoder = owner.decoder
        stacks = decoder.stacks[id(decoder.layers[0])]
        hidden, intermediate = decoder.norm.weight.shape[0], stacks.down.weight.shape[0]
        count, dim = rows.stop - rows.start, decoder.cos.shape[1]
        self.stream, self.added, self.normed = torch.empty(3, count, hidden).unbind()
        self.heads = torch.empty(count, stacks.qkv.weight.shape[1])
        self.mixed = torch.empty(count, stacks.output.weight.shape[0])
        self.gate_up = torch.empty(2, count, intermediate)
        self.active = torch.empty(count, intermediate)
        # The same memory for the kernels.
        self._stream, self._added, self._normed, self._gate_up, self._active = (
            tensor.numpy() for tensor in (self.stream, self.added, self.normed, self.gate_up, self.active)
        )
        self._heads, self._mixed = (tensor.view(count, -1, dim).numpy() for tensor in (self.heads, self.mixed))
        self._scores = np.empty(0, np.float32)

    def hidden(self, ids: NDArray[np.int64], positions: NDArray[np.int64], arrays: RowArrays) -> torch.Tensor:
        """The last hidden states (n, H) of these rows, whose tokens' keys and values go to the arrays. The memory is
        written to again in the next step."""
        decoder, kernels, mine = self.owner.decoder, self.owner.kernels, self.rows
        starts, column = arrays.starts[mine], arrays.column
        if len(self._scores) <= column:
            self._scores = np.empty(2 * column + 1, np.float32)
        torch.index_select(decoder.embeddings.weight, 0, torch.from_numpy(ids), out=self.stream)
        self.added.zero_()
        for layer in decoder.layers:
            stacks, facts = decoder.stacks[id(layer)], layer.facts
            self._add_norm(layer.input_norm)
            product(self.normed, stacks.qkv, self.heads)
            norms, epsilon = _NO_NORMS, np.float32(0)
            if stacks.head_norm is not None:
                norms, epsilon = stacks.head_norm.numpy(), _epsilon(layer.query_norm)
            keys, values = arrays.layers[id(decoder.paging.layers[layer.attention])]
            kernels.attend(
                self._heads, norms, epsilon, self.owner.turns, positions, keys[mine], values[mine], starts, column,
                facts.window or column + 1, np.float32(facts.scale), self._scores, self._mixed,
            )  # fmt: skip
            product(self.mixed, stacks.output, self.added)
            self._add_norm(layer.post_norm)
            products(self.normed, stacks.gate_up, self.gate_up)
            kernels.gate(self._gate_up, self._active)
            product(self.active, stacks.down, self.added)
        self._add_norm(decoder.norm)
        return self.normed.mul_(decoder.last_factors)

    def memory_of_logits(self, rows: int, vocabulary: int) -> torch.Tensor:
        """(rows, V), the same in every step: fresh memory costs a page fault every 4 KiB."""
        kept = self.owner.logits.get(self.number)
        if kept is None or kept.numel() < rows * vocabulary:
            kept = self.owner.logits[self.number] = torch.empty(rows * vocabulary)
        return kept[: rows * vocabulary].view(rows, vocabulary)

    def sample(
        self, logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sampling.sample`."""
        kernels = self.owner.kernels
        return (kernels.sample if kernels.can_sample(logits, params) else sample)(logits, params, keys)

    def _add_norm(self, norm: Any) -> None:
        self.owner.kernels.add_unit_rows(self._stream, self._added, self._normed, _epsilon(norm))


_NO_NORMS = np.empty((0, 0), np.float32)


def _epsilon(norm: Any) -> np.float32:
    return np.float32(norm.variance_epsilon * norm.weight.shape[0])
