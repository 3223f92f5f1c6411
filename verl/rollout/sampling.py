"""Draw tokens: counter-based noise and one draw, shared by all engines of this package.

The noise of a draw is a hash of (seed, step, sample id, position) and of the token id. It depends
neither on the batch of a sample nor on the number of earlier draws, so two engines with equal
logits draw equal tokens, and pre-emption does not change a sample. The integers behind the noise
are the same bits on every device. Their logarithm is the device's own and may differ in the last
place.
"""

import functools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.rollout.types import SamplingParams

# Logits in one chunk of rows: 64 MiB for each fp32 temporary at any vocabulary.
CHUNK_LOGITS = 1 << 24
# Number of heaviest tokens that top-p examines first.
FIRST_CANDIDATES = 128

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# the constants of MurmurHash3's 32-bit finaliser, as signed int32
_MULTIPLY_1 = 0x85EBCA6B - (1 << 32)
_MULTIPLY_2 = 0xC2B2AE35 - (1 << 32)
_MINUS_HALF_A_STEP = torch.tensor(-(2.0**-32))


def sample_keys(
    seed: int, step: int | NDArray[np.int64], sample_ids: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Return one 64-bit key per sample, from (seed, step, sample id).

    The step is one for all, or each sample's.
    """
    of_seed = _splitmix64(np.array([int(seed) & ((1 << 64) - 1)], np.uint64))
    of_step = _splitmix64(of_seed ^ np.asarray(step, np.int64).astype(np.uint64))
    ids = np.asarray(sample_ids, np.int64)
    return _splitmix64(of_step ^ ids.astype(np.uint64))


def row_keys(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the keys of one draw each, (b, 2) int32.

    The samples have `keys` (b,) and draw at response positions (b,), counted from 0.
    """
    mixed = _splitmix64(keys + positions.astype(np.uint64) * _GOLDEN)
    return mixed.view(np.int32).reshape(-1, 2)


def noise_integers(keys: Tensor, vocabulary: int) -> Tensor:
    """Return uniform integers in [0, 2**31), (b, V) int32, from row keys (b, 2) int32."""
    # Two finaliser rounds over column hash ^ key; the second half of the key enters between them,
    # so that rows with equal first halves still differ. A shift spreads over an exclusive or, so
    # the first one of the (b, V) integers is done for each column and each row.
    first = keys[:, :1].clone()
    second = keys[:, 1:]
    bits = column_hashes(vocabulary, keys.device) ^ _xor_shift_(first, 16, torch.empty_like(first))
    torch.add(second, bits, alpha=_MULTIPLY_1, out=bits)
    shifted = torch.empty_like(bits)
    _xor_shift_(bits, 13, shifted).mul_(_MULTIPLY_2)
    return _xor_shift_(bits, 16, shifted).bitwise_and_(0x7FFFFFFF)


def negative_exponential_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Return -E with E ~ Exp(1), (b, V) fp32.

    log1p of a small uniform keeps the winners' end (E near 0) exact to 2**-32; log of a uniform
    near 1 would round one draw in 2**25 to E = 0, which then wins against any weight.
    """
    integers = noise_integers(keys, vocabulary)
    # in the same memory, which is in the caches
    uniform = integers.view(torch.float32).copy_(integers)
    # -(n + 1/2) / 2**31 in one pass: multiplying by a power of two rounds nothing.
    torch.add(_MINUS_HALF_A_STEP, uniform, alpha=-(2.0**-31), out=uniform)
    # The last integers round to a uniform of 1: without a bound, E would be infinite and even a
    # sole token could lose.
    return uniform.log1p_().clamp_(min=-22.0)


def sample(logits: Tensor, params: SamplingParams, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token a row from logits (b, V) and row keys (b, 2) int32.

    Returns tokens (b,) int64 and log-probs (b,) fp32.

    The log-prob is of log_softmax(logits / temperature) over the whole vocabulary in fp32, before
    top-k, top-p and min-p. Temperature 0 takes the largest logit and needs no keys; its log-prob is
    that of temperature 1.
    """
    chunk = max(1, CHUNK_LOGITS // logits.shape[1])
    if logits.shape[0] <= chunk:
        return _sample_chunk(logits, params, keys)

    parts = []
    for start in range(0, logits.shape[0], chunk):
        mine = slice(start, start + chunk)
        own_keys = None if keys is None else keys[mine]
        parts.append(_sample_chunk(logits[mine], params, own_keys))
    tokens, log_probs = zip(*parts)
    return torch.cat(tokens), torch.cat(log_probs)


def _sample_chunk(
    logits: Tensor, params: SamplingParams, keys: Tensor | None
) -> tuple[Tensor, Tensor]:
    # Every pass over (b, V) counts: at a small model they are a quarter of a decode step on CPU.
    scaled = logits.float()
    if params.temperature not in (0, 1):
        scaled = scaled / params.temperature
    weights = scaled.softmax(-1)
    if params.temperature == 0:
        tokens = _argmin(logits.float().neg())
    else:
        assert keys is not None
        kept = weights
        if params.is_filtered:
            kept = weights.where(weights >= smallest_kept_weight(weights, params), 0.0)
        # An exponential race: argmin of E / weight is a draw in proportion to weight, and the
        # Gumbel-max draw, for one logarithm a token instead of three. The noise is -E, so the most
        # negative ratio wins; weight 0 never does.
        noise = negative_exponential_noise(keys, logits.shape[1])
        tokens = _argmin(torch.div(kept, noise, out=noise))

    return tokens, weights.gather(1, tokens[:, None])[:, 0].log_()


def _argmin(values: Tensor) -> Tensor:
    """Return `argmin` over the last dimension.

    On CPU numpy's is vectorized, and ten times as fast as torch's.
    """
    if values.device.type != "cpu":
        return values.argmin(dim=-1)
    return torch.from_numpy(values.numpy().argmin(axis=-1))


def smallest_kept_weight(weights: Tensor, params: SamplingParams) -> Tensor:
    """Return the weight (b, 1) below which top-k, top-p and min-p drop a token of `weights` (b, V).

    They apply in this order. top-k keeps the k heaviest tokens. top-p keeps the fewest of these
    that have a share of p together. min-p keeps tokens with at least min_p times the largest
    weight. Tokens as heavy as the last one kept are kept, so ties never depend on an order.
    """
    vocabulary = weights.shape[1]
    top_k = params.top_k if 0 < params.top_k < vocabulary else vocabulary
    floor = params.min_p * weights.amax(dim=-1, keepdim=True)
    if params.top_p >= 1:
        if top_k == vocabulary:
            return floor
        return torch.maximum(floor, weights.topk(top_k, dim=-1).values[:, -1:])

    if top_k < vocabulary:
        heaviest = weights.topk(top_k, dim=-1).values
        wanted = params.top_p * heaviest.sum(dim=-1, keepdim=True)
    else:
        wanted = params.top_p * weights.sum(dim=-1, keepdim=True)
        heaviest = _heaviest(weights, wanted)

    before = heaviest.cumsum(dim=-1) - heaviest
    kept = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
    return torch.maximum(floor, heaviest.gather(1, kept - 1))


def _heaviest(weights: Tensor, wanted: Tensor) -> Tensor:
    """Return the heaviest of `weights` (b, V) in falling order, (b, n).

    They are enough to sum to `wanted` (b, 1) in every row.

    A few hundred tokens carry nearly all the probability of a language model, and sorting a whole
    vocabulary takes ten times as long as picking them.
    """
    count = FIRST_CANDIDATES
    while count < weights.shape[1]:
        heaviest = weights.topk(count, dim=-1).values
        if bool((heaviest.sum(dim=-1, keepdim=True) >= wanted).all()):
            return heaviest
        count *= 8
    return weights.sort(dim=-1, descending=True).values


def _splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix bits as SplitMix64 (Steele, Lea and Flood 2014); arithmetic modulo 2**64."""
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _xor_shift_(bits: Tensor, count: int, scratch: Tensor) -> Tensor:
    """Compute bits ^= bits >>> count in place.

    int32 shifts copy the sign bit, which the mask removes.
    """
    torch.bitwise_right_shift(bits, count, out=scratch)
    return bits.bitwise_xor_(scratch.bitwise_and_((1 << (32 - count)) - 1))


@functools.lru_cache(maxsize=8)
def column_hashes(vocabulary: int, device: torch.device) -> Tensor:
    """Return (1, V) int32, one hash for each token id, after the first shift of a round."""
    mixed = _splitmix64(np.arange(vocabulary, dtype=np.uint64))
    hashes = torch.from_numpy(mixed.view(np.int32)[::2].copy())
    return _xor_shift_(hashes, 16, torch.empty_like(hashes))[None].to(device)
