"""Log-probs and entropy of chosen tokens, directly from hidden states.

The (M, V) logits exist one chunk at a time: a vocabulary of 152k and a micro-batch of 16k tokens
would take 10 GB in fp32, several times over in a backward pass written by autograd.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from verl.utils.errors import ModelError

# Number of logits in memory at once: 2 GiB in fp32, and half of that for their gradient. On an
# H200, 16k tokens of hidden size 1536 and 152k words took 54 ms forward and backward, 56 with 2**28
# and 60 with 2**27; the four matrix products alone take 39 ms at 794 TFLOP/s.
CHUNK_ELEMENTS_CUDA = 2**29
# Larger numbers of rows in a chunk are multiples of this, so that a matrix product computes whole
# tiles.
CHUNK_TILE = 256
# Words of a tile of `kernels.head`.
FUSED_WORDS = 256
# On a CPU, 16 MiB stay near the caches (2**25 made the update of a small model a fifth slower). A
# large vocabulary gets enough rows, so that its matrix products do not read the weight too often.
CHUNK_ELEMENTS_CPU = 2**22
CHUNK_ROWS_CPU = 128


@dataclass(frozen=True)
class Head:
    """The operation after a family's linear map: logits = cap * tanh(scale * linear / cap)."""

    scale: float = 1.0
    cap: float | None = None


def head_of(model: PreTrainedModel) -> Head:
    """Read the head of a causal LM from its configuration.

    Raises ModelError if the head is not one linear layer. The check at load proves that there is no
    other operation on the logits.
    """
    linear = model.get_output_embeddings()
    config: Any = model.config.get_text_config()
    if type(linear) is not nn.Linear:
        raise ModelError(
            f"Expected the head of '{config.model_type}' to be one nn.Linear, found "
            f"{type(linear).__name__}. Its log-probs cannot be computed in chunks; use a causal LM "
            "with a plain head."
        )
    scale = 1.0
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        scale *= config.logit_scale
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        scale /= config.logits_scaling
    return Head(scale=scale, cap=getattr(config, "final_logit_softcapping", None))


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    head: Head = Head(),
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log_softmax(logits / temperature) at `targets`, and the entropy in nats.

    hidden (M, H), weight (V, H), targets (M,), bias (V,) -> log_probs (M,), entropy (M,) or an
    empty tensor, both fp32 (float64 for float64 weights). Gradients are exact: logits are computed
    again chunk by chunk, and the weight's gradient is summed over chunks in fp32. On devices with
    `fused_head` the forward pass makes no logits, unless they are a single chunk that the backward
    pass can use.
    """
    if temperature <= 0:
        raise ModelError(
            f"Log-probs need a temperature above 0, got {temperature}. Greedy decoding uses those "
            "of 1."
        )
    rows = chunk_rows(weight.shape[0], on_cuda=hidden.is_cuda, elements=chunk_elements)
    keeps = torch.is_grad_enabled() and hidden.shape[0] <= rows
    settings = _Settings(head, temperature, entropy, rows, keeps)
    return _TokenLogProbs.apply(hidden, weight, bias, targets, settings)  # pyright: ignore[reportReturnType]


def chunk_rows(vocabulary: int, *, on_cuda: bool, elements: int | None = None) -> int:
    """Return the tokens of a chunk of at most `elements` logits (None: by device)."""
    if elements is None:
        on_cpu = max(CHUNK_ELEMENTS_CPU, CHUNK_ROWS_CPU * vocabulary)
        elements = CHUNK_ELEMENTS_CUDA if on_cuda else on_cpu
    rows = max(1, elements // vocabulary)
    return rows - rows % CHUNK_TILE if rows > CHUNK_TILE else rows


@dataclass(frozen=True)
class _Settings:
    head: Head
    temperature: float
    entropy: bool
    rows: int  # tokens of a chunk
    # Whether a single chunk is kept for the backward pass: computing it again would cost a product
    # and save no peak memory.
    keeps: bool

    @property
    def slope(self) -> float:
        return self.head.scale / self.temperature

    @property
    def bound(self) -> float | None:
        return None if self.head.cap is None else self.head.cap / self.temperature


def fused_head(device: torch.device) -> bool:
    """Return whether `kernels.head` run on a device: Hopper or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    *,
    temperature: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute logits / temperature (m, V) of hidden states (m, H), in fp32 or float64.

    The logits have the head's scale and cap. If they have the dtype of the states, they can be
    written to `out`. On CUDA the products of bf16 stay in fp32, because rounding logits costs 3
    digits.
    """
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t(), out=out)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits.add_(bias)

    if head.cap is None:
        factor = head.scale / temperature
        return logits if factor == 1.0 else logits.mul_(factor)
    small = logits.mul_(head.scale / head.cap).tanh_()
    return small.mul_(head.cap / temperature)


def row_statistics(
    y: Tensor, targets: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute log sum exp y, y at the target, and optionally the entropy of softmax(y) in nats.

    y is (m, V), each result (m,).
    """
    normalizers = y.logsumexp(-1)
    chosen = y.gather(1, targets[:, None]).squeeze(1)
    entropies = None
    if entropy:
        entropies = normalizers - (y * (y - normalizers[:, None]).exp_()).sum(-1)
    return normalizers, chosen, entropies


