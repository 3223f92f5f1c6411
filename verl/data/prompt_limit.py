"""Hold prompts to the limit of tokens: drop, cut or refuse longer ones."""

import logging

import numpy as np

from verl.config import DataConfig
from verl.utils.errors import DataError
from verl.utils.logging import logger, say_once


def rows_to_keep(
    name: str, lengths: np.ndarray, pictured: np.ndarray, config: DataConfig, *, several: str
) -> np.ndarray:
    """Return the numbers (n,) of the rows whose prompts are short enough, or will be cut.

    Args:
        name: of the rows, for errors and the log.
        lengths: (rows,) tokens of each prompt.
        pictured: (rows,) whether it has pictures.
        config: the limit, and whether longer prompts are dropped, cut or an error.
        several: names rows that are too long, after their number.

    Raises DataError for the first row that is neither kept nor may be dropped.
    """
    limit = config.max_prompt_length
    drops = config.filter_overlong_prompts
    long = lengths > limit
    if config.truncation != "error" and not drops:
        long &= pictured  # a cut could go through a picture

    count = int(long.sum())
    if count and not drops:
        first = int(np.argmax(long))
        others = f"{count} {several}" if count > 1 else ""
        raise DataError(
            too_long(
                f"{name}, row {first}",
                int(lengths[first]),
                limit,
                others,
                cuts=not pictured[first],
            )
        )

    if count:
        logger.info(
            "Kept %d of %d rows of %s; %d are longer than data.max_prompt_length=%d.",
            len(long) - count,
            len(long),
            name,
            count,
            limit,
        )
    return np.flatnonzero(~long)


def fit_prompt(
    ids: list[int], config: DataConfig, place: str, *, pictured: bool, whose: str
) -> list[int]:
    """Return the ids of a prompt, cut to the limit where `data.truncation` allows it.

    Args:
        ids: of its tokens.
        config: the limit, and whether longer prompts are cut.
        place: its file and row, for errors.
        pictured: whether it has pictures, and is never cut.
        whose: see `cut_prompt`.

    Raises DataError for a prompt that is too long and must not be cut.
    """
    limit = config.max_prompt_length
    if len(ids) <= limit:
        return ids
    if config.truncation == "error" or pictured:
        raise DataError(too_long(place, len(ids), limit, cuts=not pictured))
    return cut_prompt(ids, config, whose)


def cut_prompt(ids: list[int], config: DataConfig, whose: str) -> list[int]:
    """Cut the ids of a prompt that is too long, and log it once for the prompts of `whose`."""
    limit = config.max_prompt_length
    say_once(
        f"{whose} of more than data.max_prompt_length={limit} tokens are cut, as "
        f"data.truncation={config.truncation} asks.",
        logging.WARNING,
    )
    return truncate(ids, limit, config.truncation)


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Cut ids to at most `limit`: "left" and "right" cut that side, "middle" keeps both ends."""
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    if side == "middle":
        head = limit // 2
        return ids[:head] + ids[len(ids) - (limit - head) :]
    raise DataError(f"data.truncation must be left, right or middle to cut a prompt, got '{side}'.")


def all_too_long(name: str, config: DataConfig) -> DataError:
    """Return the error for rows of which none is left."""
    return DataError(
        f"All prompts of {name} are longer than data.max_prompt_length={config.max_prompt_length} "
        "tokens, and data.filter_overlong_prompts drops them. Raise the limit."
    )


def too_long(place: str, length: int, limit: int, others: str = "", *, cuts: bool = True) -> str:
    """Describe a prompt over the limit.

    Args:
        place: its file and row.
        length: its tokens.
        limit: of tokens.
        others: names all such rows, if there are several.
        cuts: False: it has pictures, and is never cut.
    """
    if others:
        others = f" ({others} are too long)"
    way = "data.truncation=left, right or middle (cut them)."
    if not cuts:
        way = "make the pictures smaller: prompts with pictures are never cut."
    return (
        f"{place}: the prompt has {length} tokens, data.max_prompt_length allows "
        f"{limit}{others}. Raise it, or set data.filter_overlong_prompts=true (drop such rows) or "
        f"{way}"
    )
