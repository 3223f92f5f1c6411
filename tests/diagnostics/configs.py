"""Configurations of common models as transformers' config objects; no weights, no downloads."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from verl.config import TrainConfig, config_from_dict

QWEN_7B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
LLAMA_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
LLAMA_70B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)

BASE = (
    "data.train_files=train.parquet",
    "data.train_batch_size=256",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "trainer.device=cuda",
    "trainer.n_gpus_per_node=8",
)


def make_config(folder: Path, model: PreTrainedConfig, *overrides: str) -> TrainConfig:
    """Return a GRPO run of `model`; later overrides win.

    Only the model's config.json is written to `folder`.
    """
    model.save_pretrained(folder)
    values: Any = OmegaConf.to_container(
        OmegaConf.from_dotlist([*BASE, f"actor_rollout_ref.model.path={folder}", *overrides])
    )
    return config_from_dict(values)
