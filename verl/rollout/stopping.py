"""The end of a response: end-of-sequence and stop tokens, stop strings."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError


def end_of_sequence_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return every end-of-sequence id, sorted.

    Sources are the model's generation config, its config and the tokenizer.
    """
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        else:
            ids.update(value or ())
    return tuple(sorted(ids))


class StopRule:
    """Decides which rows end with the token they have just drawn."""

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int], tokenizer: Any) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError(
                f"Stop strings {list(params.stop)} need a tokenizer to read the response with, got "
                "None. Give the engine a tokenizer, or stop_token_ids instead."
            )
        if "" in params.stop:
            raise ConfigError("A stop string must have at least one character, got ''.")
        if tokenizer is not None:
            _check_stop_tokens(params.stop_token_ids, len(tokenizer))

        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ids.update(eos_ids)
        self.token_ids: NDArray[np.int64] = np.array(sorted(ids), np.int64)
        self.strings = params.stop
        self.tokenizer: Any = tokenizer
        self.longest = max((len(text.encode()) for text in self.strings), default=0)  # in bytes

    def ends(self, drawn: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return (b,) bool: which of the tokens (b,) just drawn are stop tokens."""
        if self.token_ids.size == 0:
            return np.zeros(drawn.shape, np.bool_)
        return np.isin(drawn, self.token_ids)

    def completes_string(self, token_ids: NDArray[np.int64]) -> bool:
        """Return whether the response `token_ids` (n,) contains a stop string.

        Called after every token, so it decodes only the end of the response.
        """
        # Most tokens stand for at least one byte, but tokens that only pad a vocabulary for none.
        # The margins cover the changes that decoders make to the first token of a text (dropped
        # spaces, broken characters).
        window = self.longest + 8
        while True:
            text = self.tokenizer.decode(token_ids[-window:].tolist(), skip_special_tokens=False)
            if any(stop in text for stop in self.strings):
                return True
            is_whole = window >= len(token_ids)
            if is_whole or len(text.encode()) >= self.longest + 4:
                return False
            window *= 2


def _check_stop_tokens(token_ids: Sequence[int], vocabulary: int) -> None:
    """Raise ConfigError for a stop token that a tokenizer of `vocabulary` tokens does not have."""
    if not all(0 <= token_id < vocabulary for token_id in token_ids):
        raise ConfigError(
            f"stop_token_ids must be ids of the tokenizer, from 0 to {vocabulary - 1}, got "
            f"{list(token_ids)}. tokenizer.convert_tokens_to_ids gives that of a token."
        )
