"""Pack padded columns of a batch into the tensors of one micro-batch, and back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from verl.columns import COLUMNS
from verl.distributed.collectives import ALONE, Axis
from verl.engine.guard import row_name
from verl.engine.microbatch import SharedPrompts, tokens_of
from verl.models.packed import PackedBatch
from verl.models.pictures import num_in_prompt, pictures_of, row_picture_tokens
from verl.protocol import DataProto
from verl.utils.devices import send
from verl.utils.errors import DataError

# Rows share their prompt where that leaves out more than this part of their tokens. On a CPU, with
# a small model (0.7 M parameters) and 64 tokens a response, the update took 0.85 to 0.95 of the
# time where 14 % were left out, 0.8 where 24 % and 1.07 where 8 %: responses apart from their
# prompt cost an attention call more for each prompt and layer.
MIN_SAVING = 0.1
# Columns of vectors (hidden states, choices of experts), which the module reads, not the loss.
STATES = frozenset(column.name for column in COLUMNS.values() if column.shape in ("B R H", "B R C"))


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward pass, on the device."""

    packed: PackedBatch
    columns: dict[str, Tensor]  # (M,) each
    sequence: Tensor  # (M,) int64, row number in the mini-batch


class MiniBatch:
    """The rows of one update or one evaluation, and how to pack some of them.

    Ranks along `sequence` have the same rows and share their tokens.
    """

    def __init__(
        self,
        batch: DataProto,
        columns: Iterable[str],
        device: torch.device,
        *,
        share_prompts: bool = False,
        sequence: Axis = ALONE,
    ) -> None:
        required = ("input_ids", "attention_mask", "response_mask", *columns)
        present = set(batch.batch.keys())
        missing = [name for name in required if name not in present]
        if missing:
            raise DataError(
                f"The engine needs the columns {missing}, but this batch has {sorted(present)}. "
                "Run the phase that writes them (verl/columns.py) first."
            )

        self.input_ids: Tensor = batch.batch["input_ids"]
        self.attention_mask: Tensor = batch.batch["attention_mask"]
        self.columns: dict[str, Tensor] = {name: batch.batch[name] for name in columns}
        self.pictures = pictures_of(batch)
        self.uids: np.ndarray | None = batch.non_tensor_batch.get("uid")
        self.response_length: int = batch.batch["response_mask"].shape[1]
        self.prompt_width = self.attention_mask.shape[1] - self.response_length
        self.present = self.attention_mask[:, self.prompt_width :].bool()
        self.device = device
        self.sequence = sequence
        self._check_pictures()
        self.prompts = self._find_shared_prompts() if share_prompts else None

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of real tokens of each row."""
        return self.attention_mask.sum(dim=1).tolist()

    @cached_property
    def prompt_lengths(self) -> list[int]:
        """Number of real prompt tokens of each row."""
        return self.attention_mask[:, : self.prompt_width].sum(dim=1).tolist()

    @cached_property
    def picture_tokens(self) -> int:
        """Number of tokens of all different pictures."""
        different = {}
        for picture in chain.from_iterable(self.pictures):
            different[picture.key] = picture.num_tokens
        return sum(different.values())

    def pack(self, rows: Sequence[int]) -> MicroBatch:
        """Pack some rows: tokens, columns (M,), row numbers (M,); no rows give one token, M = 0."""
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.input_ids.device)
        packed = self._pack_tokens(rows, chosen)
        packed = packed.split(self.sequence.size, self.sequence.rank)

        # Boolean indexing waits for its device, so it happens where the batch lives: on the host.
        present = self.present[chosen]
        columns: dict[str, Tensor] = {}
        states: dict[str, Tensor] = {}
        for name, column in self.columns.items():
            of_tokens = states if name in STATES else columns
            of_tokens[name] = send(column[chosen][present], self.device)
        sequence = send(chosen.repeat_interleave(present.sum(dim=1)), self.device)
        packed = replace(packed.to(self.device), states=states)
        return MicroBatch(packed, columns, sequence)

    def unpack(self, plan: Sequence[Sequence[int]], pieces: Sequence[Tensor]) -> Tensor:
        """Turn (M,) per micro-batch of the plan into (B, R) fp32 on the host, zero without a token.

        Vectors, (M, H), become (B, R, H) of their own dtype.
        """
        order = torch.tensor(list(chain.from_iterable(plan)), dtype=torch.int64)
        present = self.present.cpu()
        of_token = pieces[0].shape[1:]
        dtype = pieces[0].dtype if of_token else torch.float32

        in_plan_order = torch.zeros((*present.shape, *of_token), dtype=dtype)
        values = torch.cat([piece.to(dtype) for piece in pieces])
        in_plan_order[present[order]] = values.cpu()
        result = torch.empty_like(in_plan_order)
        result[order] = in_plan_order
        return result

    def _pack_tokens(self, rows: Sequence[int], chosen: Tensor) -> PackedBatch:
        """Pack the tokens of `rows` (`chosen` as a tensor), their pictures and shared prompts."""
        if not rows:
            return PackedBatch.from_sequences([[0]])

        packed = PackedBatch.from_rows(
            self.input_ids[chosen], self.attention_mask[chosen], self.response_length
        )
        packed_rows = [row for row in rows if self.lengths[row]]
        pictures = [self.pictures[row] for row in packed_rows]
        if any(pictures):
            prompt_lengths = [self.prompt_lengths[row] for row in packed_rows]
            packed = packed.with_pictures(pictures, prompt_lengths)
        if self.prompts is not None:
            numbers = [self.prompts.number[row] for row in packed_rows]
            prompt_lengths = [self.prompts.lengths[row] for row in packed_rows]
            packed = packed.with_shared_prompts(numbers, prompt_lengths)
        return packed

    def _check_pictures(self) -> None:
        """Raise DataError for the first row whose picture tokens and features differ in number."""
        for row, own in enumerate(self.pictures):
            if own and self.lengths[row]:
                ids = self.input_ids[row][self.attention_mask[row].bool()]
                name = row_name(row, self.uids)
                row_picture_tokens(ids, self.prompt_lengths[row], own, name)

    def _find_shared_prompts(self) -> SharedPrompts | None:
        """Find rows with equal prompts, token for token, where sharing saves enough; else None."""
        ids = self.input_ids[:, : self.prompt_width].cpu()
        real = self.attention_mask[:, : self.prompt_width].bool().cpu()

        rows_of: dict[tuple[bytes, tuple[str, ...]], list[int]] = {}
        for row, pictures in enumerate(self.pictures):
            prompt = ids[row][real[row]]
            seen = pictures[: num_in_prompt(prompt, pictures)]
            keys = tuple(picture.key for picture in seen)
            rows_of.setdefault((prompt.numpy().tobytes(), keys), []).append(row)

        unshared = list(range(len(self)))
        number = list(unshared)
        for rows in rows_of.values():
            saved = (len(rows) - 1) * self.prompt_lengths[rows[0]]
            if saved > MIN_SAVING * tokens_of(rows, self.lengths):
                for row in rows:
                    number[row] = rows[0]
        if number == unshared:
            return None
        return SharedPrompts(number, self.prompt_lengths)
