"""Turn trajectories into the padded columns of a batch."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.rollout.checks import checked_ids
from verl.rollout.trajectory import MODEL, Segment, Trajectory
from verl.rollout.types import Completion
from verl.utils.errors import RolloutError

NO_TURN = -1  # in the column `turn_of_token`: a token that no model drew
NO_AGE = -1  # in the column `token_age`: a token that no model drew
# Rounding in fp32 brings the log-prob of a certain token above 0, by less than this.
_LARGEST_LOG_PROB = 1e-4


def assemble(
    trajectories: Sequence[Trajectory],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
    with_turns: bool = False,
    version: int | None = None,
    vocabulary: int | None = None,
) -> dict[str, Tensor]:
    """Return the tensor columns of phase "generate", one row for each trajectory.

    The columns are prompts (B, P), responses (B, R), input_ids, attention_mask, position_ids
    (B, T), response_mask (B, R), which is 1 for the model's own tokens alone, and rollout_log_probs
    (B, R) fp32, which is 0 for others. `with_turns` adds `turn_of_token` (B, R): the number of the
    model's turn that drew a token, or -1. `version`, that of the weights to be updated, adds
    `token_age` (B, R): versions between the weights that drew a token and these, or -1. Where the
    engine recorded them there is `routed_experts` (B, R, C), see `Completion`. `vocabulary` is the
    number of tokens that the model embeds; None: unknown.

    Raises RolloutError naming the sample that is empty or longer than its columns, that has a token
    id outside of the vocabulary, or that does not have one finite log-prob, at most 0, for each
    token of the model.
    """
    size = (len(trajectories), response_length)
    prompts = torch.full((len(trajectories), prompt_length), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros_like(prompts)
    responses = torch.full(size, pad_token_id, dtype=torch.int64)
    real = torch.zeros_like(responses)
    of_model = _columns_of_model(trajectories, size, with_turns=with_turns, version=version)

    for row, trajectory in enumerate(trajectories):
        _check(trajectory, prompt_length, response_length)
        start = prompt_length - len(trajectory.prompt_ids)
        prompts[row, start:] = torch.tensor(trajectory.prompt_ids, dtype=torch.int64)
        prompt_mask[row, start:] = 1

        end = 0
        for segment in trajectory.segments:
            place = slice(end, end + len(segment.token_ids))
            end = place.stop
            ids = checked_ids(segment.token_ids, trajectory.row, vocabulary)
            responses[row, place] = torch.from_numpy(ids)
            if segment.is_model:
                is_trained = segment.is_trained and not trajectory.is_dropped
                for name, values in _values_of(segment, is_trained, version).items():
                    if name in of_model:
                        of_model[name][row, place] = values
        real[row, :end] = 1

    attention_mask = torch.cat([prompt_mask, real], dim=1)
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_(min=0),
        **of_model,
    }


def _columns_of_model(
    trajectories: Sequence[Trajectory],
    size: tuple[int, int],
    *,
    with_turns: bool,
    version: int | None,
) -> dict[str, Tensor]:
    """Return columns (B, R) of facts about the model's tokens, as they are for other tokens."""
    columns = {
        "response_mask": torch.zeros(size, dtype=torch.int64),
        "rollout_log_probs": torch.zeros(size, dtype=torch.float32),
    }
    if with_turns:
        columns["turn_of_token"] = torch.full(size, NO_TURN, dtype=torch.int32)
    if version is not None:
        columns["token_age"] = torch.full(size, NO_AGE, dtype=torch.int32)
    routes = _no_routes(trajectories, size[1])
    if routes is not None:
        columns["routed_experts"] = routes
    return columns


def _values_of(segment: Segment, is_trained: bool, version: int | None) -> dict[str, Any]:
    """Return the values of a model's segment in these columns."""
    values: dict[str, Any] = {
        "response_mask": int(is_trained),
        "rollout_log_probs": torch.tensor(segment.log_probs, dtype=torch.float32),
        "turn_of_token": segment.turn,
    }
    if version is not None:
        values["token_age"] = _ages(segment, version)
    if segment.routed_experts is not None:
        values["routed_experts"] = torch.from_numpy(segment.routed_experts)
    return values


