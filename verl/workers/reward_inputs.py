"""Prepare the inputs of a reward model: conversations in its own tokens, of bounded length."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from verl.data.chat import Messages, encode_conversations
from verl.data.picture_parts import without_picture_parts
from verl.data.prompt_limit import truncate
from verl.protocol import DataProto
from verl.utils.errors import DataError, RewardError
from verl.utils.logging import say_once

# The place of a reward model's template: no key of the configuration sets one.
_TEMPLATE_KEY = "`chat_template` in the reward model's tokenizer_config.json"
Describe = Callable[[int], str]  # how an error names a row


@dataclass(frozen=True)
class RewardReader:
    """Encode conversations into token ids.

    Args:
        tokenizer: the reward model's own, with its chat template.
        max_length: the most tokens of one input; None: no limit.
        truncation: treatment of a longer one: "error", or the side that is cut: "left", "right",
            "middle". None: an error, and no key would have it cut.
    """

    tokenizer: Any
    max_length: int | None = None
    truncation: str | None = None

    def read(self, conversations: Sequence[Messages], describe: Describe) -> list[list[int]]:
        """Encode each conversation, with its answer, by the reward model's chat template."""
        return self.fit(_encode(self.tokenizer, conversations), describe)

    def fit(self, sequences: Sequence[Sequence[int]], describe: Describe) -> list[list[int]]:
        """Cut rows to `max_length`, and log it. Raises RewardError where none may be cut."""
        rows = [list(ids) for ids in sequences]
        limit = self.max_length
        if limit is None:
            return rows
        too_long = [row for row, ids in enumerate(rows) if len(ids) > limit]
        if not too_long:
            return rows

        if self.truncation is None or self.truncation == "error":
            longest = max(len(ids) for ids in rows)
            cut = ""
            if self.truncation:
                cut = ", or set reward_model.truncation=left or right to have inputs cut"
            raise RewardError(
                f"The input of {describe(too_long[0])} has {len(rows[too_long[0]])} tokens of the "
                f"reward model's tokenizer, and it takes {limit}; {len(too_long)} of {len(rows)} "
                f"are too long, up to {longest}. Raise reward_model.max_length if the model has "
                f"the positions, shorten data.max_prompt_length or data.max_response_length{cut}."
            )

        say_once(
            f"Inputs of more than {limit} tokens are cut for the reward model, as "
            f"reward_model.truncation={self.truncation} asks.",
            logging.WARNING,
        )
        for row in too_long:
            rows[row] = truncate(rows[row], limit, self.truncation)
        return rows


def conversations_of(batch: DataProto, tokenizer: Any, describe: Describe) -> list[Messages]:
    """Return the messages of each row's prompt (`raw_prompt`) and its decoded response."""
    prompts = batch.non_tensor_batch.get("raw_prompt")
    if prompts is None:
        raise DataError(
            "Expected the column raw_prompt (messages), which the reward model's chat template is "
            f"applied to, but this batch has {sorted(batch.non_tensor_batch)}. Have the data set "
            "give it, or, where actor and reward model have one tokenizer, set "
            "reward_model.model.input_tokenizer=null."
        )

    responses = batch.batch["responses"]
    real = batch.batch["attention_mask"][:, -responses.shape[1] :].bool()
    sequences = [ids[mask].tolist() for ids, mask in zip(responses, real)]
    texts = tokenizer.batch_decode(sequences, skip_special_tokens=True)

    conversations = []
    for row, (prompt, text) in enumerate(zip(prompts, texts)):
        conversations.append(_conversation(prompt, text, describe(row)))
    return conversations


class Scorer(Protocol):
    """A reward model in any place; `verl.models.reward_model.RewardModel` is one."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def max_length(self) -> int | None: ...

    def score(self, sequences: Sequence[Sequence[int]]) -> Tensor: ...


def compute_reward(model: Scorer, responses: Any, prompts: Any = None) -> Tensor:
    """Compute fp32 scores (B,) of B responses, each finite.

    Args:
        responses: texts; or token ids of the reward model's own tokenizer, as B tensors (or arrays,
            lists), or as one (B, T) tensor or array, where pad tokens at either end of a row do not
            count.
        prompts: B texts or lists of messages, or one text for all. A response is then the
            assistant's turn under the reward model's chat template (ids are decoded for it). Or B
            prompts in ids, before responses in ids. None: a text is an assistant's turn without a
            question, and ids are scored as they are.

    Raises:
        RewardError: a response is missing, empty, of another tokenizer or longer than the model
            takes, or its score is not finite; the message has its number.
        DataError: no fit between responses and prompts, or a chat template that refuses the
            conversation.
    """
    responses = _as_tensor(responses)
    _check_responses(responses)
    answers = _texts_or_ids(responses, "response", model.tokenizer)
    before: Any = one_prompt_each(_as_tensor(prompts), len(answers))
    reader = RewardReader(model.tokenizer, model.max_length)
    if any(_is_ids(prompt) for prompt in before):
        before = _texts_or_ids(before, "prompt", model.tokenizer)

    conversations: dict[int, Messages] = {}
    sequences: list[list[int]] = [[] for _ in answers]
    for row, (answer, prompt) in enumerate(zip(answers, before)):
        if not isinstance(answer, str) and (prompt is None or _is_ids(prompt)):
            sequences[row] = [*(prompt or ()), *answer]
        else:
            conversations[row] = _answered(prompt, answer, row, model.tokenizer)

    encoded = _encode(model.tokenizer, list(conversations.values()))
    for row, ids in zip(conversations, encoded):
        sequences[row] = ids
    return model.score(reader.fit(sequences, _response))


def one_prompt_each(prompts: Any, count: int) -> Any:
    """Return the prompts of `count` responses: a list, or a matrix of token ids as it is.

    One text is the prompt of all. None gives a list of None.

    Raises:
        DataError: they are no list, or not as many as the responses.
    """
    if prompts is None or isinstance(prompts, str):
        return [prompts] * count

    expected = (
        "compute_reward(prompts=...) must be a list of texts or chats, one for each of "
        f"{count} responses"
    )
    is_list = isinstance(prompts, Iterable) and not isinstance(prompts, bytes | Mapping | DataProto)
    if isinstance(prompts, Tensor):
        is_list = prompts.ndim > 0
    if not is_list:
        fact = " ".join(str(prompts).split())
        raise DataError(f"{expected}, got {type(prompts).__name__}: {fact:.80}.")

    entries: Any = prompts
    if not isinstance(prompts, Tensor):
        entries = list(prompts)
    if len(entries) and isinstance(entries[0], Mapping):
        raise DataError(f"{expected}, got the messages of one. Give a list of chats: [chat].")
    if len(entries) != count:
        raise DataError(f"{expected}, got {len(entries)}.")
    return entries


def _encode(tokenizer: Any, conversations: Sequence[Messages]) -> list[list[int]]:
    """Encode conversations, which end with an answer, by the reward model's chat template."""
    return encode_conversations(
        tokenizer, conversations, add_generation_prompt=False, template_key=_TEMPLATE_KEY
    )


