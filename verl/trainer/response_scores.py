"""Scores of responses that are no batch of training: by the reward model, or by the reward
function."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.config import TrainConfig
from verl.data.chat import as_messages, plain_text
from verl.models.load import load_tokenizer
from verl.protocol import DataProto
from verl.rewards.build import build_reward
from verl.rewards.manager import RewardManager
from verl.rewards.results import call_reward
from verl.rewards.text_tokenizer import TextTokenizer
from verl.utils.errors import ConfigError, DataError, RewardError, restated
from verl.utils.user_parts import describe_value
from verl.workers.reward_inputs import one_prompt_each


class RewardModelScorer:
    """The reward model of a group of workers; implements `verl.workers.reward_inputs.Scorer`."""

    def __init__(self, config: TrainConfig, group: Any) -> None:
        section = config.reward_model.model
        assert section.path is not None, "the configuration was checked"
        self.tokenizer = load_tokenizer(section.path, trust_remote_code=section.trust_remote_code)
        self.group = group
        self.max_length: int | None = group.longest_input()

    def score(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Score lists of the reward model's token ids; gives (B,)."""
        columns = {"token_ids": sequences, "response": range(len(sequences))}
        return self.group.score_tokens(DataProto.from_dict(non_tensors=columns)).batch["scores"]


class FunctionScorer:
    """The reward function of training, called on texts. A failed call is an error, whatever
    `on_error` is."""

    def __init__(self, config: TrainConfig, tokenizer: Any) -> None:
        self.source_key = config.data.reward_fn_key
        self.tokenizer = tokenizer
        self.texts = TextTokenizer()
        strict = replace(config, reward_model=replace(config.reward_model, on_error="stop"))
        self.manager = build_reward(strict, self.texts, num_examine=0)

    def score(self, responses: Sequence[Any], prompts: Any, columns: Mapping[str, Any]) -> Tensor:
        """Score texts; gives (B,). `columns` are `data_source`, `ground_truth`, `extra_info`: one
        for all, or a list."""
        missing = [name for name in ("data_source", "ground_truth") if columns[name] is None]
        if missing and isinstance(self.manager, RewardManager) and self.manager.by_rule:
            raise ConfigError(
                "compute_reward has no reward model here, and a rule needs "
                f"{' and '.join(missing)}. Give compute_reward(responses, "
                "data_source='openai/gsm8k', ground_truth=[...]), or configure another score: "
                "reward_model.enable=True with reward_model.model.path, or "
                "custom_reward_function.path."
            )

        for number, text in enumerate(responses):
            if not isinstance(text, str) or not text:
                raise RewardError(
                    f"Response {number} must be a text that is not empty, got {text!r:.80}. Token "
                    "ids are for runs with a reward model, in its own tokens."
                )

        count = len(responses)
        sources = _one_each("data_source", columns["data_source"], count)
        truths = _one_each("ground_truth", columns["ground_truth"], count)
        extras = _one_each("extra_info", columns["extra_info"], count)

        batch = self._batch(responses, one_prompt_each(prompts, count))
        batch.non_tensor_batch |= DataProto.from_dict(
            non_tensors={
                self.source_key: sources,
                "reward_model": [{"style": "rule", "ground_truth": truth} for truth in truths],
                "extra_info": extras,
            }
        ).non_tensor_batch
        with restated(lambda message: re.sub(r"\brow (\d+)", r"response \1", message, count=1)):
            return scores_of(self.manager, batch)

    def _batch(self, responses: Sequence[str], prompts: Sequence[Any]) -> DataProto:
        """Build rows of one token that is the whole text, then empty ones up to its length in the
        actor's tokens."""
        asked = [_text_of(prompt, number) for number, prompt in enumerate(prompts)]
        self.texts.texts = ["", *responses, *asked]
        encoded = self.tokenizer(list(responses), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        lengths = torch.tensor([max(len(ids), 1) for ids in encoded])
        ids = torch.zeros(len(responses), int(lengths.max()), dtype=torch.int64)
        ids[:, 0] = torch.arange(len(responses)) + 1
        columns = {"prompts": ids[:, :1] + len(responses), "responses": ids}
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        columns["attention_mask"] = torch.cat(
            [torch.ones_like(columns["prompts"]), mask.long()], dim=1
        )
        return DataProto.from_dict(tensors=columns)


def _text_of(prompt: Any, number: int) -> str:
    """Return a prompt as text, empty for None. Raises DataError with its number."""
    if prompt is None:
        return ""
    try:
        return plain_text(as_messages(prompt))
    except DataError as error:
        raise DataError(f"The prompt of response {number} {error}.") from error


def scores_of(manager: Any, batch: DataProto) -> Tensor:
    """Compute (B,) finite scores with a reward manager; raise RewardError for dropped rows too."""
    result = call_reward(manager, batch)
    if dropped := result["dropped"]:
        raise RewardError(
            f"The reward of row {dropped[0]} failed, and {len(dropped)} of {len(batch)} (see the "
            "log)."
        )
    return result["reward_tensor"].sum(-1)


def _one_each(name: str, value: Any, count: int) -> Sequence[Any]:
    """Return B entries: those of a list, array or column, or B times a single value."""
    if isinstance(value, Iterator):
        raise DataError(
            f"compute_reward({name}=...) must be a list of {count} entries, or one for all, got "
            f"{describe_value(value)}. Give list(...)."
        )

    if hasattr(value, "tolist"):
        value = value.tolist()  # Python's own values, as rows of a file have them
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Collection):
        return [value] * count

    entries = list(value)
    if len(entries) != count or hasattr(value, "columns"):
        found = f"a table of {len(value)} rows" if hasattr(value, "columns") else len(value)
        raise DataError(
            f"compute_reward needs one entry of {name} for each of {count} responses, got {found}."
        )
    return entries
