"""Log-probs and entropy of chosen tokens, straight from hidden states.

The (M, V) logits exist one chunk at a time: a vocabulary of 152k and a micro-batch of 16k tokens
would take 10 GB in fp32, several times over in a backward pass written by autograd.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from verl.utils.errors import ModelError

# Logits alive at once: 2 GiB in fp32, and half of that for their gradient. On an H200, 16k tokens
# of hidden size 1536 and 152k words took 54 ms forward and backward, 56 with 2**28 and 60 with
# 2**27; four matrix products, at 794 TFLOP/s 39 ms.
CHUNK_ELEMENTS_CUDA = 2**29
# Rows of a chunk are a multiple of this where they are more: what a matrix product computes in
# whole tiles.
CHUNK_TILE = 256
# Words of a tile of `kernels.head`.
FUSED_WORDS = 256
# On a CPU 16 MiB stay near the caches (2**25 made the update of a small model a fifth slower), but
# a large vocabulary gets enough rows for its matrix product to read the weight seldom.
CHUNK_ELEMENTS_CPU = 2**22
CHUNK_ROWS_CPU = 128


@dataclass(frozen=True)
class Head:
    """What a family does to its logits after the linear map: logits = cap * tanh(scale * linear /
    cap)."""

    scale: float = 1.0
    cap: float | None = None


def head_of(model: PreTrainedModel) -> Head:
    """Read the head of a causal LM from its configuration.

    Raises ModelError where the head is not one linear layer. That nothing else happens to the
    logits is what the check at load proves.
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
    """log_softmax(logits / temperature) at `targets`, and the entropy in nats of the whole
    distribution.

    hidden (M, H), weight (V, H), targets (M,), bias (V,) -> log_probs (M,), entropy (M,) or an
    empty tensor, both fp32 (float64 for float64 weights). Gradients are exact, computed from logits
    made again chunk by chunk; the weight's is summed over chunks in fp32. On cards with
    `fused_head` the forward pass makes no logits at all, unless they are a single chunk that the
    backward pass can use.
    """
    if temperature <= 0:
        raise ModelError(
            f"Log-probs need a temperature above 0, got {temperature}. Greedy decoding uses those "
            "of 1."
        )
    rows = chunk_rows(hidden, weight.shape[0], chunk_elements)
    settings = _Settings(
        head, temperature, entropy, rows, keeps=torch.is_grad_enabled() and hidden.shape[0] <= rows
    )
    return _TokenLogProbs.apply(hidden, weight, bias, targets, settings)  # pyright: ignore[reportReturnType]


