"""Computing a prompt once for all its responses changes neither log-probs nor gradients."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers, lists, tuples
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.grouped import Rows, grouped_rows, kernel_backward, kernel_forward
from tests.models.rows import KeepFloat64
from tests.tiny_models import FAMILIES, MORE_FAMILIES, tiny_model
from verl.models import attention, packed, shared_prompts
from verl.models import layout as layout_module
from verl.models.attention import Facts, Layout, apply_checkpointing, block_attention
from verl.models.critic import CriticModel
from verl.models.kernels import attention as attention_kernels
from verl.models.kernels import varlen
from verl.models.packed import PackedBatch, PackedCausalLM, PackedValueModel

Result = tuple[Tensor, dict[str, Tensor]]  # outputs in order of rows, gradients by parameter


def compute(
    module: nn.Module, batches: Sequence[PackedBatch], exact: bool = True, **arguments: Any
) -> Result:
    """Return the outputs of every batch in turn, and the gradients of a loss.

    The loss has a different weight for each token.
    """
    module.zero_grad()
    collected = []
    with KeepFloat64() if exact else nullcontext():
        for batch in batches:
            outputs = torch.stack(list(module(batch, **arguments).values()))
            weights = (batch.targets * 5 % 7 - 3.0).to(outputs.dtype)
            (weights * outputs[0] + 0.1 * outputs[-1] ** 2).sum().backward()
            collected.append(outputs.detach())
    gradients = {
        name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None
    }
    return torch.cat(collected, dim=1), gradients


def assert_equal(ours: Result, theirs: Result, tolerance: float) -> None:
    assert (ours[0] - theirs[0]).abs().max() <= 10 * tolerance
    assert distance(ours[1], theirs[1]) <= tolerance


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest relative error of a parameter's gradient.

    Gradients that are 0 in exact arithmetic do not count.
    """
    assert ours.keys() == theirs.keys()
    total = sum(value.norm() ** 2 for value in theirs.values()) ** 0.5
    return max(
        float((ours[name] - value).norm() / (value.norm() + 1e-3 * total))
        for name, value in theirs.items()
    )


@pytest.fixture(scope="module")
def rows() -> Rows:
    return grouped_rows(interleave=True)


@pytest.mark.parametrize("family", FAMILIES + MORE_FAMILIES)
def test_log_probs_entropy_and_gradients_equal_those_of_plain_packing(
    family: str, rows: Rows
) -> None:
    module = PackedCausalLM(tiny_model(family, dtype=torch.float64))
    plain, shared = (
        compute(module, [rows.pack(share=share)], temperature=0.7, entropy=True)
        for share in (False, True)
    )
    assert_equal(shared, plain, 1e-9)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "gpt_oss"])
def test_fp32_is_equal_to_rounding(family: str, rows: Rows) -> None:
    module = PackedCausalLM(tiny_model(family))
    plain, shared = (
        compute(module, [rows.pack(share=share)], exact=False) for share in (False, True)
    )
    assert (shared[0] - plain[0]).abs().max() <= 1e-4
    assert distance(shared[1], plain[1]) <= 1e-5


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt_oss"])
def test_checkpointing_recomputes_on_the_layout_of_its_forward(family: str, rows: Rows) -> None:
    module = PackedCausalLM(tiny_model(family, dtype=torch.float64)).train()
    first = rows.pack(range(7), share=True)
    second = rows.pack(range(7, len(rows.prompts)), share=True)
    assert first.shared
    assert second.shared
    expected = compute(module, [first, second], exact=False)[1]
    apply_checkpointing(module.model)
    module.zero_grad()

    losses = []
    for batch in (first, second):  # both forward passes before the first backward pass
        outputs = module(batch)["log_probs"]
        losses.append(((batch.targets * 5 % 7 - 3.0) * outputs + 0.1 * outputs**2).sum())

    for loss in losses:
        loss.backward()
    ours = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert distance(ours, expected) <= 1e-12


def test_values_and_their_gradients_equal_those_of_plain_packing(rows: Rows) -> None:
    module = PackedValueModel(CriticModel.from_causal_lm(tiny_model("qwen2", dtype=torch.float64)))
    plain, shared = (compute(module, [rows.pack(share=share)]) for share in (False, True))
    assert_equal(shared, plain, 1e-9)


