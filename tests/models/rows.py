"""Padded rows for the tests of this room, and the results of transformers' eager attention on
them."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.tiny_models import VOCABULARY, tiny_model
from verl.models import packed
from verl.models.layout import Layout

PROMPT_LENGTHS = (24, 5, 1, 17, 9, 2)
RESPONSE_LENGTHS = (40, 1, 33, 0, 12, 38)
RESPONSE_LENGTH = 40


@cache
def padded_rows(
    prompts: tuple[int, ...] = PROMPT_LENGTHS, responses: tuple[int, ...] = RESPONSE_LENGTHS
) -> tuple[Tensor, Tensor]:
    """Return input_ids and attention_mask (B, T).

    Prompts are padded left, responses are padded right to RESPONSE_LENGTH.
    """
    generator = torch.Generator().manual_seed(7)
    width = max(prompts)
    ids = torch.zeros(len(prompts), width + RESPONSE_LENGTH, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        real = slice(width - prompt, width + response)
        ids[row, real] = torch.randint(3, VOCABULARY, (prompt + response,), generator=generator)
        mask[row, real] = 1
    return ids, mask


@cache
def eager_log_probs(
    family: str, dtype: torch.dtype = torch.float32, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies (M,) of the response tokens.

    Computed by a dense softmax over a padded eager forward.
    """
    ids, mask = padded_rows()
    model = tiny_model(family, dtype=dtype)
    with torch.no_grad(), KeepFloat64():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False)
    dense = (output.logits / temperature).log_softmax(-1)[:, -RESPONSE_LENGTH - 1 : -1]
    chosen = dense.gather(-1, ids[:, -RESPONSE_LENGTH:, None]).squeeze(-1)
    entropy = -(dense.exp() * dense).sum(-1)
    response = mask[:, -RESPONSE_LENGTH:].bool()
    return chosen[response], entropy[response]


class KeepFloat64(TorchFunctionMode):
    """Keep float64 where transformers casts to fp32 (norms, softmax, routers), so that float64
    tolerances hold."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (
            func in (torch.matmul, Tensor.matmul, Tensor.__matmul__)
            and args[0].dtype != args[1].dtype
        ):
            return args[0].double() @ args[1].double()

        if func in (Tensor.float, Tensor.to, Tensor.type) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)

        if (
            kwargs.get("dtype") is torch.float32
            and args
            and getattr(args[0], "dtype", None) == torch.float64
        ):
            kwargs["dtype"] = torch.float64

        return func(*args, **kwargs)


def join_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all packed sequences one, in which every token sees all before it."""

    def one_sequence(
        lengths: tuple[int, ...], ends: Tensor, shared: tuple[int, ...], *_: Tensor | None
    ) -> Layout:
        return Layout((sum(lengths),), ends[[0, -1]])

    monkeypatch.setattr(packed, "Layout", one_sequence)
