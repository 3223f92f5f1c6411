"""Measure prompt lengths in tokens, once per file, tokenizer and template, and cache them."""

import hashlib
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.chat import Messages, encode_conversations
from verl.data.files import encoded_in_chunks
from verl.utils.cache import cache_folder
from verl.utils.logging import logger
from verl.utils.whole_file import whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIGEST_BYTES = 32


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a hex digest of the vocabulary, rules and template, which determine token ids."""
    if tokenizer.is_fast:
        backend: Any = tokenizer.backend_tokenizer
        rules = backend.to_str()
    else:
        vocabulary = sorted(tokenizer.get_vocab().items())
        rules = repr((type(tokenizer).__qualname__, vocabulary, tokenizer.init_kwargs))

    text = f"{rules}\0{tokenizer.chat_template}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def prompt_lengths(
    tokenizer: "PreTrainedTokenizerBase",
    conversations: Iterable[Messages],
    *,
    count: int,
    key: str,
    name: str,
) -> np.ndarray:
    """Return the lengths (count,) int32 of the conversations, from the cache if possible.

    Args:
        key: digest of all that the lengths depend on; the name of the cache file.
        name: the file of the conversations, for the log and for errors.
    """
    path = cache_folder() / "prompt_lengths" / f"{key}.bin"
    cached = _read(path, count)
    if cached is not None:
        return cached

    start = time.perf_counter()
    encoded = encoded_in_chunks(name, conversations, partial(encode_conversations, tokenizer))

    lengths = np.fromiter(map(len, encoded), dtype=np.int32)
    assert len(lengths) == count
    logger.info(
        "Measured %s prompts of %s in %.1f s.", f"{count:,}", name, time.perf_counter() - start
    )
    _write(path, lengths)

    return lengths


def _read(path: Path, count: int) -> np.ndarray | None:
    """Read lengths from a cache file; None if it is missing or does not match its digest."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("Cannot read the cache of prompt lengths '%s' (%s); measuring.", path, error)
        return None
    digest = content[:_DIGEST_BYTES]
    payload = content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest or len(payload) != 4 * count:
        logger.warning("The cache of prompt lengths '%s' is damaged; measuring again.", path)
        return None
    return np.frombuffer(payload, dtype="<i4").astype(np.int32)


def _write(path: Path, lengths: np.ndarray) -> None:
    """Write the file atomically, so that no other process ever reads half of it."""
    payload = lengths.astype("<i4").tobytes()

    try:
        with whole_file(path) as temporary:
            temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
    except OSError as error:
        logger.warning(
            (
                "Cannot store prompt lengths in '%s' (%s), so the next run measures again. "
                "VERL_CACHE sets another folder."
            ),
            path.parent,
            error,
        )
