"""Weights and activations in eight bits: rounding, products, hand-overs, decode steps, refusals."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from tests.cases import cases
from tests.rollout.interpreter import interpreted
from tests.rollout.test_cuda_decoder import (
    LENGTH,
    PAGE_SIZE,
    ROWS,
    TABLE,
    make_decoder,
    make_model,
    make_step,
)
from tests.tiny_models import tiny_model
from verl.config import TrainConfig
from verl.config.rollout import RolloutConfig
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.rollout_memory import plan_rollout
from verl.engine.model_shape import ModelShape
from verl.models.attention import Layout
from verl.rollout.base import check_engine, check_engine_model
from verl.rollout.eight_bits import (
    DTYPES,
    FP8,
    ROTATED,
    EightBitLinear,
    Rows,
    product,
    quantize,
    rotate,
    unscaled_product,
)
from verl.rollout.embedded.cuda_decoder import DevicePrefillStep, TritonDecoder
from verl.rollout.embedded.kernels.layers import add_rms_norm, swiglu
from verl.rollout.embedded.kernels.rounding import quantize_rows
from verl.rollout.twin import ModelTwin
from verl.utils.errors import ConfigError
from verl.weight_sync.fingerprint import fingerprints

CPU = torch.device("cpu")
SMALL = [FP8, torch.int8]
# of the output of a tiny model, relative
SMALLEST_ERROR = {"fp8": 0.02, "int8": 0.005}
FAMILIES = ["qwen2", "qwen3", "gemma2", "gemma3"]


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Draw rows of different sizes, with numbers of several orders of magnitude in each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-6, 3, shape[0])[:, None]
    tails = torch.randn(shape, generator=generator).exp()
    return torch.randn(shape, generator=generator) * tails * sizes


def relative_l2(one: Tensor, other: Tensor) -> float:
    return ((one - other).norm() / other.norm()).item()


# ---------------------------------------------------------------- rounding


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), width=st.integers(1, 70))
def test_integers_are_off_by_at_most_half_a_step(seed: int, rows: int, width: int):
    x = spread(rows, width, seed=seed)
    rounded = quantize(x, dtype=torch.int8)
    assert rounded.values.dtype == torch.int8
    assert ((rounded.wide() - x).abs() <= 0.5001 * rounded.scales).all()
    largest = x.abs().amax(-1)
    torch.testing.assert_close(rounded.wide().abs().amax(-1), largest, rtol=1e-6, atol=0)


@given(seed=st.integers(0, 2**31), width=st.integers(1, 9).map(lambda count: 8 * count))
def test_products_of_rotated_rows_are_those_of_the_rows(seed: int, width: int):
    x = spread(3, width, seed=seed).double()
    weight = spread(4, width, seed=seed + 1).double()
    torch.testing.assert_close(rotate(x) @ rotate(weight).t() / ROTATED, x @ weight.t())
    torch.testing.assert_close(rotate(rotate(x)), ROTATED * x)


def test_a_rotation_mixes_eight_neighbors():
    x = torch.zeros(64)
    x[8 + 3] = 1.0
    mixed = rotate(x).abs()
    expected = torch.zeros(64)
    expected[8:16] = 1.0
    assert torch.equal(mixed, expected)
    assert 0 < (rotate(x) < 0).sum() <= ROTATED // 2


def test_a_rotation_shortens_tails():
    """Products of two Gaussians, like the inputs of a last product: a third of the error."""
    x = torch.randn(4, 4096) * torch.randn(4, 4096)
    plain = quantize(x, dtype=torch.int8).wide()
    rotated = rotate(quantize(rotate(x), dtype=torch.int8).wide()) / ROTATED
    assert relative_l2(rotated, x) < 0.75 * relative_l2(plain, x)


@given(seed=st.integers(0, 2**31), rows=st.integers(1, 9), width=st.integers(1, 70))
def test_numbers_keep_four_bits_or_a_part_of_the_largest(seed: int, rows: int, width: int):
    """Bound the error by half a step: 2^-4 of a number, 2^-10 of the scale for the smallest."""
    x = spread(rows, width, seed=seed)
    rounded = quantize(x)
    error = (rounded.wide() - x).abs()
    assert (error <= 1.0001 * torch.maximum(x.abs() * 2**-4, rounded.scales * 2**-10)).all()
    largest = x.abs().amax(-1)
    torch.testing.assert_close(rounded.wide().abs().amax(-1), largest, rtol=1e-6, atol=0)


@pytest.mark.parametrize("small", SMALL)
@interpreted
def test_zeros_stay_zeros_and_broken_rows_stay_broken(small: torch.dtype):
    x = torch.zeros(3, 16)
    x[1, 4] = math.nan
    x[2, 5] = math.inf
    by_kernel = quantize_rows(x, Rows.empty(x.shape, small, CPU))
    for rounded in (quantize(x, dtype=small).wide(), by_kernel.wide()):
        assert torch.equal(rounded[0], x[0])
        assert rounded[1].isnan().any()
        assert not rounded[2].isfinite().all()


@pytest.mark.parametrize("width", [40, 64, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("small", "rotated"), [(FP8, False), (torch.int8, False), (torch.int8, True)]
)
@interpreted
def test_the_kernel_rounds_as_torch(
    width: int, dtype: torch.dtype, small: torch.dtype, rotated: bool
):
    """Ties, which are frequent among bfloat16 numbers, tell factors apart that differ by a bit."""
    x = spread(7, width, seed=3).to(dtype)
    x[3] = 0
    ours = quantize_rows(x, Rows.empty(x.shape, small, CPU), rotated=rotated)
    theirs = quantize(x, dtype=small, rotated=rotated)
    assert torch.equal(ours.scales, theirs.scales)
    assert torch.equal(ours.values.float(), theirs.values.float())


@pytest.mark.parametrize("writes_sum", [False, True])
@pytest.mark.parametrize("shift", [0.0, 1.0])
@interpreted
def test_the_norm_writes_rows(writes_sum: bool, shift: float):
    parts = torch.randn(3, 6, 40)
    weight = torch.rand(40)
    settings: dict[str, Any] = {"writes_sum": writes_sum, "shift": shift}
    expected = quantize(add_rms_norm(parts.clone().unbind(), weight, 0.3, **settings))
    rows = Rows.empty((6, 40), FP8, CPU)
    kept = parts.clone()
    values = add_rms_norm(kept.unbind(), weight, 0.3, **settings, rows=rows)
    assert values is rows.values
    assert relative_l2(rows.wide(), expected.wide()) < 1e-3
    assert torch.equal(kept[0], parts.sum(0)) == writes_sum

    kept = parts.clone()
    normed = add_rms_norm(kept.clone().unbind(), weight, 0.3, **settings)
    integers = Rows.empty((6, 40), torch.int8, CPU)
    add_rms_norm(kept.unbind(), weight, 0.3, **settings, rows=integers, rotated=True)
    expected = quantize(normed, dtype=torch.int8, rotated=True)
    assert relative_l2(integers.wide(), expected.wide()) < 2e-3


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [16, 1488])
@pytest.mark.parametrize("small", SMALL)
@interpreted
def test_the_activation_writes_rows(gelu: bool, width: int, small: torch.dtype):
    gate_up = 3 * torch.randn(5, 2 * width)
    active = swiglu(gate_up, gelu=gelu)
    rows = Rows.empty((5, width), small, CPU)
    assert swiglu(gate_up, gelu=gelu, rows=rows) is rows.values
    assert relative_l2(rows.wide(), quantize(active, dtype=small).wide()) < 1e-3

    rotated = Rows.empty((5, width), small, CPU)
    swiglu(gate_up, gelu=gelu, rows=rotated, rotated=True)
    assert relative_l2(rotated.wide(), quantize(rotate(active), dtype=small).wide()) < 1e-3


@interpreted
def test_the_activation_of_a_broken_row_is_broken():
    gate_up = torch.ones(2, 2 * 48)
    gate_up[1, 70] = math.nan
    rows = Rows.empty((2, 48), torch.int8, CPU)
    swiglu(gate_up, rows=rows, rotated=True)
    assert rows.wide()[0].isfinite().all()
    assert rows.wide()[1].isnan().all()


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("small", SMALL)
def test_a_product_is_that_of_the_rounded_matrices(count: int, biased: bool, small: torch.dtype):
    x = quantize(spread(count, 48), dtype=small)
    weight = quantize(spread(32, 48, seed=1), dtype=small)
    bias = torch.randn(32) if biased else None
    expected = torch.nn.functional.linear(x.wide(), weight.wide(), bias)
    out = product(x, weight, bias, torch.float32)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("place", [1, 2])
@interpreted
def test_the_norm_multiplies_products_by_their_scales(place: int):
    x = quantize(spread(5, 48).clamp(-10, 10))
    weight = quantize(spread(32, 48, seed=1).clamp(-10, 10))
    apart = unscaled_product(x, weight, torch.ones(()), torch.float32)
    whole = product(x, weight, None, torch.float32)
    factors = torch.rand(32)
    others = torch.randn(2, 5, 32)
    results = []
    for part in (apart, whole):
        parts = [*others.clone()]
        parts.insert(place, part)
        normed = add_rms_norm(parts, factors, 1e-6, writes_sum=True)
        results.append((normed, parts[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the twin


class Rounded(nn.Module):
    """Round rows, rotated before and turned back if they are of integers."""

    def __init__(self, small: torch.dtype) -> None:
        super().__init__()
        self.small = small

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        if self.small == FP8:
            return quantize(rows, dtype=self.small).wide().view_as(x)
        return (rotate(quantize(rotate(rows), dtype=self.small).wide()) / ROTATED).view_as(x)


def in_eight_bits(model: PreTrainedModel, quantization: str = "fp8") -> Any:
    """Return a copy with the same arithmetic in plain torch: rounded inputs times rounded weights."""
    rounded: Any = copy.deepcopy(model)
    for linear in rounded.model.layers.modules():
        if isinstance(linear, nn.Linear):
            own = Rounded(DTYPES[quantization])
            parametrize.register_parametrization(linear, "weight", own, unsafe=True)
            linear.register_forward_pre_hook(lambda _, given, own=own: own(given[0]))
    return rounded


@pytest.fixture(autouse=True)
def _equal_weights() -> None:
    """Draw the same weights in every run: a number between two of eight bits may go to either."""
    torch.manual_seed(0)


def make_twin(
    model: PreTrainedModel, dtype: torch.dtype = torch.float32, quantization: str = "fp8"
) -> ModelTwin:
    return ModelTwin(model, attention="eager", dtype=dtype, device=CPU, quantization=quantization)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_twin_computes_with_rounded_weights_and_inputs(family: str, quantization: str):
    model = make_model(family, torch.float32)
    twin = make_twin(model, quantization=quantization)
    ids = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(0))
    expected = in_eight_bits(model, quantization)(input_ids=ids).logits
    exact = cast(Any, model)(input_ids=ids).logits
    found = cast(Any, twin.module)(input_ids=ids).logits
    assert relative_l2(found, expected) < 0.01
    assert SMALLEST_ERROR[quantization] < relative_l2(expected, exact) < 0.5, "rounding must matter"

    linears = [part for part in twin.module.modules() if isinstance(part, EightBitLinear)]
    assert len(linears) == 2 * 7
    assert all(linear.weight.dtype == DTYPES[quantization] for linear in linears)
    others = {
        name: tensor
        for name, tensor in twin.module.named_parameters()
        if tensor.dtype != DTYPES[quantization]
    }
    assert any("embed" in name for name in others)
    assert all(tensor.dtype == torch.float32 for tensor in others.values())


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_a_hand_over_rounds_the_new_weights_and_proves_those_that_came(quantization: str):
    model = make_model("qwen2", torch.float32)
    twin = make_twin(model, torch.bfloat16, quantization)
    version = twin.version
    name = "model.layers.1.mlp.down_proj.weight"
    linear: Any = twin.module.get_submodule(name.removesuffix(".weight"))
    address = linear.weight.data_ptr()
    assert twin.place(name) is None
    assert twin.place("model.norm.weight") is not None

    for step in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5).add_(0.01 * step)
        sent = {key: tensor.bfloat16() for key, tensor in model.named_parameters()}
        twin.update(sent.items())
        exact = sent[name]
        if quantization == "int8":
            exact = rotate(exact.float()) / ROTATED
        expected = quantize(exact, dtype=DTYPES[quantization])
        assert torch.equal(linear.weight.float(), expected.values.float())
        assert torch.equal(linear.scales, expected.scales)
        found = {key: own.value for key, own in twin.fingerprints().items()}
        assert found == dict(zip(sent, fingerprints(list(sent.values())).tolist()))
    assert linear.weight.data_ptr() == address
    assert twin.version != version

    sent[name][3, 5] += 1
    twin.update(sent.items())
    assert twin.fingerprints()[name].value != found[name]


# ---------------------------------------------------------------- decode steps


def decoded(decoder: TritonDecoder, ids: Tensor) -> Tensor:
    """Feed ids (ROWS, LENGTH): the first tokens in one prefill, the others one by one."""
    first = LENGTH - 3  # the last step begins a second page
    places = torch.arange(first).repeat(ROWS)
    rows = torch.arange(ROWS).repeat_interleave(first)
    ends = torch.arange(0, ROWS * first + 1, first, dtype=torch.int32)
    pages = TABLE[rows, places // PAGE_SIZE].long()
    step = DevicePrefillStep(Layout((first,) * ROWS, ends), pages, places % PAGE_SIZE)
    with decoder.paging.computing(step):
        states = [*decoder(ids[:, :first].flatten(), places, step).view(ROWS, first, -1).unbind(1)]
    for position in range(first, LENGTH):
        positions = torch.full((ROWS,), position)
        states.append(decoder(ids[:, position], positions, make_step(positions, TABLE)))
    return torch.stack(states, dim=1)


# Qwen2 has biases; Gemma 3 has norms per head and after each part. Attention, with Gemma 2's cap, is
# the same with weights in eight bits: tests/rollout/test_cuda_decoder.py has it.
@pytest.mark.parametrize(
    ("quantization", "family"),
    cases(
        ["fp8", "int8"],
        ["qwen2", "gemma3", "qwen3", "gemma2"],
        quick=lambda *case: case in [("fp8", "qwen2"), ("int8", "gemma3")],
    ),
)
@interpreted
def test_decode_steps_equal_the_arithmetic_in_plain_torch(family: str, quantization: str):
    model = make_model(family, torch.float32)
    decoder = make_decoder(make_twin(model, quantization=quantization).module)
    ids = torch.randint(50, (ROWS, LENGTH))
    expected = in_eight_bits(model, quantization).model(input_ids=ids).last_hidden_state
    exact = cast(Any, model).model(input_ids=ids).last_hidden_state
    found = decoded(decoder, ids)
    assert relative_l2(found, expected) < 0.01
    assert SMALLEST_ERROR[quantization] < relative_l2(expected, exact) < 0.5, "rounding must matter"


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"deterministic": True}, "quantization=fp8 .*deterministic=true forbids"),
        ({"tensor_model_parallel_size": 2}, "needs whole weights, got .*parallel_size=2"),
        ({"dtype": "float16"}, "else in bfloat16, got .*dtype=float16"),
        ({"name": "hf"}, "name=hf. Set name=embedded, or quantization=null; vLLM servers"),
    ],
)
def test_settings_that_exclude_eight_bits(setting: dict[str, Any], message: str):
    check_engine(RolloutConfig(quantization="fp8"))
    check_engine(RolloutConfig(**setting))
    with pytest.raises(ConfigError, match=message):
        check_engine(RolloutConfig(quantization="fp8", **setting))


def test_devices_and_families_without_eight_bits():
    config = RolloutConfig(quantization="fp8")
    check_engine_model(config, make_model("qwen3", torch.float32).config, on_cuda=True)
    with pytest.raises(ConfigError, match="generates on a CPU. Set it to null"):
        check_engine_model(config, make_model("qwen3", torch.float32).config, on_cuda=False)
    with pytest.raises(ConfigError, match="supports the families llama, .* got 'qwen3_moe'"):
        check_engine_model(config, make_model("qwen3_moe", torch.float32).config, on_cuda=True)


def test_odd_sizes_are_refused_by_name():
    model = tiny_model("qwen2", intermediate_size=72)
    with pytest.raises(ConfigError, match="multiples of 16, got .* in 'model.layers.0.mlp.gate_pr"):
        make_twin(model)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_counts_the_bytes_that_the_twin_has(family: str):
    model = make_model(family, torch.float32)
    twin = make_twin(model, torch.bfloat16)
    shape = ModelShape.from_module(model)
    config = RolloutConfig(quantization="fp8", dtype="bfloat16")
    batch = BatchPlan.of(TrainConfig(), 1)
    plan = plan_rollout(config, shape, batch, on_cuda=True, aliases=False, ranks=1, room=None)
    assert plan.weights == twin.copied_bytes
