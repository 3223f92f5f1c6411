"""Divergence of a policy from a frozen model over the whole vocabulary, from hidden states.

Both heads are evaluated chunk by chunk, forward and backward, so that no (tokens, vocabulary)
tensor of either exists. The frozen model provides its last hidden states, 2 H bytes per token in
bf16 (8 KiB at H = 4,096, where logits of 152k words would take 594 KiB in fp32), and once its head,
2 V H bytes (1.2 GiB). A token costs two more products with the policy's head and two with the
frozen one, in addition to the three of its log-prob.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.algorithms.divergences import divergence, divergence_gradient
from verl.models.logprobs import Head, HeadGradients, chunk_rows, head_logits

# A chunk of log-probs has one tensor of logits, a chunk of a divergence up to this many.
CHUNK_TENSORS = 6
_PLAIN = Head()


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """The output layer of a frozen model: weight (V, H), bias (V,), and scale and cap of logits."""

    weight: Tensor
    bias: Tensor | None
    head: Head

    def to(self, device: torch.device) -> "FrozenHead":
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)


@dataclass(frozen=True, eq=False)
class Divergence:
    """A request to compute the divergence from a frozen model, as output `name` (M,)."""

    name: str
    states: str  # the column (B, R, H) with the frozen model's last hidden states
    head: FrozenHead
    kind: str  # of `verl.algorithms.divergences`
    beta: float = 0.5


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    states: Tensor,
    asked: Divergence,
    *,
    bias: Tensor | None = None,
    head: Head = _PLAIN,
    temperature: float = 1.0,
    chunk_elements: int | None = None,
) -> Tensor:
    """Compute the divergence of the policy's softmax(logits / temperature) from the frozen one.

    hidden (M, H), weight (V, H), bias (V,) of the policy; states (M, H') of the frozen model ->
    (M,) fp32 (float64 for float64 weights). If one vocabulary is padded further than the other,
    both distributions are over their common words. The gradient by hidden, weight and bias is
    exact.
    """
    rows = chunk_rows(weight.shape[0], on_cuda=hidden.is_cuda, elements=chunk_elements)
    rows = max(1, rows // CHUNK_TENSORS)
    settings = _Settings(asked, head, temperature, rows)
    return _TokenDivergence.apply(hidden, weight, bias, states, settings)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, eq=False)
class _Settings:
    asked: Divergence
    head: Head
    temperature: float
    rows: int  # tokens of a chunk


def _chunk(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute logits of the policy and log-probs of both, (m, V) each, over the words of both."""
    frozen = settings.asked.head
    temperature = settings.temperature
    words = min(weight.shape[0], frozen.weight.shape[0])
    own_bias = None if bias is None else bias[:words]
    other_bias = None if frozen.bias is None else frozen.bias[:words]

    y = head_logits(hidden, weight[:words], own_bias, settings.head, temperature=temperature)
    other = head_logits(
        states.to(frozen.weight.dtype),
        frozen.weight[:words],
        other_bias,
        frozen.head,
        temperature=temperature,
    )
    return y, y.log_softmax(-1), other.to(y.dtype).log_softmax(-1)


class _TokenDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        states: Tensor,
        settings: _Settings,
    ) -> Tensor:
        tokens = hidden.shape[0]
        precise = torch.promote_types(weight.dtype, torch.float32)
        values = torch.empty(tokens, dtype=precise, device=hidden.device)
        for start in range(0, tokens, settings.rows):
            rows = slice(start, start + settings.rows)
            _, log_p, log_q = _chunk(hidden[rows], weight, bias, states[rows], settings)
            values[rows] = divergence(log_p, log_q, settings.asked.kind, settings.asked.beta)
            del log_p, log_q
        ctx.save_for_backward(hidden, weight, bias, states)
        ctx.settings = settings
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_values: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, states = ctx.saved_tensors
        settings: _Settings = ctx.settings
        head = settings.head
        temperature = settings.temperature
        precise = torch.promote_types(weight.dtype, torch.float32)
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], precise)

        for start in range(0, hidden.shape[0], settings.rows):
            rows = slice(start, start + settings.rows)
            y, log_p, log_q = _chunk(hidden[rows], weight, bias, states[rows], settings)
            grad = divergence_gradient(log_p, log_q, settings.asked.kind, settings.asked.beta)
            del log_p, log_q
            grad.mul_(grad_values[rows, None])

            # From logits / temperature back to the linear output, see `logprobs.grad_linear`.
            slope = head.scale / temperature
            if head.cap is not None:
                grad.mul_(1 - (y * (temperature / head.cap)).square_())
            grad.mul_(slope)
            del y
            gradients.add(rows, grad)

        return *gradients.result(), None, None
