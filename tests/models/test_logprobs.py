"""Chunked log-probs against a dense softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, floats, integers, none, one_of
from torch import Tensor

from tests.tiny_models import tiny_model
from verl.models.logprobs import Head, head_of, token_log_probs
from verl.utils.errors import ModelError


def problem(
    tokens: int, vocabulary: int = 11, width: int = 5, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    draw = {
        "hidden": torch.randn(tokens, width, generator=generator, dtype=torch.float64),
        "weight": 3 * torch.randn(vocabulary, width, generator=generator, dtype=torch.float64),
        "bias": torch.randn(vocabulary, generator=generator, dtype=torch.float64),
    }
    tensors = {name: value.to(dtype).requires_grad_() for name, value in draw.items()}
    return tensors | {"targets": torch.randint(vocabulary, (tokens,), generator=generator)}


def dense(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    head: Head,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() * 1.0
    logits = (logits if bias is None else logits + bias) * head.scale
    if head.cap is not None:
        logits = head.cap * torch.tanh(logits / head.cap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=60)
@given(
    tokens=integers(0, 9),
    rows=integers(1, 12),
    has_bias=booleans(),
    wants_entropy=booleans(),
    scale=floats(0.2, 3.0),
    cap=one_of(none(), floats(0.5, 5.0)),
    temperature=floats(0.3, 2.0),
)
def test_values_and_gradients_equal_a_dense_softmax_for_any_chunk(
    tokens: int,
    rows: int,
    has_bias: bool,
    wants_entropy: bool,
    scale: float,
    cap: float | None,
    temperature: float,
) -> None:
    head = Head(scale, cap)
    results = []
    for chunked in (True, False):
        given_tensors = problem(tokens)
        bias = given_tensors["bias"] if has_bias else None
        arguments = (given_tensors["hidden"], given_tensors["weight"], given_tensors["targets"])
        if chunked:
            log_probs, entropy = token_log_probs(
                *arguments,
                bias=bias,
                head=head,
                temperature=temperature,
                entropy=wants_entropy,
                chunk_elements=11 * rows,
            )
        else:
            log_probs, entropy = dense(*arguments, bias, head, temperature)
        weights = torch.arange(tokens) - 2.5
        loss = (log_probs * weights).sum()
        if wants_entropy:
            loss = loss + (entropy * weights.flip(0)).sum()
        loss.backward()
        leaves = [
            given_tensors["hidden"],
            given_tensors["weight"],
            *([bias] if bias is not None else []),
        ]
        results.append(
            [log_probs, *([entropy] if wants_entropy else []), *(leaf.grad for leaf in leaves)]
        )

    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("chunk_elements", [11, 33, 1000])
def test_gradcheck(chunk_elements: int) -> None:
    tensors = problem(4)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return token_log_probs(
            hidden,
            weight,
            tensors["targets"],
            bias=bias,
            head=Head(0.7, 4.0),
            temperature=0.8,
            entropy=True,
            chunk_elements=chunk_elements,
        )

    assert torch.autograd.gradcheck(
        function, (tensors["hidden"], tensors["weight"], tensors["bias"])
    )


def test_only_the_entropy_may_be_differentiated() -> None:
    tensors = problem(6)
    _, entropy = token_log_probs(
        tensors["hidden"],
        tensors["weight"],
        tensors["targets"],
        bias=tensors["bias"],
        entropy=True,
        chunk_elements=22,
    )

    entropy.sum().backward()
    ours = tensors["hidden"].grad
    again = problem(6)
    dense(again["hidden"], again["weight"], again["targets"], again["bias"], Head(), 1.0)[
        1
    ].sum().backward()
    torch.testing.assert_close(ours, again["hidden"].grad)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    tensors = problem(3)
    weight = tensors["weight"].detach()
    log_probs, _ = token_log_probs(tensors["hidden"], weight, tensors["targets"])
    log_probs.sum().backward()
    assert weight.grad is None
    assert tensors["hidden"].grad is not None


def test_bf16_is_summed_and_normalized_in_fp32() -> None:
    tensors = problem(200, vocabulary=64, width=16, dtype=torch.bfloat16)
    arguments = (tensors["hidden"], tensors["weight"], tensors["targets"])
    log_probs, entropy = token_log_probs(*arguments, entropy=True, chunk_elements=64)
    assert log_probs.dtype == entropy.dtype == torch.float32
    logits = (tensors["hidden"] @ tensors["weight"].t()).float().log_softmax(-1)
    torch.testing.assert_close(
        log_probs, logits.gather(1, tensors["targets"][:, None]).squeeze(1), rtol=0, atol=0.1
    )

    log_probs.sum().backward()
    many_chunks = tensors["weight"].grad
    exact = problem(200, vocabulary=64, width=16)
    exact_logits = (
        exact["hidden"].to(torch.bfloat16).double()
        @ exact["weight"].to(torch.bfloat16).double().t()
    )
    probabilities = exact_logits.softmax(-1)

    onehot = torch.nn.functional.one_hot(exact["targets"], 64)
    expected = (onehot - probabilities).t() @ exact["hidden"].to(torch.bfloat16).double()
    # A running sum in bf16 over 200 chunks would be off by several percent.
    assert many_chunks is not None
    assert (many_chunks.double() - expected).norm() / expected.norm() < 1e-2


def test_logits_of_a_large_vocabulary_never_exist_for_all_tokens_at_once() -> None:
    tokens = 64
    vocabulary = 50_000
    hidden = torch.randn(tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, tuple | list) else (out,):
                if isinstance(value, Tensor):
                    largest = max(largest, value.numel())
            return out

    with Watch():
        log_probs, entropy = token_log_probs(
            hidden, weight, torch.arange(tokens), entropy=True, chunk_elements=8 * vocabulary
        )
        (log_probs.sum() + entropy.sum()).backward()
    assert largest == 8 * vocabulary


def test_temperature_must_be_positive() -> None:
    tensors = problem(2)
    with pytest.raises(ModelError, match="above 0"):
        token_log_probs(tensors["hidden"], tensors["weight"], tensors["targets"], temperature=0.0)


def test_heads_are_read_from_configurations() -> None:
    assert head_of(tiny_model("qwen2")) == Head()
    assert head_of(tiny_model("gemma2")) == Head(1.0, 3.0)
    assert head_of(tiny_model("cohere")) == Head(0.7)
    assert head_of(tiny_model("granite")) == Head(1 / 1.5)


def test_a_head_that_is_not_linear_is_named() -> None:
    model = tiny_model("qwen2")
    model.set_output_embeddings(torch.nn.Sequential(torch.nn.Linear(32, 128)))
    with pytest.raises(ModelError, match="Sequential"):
        head_of(model)
