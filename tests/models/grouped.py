"""Rows of a few prompts with several responses each, and a flash kernel for the CPU."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.tiny_models import VOCABULARY
from verl.models.kernels.varlen import Sequences
from verl.models.packed import PackedBatch

Group = tuple[int, Sequence[int]]  # tokens of a prompt, tokens of each of its responses
# A single prompt, prompts that begin another prompt, responses without tokens, groups of different
# size.
GROUPS: tuple[Group, ...] = (
    (24, (20, 1, 33, 5)),
    (5, (12, 0, 9)),
    (6, (38,)),
    (17, (3, 40)),
    (9, (0, 0)),
    (3, (7, 0)),
)


class Rows(NamedTuple):
    """Padded rows; `prompts` says which rows share a prompt."""

    input_ids: Tensor  # (B, T)
    attention_mask: Tensor
    prompts: list[int]
    prompt_lengths: list[int]
    response_length: int

    def pack(self, rows: Iterable[int] | None = None, *, share: bool) -> PackedBatch:
        chosen = list(range(len(self.prompts)) if rows is None else rows)
        batch = PackedBatch.from_rows(
            self.input_ids[chosen], self.attention_mask[chosen], self.response_length
        )
        if share:
            batch = batch.with_shared_prompts(
                [self.prompts[row] for row in chosen], [self.prompt_lengths[row] for row in chosen]
            )
        return batch


def grouped_rows(
    groups: Sequence[Group] = GROUPS, *, interleave: bool = False, seed: int = 0
) -> Rows:
    """Make every prompt a beginning of the same text.

    Rows are ordered group by group, or interleaved.
    """
    generator = torch.Generator().manual_seed(seed)
    width = max(prompt for prompt, _ in groups)
    height = max(max(responses) for _, responses in groups)
    text = torch.randint(3, VOCABULARY, (width,), generator=generator)
    rows = [
        (place, number)
        for number, (_, responses) in enumerate(groups)
        for place in range(len(responses))
    ]
    if interleave:
        rows.sort()

    ids = torch.zeros(len(rows), width + height, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (place, number) in enumerate(rows):
        prompt = groups[number][0]
        response = groups[number][1][place]
        ids[row, width - prompt : width] = text[:prompt]
        ids[row, width : width + response] = torch.randint(
            3, VOCABULARY, (response,), generator=generator
        )
        mask[row, width - prompt : width + response] = 1

    numbers = [number for _, number in rows]
    return Rows(ids, mask, numbers, [groups[number][0] for number in numbers], height)


def _pairs(sequences: Sequences) -> list[tuple[slice, slice]]:
    q = sequences.query_offsets.tolist()
    k = sequences.key_offsets.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _scores(q: Tensor, k: Tensor, sequences: Sequences, scale: float) -> Tensor:
    """Return scores (Hq, n, m) of q (n, Hq, D) and k (m, Hk, D); last query and key align."""
    causal, window = sequences.masked
    repeated = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, repeated) * scale
    if causal or window:
        every = torch.ones(scores.shape[1:], dtype=torch.bool)
        aligned = k.shape[0] - q.shape[0]
        scores = scores.masked_fill(every.triu(1 + aligned), float("-inf"))
        if window:
            past = every.tril(aligned - window["window_size_left"] - 1)
            scores = scores.masked_fill(past, float("-inf"))
    return scores


def kernel_forward(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `varlen.forward` in any precision."""
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[1], q.shape[0])
    for of_q, of_k in _pairs(sequences):
        assert of_q.stop - of_q.start <= sequences.longest_query
        assert of_k.stop - of_k.start <= sequences.longest_key
        scores = _scores(q[of_q], k[of_k], sequences, scale)
        values = v[of_k].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[of_q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        lse[:, of_q] = scores.logsumexp(-1)
    return out, lse


def kernel_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sequences: Sequences,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `varlen.backward` from `out` and `lse`, like FlashAttention-2.

    Dao 2023, algorithm 2.
    """
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shared_by = q.shape[1] // k.shape[1]
    for of_q, of_k in _pairs(sequences):
        probabilities = (_scores(q[of_q], k[of_k], sequences, scale) - lse[:, of_q, None]).exp()
        keys, values = (tensor[of_k].repeat_interleave(shared_by, dim=1) for tensor in (k, v))
        means = (grad_out[of_q] * out[of_q]).sum(-1).t()[..., None]
        grad_scores = probabilities * (torch.einsum("qhd,khd->hqk", grad_out[of_q], values) - means)
        grads[0][of_q] = torch.einsum("hqk,khd->qhd", grad_scores, keys) * scale
        of_keys = torch.einsum("hqk,qhd->khd", grad_scores, q[of_q]) * scale
        of_values = torch.einsum("hqk,qhd->khd", probabilities, grad_out[of_q])
        grads[1][of_k] = of_keys.unflatten(1, (-1, shared_by)).sum(2)
        grads[2][of_k] = of_values.unflatten(1, (-1, shared_by)).sum(2)

    return grads
