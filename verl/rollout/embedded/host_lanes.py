"""Decode steps of small models on CPU in lanes.

Every thread computes whole steps for a share of the rows, from their last tokens to the next ones.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier
from types import ModuleType
from typing import Any, TypeGuard, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.rollout.embedded.host_decoders import Matrix, StackedDecoder
from verl.rollout.embedded.host_rows import RowArrays
from verl.rollout.embedded.kernels.blas import sgemm_address
from verl.rollout.embedded.kernels.host_arrays import Memory, Weights
from verl.rollout.embedded.samples import Answer, IntArray
from verl.rollout.sampling import column_hashes
from verl.utils.imports import is_installed
from verl.utils.logging import logger

S = TypeVar("S")
T = TypeVar("T")
# Every lane reads all weights. With so many rows it computes on them for longer than memory needs
# to bring them.
ROWS_PER_LANE = 32
# Weights up to this size stay in a CPU's caches: 16 MiB. Then lanes may have fewer rows, and there
# may be fewer of them than threads.
CACHED_BYTES = 1 << 24
ROWS_PER_CACHED_LANE = 16
# Calls that cannot generate so many tokens gain less than the 0.6 s in which a process loads numba.
TOKENS_THAT_PAY = 4096
# A lane keeps the memory of so many logits, (row, token) pairs: 64 MiB.
LANE_LOGITS = 1 << 24
# A window that no sequence leaves.
NO_WINDOW = 1 << 62


def pay(decoder: Any, most_tokens: int) -> TypeGuard[StackedDecoder]:
    """Return whether lanes are faster for calls of up to `most_tokens` tokens.

    The answer is the same in every process that makes the same call.
    """
    return (
        isinstance(decoder, StackedDecoder)
        and decoder.cos.dtype == torch.float32
        and most_tokens >= TOKENS_THAT_PAY
        and load_kernels() is not None
    )


def count_lanes(rows: int, threads: int, weight_bytes: int) -> int:
    """Return the number of lanes of a step; 0 where torch's own operations are faster.

    One lane has all of torch's threads for its products. Each of several lanes has one thread.
    """
    if rows >= threads * ROWS_PER_LANE:
        return threads
    if weight_bytes <= CACHED_BYTES:
        return max(1, min(threads, rows // ROWS_PER_CACHED_LANE))
    return int(rows <= ROWS_PER_LANE or threads <= 2)


@functools.cache
def load_kernels() -> ModuleType | None:
    """Return the module of numba's kernels; None without numba, which is logged."""
    if not is_installed("numba"):
        logger.info("rollout: with numba this model would decode faster on CPU: pip install numba")
        return None

    if sgemm_address() is None:
        logger.info(
            "rollout: numba's kernels call MKL's products, which this torch does not have; torch "
            "decodes alone"
        )
        return None

    try:
        return importlib.import_module("verl.rollout.embedded.kernels.host")
    except ImportError as error:  # numba's own, of a numpy that is too new for it
        logger.warning(
            f"rollout: decodes without numba, which raised: {error} Fix it: pip install -U numba"
        )
        return None


