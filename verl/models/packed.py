"""Packed batches, and the two modules that compute on them: log-probs of a policy and values of a critic."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.models.attention import Layout, PackingSlot, prepare
from verl.models.critic import CriticModel
from verl.models.logprobs import Head, head_of, token_log_probs
from verl.utils.errors import DataError


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """S sequences end to end, N tokens in all, M of them response tokens to be predicted."""

    input_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64, restarting at 0 with each sequence
    cu_seqlens: Tensor  # (S+1,) int32, where each sequence begins, and N
    lengths: tuple[int, ...]  # S lengths, as host numbers: reading them costs no synchronisation
    predict: Tensor  # (M,) int64, packed index of the token before each response token
    targets: Tensor  # (M,) int64, the response token ids

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths)

    @classmethod
    def from_rows(cls, input_ids: Tensor, attention_mask: Tensor, response_length: int) -> "PackedBatch":
        """Pack the real tokens of padded rows, on the device of `input_ids`.

        input_ids (b, T), attention_mask (b, T) with 1 at real tokens; the last `response_length` columns are the
        response. Rows without any real token are left out. Raises DataError where a response token has no token
        before it, or where no row has a token.
        """
        real = attention_mask.bool()
        is_response = real.clone()
        is_response[:, : real.shape[1] - response_length] = False
        positions = real.cumsum(1) - 1
        lengths = [int(length) for length in real.sum(1).tolist() if length]
        packed_positions = positions[real]
        index = is_response[real].nonzero().squeeze(1)
        if not lengths:
            raise DataError("Expected at least one real token to pack, but attention_mask is 0 everywhere.")
        if bool((packed_positions[index] == 0).any()):
            raise DataError(
                "Every response needs at least one prompt token before it, but a row has an empty prompt. "
                "Give each prompt a token, for example the model's beginning-of-sequence token."
            )
        ids = input_ids[real]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(
            input_ids=ids,
            position_ids=packed_positions,
            cu_seqlens=ends.to(ids.device),
            lengths=tuple(lengths),
            predict=index - 1,
            targets=ids[index],
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]]) -> "PackedBatch":
        """Pack lists of token ids, on CPU; every token but the first of each is predicted."""
        longest = max(len(sequence) for sequence in sequences)
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        return cls.from_rows(ids, mask, longest - 1)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy every tensor to `device`, without waiting for the copy."""
        moved = {
            item.name: value.to(device, non_blocking=True)
            for item in fields(self)
            if isinstance(value := getattr(self, item.name), Tensor)
        }
        return replace(self, **moved)


def packed_hidden_states(body: nn.Module, slot: PackingSlot, batch: PackedBatch) -> Tensor:
    """(N, H): the last hidden states of a transformers base model over a packed batch."""
    with slot.holding(Layout(batch.lengths, batch.cu_seqlens)):
        output = body(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    return output.last_hidden_state[0]


class PackedCausalLM(nn.Module):
    """Log-probs of response tokens under a causal LM. The model is switched to packed attention in place."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.slot = prepare(model)
        self.head: Head = head_of(model)
        self.model = model

    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, entropy: bool = False) -> dict[str, Tensor]:
        """`log_probs` (M,) of log_softmax(logits / temperature) over the whole vocabulary, fp32 (float64 if the model
        is), and `entropy` (M,) in nats of the same distribution if asked for."""
        hidden = packed_hidden_states(self.model.base_model, self.slot, batch)
        linear: Any = self.model.get_output_embeddings()
        log_probs, entropies = token_log_probs(
            hidden.index_select(0, batch.predict),
            linear.weight,
            batch.targets,
            bias=linear.bias,
            head=self.head,
            temperature=temperature,
            entropy=entropy,
        )
        return {"log_probs": log_probs, "entropy": entropies} if entropy else {"log_probs": log_probs}


class PackedValueModel(nn.Module):
    """Values before response tokens. The critic's body is switched to packed attention in place."""

    def __init__(self, model: CriticModel) -> None:
        super().__init__()
        self.slot = prepare(model)
        self.model = model

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """`values` (M,): what the critic expects before each response token, fp32 (float64 if the model is)."""
        hidden = packed_hidden_states(self.model.body, self.slot, batch).index_select(0, batch.predict)
        values = self.model.value_head(hidden).squeeze(-1)
        return {"values": values.to(torch.promote_types(values.dtype, torch.float32))}
