"""Weights in eight bits on one CUDA device: rounding, products, distributions, graphs, hand-overs."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import agreement_fp8

from tests.rollout.engines import PROMPTS, make_engine, run, tokens_of
from tests.tiny_models import tiny_model
from verl.rollout import fp8
from verl.rollout.embedded.cuda_decoder import TritonDecoder
from verl.rollout.embedded.kernels.fp8 import quantize_rows
from verl.rollout.embedded.kernels.layers import add_rms_norm, swiglu
from verl.rollout.fp8 import Fp8Linear, Rows, product, quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="eight-bit products of scaled rows need Hopper",
    ),
]
CUDA = torch.device("cuda", 0)
# (N, K) of the products of a 7B layer: query, key and value; output; gate and up; down
SHAPES = [(4608, 3584), (3584, 3584), (37_888, 3584), (3584, 18_944)]
WIDTHS = [64, 896, 3584, 18_944]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]


def relative_l2(one: Tensor, other: Tensor) -> float:
    return ((one.float() - other.float()).norm() / other.float().norm()).item()


def fp8_engine(model: PreTrainedModel, **settings: Any) -> Any:
    return make_engine(model, device="cuda", quantization="fp8", **settings)


def bf16_engine(model: PreTrainedModel, **settings: Any) -> Any:
    return make_engine(model, device="cuda", dtype="bfloat16", **settings)


def realistic_model(layers: int = 8, *, untied: bool = True) -> PreTrainedModel:
    """Return a damped random model with spread weights: rows and columns of different sizes.

    Trained models have a few channels that are many times larger than the others, in the residual
    stream and in the factors of norms.
    """
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=not untied,
        initializer_range=0.05,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    agreement_fp8.damp(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and ".layers." in name:
                rows = torch.randn(parameter.shape[0], 1, generator=generator)
                parameter.mul_((0.4 * rows).exp())
            elif "norm" in name:
                parameter.mul_((0.3 * torch.randn(parameter.shape, generator=generator)).exp())
                parameter[:4] *= 8
    return model.to("cuda", torch.bfloat16)


# ---------------------------------------------------------------- kernels


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_as_on_a_cpu(width: int, dtype: torch.dtype):
    x = torch.randn(37, width) * torch.logspace(-6, 3, 37)[:, None] * torch.randn(37, width).exp()
    x[5] = 0
    x = x.to(dtype)
    ours = quantize_rows(x.cuda())
    theirs = quantize(x)
    torch.testing.assert_close(ours.scales.cpu(), theirs.scales, rtol=1e-6, atol=0)
    equal = (ours.values.cpu().float() == theirs.values.float()).float().mean().item()
    assert equal > 0.999, f"{1 - equal:.2%} of the numbers are rounded in another way"
    assert relative_l2(ours.wide().cpu(), theirs.wide()) < 1e-3


def test_broken_rows_stay_broken():
    x = torch.zeros(3, 64, device="cuda")
    x[1, 4] = float("nan")
    x[2, 5] = float("inf")
    weight = quantize(torch.ones(32, 64, device="cuda"))
    out = product(quantize_rows(x), weight, None, torch.bfloat16)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out[1].isnan().any()
    assert not out[2].isfinite().all()


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_and_activations_write_rows(width: int):
    parts = torch.randn(3, 70, width, device="cuda", dtype=torch.bfloat16)
    weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
    exact = [part.float() for part in parts.unbind()]
    wide = add_rms_norm(exact, weight.float(), 1e-6, writes_sum=False)
    rows = Rows.empty((70, width), CUDA)
    add_rms_norm(parts.unbind(), weight, 1e-6, writes_sum=False, rows=rows)
    assert relative_l2(rows.wide(), quantize(wide).wide()) < 5e-3

    gate_up = 2 * torch.randn(70, 2 * width, device="cuda", dtype=torch.bfloat16)
    rows = Rows.empty((70, width), CUDA)
    swiglu(gate_up, rows=rows)
    assert relative_l2(rows.wide(), quantize(swiglu(gate_up.float())).wide()) < 5e-3


@pytest.mark.parametrize(("columns", "inner"), SHAPES)
@pytest.mark.parametrize("fast", [False, True])
def test_products_of_a_7b_layer(columns: int, inner: int, fast: bool, monkeypatch):
    """Compare with the product of the rounded matrices in fp32, for every size of batch."""
    monkeypatch.setattr(fp8, "FAST_ACCUMULATION", fast)
    weight = quantize(0.02 * torch.randn(columns, inner, device="cuda"))
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    wide = weight.wide()
    errors = {}
    for count in (1, 2, 3, 8, 16, 33, 64, 130, 257, 1024):
        x = quantize(torch.randn(count, inner, device="cuda"))
        expected = torch.nn.functional.linear(x.wide(), wide, bias.float())
        errors[count] = relative_l2(product(x, weight, bias, torch.bfloat16), expected)
        plain = product(x, weight, None, torch.bfloat16)
        errors[count] = max(errors[count], relative_l2(plain, expected - bias.float()))
    print(f"({columns}, {inner}), fast {fast}: {errors}")
    assert max(errors.values()) < 6e-3, errors


# ---------------------------------------------------------------- the engine


def measured_kl(model: PreTrainedModel) -> tuple[float, float]:
    """Return the mean KL of eight bits to bfloat16, and of bfloat16 to float32."""
    found = agreement_fp8.measure(model, CUDA)
    print(found)
    return found["KL(bfloat16 || fp8)"], found["KL(float32 || bfloat16)"]


def test_kl_per_token_with_spread_weights():
    rounding, ordinary = measured_kl(realistic_model())
    # Of 4 bits against 8, an error of 13 times in each number: at most some hundred times the KL.
    assert ordinary < rounding < 300 * ordinary


def test_kl_per_token_of_a_tiny_model_is_above_bf16_and_bounded():
    model = tiny_model("qwen2", hidden_size=64, intermediate_size=128, head_dim=16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # fierce weights make every rounding a new answer
    rounding, ordinary = measured_kl(model.to("cuda", torch.bfloat16))
    assert ordinary < rounding < 0.2


@pytest.mark.parametrize("family", FAMILIES)
def test_decode_steps_draw_from_the_distribution_of_a_prefill(family: str):
    """Recorded log-probs are those of the rounded weights, however a token is computed."""
    model = tiny_model(family, head_dim=16, hidden_size=64, intermediate_size=128).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
        if family == "gemma3":  # its tied head makes one token certain
            model.get_input_embeddings().weight.mul_(0.1)
    engine = fp8_engine(model)
    drawn = run(engine, PROMPTS, n=4, ignore_eos=True)
    assert isinstance(engine.runner._body, TritonDecoder)
    sequences = [[*PROMPTS[own.sample_id // 4], *own.token_ids] for own in drawn]
    states = agreement_fp8.hidden_states(engine, sequences)
    log_probs = agreement_fp8.log_probs(engine, states)
    exact = bf16_engine(model)
    run(exact, PROMPTS, max_new_tokens=1)
    other = agreement_fp8.log_probs(exact, agreement_fp8.hidden_states(exact, sequences))

    near = []
    far = []
    start = 0
    for own, sequence in zip(drawn, sequences):
        first = start + len(sequence) - len(own.token_ids) - 1
        rows = torch.arange(first, first + len(own.token_ids), device="cuda")
        tokens = torch.tensor(own.token_ids, device="cuda")
        recorded = torch.tensor(own.log_probs, device="cuda")
        near.append((log_probs[rows, tokens] - recorded).abs().mean())
        far.append((other[rows, tokens] - recorded).abs().mean())
        start += len(sequence)
    distance = torch.stack(near).median().item()
    to_bf16 = torch.stack(far).median().item()
    print(f"{family}: recorded to prefill {distance:.4f}, to bfloat16 {to_bf16:.4f}")
    # Another order of sums moves a number over a border of eight bits here and there.
    assert distance < 0.7 * to_bf16


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2"])
def test_graphs_draw_what_eager_steps_draw(family: str):
    model = tiny_model(family, head_dim=16, hidden_size=64, intermediate_size=128).cuda()
    graphs = fp8_engine(model)
    eager = fp8_engine(model, enforce_eager=True)
    for params in ({"temperature": 0}, {}, {"top_p": 0.8, "top_k": 20}):
        drawn = run(graphs, PROMPTS, n=5, **params)
        assert tokens_of(drawn) == tokens_of(run(eager, PROMPTS, n=5, **params))


def test_hand_overs_round_the_new_weights_at_the_same_addresses():
    model = realistic_model(2)
    engine = fp8_engine(model)
    first = run(engine, PROMPTS, n=2)
    linears = [part for part in engine.twin.module.modules() if isinstance(part, Fp8Linear)]
    addresses = [part.weight.data_ptr() for part in linears]
    before = run(engine, PROMPTS, n=2)
    assert tokens_of(first) == tokens_of(before)

    for step in range(2):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "proj.weight" in name:
                    parameter.add_(0.3 * parameter.roll(1 + step, 0))
        engine.sleep()
        engine.wake()
        engine.update_weights(model.named_parameters())
        drawn = run(engine, PROMPTS, n=2)
        fresh = fp8_engine(model)
        assert tokens_of(drawn) == tokens_of(run(fresh, PROMPTS, n=2))
        assert tokens_of(drawn) != tokens_of(first)
        mine = engine.twin.fingerprints()
        assert mine == fresh.twin.fingerprints()
        assert mine == bf16_engine(model).twin.fingerprints()
    assert [part.weight.data_ptr() for part in linears] == addresses
    print({name: value for name, value in engine.statistics().items() if "update" in name})


def test_stacked_weights_and_their_scales_lie_behind_one_another():
    engine = fp8_engine(realistic_model(2))
    attention = engine.twin.module.model.layers[1].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight, bias = engine.twin.stacked(linears)
    expected = torch.cat([part.rows.wide() for part in linears])
    assert torch.equal(weight.wide(), expected)
    assert torch.equal(bias, torch.cat([part.bias for part in linears]))
    assert weight.values.data_ptr() == attention.q_proj.weight.data_ptr()
    assert weight.scales.data_ptr() == attention.q_proj.scales.data_ptr()


def test_weights_take_about_half_of_the_memory():
    model = realistic_model(8)
    small = fp8_engine(model).twin
    large = bf16_engine(model).twin
    layers = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "proj.weight" in name
    )
    saved = large.copied_bytes - small.copied_bytes
    assert 0.99 * layers < saved < layers
    assert small._memory is not None
    assert large._memory is not None
    assert large._memory.mapped_bytes - small._memory.mapped_bytes > 0.5 * layers
