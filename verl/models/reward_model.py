"""The discriminative reward model: a sequence classifier with one label.

It scores a text at its last token.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from verl.models.load import load_model_config, load_tokenizer, load_transformer
from verl.models.packed import PackedBatch, PackedRewardModel
from verl.models.probe import check_packed
from verl.utils.errors import ModelError, RewardError


class RewardOutput(NamedTuple):
    """The scores of B texts."""

    rewards: Tensor  # (B,) fp32 (float64 if the model is), finite


class RewardModel(nn.Module):
    """A sequence classifier of transformers with `score`, a linear map of states to one number."""

    def __init__(self, model: PreTrainedModel, *, attention_kernel: str = "auto") -> None:
        super().__init__()
        _check_head(model)
        self.packed = PackedRewardModel(model, attention_kernel=attention_kernel)
        self.trust_remote_code = False  # for its tokenizer

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str = "float32",
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        override_config: dict[str, Any] | None = None,
        max_length: int | None = None,
        check: bool = True,
        weights: bool = True,
        attention_kernel: str = "auto",
    ) -> "RewardModel":
        """Load a reward model in eval mode from a checkpoint of AutoModelForSequenceClassification.

        The arguments are those of `load_causal_lm`. Raises ModelError, with the fix, as
        `load_reward_config` does, and for a family that cannot be run packed.
        """
        config = load_reward_config(
            path, trust_remote_code=trust_remote_code, override_config=override_config
        )
        model = load_transformer(
            AutoModelForSequenceClassification,
            path,
            config,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            max_length=max_length,
            weights=weights,
        )
        made = cls(model, attention_kernel=attention_kernel)  # checks the head first
        if check:
            check_packed(model)
        made.trust_remote_code = trust_remote_code
        return made.eval()

    @property
    def config(self) -> Any:
        """Return the configuration of the classifier."""
        return self.packed.model.config

    @property
    def max_length(self) -> int | None:
        """Return the number of positions of the model; None if its configuration has no limit."""
        return getattr(self.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the reward model's own tokenizer, loaded from its folder on first use.

        Raises ModelError if the folder has none.
        """
        return load_tokenizer(self.config.name_or_path, trust_remote_code=self.trust_remote_code)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> RewardOutput:
        """Score rows (B, T), each at its last real token. Padding on either side is not computed.

        Without `attention_mask` (B, T), pad tokens at both ends of a row are padding. Raises
        RewardError for other shapes, for unknown ids, for a response without a token, with more
        than the model has positions, or with a score that is not finite.
        """
        _check_rows(input_ids, attention_mask)
        real = self._without_padding(input_ids) if attention_mask is None else attention_mask.bool()
        lengths = real.sum(1).tolist()
        self._check_lengths(lengths)
        ids = input_ids[real]
        self._check_ids(ids)

        positions = (real.cumsum(1) - 1)[real]
        return RewardOutput(self._score(ids, positions, lengths))

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, max_tokens: int = 16384) -> Tensor:
        """Compute scores (B,) of lists of token ids, on the host, without gradients.

        Each pass has about `max_tokens` tokens. Raises RewardError for ids, lengths and scores as
        `forward` does.
        """
        if not sequences:
            return torch.empty(0)
        self._check_lengths([len(sequence) for sequence in sequences])
        scores: list[Tensor] = []
        start = 0
        while start < len(sequences):
            stop = start + 1
            tokens = len(sequences[start])
            while stop < len(sequences) and tokens + len(sequences[stop]) <= max_tokens:
                tokens += len(sequences[stop])
                stop += 1

            some = sequences[start:stop]
            lengths = [len(sequence) for sequence in some]
            device = self.packed.model.device
            ids = torch.tensor(list(chain.from_iterable(some)))
            self._check_ids(ids)
            positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
            made = self._score(ids.to(device), positions, lengths, first_row=start)
            scores.append(made.cpu())
            start = stop

        return torch.cat(scores)

    def _score(
        self, ids: Tensor, positions: Tensor, lengths: Sequence[int], first_row: int = 0
    ) -> Tensor:
        ends = torch.tensor([0, *accumulate(lengths)], device=ids.device)
        batch = PackedBatch(
            input_ids=ids,
            position_ids=positions,
            cu_seqlens=ends.to(torch.int32),
            lengths=tuple(lengths),
            predict=ends[1:] - 2,
            targets=ids[ends[1:] - 1],
        )
        rewards = self.packed(batch)["rewards"]
        check_scores(rewards, lambda row: f"response {first_row + row}")
        return rewards

    def _without_padding(self, input_ids: Tensor) -> Tensor:
        pad = self.config.get_text_config().pad_token_id
        if pad is None:
            return torch.ones_like(input_ids, dtype=torch.bool)
        token = (input_ids != pad).int()
        has_begun = token.cumsum(1) > 0
        goes_on = token.flip(1).cumsum(1).flip(1) > 0
        return has_begun & goes_on

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """Raise RewardError for a row without a token, or with more than the model reads."""
        if 0 in lengths:
            raise RewardError(
                f"Response {lengths.index(0)} has no token, so there is nothing to score."
            )

        longest = max(lengths)
        if self.max_length is not None and longest > self.max_length:
            raise RewardError(
                f"Response {lengths.index(longest)} has {longest} tokens with its prompt, and the "
                f"reward model reads {self.max_length}. Shorten it, or take a reward model with "
                "more positions."
            )

    def _check_ids(self, ids: Tensor) -> None:
        """Raise RewardError for an id that the model has no embedding for."""
        embeddings: Any = self.packed.model.get_input_embeddings()
        vocabulary: int = embeddings.num_embeddings
        lowest = int(ids.min())
        highest = int(ids.max())
        if lowest < 0 or highest >= vocabulary:
            raise RewardError(
                f"input_ids must be ids of the reward model's tokenizer, below {vocabulary}, got "
                f"{lowest} to {highest}."
            )


