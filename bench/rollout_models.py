"""Random models of the shapes that `rollout.py` measures. A folder has the configuration alone:
weights are made.

A name is a shape of Qwen2.5 (`SHAPES`) or of another family (`FAMILIES`); `name@8` has 8 layers of
it.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "vocab_size": 151_936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "7b": {
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "11m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
}
# `model_type` and the numbers of the published configurations
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-4b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "gemma3-4b": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral",
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    "tiny-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 2048,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}
MAX_POSITIONS = 32_768
# a CPU's bf16 matrix products may be emulated
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def shape_of(name: str) -> dict[str, Any]:
    """Return the values of a configuration. Raises KeyError for an unknown name."""
    name, _, layers = name.partition("@")
    shape = {"model_type": "qwen2", **SHAPES[name]} if name in SHAPES else dict(FAMILIES[name])
    if layers:
        shape["num_hidden_layers"] = int(layers)
    return shape


def is_known(name: str) -> bool:
    """Check a name from the command line."""
    name, at, layers = name.partition("@")
    return (name in SHAPES or name in FAMILIES) and (not at or layers.isdecimal())


def write_config(folder: Path, name: str, device: str) -> None:
    """Write the configuration of the shape `name` as every engine reads it."""
    shape = shape_of(name)
    settings: dict[str, Any] = {}
    if shape["model_type"] not in (
        "gemma3_text",
        "gpt_oss",
    ):  # these have rotary settings of their own
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1_000_000.0}
    config = AutoConfig.for_model(
        **shape,
        dtype=DTYPES[device],
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=shape["vocab_size"] - 1,
        pad_token_id=None,
        **settings,
    )
    with torch.device("meta"):
        config.architectures = [type(AutoModelForCausalLM.from_config(config)).__name__]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)


def random_model(folder: str, device: str) -> PreTrainedModel:
    """The model of `folder`, made on the device with weights of transformers' initialization
    (normal, 0.02)."""
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[device])
    return model.eval()


def versions(device: str) -> str:
    """Of the libraries below the engine, and the device's name."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return f"torch {torch.__version__}, transformers {transformers.__version__}, {name}"
