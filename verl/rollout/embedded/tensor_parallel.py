"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053): neighboring ranks share one engine.

The ranks run the same scheduler over the same requests in lock step. Each has the queries, keys and
values of its heads, its units of the feed-forward parts, and pages for its key heads alone; two
sums over the group in a layer make hidden states whole. The plan that transformers has for the
family defines how weights are cut.

Embeddings, norms and head are whole on every rank: 2 V H numbers, or V H where head and embeddings
are tied (2.2 GB of the 15.2 GB of Qwen2.5-7B in bf16, 0.5 of the 3.1 GB of Qwen2.5-1.5B). Every
rank has all logits then, and none of them travel.
"""

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from verl.distributed.collectives import Axis, all_reduce_sum
from verl.models.lora import plain_parameters
from verl.utils.errors import ConfigError

SETTING = "actor_rollout_ref.rollout.tensor_model_parallel_size"

# A rank's part of a whole tensor.
Cut = Callable[[Tensor], Tensor]

# How the plans of transformers cut a module or a parameter. `packed`: each half of the outputs for
# itself. Embeddings, which a plan may cut by rows, stay whole here.
_COLWISE = "colwise"
_PACKED = "packed_colwise"
_ROWWISE = "rowwise"
_EXPERTS = "moe_tp_experts"
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")
_STYLES = (_COLWISE, _PACKED, _ROWWISE, _EXPERTS, *_WHOLE)
_SUMMED = (_ROWWISE, _EXPERTS)  # modules with outputs that are a rank's share of a sum
# Numbers of a configuration that the ranks have equal parts of.
_DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
)


def check_tensor_parallel(config: PreTrainedConfig, size: int) -> None:
    """Raise ConfigError where `size` ranks cannot share an engine of the model.

    The error names the family and the way out. Needs no weights.
    """
    text: Any = config.get_text_config()
    family = config.model_type
    plan = _plan(text)
    if getattr(text, "kv_lora_rank", None):
        raise ConfigError(
            f"{SETTING}={size}: the engine cannot cut multi-head latent attention (MLA), got the "
            f"model family '{family}'. Set {SETTING}=1."
        )

    if all(style in _WHOLE for style in plan.values()):
        raise ConfigError(
            f"{SETTING}={size}: transformers has no plan for cutting the model family '{family}'. "
            f"Set {SETTING}=1."
        )

    strange = {place: style for place, style in plan.items() if style not in _STYLES}
    if strange:
        place, style = next(iter(strange.items()))
        raise ConfigError(
            f"{SETTING}={size}: the engine cannot cut the model family '{family}', because "
            f"'{place}' is '{style}' in the plan of transformers. Set {SETTING}=1."
        )

    counts: dict[str, int] = {}
    for name in _DIVIDED:
        count = getattr(text, name, None)
        if isinstance(count, int):
            counts[name] = count
    if any(count % size for count in counts.values()):
        facts = ", ".join(f"{name}={count}" for name, count in counts.items())
        # A divisor of the size: it divides the number of ranks as well.
        largest = math.gcd(size, *counts.values())
        raise ConfigError(
            f"{SETTING} must divide the numbers of the family '{family}' for heads and "
            f"feed-forward units, got {size} and {facts}. Set it to {largest}."
        )


class TensorParallel:
    """One rank's part in the engine of a group. Every rank of `axis` must make each call alike.

    `in_order`: sums are added up in the order of the ranks, whatever the shape. The rings of NCCL
    and gloo begin at another rank in each part of a tensor, so the bits of a row would depend on
    where in the batch it stands.
    """

    def __init__(self, model: PreTrainedModel, axis: Axis, *, in_order: bool) -> None:
        check_tensor_parallel(model.config, axis.size)
        self.axis = axis
        self._in_order = in_order and axis.size > 2  # a + b is b + a
        self._plan = _plan(model.config.get_text_config())
        self._prefix = f"{model.base_model_prefix}."
        # By name of the parameter. Those that are not here are whole.
        self.cuts = dict(self._cuts(model))

    def sum_outputs(self, module: PreTrainedModel) -> None:
        """Add the sum over ranks to modules of the engine's model that compute a share."""
        for name, part in module.named_modules():
            if self._style(name) in _SUMMED:
                part.register_forward_hook(lambda _module, _inputs, output: self.sum(output))

    def summed(self, part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `part`, which computes a share of a sum, followed by the sum."""
        return lambda *arguments: self.sum(part(*arguments))

    def sum(self, share: Tensor) -> Tensor:
        """Return the sum of `share` over the ranks, with the same bits on all of them.

        The result may overwrite `share`.
        """
        if not self._in_order:
            return all_reduce_sum(share, self.axis)
        shares = share.new_empty(self.axis.size, *share.shape)
        dist.all_gather_into_tensor(shares.flatten(0, 1), share, group=self.axis.group)
        total = shares[0]
        for other in shares[1:]:
            total += other
        return total

    def agree(self, tokens: Tensor) -> None:
        """Make `tokens`, drawn on every rank, those of the first.

        They are equal already: rings and trees compute an element of a sum in one place and hand it
        on, and equal states go through equal kernels. But where one rank's library chose another
        kernel (for an address that is aligned better, say), a token that differs would let the
        ranks wait for each other forever. The price is one message of 8 bytes a row in
        addition to two sums in every layer.
        """
        dist.broadcast(tokens, group=self.axis.group, group_src=0)

    def _style(self, name: str) -> str | None:
        """Return the style that the plan has for a module or a parameter."""
        inner = name.removeprefix(self._prefix)
        if inner == name:
            return None
        any_layer = re.sub(r"\.\d+(?=\.|$)", ".*", inner)
        return self._plan.get(any_layer)

    def _cuts(self, model: PreTrainedModel) -> Iterator[tuple[str, Cut]]:
        size = self.axis.size
        family = model.config.model_type
        for name, parameter in plain_parameters(model):
            owner, _, kind = name.rpartition(".")
            style = self._style(name) or self._style(owner)
            is_bias = kind.endswith("bias")
            if style is None or style in _WHOLE:
                continue

            if style == _ROWWISE and is_bias:
                # Added up over the ranks, so it must be there once.
                if self.axis.rank > 0:
                    yield name, torch.zeros_like
                continue

            parts = 2 if style == _PACKED else 1
            dim = -1 if style == _ROWWISE or is_bias else -2
            if style == _EXPERTS or parameter.shape[dim] % (parts * size):
                raise ConfigError(
                    f"{SETTING}={size}: '{name}' of the family '{family}', of shape "
                    f"{tuple(parameter.shape)}, cannot be cut for so many ranks. Set {SETTING}=1."
                )

            yield name, partial(_part, self.axis, dim, parts)


def _plan(config: PreTrainedConfig) -> dict[str, str]:
    return getattr(config, "base_model_tp_plan", None) or {}


def _part(axis: Axis, dim: int, parts: int, whole: Tensor) -> Tensor:
    """Return the share of rank `axis.rank` in each of `parts` equal parts along `dim`."""
    pieces = [part.chunk(axis.size, dim)[axis.rank] for part in whole.chunk(parts, dim)]
    return pieces[0] if parts == 1 else torch.cat(pieces, dim)
