"""Tiny random models that read pictures, with large weights so that a parity test can fail."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.tiny_models import make_fierce

VOCABULARY = 128
IMAGE, START, END, VIDEO = 120, 121, 122, 123
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "num_heads": 4,
            "hidden_size": 32,
            "mlp_ratio": 2,
            "patch_size": 4,
        },
    },
    "qwen2_5_vl": {
        **_QWEN_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": _MROPE},
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": {
        **_QWEN_TOKENS,
        "text_config": {
            **_TEXT,
            "head_dim": 8,
            "rope_parameters": {**_MROPE, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 32,
            "patch_size": 4,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "internvl": {
        "tie_word_embeddings": False,
        "image_token_id": IMAGE,
        "image_seq_length": 4,
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_SIGLIP, "image_size": [16, 16], "patch_size": [4, 4]},
    },
    "smolvlm": {
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _SIGLIP,
    },
    "llava_onevision": {
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {
            **_SIGLIP,
            "model_type": "siglip_vision_model",
            "vision_use_head": False,
        },
    },
    "gemma3": {
        "tie_word_embeddings": False,
        "image_token_index": IMAGE,
        "boi_token_index": START,
        "eoi_token_index": END,
        "mm_tokens_per_image": 4,
        "text_config": {
            **_TEXT,
            "model_type": "gemma3_text",
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            # A picture is larger than the window.
            "sliding_window": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
    },
}
FAMILIES = tuple(_CONFIGS)


def tiny_vision_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    text: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Return a tiny model of `family` in eval mode, see `tests.tiny_models.tiny_model`.

    `text` replaces values of its text model's configuration.
    """
    values = _CONFIGS[family]
    if text is not None:
        values = {**values, "text_config": {**values["text_config"], **text}}
    config = AutoConfig.for_model(family, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(
            config, dtype=torch.float64, attn_implementation="eager"
        )
        make_fierce(model)
    model.to(dtype)  # pyright: ignore[reportArgumentType]
    return model.eval()


def save_tiny_vision(folder: Path, family: str, **arguments: Any) -> Path:
    """Save the weights and the configuration of a tiny model."""
    tiny_vision_model(family, **arguments).save_pretrained(folder)
    return folder


def wide_vision_model(
    family: str, dtype: torch.dtype, *, intermediate: int = 256
) -> PreTrainedModel:
    """Return a model of `family` whose tower is wide enough to measure its memory.

    It has four layers with states of 64 and an MLP of 192; the language model has states of 96 and
    an MLP of `intermediate`.
    """
    values = _CONFIGS[family]
    text = {**values["text_config"], "hidden_size": 96, "intermediate_size": intermediate}
    if "head_dim" in text:
        text["head_dim"] = 24
    if "rope_parameters" in text:
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [4, 4, 4]}

    vision = {**values["vision_config"], "hidden_size": 64, "intermediate_size": 192}
    changed: dict[str, Any] = {}
    if family == "qwen2_vl":
        del vision["intermediate_size"]
        vision |= {"depth": 4, "embed_dim": 64, "mlp_ratio": 3, "hidden_size": 96}
    elif family.startswith("qwen"):
        vision |= {"depth": 4, "out_hidden_size": 96}
    else:
        side: Any = [32, 32] if family == "internvl" else 32
        vision |= {"num_hidden_layers": 4, "image_size": side}
        changed = {
            "image_seq_length": 16,
            "mm_tokens_per_image": 16,
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
        }

    for name in changed.keys() & values.keys():
        values = {**values, name: changed[name]}
    values = {**values, "text_config": text, "vision_config": vision}
    config = AutoConfig.for_model(family, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation="eager"
        )