def chunk_rows(hidden: Tensor, vocabulary: int, chunk_elements: int | None = None) -> int:
    """Tokens of a chunk, which has at most `chunk_elements` logits; None: as the device likes."""
    if chunk_elements is None:
        on_cpu = max(CHUNK_ELEMENTS_CPU, CHUNK_ROWS_CPU * vocabulary)
        chunk_elements = CHUNK_ELEMENTS_CUDA if hidden.is_cuda else on_cpu
    rows = max(1, chunk_elements // vocabulary)
    return rows - rows % CHUNK_TILE if rows > CHUNK_TILE else rows


@dataclass(frozen=True)
class _Settings:
    head: Head
    temperature: float
    entropy: bool
    rows: int  # tokens of a chunk
    # one chunk for the backward pass: making it again would cost a product and save no peak memory
    keeps: bool

    @property
    def slope(self) -> float:
        return self.head.scale / self.temperature

    @property
    def bound(self) -> float | None:
        return None if self.head.cap is None else self.head.cap / self.temperature


def fused_head(device: torch.device) -> bool:
    """Whether `kernels.head` run on a device: Hopper or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """(m, V) in fp32 or float64. On CUDA the products of bf16 stay in fp32: rounding logits costs 3
    digits."""
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(hidden, weight.t(), out=out)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if bias is None else logits.add_(bias)


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    head: Head,
    *,
    temperature: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """(m, V) logits / temperature of hidden states (m, H), with the head's scale and cap, in fp32
    or float64.

    Where they are of the states' own dtype, they can be written to `out`.
    """
    logits = _linear(hidden, weight, bias, out)
    if head.cap is None:
        factor = head.scale / temperature
        return logits if factor == 1.0 else logits.mul_(factor)
    return logits.mul_(head.scale / head.cap).tanh_().mul_(head.cap / temperature)


def row_statistics(
    y: Tensor, targets: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log sum exp y, y at the target and, if asked for, the entropy of softmax(y) in nats: (m,)
    each, of y (m, V)."""
    normalizers = y.logsumexp(-1)
    chosen = y.gather(1, targets[:, None]).squeeze(1)
    entropies = normalizers - (y * (y - normalizers[:, None]).exp_()).sum(-1) if entropy else None
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
    """The gradient (m, V) in `dtype` of the linear output, from those (m,) of the log-probs and the
    entropies.

    With p = softmax(y): d log_prob / dy = onehot - p and d entropy / dy = -p * (log p + entropy).
    dy is `slope` times the change of the linear output, less where y comes near to `bound`: y =
    bound * tanh(linear * slope / bound).
    """
    log_p = y - normalizers[:, None]
    p = log_p.exp()
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(normalizers)
    grad_log_probs = grad_log_probs[:, None]
    if grad_entropies is None or entropies is None:
        grad = p.mul_(-grad_log_probs)
    else:
        grad = p.mul_(
            log_p.add_(entropies[:, None]).mul_(-grad_entropies[:, None]).sub_(grad_log_probs)
        )
    grad = grad.scatter_add_(1, targets[:, None], grad_log_probs)
    return grad.mul_(slope if bound is None else (1 - (y / bound).square_()).mul_(slope)).to(dtype)


def _row_operations(y: Tensor) -> Any:
    """The two functions above, or on CUDA their kernels, which read `y` once."""
    if y.is_cuda and y.dtype == torch.float32:
        # triton exists beside CUDA only
        return importlib.import_module("verl.models.kernels.logprobs")
    return sys.modules[__name__]


def _fused_kernels(hidden: Tensor, weight: Tensor) -> Any:
    """The kernels of a head without logits, where they can do it; None where they cannot."""
    if not fused_head(hidden.device):
        return None
    # triton exists beside CUDA only
    kernels: Any = importlib.import_module("verl.models.kernels.head")
    return kernels if kernels.can_read(hidden, weight) else None


def _in_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`row_statistics` of all tokens (M,), and the logits if they are to be kept."""
    tokens = hidden.shape[0]
    kept = None
    precise = torch.promote_types(weight.dtype, torch.float32)
    normalizers, chosen, entropies = (
        torch.empty(tokens, dtype=precise, device=hidden.device) for _ in range(3)
    )

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
    """y = logits / temperature; log_prob = y[target] - lse(y); entropy = lse(y) - sum(softmax(y) *
    y)."""

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
        kernels = None if bias is not None or settings.keeps else _fused_kernels(hidden, weight)
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
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        precise = normalizers.dtype
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=precise) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=precise) if needs_bias else None

        for start in range(0, hidden.shape[0], settings.rows):
            rows = slice(start, start + settings.rows)
            part = hidden[rows]
            y = kept
            if y is None:
                y = head_logits(part, weight, bias, head, temperature=settings.temperature)
            grad = _row_operations(y).grad_linear(
                y,
                targets[rows],
                normalizers[rows],
                entropies[rows] if settings.entropy else None,
                None if grad_log_probs is None else grad_log_probs[rows],
                None if grad_entropy is None or not settings.entropy else grad_entropy[rows],
                slope=settings.slope,
                bound=settings.bound,
                dtype=precise if needs_bias else weight.dtype,
            )
            if grad_bias is not None:
                grad_bias += grad.sum(0)
                grad = grad.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), part)

        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """total += one @ other. Of bf16 on CUDA within the product, in fp32: no temporary of the size
    of the weight."""
    if one.is_cuda and total.dtype != one.dtype:
        torch.addmm(total, one, other, out_dtype=total.dtype, out=total)
    else:
        total += one @ other