def _check_rows(input_ids: Any, attention_mask: Tensor | None) -> None:
    """Raise RewardError for ids that are not (B, T), or a mask of another shape."""
    if not isinstance(input_ids, Tensor) or 0 in input_ids.shape:
        got = type(input_ids).__name__
        if isinstance(input_ids, Tensor):
            got = f"shape {tuple(input_ids.shape)}"
        raise RewardError(
            f"Expected input_ids as a tensor of shape (B, T), none of them 0, got {got}. Lists "
            "of ids of any lengths are for RewardModel.score."
        )

    has_other_mask = attention_mask is not None and attention_mask.shape != input_ids.shape
    if input_ids.ndim != 2 or has_other_mask:
        mask = "none" if attention_mask is None else tuple(attention_mask.shape)
        raise RewardError(
            "Expected input_ids of shape (B, T) and, if any, an attention_mask of the same "
            f"shape, got {tuple(input_ids.shape)} and {mask}. Give a single text as a batch of "
            "one: input_ids[None]."
        )


def load_reward_config(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
) -> Any:
    """Load the configuration of a reward model, without its weights.

    Raises ModelError for a causal LM, which has no head for scores, and for several labels.
    """
    config = load_model_config(
        path, trust_remote_code=trust_remote_code, override_config=override_config
    )
    architectures: list[str] = getattr(config, "architectures", None) or []
    if any("CausalLM" in name or "LMHead" in name for name in architectures):
        raise ModelError(
            f"'{path}' is a language model ({', '.join(architectures)}) without a head for scores. "
            "A reward model is a sequence classifier with one label: give the folder of one "
            "(AutoModelForSequenceClassification, num_labels=1), or let the language model judge "
            "over HTTP (reward_model.judge.url)."
        )

    if config.num_labels != 1:
        raise ModelError(
            f"'{path}' has {config.num_labels} labels, but a reward model needs one score. Give a "
            "checkpoint with num_labels=1; or keep the row of one label: "
            "model.score.weight.data = model.score.weight.data[i : i + 1], model.config.num_labels "
            "= 1, and save it."
        )

    return config


def check_scores(scores: Tensor, describe: Callable[[int], str]) -> None:
    """Raise RewardError for the first score (B,) that is not finite; `describe(row)` names it."""
    odd = (~torch.isfinite(scores)).nonzero().flatten().tolist()
    if odd:
        raise RewardError(
            f"The reward model gives {describe(odd[0])} the score {scores[odd[0]].item()}, and "
            f"{len(odd)} of {len(scores)} scores are not finite. Check that text, and that all "
            "weights of the model are finite."
        )


def _check_head(model: PreTrainedModel) -> None:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.out_features != 1:
        raise ModelError(
            "A reward model needs a linear head named score with one output, but "
            f"{type(model).__name__} has {head or 'none'}. Give a checkpoint of "
            "AutoModelForSequenceClassification of transformers, num_labels=1, of a causal family "
            "(Llama, Qwen, Mistral, Gemma, GPT-2, GPT-NeoX and similar families)."
        )