def grad_linear(
    y: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor | None,
    grad_log_probs: Tensor | None,
    grad_entropies: Tensor | None,
    *,
    slope: float,
    bound: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient (m, V) of the linear output from those of log-probs and entropies (m,).

    With p = softmax(y): d log_prob / dy = onehot - p and d entropy / dy = -p * (log p + entropy).
    dy is `slope` times the change of the linear output, and smaller if y is near `bound`: y =
    bound * tanh(linear * slope / bound). The gradient has `dtype`.
    """
    log_p = y - normalizers[:, None]
    p = log_p.exp()
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(normalizers)
    grad_log_probs = grad_log_probs[:, None]
    if grad_entropies is None or entropies is None:
        grad = p.mul_(-grad_log_probs)
    else:
        by_entropy = log_p.add_(entropies[:, None]).mul_(-grad_entropies[:, None])
        grad = p.mul_(by_entropy.sub_(grad_log_probs))
    grad = grad.scatter_add_(1, targets[:, None], grad_log_probs)

    if bound is None:
        return grad.mul_(slope).to(dtype)
    slopes = (1 - (y / bound).square_()).mul_(slope)
    return grad.mul_(slopes).to(dtype)


def _row_operations(y: Tensor) -> Any:
    """Return the module of the two functions above, or on CUDA of kernels that read `y` once."""
    if y.is_cuda and y.dtype == torch.float32:
        # triton is installed only with CUDA
        return importlib.import_module("verl.models.kernels.logprobs")
    return sys.modules[__name__]


def _fused_kernels(hidden: Tensor, weight: Tensor) -> Any:
    """Return the kernels of a head without logits; None if they do not support these tensors."""
    if not fused_head(hidden.device):
        return None
    # triton is installed only with CUDA
    kernels: Any = importlib.import_module("verl.models.kernels.head")
    return kernels if kernels.can_read(hidden, weight) else None


def _in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute `row_statistics` of all tokens (M,), and return the logits if they are kept."""
    tokens = hidden.shape[0]
    kept = None
    precise = torch.promote_types(weight.dtype, torch.float32)
    normalizers = torch.empty(tokens, dtype=precise, device=hidden.device)
    chosen = torch.empty_like(normalizers)
    entropies = torch.empty_like(normalizers)

    for start in range(0, tokens, settings.rows):
        rows = slice(start, start + settings.rows)
        y = head_logits(hidden[rows], weight, bias, settings.head, temperature=settings.temperature)
        found = _row_operations(y).row_statistics(y, targets[rows], entropy=settings.entropy)
        normalizers[rows], chosen[rows], entropy = found
        if entropy is not None:
            entropies[rows] = entropy
        kept = y if settings.keeps else None
        del y

    return normalizers, chosen, entropies if settings.entropy else None, kept


class _TokenLogProbs(torch.autograd.Function):
    """log_prob = y[target] - lse(y), entropy = lse(y) - sum(softmax(y) * y), y = logits / T."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        kept = None
        kernels = None
        if bias is None and not settings.keeps:
            kernels = _fused_kernels(hidden, weight)
        if kernels is not None:
            normalizers, chosen, entropies = kernels.head_statistics(
                hidden,
                weight,
                targets,
                slope=settings.slope,
                bound=settings.bound,
                entropy=settings.entropy,
            )
        else:
            normalizers, chosen, entropies, kept = _in_chunks(
                hidden, weight, bias, targets, settings
            )

        log_probs = chosen - normalizers
        if entropies is None:
            entropies = log_probs.new_empty(0)
        ctx.save_for_backward(hidden, weight, bias, targets, normalizers, entropies, kept)
        ctx.settings = settings
        ctx.set_materialize_grads(False)

        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropies, kept = ctx.saved_tensors
        settings: _Settings = ctx.settings
        head = settings.head
        precise = normalizers.dtype
        gradients = HeadGradients(hidden, weight, bias, ctx.needs_input_grad[:3], precise)
        if not settings.entropy:
            grad_entropy = None

        for start in range(0, hidden.shape[0], settings.rows):
            rows = slice(start, start + settings.rows)
            y = kept
            if y is None:
                y = head_logits(hidden[rows], weight, bias, head, temperature=settings.temperature)
            grad = _row_operations(y).grad_linear(
                y,
                targets[rows],
                normalizers[rows],
                _of(rows, entropies if settings.entropy else None),
                _of(rows, grad_log_probs),
                _of(rows, grad_entropy),
                slope=settings.slope,
                bound=settings.bound,
                dtype=gradients.dtype,
            )
            gradients.add(rows, grad)

        return *gradients.result(), None, None


def _of(rows: slice, values: Tensor | None) -> Tensor | None:
    return None if values is None else values[rows]


class HeadGradients:
    """Gradients of a head's input (M, H), weight (V, H) and bias (V,), chunk by chunk.

    Those of weight and bias are summed in `precise`. What nothing needs is not computed.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
        precise: torch.dtype,
    ) -> None:
        self._input = hidden
        self._head = (weight, bias)
        self._hidden: Tensor | None = None
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self.dtype = weight.dtype  # in which `add` takes gradients
        needs_hidden, needs_weight, needs_bias = needs

        if needs_hidden:
            self._hidden = torch.empty_like(hidden)
        if needs_weight:
            self._weight = torch.zeros_like(weight, dtype=precise)
        if needs_bias:
            assert bias is not None
            self._bias = torch.zeros_like(bias, dtype=precise)
            self.dtype = precise

    def add(self, rows: slice, grad: Tensor) -> None:
        """Add a gradient of the logits (m, n) of some rows and the first n words."""
        weight = self._head[0]
        words = grad.shape[1]
        if self._bias is not None:
            self._bias[:words] += grad.sum(0)
        grad = grad.to(weight.dtype)
        if self._hidden is not None:
            self._hidden[rows] = grad @ weight[:words]
        if self._weight is not None:
            add_product(self._weight[:words], grad.t(), self._input[rows])

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of input, weight and bias in the dtypes of these."""
        weight, bias = self._head
        if self._weight is not None:
            self._weight = self._weight.to(weight.dtype)
        if self._bias is not None:
            assert bias is not None
            self._bias = self._bias.to(bias.dtype)
        return self._hidden, self._weight, self._bias


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add the product `one @ other` to `total`, in place.

    For bf16 on CUDA the product itself adds in fp32, without a temporary of the weight's size.
    """
    if one.is_cuda and total.dtype != one.dtype:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total += one @ other
