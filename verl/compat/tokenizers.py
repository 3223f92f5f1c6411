"""Tokenizers and processors by verl 0.5's names."""

from typing import Any

from transformers import AutoProcessor

from verl.models.load import load_tokenizer
from verl.utils.errors import ModelError
from verl.utils.logging import logger


def hf_tokenizer(
    name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any
) -> Any:
    """Load the tokenizer of a model, with padding on the left and a pad token.

    `kwargs` are trust_remote_code and custom_chat_template. The tokens are never changed, so the
    two switches are ignored.
    """
    return load_tokenizer(name_or_path, **kwargs)


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Load the processor of a model that takes images; None, with a warning, if it has none."""
    try:
        processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, ImportError) as error:  # torchvision may be missing
        logger.warning("No processor for '%s': %s", name_or_path, error)
        return None
    return processor if "Processor" in type(processor).__name__ else None


def set_pad_token_id(tokenizer: Any) -> None:
    """Use the end-of-sequence token as pad token if a tokenizer has none."""
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token_id is None:
        raise ModelError("The tokenizer has no pad and no end-of-sequence token. Set pad_token.")
    tokenizer.pad_token = tokenizer.eos_token
