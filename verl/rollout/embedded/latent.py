"""Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1) over paged latents.

These layers compute one latent and one rotary key for each token. All heads share them, and
`expand_kv` makes the keys and values of every head from them just before attention. The engine
keeps the shared numbers alone: the rotary key takes the place of the keys in a page, and the latent
takes the place of the values.

A decode step never expands them. The part of `kv_b_proj` that makes keys (W_UK) is applied to the
query, and the part that makes values (W_UV) to the result. Both are views of the parameter itself,
so new weights hold from the next step on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from verl.utils.errors import ModelError


class LatentLayer:
    """The latents that one attention module computes, and its products with W_UK and W_UV.

    `expands` says whether the module's attention gets keys and values of every head (in a prefill)
    or the rotary keys and latents themselves (in a decode step).
    """

    def __init__(self, module: Any, expands: Callable[[], bool]) -> None:
        if module.kv_b_proj.bias is not None:
            raise ModelError(
                f"{type(module).__name__}.kv_b_proj must have no bias to be absorbed into queries, "
                "but it has one. Set actor_rollout_ref.rollout.name=hf."
            )
        self._module = module
        self._expands = expands
        self._expand_kv = module.expand_kv
        self._shared: tuple[Tensor, Tensor] | None = None
        module.expand_kv = self._expand

    def take(self) -> tuple[Tensor, Tensor]:
        """Rotary keys (1, N, Dr) and latents (1, N, R) of the prefill that is being computed."""
        shared = self._shared
        assert shared is not None, "attention was called before expand_kv"
        self._shared = None
        return shared

    def absorb(self, q: Tensor) -> Tensor:
        """Turn queries (N, Hq, D) into queries (N, Hq, Dr + R) for rotary keys and latents."""
        key_weight = self._weights()[0]
        plain, rotary = q.split([key_weight.shape[1], q.shape[2] - key_weight.shape[1]], dim=2)
        absorbed = torch.bmm(plain.transpose(0, 1), key_weight).transpose(0, 1)
        return torch.cat([rotary, absorbed], dim=2)

    def expand_output(self, out: Tensor) -> Tensor:
        """Turn weighted latents (N, Hq, R) into weighted values (N, Hq, Dv)."""
        value_weight = self._weights()[1]
        return torch.bmm(out.transpose(0, 1), value_weight.transpose(1, 2)).transpose(0, 1)

    def _expand(self, latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
        if not self._expands():
            return rotary_keys, latents
        self._shared = (rotary_keys[0], latents[0])
        return self._expand_kv(latents, rotary_keys)

    def _weights(self) -> tuple[Tensor, Tensor]:
        """Return W_UK (Hq, D - Dr, R) and W_UV (Hq, Dv, R)."""
        sizes = [self._module.qk_nope_head_dim, self._module.v_head_dim]
        heads = self._module.kv_b_proj.weight.unflatten(0, (-1, sum(sizes)))
        key_weight, value_weight = heads.split(sizes, dim=1)
        return key_weight, value_weight


def is_latent(module: nn.Module) -> bool:
    """Return whether `module` is an attention that expands latents."""
    return hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")
