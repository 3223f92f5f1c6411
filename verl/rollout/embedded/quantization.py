"""Refuse weights, keys and values in eight bits where they have not been proved."""

import torch
from transformers import PreTrainedConfig

from verl.config.rollout import RolloutConfig
from verl.models.families import LLAMA_FAMILIES
from verl.rollout.embedded.fused import GEMMA_FAMILIES
from verl.utils.errors import ConfigError

_SETTING = "actor_rollout_ref.rollout.quantization"
_FAMILIES = (*LLAMA_FAMILIES, *GEMMA_FAMILIES)
_OLDEST = (9, 0)  # compute capability with eight-bit products of scaled rows: Hopper
_CACHE_SETTING = "actor_rollout_ref.rollout.kv_cache_dtype"
_OLDEST_FOR_CACHE = (8, 9)  # compute capability that converts float8_e4m3fn: Ada


def check_settings(config: RolloutConfig) -> None:
    """Raise ConfigError for a setting that excludes weights in eight bits."""
    if config.quantization is None:
        return
    section = "actor_rollout_ref.rollout"
    asked = f"{_SETTING}={config.quantization}"

    if config.deterministic:
        raise ConfigError(
            f"{asked} computes products whose bits depend on the batch, and {section}."
            "deterministic=true forbids this. Set deterministic to false, or quantization to null."
        )
    if config.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"{asked} needs whole weights, got {section}.tensor_model_parallel_size="
            f"{config.tensor_model_parallel_size}. Set it to 1, or quantization to null."
        )
    if config.dtype not in (None, "bfloat16"):
        raise ConfigError(
            f"{asked} computes everything else in bfloat16, got {section}.dtype={config.dtype}. "
            "Set dtype to bfloat16 or null, or quantization to null."
        )


def check_family(config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
    """Raise ConfigError for a device or a model without eight-bit products."""
    if config.quantization is None:
        return
    if not on_cuda:
        raise ConfigError(
            f"{_SETTING}={config.quantization} needs an NVIDIA GPU of compute capability 9.0 or "
            "later (Hopper), and this run generates on a CPU. Set it to null."
        )
    if model.model_type not in _FAMILIES:
        raise ConfigError(
            f"{_SETTING}={config.quantization} supports the families {', '.join(_FAMILIES)}, got "
            f"'{model.model_type}'. Set it to null."
        )


def check_runner(quantization: str, device: torch.device, family: str, *, fuses: bool) -> None:
    """Raise ConfigError for a GPU without eight-bit products, or modules that are a user's own."""
    asked = f"{_SETTING}={quantization}"
    found = torch.cuda.get_device_capability(device)
    if found < _OLDEST:
        raise ConfigError(
            f"{asked} needs an NVIDIA GPU of compute capability 9.0 or later (Hopper), got "
            f"{torch.cuda.get_device_name(device)} of {found[0]}.{found[1]}. Set it to null."
        )
    if not fuses:
        raise ConfigError(
            f"{asked} needs decoder layers that are transformers' own, and this model of "
            f"the family '{family}' has other modules or another activation. Set it to null."
        )


def check_cache_settings(config: RolloutConfig) -> None:
    """Raise ConfigError for a setting that excludes keys and values in eight bits."""
    if config.kv_cache_dtype == "auto":
        return
    section = "actor_rollout_ref.rollout"
    asked = f"{_CACHE_SETTING}={config.kv_cache_dtype}"

    if config.deterministic:
        raise ConfigError(
            f"{asked} rounds keys and values in pages alone: a token that is computed again after "
            f"a pre-emption has other bits, and {section}.deterministic=true forbids this. Set "
            "deterministic to false, or kv_cache_dtype to auto."
        )
    if config.dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(
            f"{asked} computes in bfloat16 or float32, got {section}.dtype={config.dtype}: the "
            "scales may be too small for float16. Set dtype to bfloat16 or null, or "
            "kv_cache_dtype to auto."
        )


def check_cache_device(config: RolloutConfig, *, on_cuda: bool) -> None:
    """Raise ConfigError for keys and values in eight bits on a CPU."""
    if config.kv_cache_dtype != "auto" and not on_cuda:
        needed = " of compute capability 8.9 or later" if config.kv_cache_dtype == "fp8" else ""
        raise ConfigError(
            f"{_CACHE_SETTING}={config.kv_cache_dtype} needs an NVIDIA GPU{needed}, and this run "
            "generates on a CPU. Set it to auto."
        )


def check_cache_runner(device: torch.device) -> None:
    """Raise ConfigError for a GPU that does not convert float8_e4m3fn."""
    found = torch.cuda.get_device_capability(device)
    if found < _OLDEST_FOR_CACHE:
        raise ConfigError(
            f"{_CACHE_SETTING}=fp8 needs an NVIDIA GPU of compute capability 8.9 or later (Ada, "
            f"Hopper), got {torch.cuda.get_device_name(device)} of {found[0]}.{found[1]}. Set it "
            "to auto."
        )
