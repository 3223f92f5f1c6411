"""Checks of configuration and requests that all engines of this package share."""

import operator
from collections.abc import Container, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.models.pictures import picture_tokens
from verl.models.vision import reads_pictures
from verl.rollout.types import Request, SamplingParams
from verl.utils.errors import ConfigError, DataError, RolloutError


def longest_sequence(config: RolloutConfig, model: PreTrainedModel) -> int:
    """Return the most tokens that a prompt and its response may have together.

    Raises ConfigError where the model has fewer positions.
    """
    length = config.longest_sequence
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length > positions:
        raise ConfigError(
            f"The rollout allows sequences of {length} tokens (max_model_len, or prompt_length + "
            f"response_length), but the model has {positions} positions. Lower "
            "data.max_prompt_length or data.max_response_length."
        )
    return length


def check_params(params: SamplingParams) -> None:
    """Raise ConfigError for sampling parameters outside of their range."""
    expected = {
        "max_new_tokens must be at least 1": params.max_new_tokens >= 1,
        "temperature must be 0 (greedy) or at least 1e-37": params.temperature == 0
        or params.temperature >= 1e-37,
        "top_k must be -1 (off) or at least 0": params.top_k >= -1,
        "top_p must be above 0 and at most 1": 0 < params.top_p <= 1,
        "min_p must be at least 0 and at most 1": 0 <= params.min_p <= 1,
        "stop must be a tuple of strings": not isinstance(params.stop, str),
    }
    broken = [rule for rule, holds in expected.items() if not holds]
    if broken:
        raise ConfigError(f"Sampling parameters: {'; '.join(broken)}; got {params}.")


def check_requests(requests: Sequence[Request], *, max_model_len: int, vocabulary: int) -> None:
    """Raise RolloutError for a prompt that cannot be continued, or for a repeated sample id."""
    seen: set[int] = set()
    for number, request in enumerate(requests):
        _check_prompt(number, request.prompt_ids, max_model_len, vocabulary)
        _check_limits(number, request)
        _check_continuations(number, request)

        for sample_id in request.sample_ids:
            if not -(2**63) <= sample_id < 2**63:
                raise RolloutError(
                    f"Request {number} has the sample id {sample_id}; ids must fit in 64 bits."
                )
            if sample_id in seen:
                raise RolloutError(
                    f"Sample id {sample_id} was asked for twice in one call; ids must be unique."
                )
            seen.add(sample_id)


def refuse_running(requests: Sequence[Request], running: Container[int]) -> None:
    """Raise RolloutError for a sample id that is among the unfinished ones, `running`."""
    for request in requests:
        for sample_id in request.sample_ids:
            if sample_id in running:
                raise RolloutError(
                    f"Sample id {sample_id} is being generated already; ids must be unique among "
                    "the requests at work."
                )


def _check_prompt(number: int, prompt: Sequence[int], max_model_len: int, vocabulary: int) -> None:
    if not prompt:
        raise RolloutError(f"Request {number} has an empty prompt; it needs one token at least.")
    if len(prompt) >= max_model_len:
        raise RolloutError(
            f"Request {number} has a prompt of {len(prompt)} tokens, which leaves no room for a "
            f"response in {max_model_len}. Raise actor_rollout_ref.rollout.max_model_len or filter "
            "overlong prompts."
        )

    smallest = min(prompt)
    largest = max(prompt)
    if smallest < 0 or largest >= vocabulary:
        raise RolloutError(
            f"Request {number} has token ids {smallest}..{largest}, the model knows "
            f"0..{vocabulary - 1}. Use the tokenizer that belongs to the model."
        )


def _check_limits(number: int, request: Request) -> None:
    limits = request.limits
    if limits is None:
        return
    if len(limits) != len(request.sample_ids) or min(limits, default=1) < 1:
        raise RolloutError(
            f"Request {number} has {len(request.sample_ids)} samples and the limits {limits}; "
            "each sample needs one of at least 1."
        )


def _check_continuations(number: int, request: Request) -> None:
    continuations = request.continuations
    if continuations is None:
        return
    if len(continuations) != len(request.sample_ids):
        raise RolloutError(
            f"Request {number} has {len(request.sample_ids)} samples and {len(continuations)} "
            "continuations; each sample needs one."
        )
    for sample_id, begun in zip(request.sample_ids, continuations):
        if len(begun.token_ids) != len(begun.log_probs):
            raise RolloutError(
                f"Sample {sample_id} continues {len(begun.token_ids)} tokens with "
                f"{len(begun.log_probs)} log-probs; each token needs one."
            )


def check_pictures(requests: Sequence[Request], config: PreTrainedConfig) -> None:
    """Raise RolloutError for pictures that a model does not read or that a prompt does not fit."""
    for number, request in enumerate(requests):
        if not request.pictures:
            continue
        if not reads_pictures(config):
            raise RolloutError(
                f"Request {number} has pictures, but the family '{config.model_type}' reads text "
                "alone. Give a model with a vision tower."
            )
        try:
            picture_tokens(torch.tensor(request.prompt_ids), request.pictures, f"Request {number}")
        except DataError as error:
            raise RolloutError(str(error)) from error


def response_limits(request: Request, params: SamplingParams, max_model_len: int) -> list[int]:
    """Return how many tokens each sample of `request` may draw."""
    most = min(params.max_new_tokens, max_model_len - len(request.prompt_ids))
    asked = request.limits or [most] * len(request.sample_ids)
    limits = [min(most, limit) for limit in asked]
    for sample_id, limit, begun in zip(request.sample_ids, limits, request.continuations or ()):
        if len(begun.token_ids) >= limit:
            raise RolloutError(
                f"Sample {sample_id} has drawn {len(begun.token_ids)} tokens and may draw {limit}: "
                "nothing is left to continue."
            )
    return limits


def checked_ids(token_ids: Sequence[int], sample: int, vocabulary: int | None) -> NDArray[np.int64]:
    """Return the token ids of a response as an array.

    Args:
        sample: number of the response, for the error.
        vocabulary: number of tokens that the model embeds; None: unknown.

    Raises RolloutError for an id that the model cannot read.
    """
    limit = 2**63 if vocabulary is None else vocabulary
    try:
        # operator.index, because an array of integers would cut the fraction of a float silently.
        ids = np.fromiter(map(operator.index, token_ids), np.int64)
    except (TypeError, OverflowError):
        ids = None
    if ids is not None and ids.min(initial=0) >= 0 and ids.max(initial=0) < limit:
        return ids

    expected = "integers of at least 0"
    if vocabulary is not None:
        expected = f"0..{vocabulary - 1}, because the model embeds {vocabulary} tokens"
    raise RolloutError(
        f"Expected token ids {expected}, but the response of sample {sample} has "
        f"{_first_unknown(token_ids, limit)}. Let the rollout engine and the agent loop use the "
        "model's own tokenizer."
    )


def _first_unknown(token_ids: Sequence[Any], limit: int) -> Any:
    """Return the first id that is no integer of 0..limit - 1."""
    for token_id in token_ids:
        try:
            is_known = 0 <= operator.index(token_id) < limit
        except TypeError:
            is_known = False
        if not is_known:
            return token_id
    return None
