"""A tokenizer for responses that are texts already."""

from collections.abc import Sequence
from typing import Any

import torch


class TextTokenizer:
    """A vocabulary of whole texts, so that managers get token ids to decode, as in training."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, texts: Sequence[str]) -> torch.Tensor:
        """Return one new id for each text, of shape (B, 1)."""
        start = len(self.texts)
        self.texts += texts
        return torch.arange(start, len(self.texts)).unsqueeze(1)

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(self.texts[int(number)] for number in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids) for ids in rows]
