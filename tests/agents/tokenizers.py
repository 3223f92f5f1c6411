"""Tokenizers for tests of chat templates: byte-level, so that they encode any text."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.shared_files import SHARED

# Merges that let tokens span words' ends, line breaks and punctuation, as real vocabularies have.
_MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "Ċ Ċ", ". Ċ", "} }", '" }', ": Ġ", "Ġ Ġ"]


def word_tokenizer(
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"),
    *,
    eos: str = "<|im_end|>",
    template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Build a small byte-level BPE tokenizer with special tokens and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [tuple(merge.split(" ")) for merge in _MERGES]
    words = alphabet + ["".join(pair) for pair in pairs]
    backend = Tokenizer(
        models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=pairs)
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    return with_specials(tokenizer, specials, eos=eos, template=template)


def minimind_tokenizer(
    specials: Sequence[str], *, eos: str, template: str | None
) -> PreTrainedTokenizerBase:
    """Load the vocabulary of a published model, with further special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "minimind-tokenizer")
    return with_specials(tokenizer, specials, eos=eos, template=template)


def with_specials(
    tokenizer: PreTrainedTokenizerBase, specials: Sequence[str], *, eos: str, template: str | None
) -> PreTrainedTokenizerBase:
    """Add special tokens, and set the one that ends a text and the chat template."""
    tokens = [AddedToken(token, special=True, normalized=False) for token in specials]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = eos
    if "<bos>" in specials:
        tokenizer.bos_token = "<bos>"
    tokenizer.chat_template = template
    return tokenizer
