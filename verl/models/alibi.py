"""Linear biases on attention scores instead of positions (ALiBi, arXiv:2108.12409).

transformers' modules of these families (BLOOM, MPT) compute attention themselves, so packed and
paged attention would never see a query. `route_attention` makes them call the attention that their
configuration names. With transformers' own implementations they run unchanged.
"""

import math
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from verl.models.vision import attention_settings


class KeyBias(NamedTuple):
    """A bias for each query head and key: a slope times the position of the key.

    A softmax does not change if all keys of a query get the same number, so this equals a bias by
    the distance of query and key.
    """

    slopes: Tensor  # (Hq,) fp32

    def at(self, positions: Tensor) -> Tensor:
        """Return the biases (Hq, ...) of keys at `positions` (...), in fp32."""
        return self.slopes.view(-1, *[1] * positions.dim()) * positions


def alibi_slopes(heads: int, device: torch.device | str) -> Tensor:
    """Return the slopes (Hq,) in fp32: a geometric sequence for a power of two.

    For other numbers of heads, return the slopes of the next lower power and every other one of the
    next higher power.
    """
    power = 2 ** math.floor(math.log2(heads))
    exponents = [8 * (head + 1) / power for head in range(power)]
    exponents += [4 * (2 * head + 1) / power for head in range(heads - power)]
    return torch.tensor([2.0**-exponent for exponent in exponents], device=device)


def has_key_bias(module: nn.Module) -> bool:
    """Return whether `module` is an attention that adds ALiBi biases to its scores."""
    return type(module).__name__ in _FORWARDS


def config_has_key_bias(config: PreTrainedConfig) -> bool:
    """Return whether a model of this configuration has attention with ALiBi biases."""
    return config.model_type in _FAMILIES


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation, also of routed models, where transformers refuses it."""
    if any(has_key_bias(module) for module in model.modules()):
        model.config._attn_implementation = implementation
    else:
        model.set_attn_implementation(attention_settings(model.config, implementation))


def route_attention(model: nn.Module) -> None:
    """Make attention with ALiBi biases use transformers' attention interface, in place."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        if type(part).__name__ == "MptModel":
            # Set methods, not closures, because a copy of the model must have its own.
            part.forward = MethodType(_mpt_body, part)
        for module in part.modules():
            if has_key_bias(module):
                attention: Any = module
                attention.config = part.config
                attention.forward = MethodType(_FORWARDS[type(module).__name__], module)


def _bloom_attention(
    module: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    if not _is_routed(module.config):
        return type(module).forward(module, hidden_states, residual, alibi, *args, **kwargs)
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    bias = KeyBias(alibi_slopes(module.num_heads, q.device))
    out = _attend(module, q, k, v, bias, module.inv_norm_factor)
    out = F.dropout(module.dense(out), module.hidden_dropout, module.training)
    return out + residual, None


def _mpt_attention(
    module: Any, hidden_states: Tensor, position_bias: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    if not _is_routed(module.config):
        return type(module).forward(module, hidden_states, position_bias, *args, **kwargs)
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    heads = qkv.unflatten(2, (3, module.n_heads, module.head_dim))
    q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
    bias = KeyBias(alibi_slopes(module.n_heads, q.device))
    return module.out_proj(_attend(module, q, k, v, bias, module.softmax_scale)), None


_FORWARDS = {
    "BloomAttention": _bloom_attention,
    "MptAttention": _mpt_attention,
}
_FAMILIES = ("bloom", "mpt")  # the model types with these modules


def _mpt_body(body: Any, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
    """Run MptModel without the mask that it builds, which our attention does not accept."""
    if not _is_routed(body.config):
        return type(body).forward(body, input_ids, **kwargs)
    hidden = body.wte(input_ids)
    for block in body.blocks:
        hidden = block(hidden, position_bias=None, attention_mask=None)[0]
    return BaseModelOutput(last_hidden_state=body.norm_f(hidden))


def _is_routed(config: Any) -> bool:
    """Return whether the attention is one of ours; only these accept biases."""
    return config._attn_implementation.startswith("verl_")


def _attend(module: Any, q: Tensor, k: Tensor, v: Tensor, bias: KeyBias, scale: float) -> Tensor:
    """Compute attention: q (1, Hq, N, D), k and v (1, Hk, N, D) -> (1, N, Hq * D)."""
    attention: Any = AttentionInterface()[module.config._attn_implementation]
    out, _ = attention(module, q, k, v, None, scaling=scale, sliding_window=None, key_bias=bias)
    return out.flatten(2)
