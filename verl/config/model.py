"""The language model that is trained, and rolled out."""

from dataclasses import dataclass, field
from typing import Any

from verl.config.choices import ATTENTION_KERNELS, DTYPES, MAX_LORA_RANK
from verl.config.setting import setting

_SHM = "weights are read through the page cache once a process"


@dataclass(kw_only=True, slots=True)
class FusedKernelConfig:
    impl_backend: str = setting(
        "torch", "backend of fused kernels", no_effect="log-probs are fused and chunked always"
    )


@dataclass(kw_only=True, slots=True)
class LoadedModelConfig:
    """The keys of any model."""

    path: str | None = setting(
        None,
        (
            "folder or hub name of a Hugging Face causal LM; 'toy' and 'calculator' are the "
            "packaged ones"
        ),
        is_path=True,
    )
    external_lib: Any = setting(
        None,
        (
            "Python module or .py file (or several, as a list or with commas) imported at start: "
            "the place to register your own losses, estimators, ..."
        ),
        many=True,
        is_path=True,
    )
    override_config: dict[str, Any] = setting({}, "entries of the model's config.json to replace")
    trust_remote_code: bool = setting(False, "run Python code that comes with a model")


@dataclass(kw_only=True, slots=True)
class TrainedModelConfig(LoadedModelConfig):
    """The keys of a model that is trained: the actor, or the critic."""

    use_shm: bool = setting(False, "copy weights to /dev/shm first", no_effect=_SHM)
    dtype: str | None = setting(
        None,
        (
            "dtype of the parameters; null: float32, computed in bfloat16 on CUDA (frozen ones of "
            "LoRA there: bfloat16)"
        ),
        choices=DTYPES,
    )
    enable_gradient_checkpointing: bool = setting(
        True, "recompute activations in the backward pass"
    )
    attention_kernel: str = setting(
        "auto",
        "for packed sequences on CUDA; auto: the fastest that is installed and proved",
        choices=ATTENTION_KERNELS,
    )
    gradient_checkpointing_share: float = setting(
        1.0,
        "share of the decoder layers that recompute: less where memory is left",
        above=0,
        at_most=1,
    )
    enable_activation_offload: bool = setting(
        False, "keep the inputs of checkpointed layers on the host"
    )
    use_remove_padding: bool = setting(
        True,
        "compute on packed sequences",
        no_effect="sequences are always packed; there is no padded path",
    )
    lora_rank: int = setting(
        0, "rank of LoRA adapters; 0: train all weights", at_least=0, at_most=MAX_LORA_RANK
    )
    lora_alpha: int = setting(16, "LoRA: adapters count lora_alpha / lora_rank", above=0)
    target_modules: Any = setting(
        "all-linear",
        "LoRA: modules that get adapters; a list of (ends of) names, or a regex for whole names",
    )
    exclude_modules: Any = setting(None, "LoRA: modules that get none, given likewise")


@dataclass(kw_only=True, slots=True)
class ModelConfig(TrainedModelConfig):
    custom_chat_template: str | None = setting(
        None, "Jinja chat template instead of the tokenizer's own"
    )
    use_liger: bool = setting(
        False, "Liger kernels", no_effect="log-probs are fused and chunked by our own code"
    )
    use_fused_kernels: bool = setting(
        True,
        (
            "kernels that fuse steps of the trainer's compiled layers in passes without gradients, "
            "where installed and proved; rollout engines choose their own"
        ),
    )
    fused_kernel_options: FusedKernelConfig = field(default_factory=FusedKernelConfig)
