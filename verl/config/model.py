"""The language model that is trained, and rolled out."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.setting import setting

_LORA = "read with lora_rank > 0 only, which is not available in this version"
_SHM = "weights are read through the page cache once a process"


@dataclass(kw_only=True, slots=True)
class FusedKernelConfig:
    impl_backend: str = setting("torch", "backend of fused kernels", no_effect="log-probs are fused and chunked always")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str | None = setting(
        None, "folder or hub name of a Hugging Face causal LM; 'toy' is the packaged one", is_path=True
    )
    custom_chat_template: str | None = setting(None, "Jinja chat template instead of the tokenizer's own")
    use_shm: bool = setting(False, "copy weights to /dev/shm first", no_effect=_SHM)
    external_lib: str | None = setting(
        None,
        "Python module or .py file imported at start: the place to register your own losses, estimators, ...",
        is_path=True,
    )
    override_config: dict[str, Any] = setting({}, "entries of the model's config.json to replace")
    dtype: str | None = setting(
        None,
        "dtype of the trained parameters; null: float32 (computed in bfloat16 on CUDA)",
        choices=("float32", "bfloat16", "float64"),
    )
    enable_gradient_checkpointing: bool = setting(True, "recompute activations in the backward pass")
    enable_activation_offload: bool = setting(
        False, "keep activations on the host", planned="activations stay on the device; use gradient checkpointing"
    )
    use_remove_padding: bool = setting(
        True, "compute on packed sequences", no_effect="sequences are always packed; there is no padded path"
    )
    lora_rank: int = setting(0, "rank of LoRA adapters; 0: train all weights", planned="LoRA is not built yet")
    lora_alpha: int = setting(16, "scale of LoRA adapters", no_effect=_LORA)
    target_modules: Any = setting("all-linear", "modules that get adapters", no_effect=_LORA)
    exclude_modules: Any = setting(None, "modules that get no adapters", no_effect=_LORA)
    use_liger: bool = setting(False, "Liger kernels", no_effect="log-probs are fused and chunked by our own code")
    use_fused_kernels: bool = setting(
        True, "fused log-probs", no_effect="log-probs are always fused and chunked", also=(False,)
    )
    fused_kernel_options: FusedKernelConfig = field(default_factory=FusedKernelConfig)
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")