def _ages(segment: Segment, version: int) -> Tensor:
    """Return the versions between the weights that drew each token and `version`."""
    if segment.versions is None:
        drawn_by = torch.full((len(segment.token_ids),), segment.version, dtype=torch.int32)
    else:
        drawn_by = torch.tensor(segment.versions, dtype=torch.int32)
    return version - drawn_by


def _no_routes(trajectories: Sequence[Trajectory], response_length: int) -> Tensor | None:
    """Return a column (B, R, C) without a choice of experts; None where no token has one."""
    for trajectory in trajectories:
        for segment in trajectory.segments:
            if segment.routed_experts is not None:
                like = torch.from_numpy(segment.routed_experts)
                size = (len(trajectories), response_length, like.shape[1])
                return like.new_full(size, torch.iinfo(like.dtype).max)
    return None


def trajectories_of(
    prompts: Sequence[Sequence[int]], completions: Iterable[Completion]
) -> list[Trajectory]:
    """Return one trajectory for each prompt: `prompts[i]` with the completion of sample id i.

    Raises RolloutError naming a sample that is missing, doubled or unknown.
    """
    by_sample = _by_sample(completions, len(prompts))
    trajectories = []
    for row, prompt in enumerate(prompts):
        completion = by_sample[row]
        drawn = Segment(
            source=MODEL,
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            routed_experts=completion.routed_experts,
        )
        trajectories.append(Trajectory(row=row, prompt_ids=prompt, segments=[drawn]))
    return trajectories


def _by_sample(completions: Iterable[Completion], rows: int) -> dict[int, Completion]:
    by_sample: dict[int, Completion] = {}
    for completion in completions:
        if not 0 <= completion.sample_id < rows:
            raise RolloutError(
                f"The engine returned sample {completion.sample_id}, but 0..{rows - 1} were asked "
                "for. An engine must return the sample ids of its requests."
            )
        if completion.sample_id in by_sample:
            raise RolloutError(
                f"The engine returned sample {completion.sample_id} twice; each is due exactly "
                "once."
            )
        by_sample[completion.sample_id] = completion

    missing = [row for row in range(rows) if row not in by_sample]
    if missing:
        shown = ", ".join(map(str, missing[:5]))
        if len(missing) > 5:
            shown += " ..."
        raise RolloutError(
            f"Expected {rows} samples from the engine, {len(missing)} are missing: {shown}."
        )
    return by_sample


def _check(trajectory: Trajectory, prompt_length: int, response_length: int) -> None:
    name = f"sample {trajectory.row}"
    count = 0
    for segment in trajectory.segments:
        count += len(segment.token_ids)
        if segment.is_model:
            _check_log_probs(segment, name)

    if count == 0:
        raise RolloutError(
            f"The engine returned an empty response for {name}; one token at least is due."
        )
    if len(trajectory.prompt_ids) > prompt_length:
        raise RolloutError(
            f"The prompt of {name} has {len(trajectory.prompt_ids)} tokens, its column "
            f"{prompt_length}. Raise data.max_prompt_length or filter overlong prompts."
        )
    if count > response_length:
        raise RolloutError(
            f"The response of {name} has {count} tokens, its column {response_length}. Ask the "
            "engine for at most data.max_response_length new tokens."
        )


def _check_log_probs(segment: Segment, name: str) -> None:
    expected = len(segment.token_ids)
    log_probs = segment.log_probs or ()
    if len(log_probs) != expected or not all(map(math.isfinite, log_probs)):
        not_finite = ""
        if len(log_probs) == expected:
            not_finite = ", some of them not finite"
        raise RolloutError(
            f"Expected {expected} finite log-probs for {name}, got {len(log_probs)}{not_finite}."
        )

    largest = max(log_probs, default=0.0)
    if largest > _LARGEST_LOG_PROB:
        raise RolloutError(
            f"A log-prob is at most 0, but the engine returned {largest:g} for a token of {name}. "
            "An engine must return log_softmax(logits / temperature) of each token that it drew."
        )
