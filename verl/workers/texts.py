"""Collect the texts that a job without training generates, as columns of a batch."""

from collections.abc import Iterable, Sequence
from typing import Any

from verl.rollout.checks import checked_ids
from verl.rollout.types import Completion, Request
from verl.utils.errors import RolloutError


def text_columns(
    completions: Iterable[Completion],
    requests: Sequence[Request],
    tokenizer: Any,
    vocabulary: int | None = None,
) -> dict[str, list[Any]]:
    """Return the columns of prompts with their completions, in the order of `requests`.

    These are `responses` (lists of texts without special tokens), and of all samples of a prompt
    together `num_tokens` and `num_cut` (responses that the limit ended).

    Args:
        completions: in any order.
        requests: one for each prompt.
        vocabulary: number of tokens that the model embeds; None: unknown.

    Raises RolloutError for missing samples and for token ids that the model does not embed.
    """
    finished = {completion.sample_id: completion for completion in completions}
    wanted: list[int] = []
    for request in requests:
        wanted += request.sample_ids
    if finished.keys() != set(wanted):
        raise RolloutError(
            f"Expected {len(wanted)} samples from the engine, got {len(finished)}, or others."
        )

    for number in wanted:
        checked_ids(finished[number].token_ids, number, vocabulary)

    token_ids = [finished[number].token_ids for number in wanted]
    texts = dict(zip(wanted, tokenizer.batch_decode(token_ids, skip_special_tokens=True)))

    columns: dict[str, list[Any]] = {"responses": [], "num_tokens": [], "num_cut": []}
    for request in requests:
        group = [finished[number] for number in request.sample_ids]
        is_cut = [completion.finish_reason == "length" for completion in group]
        columns["responses"].append([texts[number] for number in request.sample_ids])
        columns["num_tokens"].append(sum(len(completion.token_ids) for completion in group))
        columns["num_cut"].append(sum(is_cut))
    return columns
