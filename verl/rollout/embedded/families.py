"""Model families that the embedded engine does not support, by their configuration alone."""

from transformers import PreTrainedConfig

from verl.config.rollout import RolloutConfig
from verl.models.alibi import config_has_key_bias
from verl.models.vision import reads_pictures
from verl.utils.errors import ConfigError


def check_attention(config: RolloutConfig, model: PreTrainedConfig, *, on_cuda: bool) -> None:
    """Raise ConfigError for attention that the CUDA or the deterministic kernels do not compute."""
    if reads_pictures(model):
        _check_pictures(config, model)
    feature = _special_attention(model)
    if feature is None:
        return

    if config.deterministic:
        raise ConfigError(
            f"actor_rollout_ref.rollout.deterministic=true does not support {feature}, got the "
            f"family '{model.model_type}'. Set it to false."
        )
    if on_cuda:
        raise ConfigError(
            f"On CUDA actor_rollout_ref.rollout.name={config.name} needs attention without "
            f"{feature}, got the family '{model.model_type}'. Set it to hf."
        )


def _check_pictures(config: RolloutConfig, model: PreTrainedConfig) -> None:
    name = "actor_rollout_ref.rollout"
    if config.deterministic:
        raise ConfigError(
            f"{name}.deterministic=true does not support models that read pictures, got the family "
            f"'{model.model_type}'. Set it to false."
        )
    if config.tensor_model_parallel_size > 1:
        raise ConfigError(
            f"{name}.tensor_model_parallel_size={config.tensor_model_parallel_size} does not "
            f"support models that read pictures, got the family '{model.model_type}'. Set it to 1."
        )


def _special_attention(model: PreTrainedConfig) -> str | None:
    """Name the attention that is not softmax attention over the keys and values of each head."""
    if getattr(model.get_text_config(), "kv_lora_rank", None):
        return "multi-head latent attention (MLA)"
    if config_has_key_bias(model):
        return "ALiBi biases"
    return None
