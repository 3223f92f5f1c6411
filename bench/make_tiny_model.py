"""Make the small model of `grpo_cpu.py`: a random Qwen2 with a tokenizer of its own.

4 layers, hidden size 128, 4 query and 2 key heads, tied embeddings: 0.7 million parameters. The
tokenizer is a byte-level BPE of 1,000 tokens, with a token for each digit, learnt from made-up sums
and words; the vocabulary is padded to 1,024.

Run `python bench/make_tiny_model.py FOLDER`. A fixed seed gives the same model every time.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD = "<|pad|>"
END = "<|end|>"
NUM_TOKENS = 1000
PADDED_TOKENS = 1024
CORPUS_LINES = 8000
CORPUS_WORDS = 1200


def corpus(seed: int) -> Iterator[str]:
    """Yield lines to learn merges from: sums, and sentences of made-up words."""
    draw = random.Random(seed)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvw" for vowel in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(2, 4))) for _ in range(CORPUS_WORDS)]
    for _ in range(CORPUS_LINES):
        one = draw.randint(0, 99)
        other = draw.randint(0, 99)
        yield f"Compute {one} + {other} = {one + other}"
        yield " ".join(draw.choices(words, k=10)) + "."


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=[PAD, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )


def make_model(seed: int, *, end: int, pad: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=PADDED_TOKENS,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )

    return Qwen2ForCausalLM(config)


def make(folder: Path, seed: int = 0) -> int:
    """Write model and tokenizer. Return the number of parameters."""
    tokenizer = make_tokenizer(seed)
    ids: Any = tokenizer.convert_tokens_to_ids([END, PAD])
    model = make_model(seed, end=ids[0], pad=ids[1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    parameters = make(arguments.folder, arguments.seed)
    print(f"{arguments.folder}: {parameters:,} parameters")


if __name__ == "__main__":
    main()
