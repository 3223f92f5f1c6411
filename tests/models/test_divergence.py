"""Chunked divergences against dense softmaxes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, floats, integers, none, one_of, sampled_from
from torch import Tensor

from tests.tiny_models import tiny_model
from verl.algorithms.divergences import DIVERGENCES, divergence
from verl.models import divergence as module
from verl.models.divergence import CHUNK_TENSORS, Divergence, FrozenHead, token_divergence
from verl.models.logprobs import Head
from verl.models.packed import PackedBatch, PackedCausalLM


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def dense_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    logits = hidden @ weight.t()
    logits = (logits if bias is None else logits + bias) * head.scale
    return logits if head.cap is None else head.cap * torch.tanh(logits / head.cap)


@settings(max_examples=60)
@given(
    tokens=integers(0, 9),
    rows=integers(1, 12),
    vocabularies=sampled_from([(11, 11), (11, 13), (13, 11)]),
    has_bias=booleans(),
    scale=floats(0.2, 3.0),
    cap=one_of(none(), floats(0.5, 5.0)),
    temperature=floats(0.3, 2.0),
    kind=sampled_from(DIVERGENCES),
)
def test_values_and_gradients_equal_dense_softmaxes_for_any_chunk(
    tokens: int,
    rows: int,
    vocabularies: tuple[int, int],
    has_bias: bool,
    scale: float,
    cap: float | None,
    temperature: float,
    kind: str,
) -> None:
    """Include a frozen model of another width, with another head, and a longer or shorter
    vocabulary."""
    own, other = vocabularies
    head = Head(scale, cap)
    frozen_head = Head(0.7, 4.0)
    leaves = [draw(1, tokens, 5), 2 * draw(2, own, 5), draw(3, own)]
    states = draw(4, tokens, 6)
    frozen_weight = 2 * draw(5, other, 6)
    frozen_bias = draw(6, other)
    frozen = FrozenHead(frozen_weight, frozen_bias, frozen_head)
    weights = torch.arange(tokens) - 2.5

    results = []
    for is_chunked in (True, False):
        hidden, weight, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        used_bias = bias if has_bias else None
        if is_chunked:
            values = token_divergence(
                hidden,
                weight,
                states,
                Divergence("name", "states", frozen, kind, beta=0.3),
                bias=used_bias,
                head=head,
                temperature=temperature,
                chunk_elements=own * rows * CHUNK_TENSORS,
            )
        else:
            words = min(own, other)
            y = dense_logits(hidden, weight, used_bias, head)[:, :words] / temperature
            z = dense_logits(states, frozen_weight, frozen_bias, frozen_head)[:, :words]
            z = z / temperature
            values = divergence(y.log_softmax(-1), z.log_softmax(-1), kind, 0.3)
        (values * weights).sum().backward()
        gradients = [hidden.grad, weight.grad, *([bias.grad] if has_bias else [])]
        results.append([values, *gradients])

    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_tensor_of_tokens_times_vocabulary_is_created(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    for name in ("divergence", "divergence_gradient"):
        function = getattr(module, name)

        def spied(log_p, log_q, *rest, function=function):
            seen.append(max(log_p.shape[0], log_q.shape[0]))
            return function(log_p, log_q, *rest)

        monkeypatch.setattr(module, name, spied)
    hidden = draw(1, 40, 5).requires_grad_()
    weight = draw(2, 11, 5)
    asked = Divergence("name", "states", FrozenHead(draw(3, 11, 5), None, Head()), kind)
    values = token_divergence(
        hidden, weight, draw(4, 40, 5), asked, chunk_elements=11 * 4 * CHUNK_TENSORS
    )
    values.sum().backward()
    assert seen == [4] * 20


def test_bf16_states_are_compared_in_fp32() -> None:
    hidden = draw(1, 50, 16).bfloat16()
    weight = draw(2, 64, 16).bfloat16()
    frozen = FrozenHead(draw(3, 64, 16).bfloat16(), None, Head())
    asked = Divergence("name", "states", frozen, "reverse_kl")
    values = token_divergence(hidden, weight, draw(4, 50, 16).bfloat16(), asked)
    assert values.dtype == torch.float32
    y = (hidden @ weight.t()).float()
    z = (draw(4, 50, 16).bfloat16() @ frozen.weight.t()).float()
    expected = divergence(y.log_softmax(-1), z.log_softmax(-1), "reverse_kl")
    torch.testing.assert_close(values, expected)


def test_a_packed_model_gives_the_divergence_from_another() -> None:
    """Compare with the other model's own logits, token by token; require its states."""
    student = tiny_model("qwen2")
    teacher = tiny_model("llama", seed=1, hidden_size=48)
    sequences = [[5, 6, 7, 8], [9, 10, 11]]
    teacher_logits = [teacher(torch.tensor([ids])).logits[0, :-1] for ids in sequences]
    student_logits = [student(torch.tensor([ids])).logits[0, :-1] for ids in sequences]
    expected = divergence(
        torch.cat(student_logits).log_softmax(-1),
        torch.cat(teacher_logits).log_softmax(-1),
        "reverse_kl",
    )

    batch = PackedBatch.from_sequences(sequences)
    packed_teacher = PackedCausalLM(teacher)
    packed_student = PackedCausalLM(student)
    states = packed_teacher(batch, states=True)["states"].detach()
    linear: Any = teacher.get_output_embeddings()
    head = FrozenHead(linear.weight.detach(), None, packed_teacher.head)
    asked = Divergence(name="kl", states="teacher_states", head=head, kind="reverse_kl")
    assert "kl" not in packed_student(batch, divergences=[asked])
    batch = replace(batch, states={"teacher_states": states})
    got = packed_student(batch, divergences=[asked])["kl"]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)
