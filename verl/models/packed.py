"""Packed batches, and modules that compute log-probs, values and scores on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from verl.models.attention import PackingSlot, prepare
from verl.models.divergence import Divergence, token_divergence
from verl.models.layout import Layout, segment_bounds
from verl.models.logprobs import Head, head_of, token_log_probs
from verl.models.pictures import (
    Picture,
    Placed,
    place_pictures,
    row_picture_tokens,
    three_part_positions,
    tokens_ahead,
)
from verl.models.routing import joined, spread
from verl.models.vision import language_inputs, text_body
from verl.utils.devices import send
from verl.utils.errors import DataError, ModelError

if TYPE_CHECKING:
    from verl.models.critic import CriticModel


def padded_rows(sequences: Sequence[Sequence[int]], side: str = "right") -> tuple[Tensor, Tensor]:
    """Return lists of token ids as rows (b, T) on CPU, and a mask (b, T) with 1 at their tokens.

    `side` is the one that is padded, "left" or "right".
    """
    rows = [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
    real = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_side=side)
    return ids, pad_sequence(real, batch_first=True, padding_side=side)


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """S consecutive segments with N tokens, of which M response tokens are to be predicted.

    A segment is a whole sequence, or, after `with_shared_prompts`, a prompt or one of its
    responses.
    """

    input_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64, of each token in its sequence; (3, N) with pictures' parts
    cu_seqlens: Tensor  # (S+1,) int32, where each segment begins, and N
    lengths: tuple[int, ...]  # S lengths on the host: reading them needs no synchronization
    shared: tuple[int, ...] = ()  # number of responses of each shared prompt, as in `Layout`
    predict: Tensor  # (M,) int64, packed index of the token before each response token
    targets: Tensor  # (M,) int64, the response token ids
    # (m,) int64, in a part of `split`: numbers of the predictions that are made from it
    places: Tensor | None = None
    num_predictions: int = 0  # M, in a part of `split`
    # (M, H) each, of the whole batch: hidden states of other models at the predicting tokens, and
    # (M, C) `routed_experts`, to which these tokens are routed
    states: Mapping[str, Tensor] = field(default_factory=dict)
    placed: Placed | None = None  # the tokens that get features of pictures
    # (N,) int64, how many later tokens each token of the whole batch sees; None: no token sees any.
    # It stays on the host, like `lengths`.
    ahead: Tensor | None = None

    @property
    def max_seqlen(self) -> int:
        """Return the number of tokens of the longest segment."""
        return max(self.lengths)

    @classmethod
    def from_rows(
        cls, input_ids: Tensor, attention_mask: Tensor, response_length: int
    ) -> "PackedBatch":
        """Pack the real tokens of padded rows, on the device of `input_ids`.

        input_ids (b, T), attention_mask (b, T) with 1 at real tokens; the last `response_length`
        columns are the response. Rows without a real token are dropped. Raises DataError if a
        response token has no token before it, or no row has a token.
        """
        real = attention_mask.bool()
        is_response = real.clone()
        is_response[:, : real.shape[1] - response_length] = False
        positions = real.cumsum(1) - 1
        lengths = [int(length) for length in real.sum(1).tolist() if length]
        packed_positions = positions[real]
        index = is_response[real].nonzero().squeeze(1)

        if not lengths:
            raise DataError(
                "Expected at least one real token to pack, but attention_mask is 0 everywhere."
            )
        if bool((packed_positions[index] == 0).any()):
            raise DataError(
                "Every response needs at least one prompt token before it, but a row has an empty "
                "prompt. Give each prompt a token, for example the model's beginning-of-sequence "
                "token."
            )

        ids = input_ids[real]
        return cls(
            input_ids=ids,
            position_ids=packed_positions,
            cu_seqlens=segment_bounds(lengths).to(ids.device),
            lengths=tuple(lengths),
            predict=index - 1,
            targets=ids[index],
        )

    @classmethod
    def from_sequences(cls, sequences: Sequence[Sequence[int]]) -> "PackedBatch":
        """Pack lists of token ids, on CPU; every token but the first of each is predicted."""
        ids, mask = padded_rows(sequences)
        return cls.from_rows(ids, mask, ids.shape[1] - 1)

    def with_pictures(
        self, pictures: Sequence[Sequence[Picture]], prompt_lengths: Sequence[int]
    ) -> "PackedBatch":
        """Return these S sequences with the pictures of each; see `row_picture_tokens`.

        Raises DataError where a sequence has not as many picture tokens as its pictures have
        features.
        """
        assert not self.shared, "pictures come before prompts are shared"
        starts = [0, *accumulate(self.lengths)]
        places: list[Tensor] = []
        for number, (own, length) in enumerate(zip(pictures, prompt_lengths)):
            ids = self.input_ids[starts[number] : starts[number + 1]]
            places.append(row_picture_tokens(ids, length, own, f"packed sequence {number}"))

        placed = place_pictures(starts[:-1], places, pictures)
        if placed is None:
            return self
        positions = self.position_ids
        if placed.pictures[0].grid is not None:
            parts = []
            for length, own_places, own in zip(self.lengths, places, pictures):
                parts.append(three_part_positions(length, own_places, own)[0])
            positions = torch.cat(parts, dim=1)

        ahead = None
        if placed.pictures[0].sees_itself:
            counts = []
            for length, own_places, own in zip(self.lengths, places, pictures):
                counts.append(tokens_ahead(length, own_places, own))
            ahead = torch.cat(counts)
        return replace(self, position_ids=positions, placed=placed, ahead=ahead)

    def with_shared_prompts(
        self, prompts: Sequence[int], prompt_lengths: Sequence[int]
    ) -> "PackedBatch":
        """Return these S sequences with each shared prompt only once.

        The M predicted tokens keep their order.

        Args:
            prompts: S numbers; sequences with equal numbers share their prompt.
            prompt_lengths: S lengths of the prompts. The caller guarantees that shared prompts are
                equal.
        """
        assert not self.shared, "prompts are shared already"
        members: dict[int, list[int]] = {}
        for sequence, prompt in enumerate(prompts):
            members.setdefault(prompt, []).append(sequence)
        if len(members) == len(self.lengths):
            return self

        starts = [0, *accumulate(self.lengths)]
        plain: list[range] = []
        shared: dict[range, list[range]] = {}  # tokens of a prompt -> tokens of its responses
        for group in members.values():
            answered = [i for i in group if self.lengths[i] > prompt_lengths[i]]
            first = (answered or group)[0]
            if len(answered) < 2:
                plain.append(range(starts[first], starts[first + 1]))
                continue

            prompt = range(starts[first], starts[first] + prompt_lengths[first])
            shared[prompt] = []
            for i in answered:
                begin = starts[i] + prompt_lengths[i]
                shared[prompt].append(range(begin, starts[i + 1]))

        segments = [*plain, *shared, *chain.from_iterable(shared.values())]
        lengths = tuple(len(segment) for segment in segments)
        kept = torch.cat([torch.arange(segment.start, segment.stop) for segment in segments])
        place = torch.empty(starts[-1], dtype=torch.int64)
        place[kept] = torch.arange(len(kept))
        for prompt, responses in shared.items():
            # The first token of every response is predicted from the last one of the prompt.
            place[[response.start - 1 for response in responses]] = place[prompt.stop - 1].item()

        device = self.input_ids.device
        ahead = None if self.ahead is None else self.ahead[kept]
        kept = kept.to(device)
        return replace(
            self,
            input_ids=self.input_ids[kept],
            position_ids=self.position_ids[..., kept],
            cu_seqlens=segment_bounds(lengths).to(device),
            lengths=lengths,
            shared=tuple(len(responses) for responses in shared.values()),
            predict=place.to(device)[self.predict],
            placed=self._placed_at(kept),
            ahead=ahead,
        )

    def split(self, parts: int, part: int) -> "PackedBatch":
        """Return one rank's part: N / parts consecutive tokens, and the predictions from them.

        Segments remain those of the whole batch, which attention sees. If `parts` does not divide
        N, one segment is added at the front, because shared prompts and their responses come last.
        """
        if parts == 1:
            return self

        added = -len(self.input_ids) % parts
        lengths = (added, *self.lengths) if added else self.lengths
        ids = torch.cat([self.input_ids.new_zeros(added), self.input_ids])
        filled = torch.arange(added).to(self.position_ids)
        filled = filled.expand(*self.position_ids.shape[:-1], added)
        positions = torch.cat([filled, self.position_ids], dim=-1)
        ahead = self.ahead
        if ahead is not None:
            ahead = torch.cat([ahead.new_zeros(added), ahead])
        size = len(ids) // parts
        predict = self.predict + added
        places = (predict // size == part).nonzero().squeeze(1)
        own = slice(part * size, (part + 1) * size)

        return replace(
            self,
            input_ids=ids[own],
            position_ids=positions[..., own],
            cu_seqlens=segment_bounds(lengths).to(self.cu_seqlens.device),
            lengths=lengths,
            predict=predict[places] - own.start,
            targets=self.targets[places],
            places=places,
            num_predictions=len(self.targets),
            placed=self._placed_at(torch.arange(own.start, own.stop) - added),
            ahead=ahead,
        )

    def _placed_at(self, kept: Tensor) -> Placed | None:
        """Return the picture tokens among `kept`, the packed tokens that stay (below 0: none)."""
        if self.placed is None:
            return None
        place = torch.full((len(self.input_ids),), -1)
        is_token = kept >= 0
        place[kept[is_token]] = is_token.nonzero().squeeze(1)
        tokens = place[self.placed.tokens]
        stays = tokens >= 0
        # Every part computes all pictures, so that ranks make the same calls of a sharded tower.
        return self.placed._replace(tokens=tokens[stays], rows=self.placed.rows[stays])

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Copy every tensor but `ahead` to `device`, without waiting for the copy."""
        moved: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor) and item.name != "ahead":
                moved[item.name] = send(value, device)
            elif isinstance(value, Placed):
                tokens = send(value.tokens, device)
                moved[item.name] = value._replace(tokens=tokens, rows=send(value.rows, device))
        return replace(self, **moved)


