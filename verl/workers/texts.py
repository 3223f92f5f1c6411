"""Collect the texts that a job without training generates, as columns of a batch."""

from collections.abc import Iterable, Sequence
from typing import Any

from verl.rollout.checks import checked_ids
from verl.rollout.types import Completion
from verl.utils.errors import RolloutError


def text_columns(
    completions: Iterable[Completion],
    rows: Sequence[int],
    n: int,
    tokenizer: Any,
    vocabulary: int | None = None,
) -> dict[str, list[Any]]:
    """Return the columns of prompts with n completions each, in the order of `rows`.

    These are `responses` (lists of n texts without special tokens), and of all n together
    `num_tokens` and `num_cut` (responses that the limit ended).

    Args:
        completions: in any order.
        rows: numbers of the prompts in the whole batch.
        vocabulary: number of tokens that the model embeds; None: unknown.

    Raises RolloutError for missing samples and for token ids that the model does not embed.
    """
    finished = {completion.sample_id: completion for completion in completions}
    wanted: list[int] = []
    for row in rows:
        wanted += range(row * n, (row + 1) * n)
    if finished.keys() != set(wanted):
        raise RolloutError(
            f"Expected {len(wanted)} samples from the engine, got {len(finished)}, or others."
        )

    for number in wanted:
        checked_ids(finished[number].token_ids, number, vocabulary)

    ordered = [finished[number] for number in wanted]
    token_ids = [completion.token_ids for completion in ordered]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    columns: dict[str, list[Any]] = {"responses": [], "num_tokens": [], "num_cut": []}
    for start in range(0, len(wanted), n):
        group = slice(start, start + n)
        columns["responses"].append(texts[group])
        columns["num_tokens"].append(sum(map(len, token_ids[group])))
        is_cut = [completion.finish_reason == "length" for completion in ordered[group]]
        columns["num_cut"].append(sum(is_cut))
    return columns
