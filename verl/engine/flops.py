"""Count floating-point operations of a batch, and their share of the device's peak."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Dense bf16 peak in FLOP/s by a word of the device's name, from the makers' data sheets. The first
# entry that fits counts.
PEAK_BF16_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
}


@dataclass(frozen=True)
class FlopsModel:
    """The numbers of a model that FLOPs follow from (Kaplan et al. 2020, section 2.1).

    A forward pass costs 2 FLOPs per token and active matrix parameter, and 4 * attention width per
    pair of a query and a key that it sees; a backward pass costs twice that, but for matrices that
    are frozen (LoRA) only once. Recomputation under gradient checkpointing is not counted, and a
    prompt counts for each of its responses, also where it is computed once for all: the share of
    the device's peak is comparable between the two, and may exceed 1.
    """

    # active per token: the head counts, looked-up embeddings and idle experts do not
    matrix_parameters: int
    attention_width: int  # heads * head size, the mean of keys and values
    windows: tuple[int | None, ...]  # per layer: how many keys a query sees at most, None for all
    frozen_parameters: int = 0  # matrix parameters that need no gradient

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> "FlopsModel":
        """Read a transformers module, sharded or not.

        For a critic give its body (the value head is one column).
        """
        config = model.config.get_text_config()
        key_dim, value_dim = head_sizes(config)
        return cls(
            matrix_parameters=_active_matrix_parameters(model, config),
            attention_width=config.num_attention_heads * (key_dim + value_dim) // 2,
            windows=_windows(config),
            frozen_parameters=_active_matrix_parameters(model, config, frozen=True),
        )

    def forward(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of one forward pass over packed sequences of these lengths."""
        pairs = 0
        for window in self.windows:
            pairs += sum(causal_pairs(length, window) for length in lengths)
        return 2.0 * self.matrix_parameters * sum(lengths) + 4.0 * self.attention_width * pairs

    def train(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of forward and backward."""
        return 3.0 * self.forward(lengths) - 2.0 * self.frozen_parameters * sum(lengths)


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the sizes of one key and of one value of a head."""
    if getattr(config, "kv_lora_rank", None):
        # `head_dim` is the rotary part alone there.
        return config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def num_experts(config: Any) -> int:
    """Return the number of experts of a layer; 0 for a dense model."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return experts or 0


def causal_pairs(length: int, window: int | None = None) -> int:
    """Count pairs (query, key) with key <= query and at most `window` keys per query."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def model_flops_utilization(flops: float, seconds: float, device: torch.device) -> float | None:
    """Return the share of the device's dense bf16 peak; None where that is unknown (CPU)."""
    if device.type != "cuda":
        return None

    peak = peak_bf16_flops(torch.cuda.get_device_name(device))
    return None if peak is None else flops / seconds / peak


def peak_bf16_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a device in FLOP/s; None if it is unknown."""
    for model, peak in PEAK_BF16_FLOPS.items():
        # An "RTX A1000" is no A100. Letters may follow, as in "A100X".
        if re.search(rf"\b{model}(?!\d)", device_name):
            return peak
    return None


def _active_matrix_parameters(model: PreTrainedModel, config: Any, *, frozen: bool = False) -> int:
    head = model.get_output_embeddings()
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(module.weight) for module in embeddings}
    if head is not None:
        looked_up.discard(id(head.weight))  # tied: multiplied once per token at the end
    experts = num_experts(config)
    active_share = config.num_experts_per_tok / experts if experts else 1.0

    total = 0.0
    for name, parameter in model.named_parameters():
        is_multiplied = parameter.ndim >= 2 and id(parameter) not in looked_up
        if not is_multiplied or (frozen and parameter.requires_grad):
            continue
        total += parameter.numel() * (active_share if ".experts." in name else 1.0)
    return round(total)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kind = "sliding_attention" if window else "full_attention"
        kinds = [kind] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
