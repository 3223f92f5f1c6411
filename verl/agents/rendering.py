"""A chat template as the boundary sees it: messages to text, text to ids, ids to text."""

import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import models, normalizers, pre_tokenizers

from verl.agents.formats.base import ToolSchemas
from verl.agents.formats.tool_parser import decoded
from verl.data.chat import Message, encode_rendered, render_conversation


class ChatTemplate:
    """The chat template of a tokenizer.

    Methods that render raise DataError where the template refuses the messages.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._special_tokens = _added_tokens(tokenizer)
        # Ids that are never part of ordinary text.
        self.special_ids = frozenset(self._special_tokens.values())
        self._special_texts = tuple(self._special_tokens)
        self._anchors = self._usable_anchors()
        self._longest_token = self._characters_of_a_token()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas | None = None,
        generate: bool = True,
    ) -> str:
        """Return the text of a conversation, with the generation prompt if `generate`."""
        return render_conversation(
            self.tokenizer,
            list(messages),
            add_generation_prompt=generate,
            tools=tools,
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a whole conversation."""
        return encode_rendered(self.tokenizer, [text])[0]

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that stands behind other text.

        Nothing is put in front, as tokenizers do at the beginning of a text.
        """
        # A special token is split off before anything else, so nothing can join it.
        if text.startswith(self._special_texts):
            return self._plain_ids(text)

        for anchor, before in self._anchors:
            ids = self._plain_ids(anchor + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._plain_ids(text)

    def beginning(self, text: str, num_tokens: int) -> str:
        """Return a beginning of the text with at least so many tokens, or the whole text.

        A tool may answer with millions of characters. To tokenize all of them takes seconds, and
        few of them show that the answer is too long.
        """
        if self._longest_token is None:
            return text

        enough = num_tokens * self._longest_token
        # The tokenizer composes other texts first, and they become shorter.
        if len(text) <= enough or not unicodedata.is_normalized("NFC", text):
            return text
        return text[:enough]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return decoded(self.tokenizer, token_ids)

    def decode_part(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids that stand behind other ids.

        Some tokenizers drop a space in front of the first id of a text.
        """
        before = self._plain_ids("a")
        return self.decode([*before, *token_ids])[len(self.decode(before)) :]

    def known_ids(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of those tokens that the tokenizer has as special ones."""
        found = [self._special_tokens.get(token) for token in tokens]
        return frozenset(each for each in found if each is not None)

    # ------------------------------------------------------------ tokenizing

    def _usable_anchors(self) -> list[tuple[str, list[int]]]:
        """Return texts to put in front of another that then decodes to itself, and their ids."""
        eos = self.tokenizer.eos_token
        usable = []
        for anchor in [eos, "a", "."] if eos in self._special_tokens else ["a", "."]:
            before = self._plain_ids(anchor)
            both = self._plain_ids(f"{anchor}\n:")
            if self.decode(both) == self.decode(before) + "\n:":
                usable.append((anchor, before))
        return usable

    def _plain_ids(self, text: str) -> list[int]:
        # Straight from the backend, unless a caller has left settings in it: this runs between all
        # turns, and transformers' own call takes three times as long.
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None and self._is_unchanged(backend):
            return backend.encode(text, add_special_tokens=False).ids

        encoded: Any = self.tokenizer(
            text, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _characters_of_a_token(self) -> int | None:
        """Return the most characters of a text that one token stands for; None: it is not known.

        It is known for vocabularies of bytes. Others may drop characters, or have one token for
        many unknown ones.
        """
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None or not isinstance(backend.model, models.BPE):
            return None
        if not isinstance(backend.normalizer, normalizers.NFC | None):
            return None

        vocabulary = self.tokenizer.get_vocab()
        has_all_bytes = vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        added = self.tokenizer.added_tokens_decoder.values()
        drops_spaces = any(token.lstrip or token.rstrip for token in added)
        if drops_spaces or not has_all_bytes:
            return None
        return max(len(token) for token in vocabulary)

    def _is_unchanged(self, backend: Any) -> bool:
        """Return whether a backend encodes as a call of the tokenizer would have it do."""
        splits = getattr(self.tokenizer, "split_special_tokens", False)
        is_whole = backend.padding is None and backend.truncation is None
        return is_whole and backend.encode_special_tokens == splits


def _added_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the tokens that the tokenizer splits off before it looks at ordinary text."""
    return {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
