"""Random models of the shapes that `rollout.py` measures. A folder has the configuration alone:
weights are made."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config

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
MAX_POSITIONS = 32_768
# a CPU's bf16 matrix products may be emulated
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def write_config(folder: Path, name: str, device: str) -> None:
    """Write the configuration of the shape `name` as every engine reads it."""
    config = Qwen2Config(
        **SHAPES[name],
        architectures=["Qwen2ForCausalLM"],
        dtype=DTYPES[device],
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=None,
        eos_token_id=SHAPES[name]["vocab_size"] - 1,
    )
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
