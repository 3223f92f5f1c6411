"""Decode steps of small models on CPU in lanes: every thread takes a share of the rows all the way from their last
tokens to the next ones."""

import functools
import importlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl.rollout.embedded.fused import StackedDecoder, product, products
from verl.rollout.embedded.host_rows import RowArrays
from verl.utils.imports import is_installed
from verl.utils.logging import logger

# With fewer rows a thread waits for its weights more than it computes.
ROWS_PER_LANE = 16
# Calls that cannot generate so many tokens do not gain what a process needs to load numba: 0.6 s.
TOKENS_THAT_PAY = 4096

Answer = tuple[NDArray[np.int64], NDArray[np.float32]]  # tokens (b,) and their log-probs (b,)


def pay(decoder: Any, most_tokens: int) -> bool:
    """Whether calls of up to `most_tokens` tokens go in lanes. The same in every process that makes the same call."""
    return (
        isinstance(decoder, StackedDecoder)
        and decoder.cos.dtype == torch.float32
        and most_tokens >= TOKENS_THAT_PAY
        and load_kernels("host_layers") is not None
    )


@functools.cache
def load_kernels(name: str) -> ModuleType | None:
    """A module of numba's kernels; None, and why in the log, without numba."""
    if not is_installed("numba"):
        logger.info("rollout: with numba this model would decode faster on CPU: pip install numba")
        return None
    try:
        return importlib.import_module(f"verl.rollout.embedded.kernels.{name}")
    except ImportError as error:  # numba's own, of a numpy that is too new for it
        logger.warning(f"rollout: decodes without numba, which raised: {error} Mend it: pip install -U numba")
        return None


class Lanes:
    """A `StackedDecoder` whose threads meet once a step, where those of torch meet in each of 150 operations.

    What lies between matrix products is one call of `kernels.host_layers`.
    """

    def __init__(self, decoder: StackedDecoder) -> None:
        self.decoder = decoder
        self.kernels: Any = load_kernels("host_layers")
        self.turns = decoder.turns[:, 0].numpy()  # (P, D / 2)
        self.num_threads = torch.get_num_threads()
        self._lanes: list[Lane] = []
        self._pool: ThreadPoolExecutor | None = None

    def decode(self, rows: int, step: Callable[["Lane"], Answer]) -> Answer:
        """Have every lane take its `step` of a batch of so many rows; gives the answers of all rows."""
        lanes = self._lanes_of(rows)

        def run(lane: Lane) -> Answer:
            with torch.inference_mode():
                return step(lane)

        if len(lanes) == 1:
            return run(lanes[0])  # with all of torch's threads for its products
        if self._pool is None:
            self._pool = _single_threads(self.num_threads)
        running = [self._pool.submit(run, lane) for lane in lanes]
        try:
            tokens, log_probs = zip(*(lane.result() for lane in running))
        finally:
            wait(running)  # none goes on when another has failed
        return np.concatenate(tokens), np.concatenate(log_probs)

    def _lanes_of(self, rows: int) -> list["Lane"]:
        if not self._lanes or self._lanes[-1].rows.stop != rows:
            count = max(1, min(self.num_threads, rows // ROWS_PER_LANE))
            bounds = [rows * i // count for i in range(count + 1)]
            self._lanes = [Lane(self, slice(*ends)) for ends in itertools.pairwise(bounds)]
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

    def __init__(self, owner: Lanes, rows: slice) -> None:
        self.owner = owner
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

    def _add_norm(self, norm: Any) -> None:
        self.owner.kernels.add_unit_rows(self._stream, self._added, self._normed, _epsilon(norm))


_NO_NORMS = np.empty((0, 0), np.float32)


def _epsilon(norm: Any) -> np.float32:
    return np.float32(norm.variance_epsilon * norm.weight.shape[0])