@pytest.fixture(scope="module")
def modules() -> dict[str, PackedCausalLM]:
    return {
        family: PackedCausalLM(tiny_model(family, dtype=torch.float64))
        for family in ("qwen2", "mistral")
    }


groups_strategy = lists(
    tuples(integers(1, 14), lists(integers(0, 14), min_size=1, max_size=5)), min_size=1, max_size=4
).filter(lambda groups: any(response for _, responses in groups for response in responses))


@settings(max_examples=20)
@given(groups=groups_strategy, interleave=booleans(), cut=integers(0, 20))
def test_any_groups_with_any_split_give_the_plain_gradient(
    modules, groups, interleave, cut
) -> None:
    rows = grouped_rows(groups, interleave=interleave)
    everything = range(len(rows.prompts))
    for module in modules.values():
        plain = compute(module, [rows.pack(share=False)])
        parts = [
            rows.pack(part, share=True) for part in (everything[:cut], everything[cut:]) if part
        ]
        assert_equal(compute(module, parts), plain, 1e-9)


@settings(max_examples=100)
@given(groups=groups_strategy, interleave=booleans())
def test_a_shared_batch_holds_the_same_sequences(groups, interleave) -> None:
    rows = grouped_rows(groups, interleave=interleave)
    plain = rows.pack(share=False)
    shared = rows.pack(share=True)
    assert torch.equal(shared.targets, plain.targets)
    assert torch.equal(shared.input_ids[shared.predict], plain.input_ids[plain.predict])
    assert torch.equal(shared.position_ids[shared.predict], plain.position_ids[plain.predict])
    assert sum(shared.lengths) == len(shared.input_ids) == int(shared.cu_seqlens[-1])
    assert len(shared.input_ids) == sum(prompt + sum(responses) for prompt, responses in groups)

    layout = Layout(shared.lengths, shared.cu_seqlens, shared.shared)
    assert layout.longest == max(plain.lengths)
    seen = 0

    for prompt, responses in layout.prompts:
        end = layout.starts[prompt + 1] - 1
        for response in responses:
            assert shared.position_ids[layout.starts[response]] == shared.position_ids[end] + 1
            seen += 1

    assert (
        seen
        == sum(shared.shared)
        == sum(sum(r > 0 for r in rs) for _, rs in groups if sum(r > 0 for r in rs) > 1)
    )


def test_without_shared_prompts_the_batch_is_the_plain_one() -> None:
    rows = grouped_rows(((5, (7,)), (6, (3,)), (9, (0,))))
    plain = rows.pack(share=False)
    assert plain.with_shared_prompts([4, 1, 2], rows.prompt_lengths) is plain
    assert plain.shared == ()


# ---------------------------------------------------------------- the kernel path, on CPU by a stan


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send CPU tensors through the path of CUDA tensors, in float64: exact up to rounding."""
    monkeypatch.setattr(varlen, "forward", kernel_forward)
    monkeypatch.setattr(varlen, "backward", kernel_backward)
    monkeypatch.setattr(attention_kernels, "varlen_attn", differentiable_kernel)


def differentiable_kernel(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, key_ends: Tensor, *longest: int, **asked: Any
) -> Tensor:
    """Compute `varlen_attn` with a window: the last query of a sequence is at its last key."""
    left, right = asked["window_size"]
    assert right == 0
    outputs = []

    for start, stop, key_start, key_stop in zip(ends[:-1], ends[1:], key_ends[:-1], key_ends[1:]):
        one = int(stop - start)
        more = int(key_stop - key_start)
        gap = torch.arange(one)[:, None] + more - one - torch.arange(more)
        parts = (q[start:stop], k[key_start:key_stop], v[key_start:key_stop])
        heads_first = (part.transpose(0, 1)[None] for part in parts)
        seen = (gap >= 0) & (gap <= left)
        outputs.append(
            attention._scores_to_values(*heads_first, seen, asked["scale"], None, None)[
                0
            ].transpose(0, 1)
        )

    return torch.cat(outputs)


def attend(function: Callable[..., Tensor], layout: Layout, window: int | None) -> list[Tensor]:
    """Return the output and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(
            layout.starts[-1], heads, 8, generator=generator, dtype=torch.float64
        ).requires_grad_()
        for heads in (4, 2, 2)
    )
    out = function(q, k, v, layout, Facts(0.9, window, None, None))
    (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]


