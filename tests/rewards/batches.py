"""Batches for the tests of this room: text in, a scored DataProto out; one character is one
token."""

from typing import Any

import numpy as np
import torch

from verl.protocol import DataProto

PAD = 0
SPECIAL = 1


class CharTokenizer:
    """Use the code point of a character as its token; 0 pads and 1 is a special token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(i) if i != SPECIAL else "" if skip_special_tokens else "<eos>" for i in ids
        )

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def make_batch(
    responses: list[str],
    ground_truths: list[Any] | None = None,
    data_sources: list[str] | None = None,
    extra_infos: list[Any] | None = None,
    prompts: list[str] | None = None,
) -> DataProto:
    """Return a batch of prompts padded left and responses padded right, with one column to spare.

    Each response ends with a special token.
    """
    prompt_ids = [[ord(c) for c in text] for text in prompts or ["question?"] * len(responses)]
    response_ids = [[ord(c) for c in text] + [SPECIAL] for text in responses]
    prompt_width = max(map(len, prompt_ids)) + 1
    response_width = max(map(len, response_ids)) + 1
    left = torch.tensor([[PAD] * (prompt_width - len(ids)) + ids for ids in prompt_ids])
    right = torch.tensor([ids + [PAD] * (response_width - len(ids)) for ids in response_ids])
    input_ids = torch.cat([left, right], dim=1)
    columns: dict[str, Any] = {}

    if ground_truths is not None:
        columns["reward_model"] = objects(
            [{"style": "rule", "ground_truth": truth} for truth in ground_truths]
        )

    columns["data_source"] = objects(list(data_sources or ["toy"] * len(responses)))
    if extra_infos is not None:
        columns["extra_info"] = objects(extra_infos)
    return DataProto.from_dict(
        {
            "prompts": left,
            "responses": right,
            "input_ids": input_ids,
            "attention_mask": (input_ids != PAD).long(),
            "response_mask": (right != PAD).long(),
        },
        columns,
    )