def _answered(prompt: Any, answer: Any, row: int, tokenizer: Any) -> Messages:
    """Return a prompt of texts, or none, and its answer as messages."""
    if _is_ids(prompt):
        raise DataError(
            f"Prompt {row} is given in token ids and response {row} as a text. Give both as texts."
        )
    if not isinstance(answer, str):
        answer = tokenizer.decode(answer, skip_special_tokens=True)
    return _conversation([] if prompt is None else prompt, answer, _response(row))


def _check_responses(responses: Any) -> None:
    """Raise DataError unless the responses are a list, at least one, or a matrix of ids."""
    if isinstance(responses, Tensor):
        fits = responses.ndim == 2
        got = f"{tuple(responses.shape)}"
    else:
        fits = isinstance(responses, Sized) and not isinstance(responses, str | bytes | Mapping)
        got = f"{responses!r:.80}"
    if not fits or not len(responses):
        raise DataError(
            "compute_reward needs a list of responses (texts or token ids) or a (B, T) tensor of "
            f"ids, got {got}."
        )


def _response(row: int) -> str:
    return f"response {row}"


def _conversation(prompt: Any, answer: str, name: str) -> Messages:
    try:
        is_empty = isinstance(prompt, list) and not prompt
        before = [] if is_empty else without_picture_parts(prompt)
    except DataError as error:
        raise DataError(f"The prompt of {name} {error}.") from error
    return [*before, {"role": "assistant", "content": answer}]


def _as_tensor(value: Any) -> Any:
    """Return an array of numbers as a tensor, and any other value as it is."""
    is_numeric = isinstance(value, np.ndarray) and value.dtype.kind in "biuf"
    return torch.from_numpy(value) if is_numeric else value


def _is_ids(value: Any) -> bool:
    if isinstance(_as_tensor(value), Tensor):
        return True
    is_list = isinstance(value, (list, tuple)) and bool(value)
    return is_list and isinstance(value[0], int)


def _texts_or_ids(values: Any, kind: str, tokenizer: Any) -> list[str | list[int]]:
    """Check texts and token ids; give texts as they are, token ids as lists."""
    if isinstance(values, Tensor) and values.ndim == 2:
        values = [_without_padding(row.tolist(), tokenizer.pad_token_id) for row in values]

    checked: list[str | list[int]] = []
    for number, value in enumerate(values):
        name = f"{kind} {number}".capitalize()
        value = _as_tensor(value)
        if isinstance(value, Tensor):
            value = value.tolist()
        if value is None:
            raise RewardError(f"{name} is missing.")
        if isinstance(value, (str, list, tuple)) and not value:
            raise RewardError(f"{name} is empty.")
        if isinstance(value, str):
            checked.append(value)
        else:
            checked.append(_checked_ids(value, name, len(tokenizer)))
    return checked


def _without_padding(ids: list[int], pad_token_id: int) -> list[int]:
    """Cut pad tokens from both ends of a row."""
    real = [place for place, token in enumerate(ids) if token != pad_token_id]
    return ids[real[0] : real[-1] + 1] if real else []


def _checked_ids(value: Any, name: str, vocabulary: int) -> list[int]:
    """Return token ids as a list. Raises RewardError unless the tokenizer has all of them."""
    is_list = isinstance(value, (list, tuple))
    if not is_list or not all(_is_whole(token) for token in value):
        raise RewardError(f"{name} must be a text or token ids (T,), got {value!r:.80}.")

    lowest = min(value)
    highest = max(value)
    if lowest < 0 or highest >= vocabulary:
        raise RewardError(
            f"{name} has the token ids {lowest} to {highest}, but the reward model's "
            f"tokenizer has {vocabulary}: they are of another tokenizer. Decode them, and "
            "give texts."
        )
    return [int(token) for token in value]


def _is_whole(token: Any) -> bool:
    """Return whether a value is a whole number. The entries of a mask, True and False, are none."""
    return isinstance(token, Integral) and not isinstance(token, bool)