class Lanes:
    """A `StackedDecoder` with threads that synchronize once in some steps.

    torch's threads synchronize in each of 150 operations. The steps are one call of `kernels.host`
    without the GIL.
    """

    def __init__(self, decoder: StackedDecoder, head: Any) -> None:
        self.decoder = decoder
        self._head = head
        self.kernels: Any = load_kernels()
        self._logits: dict[int, Tensor] = {}  # memory for them by number of the lane
        self._lanes: list[Lane] = []

    def run(
        self, weights: Any, rows: int, count: int, steps: Callable[["Lane"], list[Answer]]
    ) -> list[Answer]:
        """Let each of `count` lanes compute its rows. Return each step's answer of all rows."""
        lanes = self._lanes_of(weights, rows, count)
        if len(lanes) == 1:
            return steps(lanes[0])  # with all of torch's threads for its products
        parts = self._together(steps, lanes)
        return [joined(answers) for answers in zip(*parts)]

    def share(self, rows: int, compute: Callable[[slice], T]) -> list[T]:
        """Let threads compute shares of so many rows at once. Return the results in order.

        It is for small work between steps: torch's own threads would sleep by then, and wait for
        one another in each operation.
        """
        return self._together(compute, _shares(rows, min(rows, torch.get_num_threads())))

    def _together(self, compute: Callable[[S], T], parts: Sequence[S]) -> list[T]:
        def run(part: S) -> T:
            with torch.inference_mode():
                return compute(part)

        running = [self._pool.submit(run, part) for part in parts]
        try:
            return [each.result() for each in running]
        finally:
            wait(running)  # none goes on when another has failed

    def weights(self) -> Any:
        """Return `host_arrays.Weights`: the model's own memory and the decoder's."""
        decoder = self.decoder
        stacks = self.decoder.stacks
        layers = decoder.layers
        norm = decoder.norm
        heads_norm = decoder.layers[0].query_norm

        head_epsilon = 0.0
        if heads_norm is not None:
            head_epsilon = heads_norm.variance_epsilon * decoder.cos.shape[1]
        head_norms = stacks.head_norm
        if head_norms is None:
            head_norms = stacks.qkv.weight[:, :0]
        head_bias = self._head.bias
        if head_bias is not None:
            head_bias = head_bias[None]

        return Weights(
            embeddings=decoder.embeddings.weight.detach().numpy(),
            **_arrays("head", Matrix(self._head.weight, head_bias)),
            head_norms=head_norms.numpy(),
            **_arrays("qkv", stacks.qkv),
            **_arrays("output", stacks.output),
            **_arrays("gate_up", stacks.gate_up),
            **_arrays("down", stacks.down),
            last_factors=decoder.last_factors.numpy(),
            turns=decoder.turns[:, 0].numpy(),
            windows=np.array([layer.facts.window or NO_WINDOW for layer in layers]),
            scale=np.float32(layers[0].facts.scale),
            epsilon=np.float32(norm.variance_epsilon * norm.weight.shape[0]),
            head_epsilon=np.float32(head_epsilon),
        )

    def memory_of_logits(self, lane: int, rows: int, vocabulary: int) -> Tensor:
        """Return memory (n, V) for at most n rows, the same in every step.

        Fresh memory would cost a page fault every 4 KiB.
        """
        rows = max(1, min(rows, LANE_LOGITS // vocabulary))
        kept = self._logits.get(lane)
        if kept is None or kept.numel() < rows * vocabulary:
            kept = self._logits[lane] = torch.empty(rows * vocabulary)
        return kept[: rows * vocabulary].view(rows, vocabulary)

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return _single_threads(torch.get_num_threads())

    def _lanes_of(self, weights: Any, rows: int, count: int) -> list["Lane"]:
        if len(self._lanes) != count or self._lanes[-1].rows.stop != rows:
            shares = enumerate(_shares(rows, count))
            self._lanes = [Lane(self, weights, number, share) for number, share in shares]
        return self._lanes


def joined(answers: Sequence[Answer]) -> Answer:
    """Return the answer of all rows, of which each of `answers` has a share."""
    tokens, log_probs = zip(*answers)
    return np.concatenate(tokens), np.concatenate(log_probs)


def _shares(rows: int, count: int) -> list[slice]:
    """Return `count` slices of all rows, which differ by one row at most."""
    ends = [rows * number // count for number in range(count + 1)]
    return list(map(slice, ends, ends[1:]))


def _single_threads(count: int) -> ThreadPoolExecutor:
    """Make threads in which torch's operations use no other threads."""
    threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first look takes over the last setting of any thread

    pool = ThreadPoolExecutor(count, "verl-lane", initializer=begin)
    all_there = Barrier(count)
    wait([pool.submit(all_there.wait) for _ in range(count)])
    torch.set_num_threads(threads)  # which threads to come take over
    return pool


class Lane:
    """The rows of one thread, and memory that all of its steps share."""

    def __init__(self, owner: Lanes, weights: Any, number: int, rows: slice) -> None:
        self.owner = owner
        self.rows = rows
        count = rows.stop - rows.start
        dim = owner.decoder.cos.shape[1]
        hidden = weights.down.shape[2]
        intermediate = weights.down.shape[1]
        shapes = {
            "stream": (count, hidden),
            "added": (count, hidden),
            "normed": (count, hidden),
            "heads": (count, weights.qkv.shape[2] // dim, dim),
            "mixed": (count, weights.output.shape[1] // dim, dim),
            "gate_up": (2, count, intermediate),
            "active": (count, intermediate),
            "scores": (count, weights.output.shape[1] // dim, 0),
            "scratch": weights.head.shape[:1],
        }

        # By torch, which has them begin where vectors do.
        arrays = {name: torch.empty(shape).numpy() for name, shape in shapes.items()}
        self.logits = owner.memory_of_logits(number, count, weights.head.shape[0])
        self.memory = Memory(**arrays, logits=self.logits.numpy())

    def generate(
        self,
        ids: IntArray,
        noise: NDArray[np.int32],
        weights: Any,
        arrays: RowArrays,
        temperature: float,
    ) -> list[Answer]:
        """Feed `ids` (b,) of these rows and draw a token for each step of `noise` (s, b, 2).

        Each is drawn from the one before; without any keys (s, 0, 2) it is the likeliest.
        """
        tokens = np.empty((len(noise), len(ids)), np.int64)
        log_probs = np.empty((len(noise), len(ids)), np.float32)
        hashes = column_hashes(len(weights.head), torch.device("cpu"))
        columns = hashes[0].numpy().view(np.uint32)
        self._have_scores(arrays)
        self.owner.kernels.generate(
            ids,
            np.ascontiguousarray(noise).view(np.uint32),
            weights,
            arrays.keys,
            arrays.values,
            arrays.starts,
            self.rows.start,
            arrays.column,
            self.memory,
            np.float32(temperature),
            columns,
            tokens,
            log_probs,
        )

        return list(zip(tokens, log_probs))

    def hidden(self, ids: IntArray, weights: Any, arrays: RowArrays, column: int) -> Tensor:
        """Return the last hidden states (b, H) of these rows.

        Writes the keys and values of their tokens to a column of the arrays. The next step
        overwrites the result.
        """
        self._have_scores(arrays)
        self.owner.kernels.step(
            ids,
            weights,
            arrays.keys,
            arrays.values,
            arrays.starts,
            self.rows.start,
            column,
            self.memory,
        )
        return torch.from_numpy(self.memory.normed)

    def _have_scores(self, arrays: RowArrays) -> None:
        rows, heads, columns = self.memory.scores.shape
        if columns < arrays.keys.shape[1]:
            scores = torch.empty(rows, heads, arrays.keys.shape[1]).numpy()
            self.memory = self.memory._replace(scores=scores)


def _arrays(name: str, matrix: Matrix) -> dict[str, NDArray[np.float32]]:
    weight = matrix.weight.detach()
    bias = weight[..., :0, :] if matrix.bias is None else matrix.bias.detach()
    return {name: weight.numpy(), f"{name}_bias": bias.numpy()}
