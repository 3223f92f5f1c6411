"""The arrays that a decode step of `kernels.host` reads and writes.

n layers, b rows of a step, R rows and C columns of the cache, Hq query heads and Hk key heads of D
numbers, H hidden and I inner numbers, V tokens of the vocabulary, P positions.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Weights(NamedTuple):
    """The weights of n layers, as `host_decoders.Stacks` has them.

    A weight that the model lacks is empty in its last dimension but one.
    """

    embeddings: NDArray  # (V, H)
    qkv: NDArray  # (n, H, (Hq + 2 Hk) D)
    qkv_bias: NDArray  # (n, 1, (Hq + 2 Hk) D)
    head_norms: NDArray  # (n, Hq + Hk, D)
    output: NDArray  # (n, Hq D, H)
    output_bias: NDArray  # (n, 1, H)
    gate_up: NDArray  # (n, 2, H, I)
    gate_up_bias: NDArray  # (n, 2, 1, I)
    down: NDArray  # (n, I, H)
    down_bias: NDArray  # (n, 1, H)
    last_factors: NDArray  # (H,)
    turns: NDArray  # (P, D / 2)
    head: NDArray  # (V, H)
    head_bias: NDArray  # (1, V)
    windows: NDArray  # (n,), int64
    scale: np.float32
    epsilon: np.float32  # times H
    head_epsilon: np.float32  # times D


class Memory(NamedTuple):
    """The memory that a step writes to."""

    stream: NDArray  # (b, H)
    added: NDArray  # (b, H)
    normed: NDArray  # (b, H)
    heads: NDArray  # (b, Hq + 2 Hk, D)
    mixed: NDArray  # (b, Hq, D)
    gate_up: NDArray  # (2, b, I)
    active: NDArray  # (b, I)
    scores: NDArray  # (b, Hq, C)
    logits: NDArray  # (rows with logits at the same time, V)
    scratch: NDArray  # (V,)
