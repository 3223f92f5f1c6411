"""Tiny random reward models, and a tokenizer that differs from the actor's."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.tiny_models import SPECIAL_TOKENS, tiny_model, tiny_tokenizer

OTHER_TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<eos>{% endfor %}"
)


def tiny_classifier(
    family: str = "qwen2", *, num_labels: int = 1, **arguments: Any
) -> PreTrainedModel:
    """Return transformers' classifier over the body of `tiny_model`, with large scores.

    In eval mode with eager attention; scores deviate by 3 or more.
    """
    causal = tiny_model(family, num_labels=num_labels, **arguments)
    model = AutoModelForSequenceClassification.from_config(causal.config, dtype=causal.dtype).eval()
    model.set_attn_implementation("eager")
    model.base_model.load_state_dict(causal.base_model.state_dict())
    head: Any = model.score
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.weight.copy_(
            torch.randn(head.weight.shape, generator=generator) * 6 / math.sqrt(head.in_features)
        )
    return model


def other_tokenizer() -> PreTrainedTokenizerFast:
    """Return the characters of `tiny_tokenizer` under other ids, with another chat template."""
    described = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    characters = [token for token in vocabulary if token not in SPECIAL_TOKENS]
    ids = [vocabulary[token] for token in characters]
    vocabulary.update(zip(characters, reversed(ids)))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = OTHER_TEMPLATE
    return tokenizer


def save_reward_model(
    folder: Path, family: str = "qwen2", *, tokenizer: Any = None, **arguments: Any
) -> Path:
    """Save a Hugging Face folder with a tiny classifier and a tokenizer, by default that of
    `tiny_tokenizer`."""
    tiny_classifier(family, **arguments).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder
