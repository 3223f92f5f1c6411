"""Refuse families that cannot be packed, and change configurations before loading."""

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from verl.utils.errors import ModelError
from verl.utils.logging import say_once
from verl.utils.registry import nearest_names

# Families with layers that pass state from token to token without softmax attention, by the
# beginning of their names.
_RECURRENT = (
    "mamba",
    "rwkv",
    "xlstm",
    "recurrent_gemma",
    "jamba",
    "bamba",
    "zamba",
    "nemotron_h",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
)
# Families with Llama's decoder layer: rotary embeddings of whole heads, and a gated MLP (SwiGLU).
LLAMA_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# The same within models that read pictures. The three parts of a text position are equal, and
# rotate as one.
LLAMA_VISION_FAMILIES = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
_PACKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}


def refuse_unpackable(config: PreTrainedConfig, max_length: int | None = None) -> None:
    """Raise ModelError, with family and reason, for a model that packing would compute wrongly.

    The check at load covers families that are unknown here.

    Args:
        config: configuration of the model.
        max_length: largest length of prompt and response together; None if it is unknown.
    """
    family = config.model_type
    text = config.get_text_config()
    reason = _reason(config) or _reason(text) or _rope_reason(text, max_length)
    if reason:
        raise ModelError(
            f"The model family '{family}' cannot be trained on packed sequences: {reason}. "
            "Supported are causal language models with softmax attention in all layers, and rotary "
            "or learned positions or ALiBi biases (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, "
            "GPT-OSS, DeepSeek-V2 and V3, BLOOM, MPT and similar families)."
        )


def _reason(config: Any) -> str | None:
    """Return the reason why packed attention would be wrong, apart from positions."""
    family = config.model_type
    layers = set(getattr(config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if family == "falcon" and config.alibi:
        return "the eager attention of transformers adds its ALiBi biases twice"
    if getattr(config, "index_topk", None):
        return "its layers choose the keys that they see by an indexer"

    if family.startswith(_RECURRENT):
        return (
            "some of its layers are recurrent (state-space or linear attention), whose state would "
            "leak"
        )

    if layers:
        return f"it has layers of type {', '.join(sorted(layers))}"
    is_bidirectional = getattr(config, "use_bidirectional_attention", False)
    if is_bidirectional or getattr(config, "is_causal", True) is False:
        return "its attention looks at later tokens"

    return None


def rope_settings(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the rotary settings of a text configuration: one, or one for each layer type."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        yield settings
    else:
        yield from (value for value in settings.values() if isinstance(value, dict))


def _rope_reason(config: Any, max_length: int | None) -> str | None:
    """Return the reason why positions would depend on the batch.

    transformers chooses the frequencies of dynamic and long rotary embeddings by the longest
    position in the batch, so one long sequence would change the log-probs of short ones in its
    pack.
    """
    for settings in rope_settings(config):
        kind = settings.get("rope_type")
        if kind not in ("dynamic", "longrope"):
            continue
        original = (
            settings.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if max_length is None or max_length > original:
            configured = "no maximum is configured"
            if max_length is not None:
                configured = f"up to {max_length} are configured"
            return (
                f"its '{kind}' rotary positions depend on the longest sequence of a batch beyond "
                f"{original} tokens, and {configured}; sequences of at most {original} tokens "
                "(prompt and response) work"
            )

    return None


def zero_dropout(config: PreTrainedConfig) -> None:
    """Set every dropout (and router noise) of a configuration and its parts to 0.

    Log-probs must not vary from pass to pass, and GPT-2 and OPT have a dropout of 0.1.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            zero_dropout(value)
        elif ("drop" in name or "jitter_noise" in name) and isinstance(value, float):
            setattr(config, name, 0.0)


def zero_module_dropout(model: nn.Module) -> None:
    """Set the dropout of modules to 0, for families with a rate in their code."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def override(config: Any, changes: dict[str, Any], where: str = "override_config") -> None:
    """Write nested `changes` into a configuration.

    Raises ModelError for an unknown key, except a dropout of 0 that the family does not have:
    scripts for several families turn all of them off. The attention of transformers is not used,
    so its choice is left out with a line in the log.
    """
    for name, value in changes.items():
        if name in ("attn_implementation", "_attn_implementation"):
            say_once(
                f"{where}.{name}={value} has no effect: attention runs on packed sequences, by the "
                "kernel that model.attention_kernel chooses.",
                logging.WARNING,
            )
            continue
        if not hasattr(config, name):
            if "drop" in name and value == 0:
                continue
            known = [key for key in config.to_dict() if not key.startswith("_")]
            raise ModelError(
                f"{where}.{name}: the configuration of '{config.model_type}' has no such key. "
                f"Nearest: {nearest_names(name, known)}."
            )
        current = getattr(config, name)
        if isinstance(current, PreTrainedConfig) and isinstance(value, dict):
            override(current, value, f"{where}.{name}")
        elif isinstance(current, dict) and isinstance(value, dict):
            setattr(config, name, _merged(current, value))
        else:
            setattr(config, name, value)


def _merged(current: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        merged[name] = value
    return merged
