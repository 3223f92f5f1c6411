"""The draw of a token on CPU in one pass over its row's logits, compiled by numba."""

import numpy as np
import torch

from verl.rollout.embedded.kernels.host_math import compiled, exp, largest_of, log1p
from verl.rollout.sampling import shifted_column_hashes
from verl.rollout.types import SamplingParams


def can_sample(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether `sample` draws by these parameters: from whole vocabularies alone."""
    return logits.dtype == torch.float32 and params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0


def sample(
    logits: torch.Tensor, params: SamplingParams, keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`verl.rollout.sampling.sample`, with the same noise, whose logarithms may differ in the last place."""
    rows, vocabulary = logits.shape
    tokens, log_probs = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    columns = shifted_column_hashes(vocabulary, logits.device)[0]
    noise = torch.empty(0, 2, dtype=torch.int32) if keys is None else keys
    _draw(
        logits.numpy(), np.float32(params.temperature or 1.0), noise.numpy().view(np.uint32),
        columns.numpy().view(np.uint32), np.empty(vocabulary, np.float32), tokens.numpy(), log_probs.numpy(),
    )  # fmt: skip
    return tokens, log_probs


@compiled
def _draw(logits, temperature, keys, columns, scratch, tokens, log_probs):
    """tokens (b,) and log_probs (b,) from logits (b, V), uint32 row keys (b, 2), or (0, 2) for the largest logit, and
    column hashes (V,). scratch (V,)."""
    factor = np.float32(1) / temperature
    for row in range(logits.shape[0]):
        mine = logits[row]
        largest = largest_of(mine) * factor
        total = np.float32(0)
        for i in range(len(mine)):
            weight = exp(mine[i] * factor - largest)
            scratch[i] = weight
            total += weight
        if keys.shape[0] > 0:
            first = np.uint32(keys[row, 0] ^ (keys[row, 0] >> np.uint32(16)))
            second = keys[row, 1]
            for i in range(len(mine)):
                # `noise_integers` and `negative_exponential_noise`
                bits = np.uint32(columns[i] ^ first)
                bits = np.uint32(second + np.uint32(bits * np.uint32(0x85EBCA6B)))
                bits = np.uint32(bits ^ (bits >> np.uint32(13)))
                bits = np.uint32(bits * np.uint32(0xC2B2AE35))
                bits = np.uint32(bits ^ (bits >> np.uint32(16)))
                number = np.float32(np.int32(bits & np.uint32(0x7FFFFFFF)))
                scratch[i] /= -log1p(np.float32(-(2.0**-32)) - number * np.float32(2.0**-31))
        token = _first(scratch, largest_of(scratch))
        tokens[row] = token
        log_probs[row] = mine[token] * factor - largest - np.float32(np.log(total))


@compiled
def _first(numbers, wanted):
    """Where `wanted` is first; 0 if it is NaN, and so is the log-prob then."""
    for i in range(len(numbers)):
        if numbers[i] == wanted:
            return i
    return 0
