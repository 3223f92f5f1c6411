"""Turn completions into the padded columns of a batch."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from verl.rollout.types import Completion
from verl.utils.errors import RolloutError


def assemble(
    prompts: Sequence[Sequence[int]],
    completions: Iterable[Completion],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> dict[str, Tensor]:
    """Return the tensor columns of phase "generate".

    Row i is `prompts[i]` with the completion of sample id i. The columns are prompts (B, P),
    responses (B, R), input_ids, attention_mask, position_ids (B, T), response_mask (B, R) and
    rollout_log_probs (B, R) fp32.

    Raises RolloutError naming the sample that is missing, doubled, unknown, empty or longer than
    its columns, or that does not have one finite log-prob for each token.
    """
    rows = len(prompts)
    by_sample = _by_sample(completions, rows)
    prompt_ids = torch.full((rows, prompt_length), pad_token_id, dtype=torch.int64)
    prompt_mask = torch.zeros((rows, prompt_length), dtype=torch.int64)
    responses = torch.full((rows, response_length), pad_token_id, dtype=torch.int64)
    response_mask = torch.zeros((rows, response_length), dtype=torch.int64)
    log_probs = torch.zeros((rows, response_length), dtype=torch.float32)

    for row, prompt in enumerate(prompts):
        completion = by_sample[row]
        _check(completion, prompt, prompt_length, response_length)
        start = prompt_length - len(prompt)
        count = len(completion.token_ids)
        prompt_ids[row, start:] = torch.tensor(prompt, dtype=torch.int64)
        prompt_mask[row, start:] = 1
        responses[row, :count] = torch.tensor(completion.token_ids, dtype=torch.int64)
        response_mask[row, :count] = 1
        log_probs[row, :count] = torch.tensor(completion.log_probs, dtype=torch.float32)

    attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
    return {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(dim=1) - 1).clamp_(min=0),
        "response_mask": response_mask,
        "rollout_log_probs": log_probs,
    }


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
        shown = ", ".join(map(str, missing[:5])) + (" ..." if len(missing) > 5 else "")
        raise RolloutError(
            f"Expected {rows} samples from the engine, {len(missing)} are missing: {shown}."
        )
    return by_sample


def _check(
    completion: Completion, prompt: Sequence[int], prompt_length: int, response_length: int
) -> None:
    name = f"sample {completion.sample_id}"
    count = len(completion.token_ids)
    if count == 0:
        raise RolloutError(
            f"The engine returned an empty response for {name}; one token at least is due."
        )
    if len(prompt) > prompt_length:
        raise RolloutError(
            f"The prompt of {name} has {len(prompt)} tokens, its column {prompt_length}. Raise "
            "data.max_prompt_length or filter overlong prompts."
        )
    if count > response_length:
        raise RolloutError(
            f"The response of {name} has {count} tokens, its column {response_length}. Ask the "
            "engine for at most data.max_response_length new tokens."
        )

    if len(completion.log_probs) != count or not all(map(math.isfinite, completion.log_probs)):
        raise RolloutError(
            f"Expected {count} finite log-probs for {name}, got {len(completion.log_probs)}"
            f"{'' if len(completion.log_probs) != count else ', some of them not finite'}."
        )
