"""Functions of padded tensors by verl 0.5's names (`verl.utils.torch_functional`)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from verl.algorithms import masked
from verl.utils.errors import BatchError

Logits = Float[Tensor, "*tokens V"]
PerToken = Float[Tensor, "*tokens"]
Ids = Int[Tensor, "B T"]
Mask = Shaped[Tensor, "B T"]
IdsAndMask = tuple[Int[Tensor, "B W"], Shaped[Tensor, "B W"]]  # of another width
TRUNCATIONS = ("left", "right", "middle", "error")


# ---- log-probs -----------------------------------------------------------------------------------


def logprobs_from_logits(
    logits: Logits,
    labels: Int[Tensor, "*tokens"],
    inplace_backward: bool = True,
) -> PerToken:
    """Return the log-prob of each label, z_label - logsumexp(z), in the dtype of the logits.

    `inplace_backward` is a setting of another kernel and is ignored.
    """
    chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


logprobs_from_logits_naive = logprobs_from_logits


def log_probs_from_logits_response(
    input_ids: Ids, logits: Float[Tensor, "B T V"], response_length: int
) -> Float[Tensor, "B R"]:
    """Return log-probs of the last `response_length` tokens, from logits one position earlier."""
    return logprobs_from_logits(
        logits[:, -response_length - 1 : -1], input_ids[:, -response_length:]
    )


def entropy_from_logits(logits: Logits) -> PerToken:
    """Return the entropy of softmax(logits): logsumexp(z) - sum over v of p_v z_v."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clip values to the bounds of two tensors."""
    return torch.max(torch.min(x, tensor_max), tensor_min)


# ---- masks ---------------------------------------------------------------------------------------


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the sum of the values under the mask."""
    return masked.masked_sum(values, mask, axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Return the mean of the values under the mask; 0 if the mask is empty."""
    return masked.masked_mean(values, mask, axis)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values under the mask.

    Raises BatchError (a ValueError) for fewer than two values, or for none if not `unbiased`.
    """
    count = int(mask.bool().sum())
    least = 1 + int(unbiased)
    if count < least:
        raise BatchError(
            f"A variance with unbiased={unbiased} needs at least {least} values under the mask, "
            f"got {count}."
        )
    return masked.masked_var(values, mask, unbiased)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale values to mean 0 (or the old mean without `shift_mean`) and variance 1 under the mask.

    The values outside of the mask become 0.
    """
    return masked.masked_whiten(values, mask, shift_mean)


def get_response_mask(
    response_id: Int[Tensor, "B R"],
    eos_token: int | Sequence[int] = 2,
    dtype: torch.dtype = torch.int64,
) -> Shaped[Tensor, "B R"]:
    """Return a mask that is 1 up to and including a response's first end-of-sequence token."""
    ends = torch.as_tensor([eos_token] if isinstance(eos_token, int) else list(eos_token))
    is_end = torch.isin(response_id, ends.to(response_id.device)).long()
    ended_before = is_end.cumsum(-1) - is_end
    return (ended_before == 0).to(dtype)


def compute_position_id_with_mask(mask: Shaped[Tensor, "*B T"]) -> Shaped[Tensor, "*B T"]:
    """Return the position of each real token; 0 on the padding to the left."""
    return torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0)


# ---- padding -------------------------------------------------------------------------------------


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Ids:
    """Pad rows on the right to the longest of them, or to `max_length` if that is longer."""
    longest = max((len(row) for row in response), default=0)
    width = max(longest, max_length or 0)
    rows: list[list[int]] = []
    for row in response:
        padding = [pad_token_id] * (width - len(row))
        rows.append([*row, *padding])
    return torch.tensor(rows)


def pad_sequence_to_length(
    tensors: Shaped[Tensor, "*B T"], max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Shaped[Tensor, "*B W"]:
    """Pad the last dimension to `max_seq_len`. A longer one is returned as it is."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    sides = (missing, 0) if left_pad else (0, missing)
    return functional.pad(tensors, sides, "constant", pad_token_id)


def postprocess_data(
    input_ids: Ids,
    attention_mask: Mask,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> IdsAndMask:
    """Pad to `max_length` columns, or cut to it if `truncation` allows it.

    `left` drops the beginning, `right` the end, `middle` the middle; `error` raises BatchError.
    """
    if truncation not in TRUNCATIONS:
        raise BatchError(f"truncation must be one of {', '.join(TRUNCATIONS)}, got {truncation!r}.")
    length = input_ids.shape[-1]
    if length <= max_length:
        return (
            pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad),
            pad_sequence_to_length(attention_mask, max_length, 0, left_pad),
        )

    if truncation == "error":
        raise BatchError(
            f"A sequence of {length} tokens is longer than max_length={max_length}. Set "
            "truncation to left, right or middle, or raise max_length."
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    tail = length - (max_length - head)
    kept = [*range(head), *range(tail, length)]
    return input_ids[:, kept], attention_mask[:, kept]


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: Any,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> IdsAndMask:
    """Tokenize one text without special tokens, and apply `postprocess_data`."""
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(
        encoded["input_ids"],
        encoded["attention_mask"],
        max_length,
        pad_token_id,
        left_pad,
        truncation,
    )


def remove_pad_token(input_ids: Ids, attention_mask: Mask) -> list[list[int]]:
    """Return the token ids of each row without the padding on its left."""
    starts = input_ids.shape[-1] - attention_mask.sum(-1)
    return [row[start:].tolist() for row, start in zip(input_ids, starts.tolist())]


def split_dict_tensor_into_batches(tensors: Any, batch_size: int) -> list[Any]:
    """Split a TensorDict into parts of `batch_size` rows, which must divide its rows."""
    rows = tensors.batch_size[0]
    if rows % batch_size:
        raise BatchError(f"batch_size must divide the {rows} rows, got {batch_size}.")
    return list(tensors.split(batch_size))


# ---- learning rates ------------------------------------------------------------------------------


def get_constant_schedule_with_warmup(
    optimizer: torch.optim.Optimizer, num_warmup_steps: int, last_epoch: int = -1
) -> LambdaLR:
    """Make a schedule that rises from 0 to 1 during the warm-up and stays at 1."""

    def factor(step: int) -> float:
        return min(1.0, step / max(1.0, num_warmup_steps))

    return LambdaLR(optimizer, factor, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: torch.optim.Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LambdaLR:
    """Make a schedule that rises from 0 to 1 during the warm-up and then follows a cosine.

    The cosine makes `num_cycles` turns, with `min_lr_ratio` as the lowest value.
    """
    if not 0 <= min_lr_ratio <= 1:
        raise BatchError(f"min_lr_ratio must lie between 0 and 1, got {min_lr_ratio}.")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))
        return max(0.0, min_lr_ratio + (1 - min_lr_ratio) * wave)

    return LambdaLR(optimizer, factor, last_epoch)
