"""Sequence parallelism by exchanging heads for tokens (DeepSpeed-Ulysses, Jacobs et al. 2023,
arXiv:2309.14509).

N packed tokens are split over P ranks, N / P consecutive ones each. Everything but attention works
on tokens alone and needs nothing of the others. Around attention an all-to-all gives each rank all
N tokens of H / P heads, and another one undoes it. Each rank's gradients of the weights are the
share of its own tokens: summed over the ranks, they are whole.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.distributed.collectives import Axis, all_reduce_sum
from verl.utils.errors import ModelError


@dataclass(frozen=True)
class SequenceParallel:
    """The exchanges among ranks that share tokens. All of them must make the same calls."""

    axis: Axis

    def check_heads(self, heads: int, owner: str) -> None:
        """Raise ModelError, naming the `owner`, if its query heads cannot be dealt out evenly."""
        size = self.axis.size
        if heads % size:
            fitting = [str(part) for part in range(1, size) if heads % part == 0]
            raise ModelError(
                f"ulysses_sequence_parallel_size must divide the query heads of {owner}, got "
                f"{size} and {heads}. Smaller sizes that fit: {', '.join(fitting)}."
            )

    def to_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Exchange this rank's n tokens of all heads for all P * n tokens of its heads.

        q (n, Hq, D), k (n, Hk, D), v (n, Hk, Dv) -> q (P * n, Hq / P, D), and k and v likewise. Key
        heads are repeated until P divides them, which keeps each with its query heads.
        """
        repeats = math.lcm(k.shape[1], self.axis.size) // k.shape[1]
        if repeats > 1:
            k = k.repeat_interleave(repeats, dim=1)
            v = v.repeat_interleave(repeats, dim=1)
        return self._tokens_for_heads(q), self._tokens_for_heads(k), self._tokens_for_heads(v)

    def to_tokens(self, out: Tensor) -> Tensor:
        """Undo `to_heads` for one tensor: (P * n, H / P, D) -> (n, H, D)."""
        # (P, n, H / P, D), by the rank of the heads
        parts = self._exchange(out.unflatten(0, (self.axis.size, -1)))
        return parts.transpose(0, 1).flatten(1, 2)

    def own_heads(self, per_head: Tensor) -> Tensor:
        """Return this rank's part (H / P,) of a tensor (H,) with one number for each head."""
        return per_head.tensor_split(self.axis.size)[self.axis.rank]

    def gather(self, values: Tensor, places: Tensor, total: int) -> Tensor:
        """Gather values (m, ...) of each rank to (total, ...) on all; `places` (m,) is their order.

        All ranks must compute the same from the result: a value's gradient is then known on its own
        rank, and the backward pass sums nothing.
        """
        return _Gather.apply(values, places, total, self.axis)  # pyright: ignore[reportReturnType]

    def _tokens_for_heads(self, x: Tensor) -> Tensor:
        parts = self._exchange(
            x.unflatten(1, (self.axis.size, -1)).transpose(0, 1)
        )  # (P, n, H / P, D), by tokens' rank
        return parts.flatten(0, 1)

    def _exchange(self, parts: Tensor) -> Tensor:
        return _AllToAll.apply(parts, self.axis)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    """Sends part i of (P, ...) to rank i, and receives part i from rank i.

    It is its own transpose.
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(parts, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.axis), None


def _all_to_all(parts: Tensor, axis: Axis) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=axis.group)
    return received


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Tensor, total: int, axis: Axis) -> Tensor:
        ctx.save_for_backward(places)
        # Some numbers a token, so it does not matter that most of the sum is zeros.
        whole = values.new_zeros(total, *values.shape[1:]).index_copy_(0, places, values)
        return all_reduce_sum(whole, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None, None


def apply_sequence_parallel(module: Any, axis: Axis) -> None:
    """Let the ranks of `axis` share the tokens of `module` (a PackedCausalLM or PackedValueModel).

    From then on it takes parts of a batch (`PackedBatch.split`), and returns the predictions of the
    whole on every rank.

    Raises ModelError where the model's heads cannot be dealt out evenly.
    """
    config = module.model.config.get_text_config()
    split = SequenceParallel(axis)
    split.check_heads(config.num_attention_heads, f"the family '{config.model_type}'")
    module.slot.sequence_parallel = split