def packed_hidden_states(
    model: PreTrainedModel, slot: PackingSlot, batch: PackedBatch, routes: Tensor | None = None
) -> Tensor:
    """Compute the last hidden states (N, H) of a model on a packed batch or a part of one.

    Tokens are routed to the experts of `routes` (N, C), if given.
    """
    assert (batch.places is None) == (slot.sequence_parallel is None), (
        "parts are for ranks that share their tokens"
    )
    positions = batch.position_ids.unsqueeze(-2)  # (1, N), or (3, 1, N)
    layout = Layout(batch.lengths, batch.cu_seqlens, batch.shared, routes, batch.ahead)
    with slot.holding(layout):
        inputs = language_inputs(model, batch.input_ids, batch.placed)
        output = text_body(model)(**inputs, position_ids=positions, use_cache=False)
    return output.last_hidden_state[0]


def _of_whole_batch(slot: PackingSlot, batch: PackedBatch, values: Tensor) -> Tensor:
    """Gather the values (m, ...) of this part's predictions to (M, ...) on every rank."""
    if batch.places is None:
        return values
    assert slot.sequence_parallel is not None
    return slot.sequence_parallel.gather(values, batch.places, batch.num_predictions)


def _routes(batch: PackedBatch) -> Tensor | None:
    """Return the experts (N, C) that the tokens of this part are routed to, where it has some."""
    chosen = batch.states.get("routed_experts")
    if chosen is None:
        return None
    if batch.places is not None:
        chosen = chosen.index_select(0, batch.places)
    return spread(chosen, batch.predict, len(batch.input_ids))