def shared_layout(rows: Rows) -> Layout:
    batch = rows.pack(share=True)
    assert batch.shared == (4, 2, 2)
    return Layout(batch.lengths, batch.cu_seqlens, batch.shared)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("window", "piece"), [(None, 1024), (None, 17), (1, 17), (5, 17), (30, 17), (500, 17)]
)
def test_kernel_calls_give_the_result_of_blocks(
    rows: Rows, window: int | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_module, "_PIECE", piece)
    layout = shared_layout(rows)
    assert len(layout.parts.across.query_offsets) == (4 if piece == 1024 else 13)
    for ours, theirs in zip(
        attend(attention._varlen_attention, layout, window),
        attend(block_attention, layout, window),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_checkpointing_keeps_the_result_of_kernel_calls(rows: Rows) -> None:
    def checkpointed(*arguments: Any) -> Tensor:
        return checkpoint(attention._varlen_attention, *arguments, use_reentrant=False)

    layout = shared_layout(rows)
    expected = attend(attention._varlen_attention, layout, None)
    for ours, theirs in zip(attend(checkpointed, layout, None), expected, strict=True):
        assert torch.equal(ours, theirs)


def keep_log_sum_exp(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    merge(out, lse.clone(), other, other_lse)


merge = shared_prompts._merge_


@pytest.mark.usefixtures("kernel")
def test_a_log_sum_exp_of_one_part_is_noticed(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = shared_layout(rows)
    expected = attend(block_attention, layout, None)
    monkeypatch.setattr(shared_prompts, "_merge_", keep_log_sum_exp)
    out, *gradients = attend(attention._varlen_attention, layout, None)
    torch.testing.assert_close(out, expected[0])
    for ours, theirs in zip(gradients, expected[1:], strict=True):
        assert (ours - theirs).norm() > 1e-2 * theirs.norm()


@pytest.mark.usefixtures("kernel")
def test_a_causal_part_over_the_prompt_is_noticed(rows: Rows) -> None:
    layout = shared_layout(rows)
    expected = attend(block_attention, layout, None)
    across = layout.parts.across._replace(causal=True)
    vars(layout)["parts"] = layout.parts._replace(across=across)
    ours = attend(attention._varlen_attention, layout, None)
    for one, other in zip(ours, expected, strict=True):
        assert not (one - other).norm() < 1e-2 * other.norm()  # nan is noticed too


# ---------------------------------------------------------------- injected mistakes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_response_that_sees_another_is_noticed(
    family: str, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_response(
        lengths: tuple[int, ...], ends: Tensor, shared: tuple[int, ...], *_: Tensor | None
    ) -> Layout:
        first = len(lengths) - sum(shared)
        bounds = [first + sum(shared[:number]) for number in range(len(shared) + 1)]
        joined = lengths[:first] + tuple(sum(lengths[a:b]) for a, b in pairwise(bounds))
        return Layout(joined, torch.cat([ends[:first], ends[bounds]]), (1,) * len(shared))

    expected = log_probs(family, rows.pack(share=False))
    monkeypatch.setattr(packed, "Layout", one_response)
    assert (log_probs(family, rows.pack(share=True)) - expected).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_that_restart_with_the_response_are_noticed(family: str, rows: Rows) -> None:
    batch = rows.pack(share=True)
    positions = batch.position_ids.clone()
    layout = shared_layout(rows)
    for _, responses in layout.prompts:
        for response in responses:
            own = slice(*layout.starts[response : response + 2])
            positions[own] -= int(positions[own][0])
    wrong = log_probs(family, replace(batch, position_ids=positions))
    assert (wrong - log_probs(family, rows.pack(share=False))).abs().max() > 1e-2


def test_first_tokens_predicted_from_a_response_are_noticed(rows: Rows) -> None:
    batch = rows.pack(share=True)
    layout = shared_layout(rows)
    firsts = [layout.starts[prompt + 1] - 1 for prompt, _ in layout.prompts]
    wrong = torch.where(
        torch.isin(batch.predict, torch.tensor(firsts)), batch.predict + 1, batch.predict
    )
    expected = log_probs("qwen2", rows.pack(share=False))
    assert (log_probs("qwen2", replace(batch, predict=wrong)) - expected).abs().max() > 1e-2


def log_probs(family: str, batch: PackedBatch) -> Tensor:
    with torch.no_grad():
        return PackedCausalLM(tiny_model(family))(batch)["log_probs"]