class _PackedModel(nn.Module):
    """A model that is switched to packed attention in place."""

    def __init__(self, model: Any, *, attention_kernel: str = "auto") -> None:
        super().__init__()
        self.slot = prepare(model)
        self.slot.kernel = attention_kernel
        self.model = model


class PackedCausalLM(_PackedModel):
    """Log-probs of response tokens under a causal LM."""

    def __init__(self, model: PreTrainedModel, *, attention_kernel: str = "auto") -> None:
        super().__init__(model, attention_kernel=attention_kernel)
        self.head: Head = head_of(model)

    def forward(
        self,
        batch: PackedBatch,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        states: bool = False,
        sum_pi_squared: bool = False,
        divergences: Sequence[Divergence] = (),
        routed_experts: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """Compute `log_probs` (M,), in fp32 (float64 in a float64 model), and further outputs.

        A log-prob is log_softmax(logits / temperature) over the whole vocabulary.

        Args:
            batch: the packed tokens.
            temperature: temperature of the softmax.
            entropy: add `entropy` (M,) of the same distribution, in nats.
            states: add `states` (M, H), the last hidden states of the predicting tokens.
            sum_pi_squared: add the sum of squared probabilities (M,) over the vocabulary:
                exp(2 log_prob - log_prob at half the temperature) of any token.
            divergences: add those with states in the batch, (M,) each, under their names.
            routed_experts: add `routed_experts` (M, C) in this dtype, the experts that the
                predicting tokens are routed to (`verl.models.routing`).
        """
        self.slot.recorded = None if routed_experts is None else {}
        hidden = packed_hidden_states(self.model, self.slot, batch, _routes(batch))
        hidden = hidden.index_select(0, batch.predict)

        linear: Any = self.model.get_output_embeddings()
        score = partial(
            token_log_probs,
            hidden,
            linear.weight,
            batch.targets,
            bias=linear.bias,
            head=self.head,
        )
        log_probs, entropies = score(temperature=temperature, entropy=entropy)

        outputs = {"log_probs": log_probs}
        if entropy:
            outputs["entropy"] = entropies
        if states:
            outputs["states"] = hidden
        if routed_experts is not None:
            assert self.slot.recorded, "`watch_routers` comes first"
            chosen = joined(self.slot.recorded, routed_experts)
            outputs["routed_experts"] = chosen.index_select(0, batch.predict)
            self.slot.recorded = None
        if sum_pi_squared:
            sharper, _ = score(temperature=temperature / 2)
            outputs["sum_pi_squared"] = (2 * log_probs - sharper).exp()
        for asked in divergences:
            if asked.states in batch.states:
                outputs[asked.name] = self._divergence(asked, hidden, batch, temperature)

        whole: dict[str, Tensor] = {}
        for name, values in outputs.items():
            whole[name] = _of_whole_batch(self.slot, batch, values)
        return whole

    def _divergence(
        self, asked: Divergence, hidden: Tensor, batch: PackedBatch, temperature: float
    ) -> Tensor:
        """Compute a divergence (M,) of this model, with `hidden` states (M, H), from another."""
        others = batch.states[asked.states]
        if batch.places is not None:
            others = others.index_select(0, batch.places)
        linear: Any = self.model.get_output_embeddings()
        return token_divergence(
            hidden,
            linear.weight,
            others,
            asked,
            bias=linear.bias,
            head=self.head,
            temperature=temperature,
        )


class PackedValueModel(_PackedModel):
    """Values before response tokens, of a CriticModel."""

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Compute `values` (M,), the critic's before each response token, in at least fp32."""
        hidden = packed_hidden_states(self.model.body, self.slot, batch)
        hidden = hidden.index_select(0, batch.predict)
        values = self.model.value_head(hidden)
        if values.shape != (len(hidden), 1):
            raise ModelError(
                f"The value head must map states (..., {hidden.shape[-1]}) to values (..., 1), but "
                f"{tuple(hidden.shape)} became {tuple(values.shape)}. End it in one output: "
                "torch.nn.Linear(..., 1)."
            )
        # A copy, because FSDP2 warns of outputs that are views.
        values = _at_least_fp32(values.squeeze(-1).clone())
        return {"values": _of_whole_batch(self.slot, batch, values)}


class PaddedValueModel(nn.Module):
    """Values by a critic's own `forward(input_ids, attention_mask)` on padded rows.

    It replaces `PackedValueModel`, except with shared prompts and with ranks that share tokens,
    where segments are not whole rows.
    """

    def __init__(self, model: "CriticModel") -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Compute `values` (M,), see `PackedValueModel.forward`."""
        assert not batch.shared, "a padded forward takes whole rows"
        assert batch.places is None, "a padded forward takes whole rows"
        device = batch.input_ids.device
        lengths = torch.tensor(batch.lengths, device=device)
        real = torch.arange(batch.max_seqlen, device=device) < lengths[:, None]
        ids = torch.zeros(real.shape, dtype=batch.input_ids.dtype, device=device)
        ids = ids.masked_scatter(real, batch.input_ids)

        # Do this in every call: checkpointing and other wrappers switch to packed attention.
        self.model.use_own_attention()
        values: Any = self.model(input_ids=ids, attention_mask=real.long())
        if isinstance(values, Tensor) and values.shape == (*ids.shape, 1):
            values = values.squeeze(-1)
        if not isinstance(values, Tensor) or values.shape != ids.shape:
            found = type(values).__name__
            if isinstance(values, Tensor):
                found = f"shape {tuple(values.shape)}"
            raise ModelError(
                f"{type(self.model).__name__}.forward must return one value per token, a tensor of "
                f"shape {tuple(ids.shape)} or {(*ids.shape, 1)} for input_ids {tuple(ids.shape)}, "
                f"got {found}."
            )
        return {"values": _at_least_fp32(values[real].index_select(0, batch.predict))}


class PackedRewardModel(_PackedModel):
    """Scores of sequences at their last token, of a sequence classifier."""

    def forward(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Compute `rewards` (M,), the head's output at each response token, in at least fp32."""
        assert batch.places is None, "a score is read from the token after the one that predicts it"
        hidden = packed_hidden_states(self.model, self.slot, batch)
        hidden = hidden.index_select(0, batch.predict + 1)
        head: Any = self.model.score
        # Use fp32, because a score in bf16 has only three digits.
        bias = None if head.bias is None else _at_least_fp32(head.bias)
        scores = F.linear(_at_least_fp32(hidden), _at_least_fp32(head.weight), bias)
        return {"rewards": scores.squeeze(-1)}


def _at_least_fp32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
