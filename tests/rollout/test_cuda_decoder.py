"""Decode steps of the Triton decoder, interpreted on the CPU and compared with transformers;
tests/gpu has whole rollouts."""

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.rollout.interpreter import interpreted
from verl.models.attention import Layout
from verl.rollout.eight_bits import DTYPES, EightBitLinear, Rows
from verl.rollout.embedded import cuda_decoder
from verl.rollout.embedded.attention import LayerPages, Paging, PrefillStep
from verl.rollout.embedded.cuda_decoder import DevicePrefillStep, DeviceStep, Slots, TritonDecoder
from verl.rollout.embedded.extension import extend_step
from verl.rollout.embedded.kernels.decode_launch import split_workspace

ROWS = 2
LENGTH = 10
PAGE_SIZE = 8
WIDTH = 2
STEPS = 3
AHEAD = LENGTH - STEPS  # of the second sequence's tokens, computed before the first step
BOTH = torch.arange(ROWS)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# For families whose experts have this width: a full tile of the kernel and a part of one.
SMALL = SIZES | {"intermediate_size": 40}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
WINDOWS: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
TABLE = (
    torch.randperm(ROWS * WIDTH, generator=torch.Generator().manual_seed(0)).view(ROWS, WIDTH).int()
)


def make_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    model: Any
    if family == "qwen2":  # biases
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES))
    elif family == "qwen3":  # norms per head
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16))
    elif family == "qwen3_moe":  # the first layer is dense
        config = Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, mlp_only_layers=[0])
        model = Qwen3MoeForCausalLM(config)
    elif family == "qwen2_moe":  # a shared expert
        config = Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=40)
        model = Qwen2MoeForCausalLM(config)
    elif family == "gemma2":  # caps, norms after each part
        config = Gemma2Config(
            **SIZES, **WINDOWS, attn_logit_softcapping=1.0, query_pre_attn_scalar=4
        )
        model = Gemma2ForCausalLM(config)
        model.set_attn_implementation("eager")  # other implementations may leave out the cap
    elif family == "gemma3":  # norms per head, two kinds of angles
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **WINDOWS, query_pre_attn_scalar=4))
    elif family == "gpt_oss":  # sinks, biases of experts
        model = GptOssForCausalLM(
            GptOssConfig(**SMALL, **WINDOWS, num_local_experts=6, num_experts_per_tok=2)
        )
    else:
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=6, sliding_window=4))
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        else:  # default ones are too flat for a router to matter
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval().requires_grad_(False)


class Twin(SimpleNamespace):
    def stacked(self, linears: list[Any]) -> tuple[Any, Tensor | None]:
        biases = [linear.bias for linear in linears if linear.bias is not None]
        weight: Any = torch.cat([linear.weight for linear in linears])
        if self.quantization is not None:
            weight = Rows(weight, torch.cat([linear.scales for linear in linears]))
        return weight, torch.cat(biases) if biases else None


def make_decoder(
    model: PreTrainedModel, cache_dtype: torch.dtype | None = None, pages: int = ROWS * WIDTH
) -> TritonDecoder:
    """Build a decoder with pages of NaN, in the model's dtype unless another one is given."""
    module: Any = copy.deepcopy(model)
    paging = Paging(module)
    zeros = torch.zeros(1, dtype=torch.long)
    layout = Layout((1,), torch.tensor([0, 1], dtype=torch.int32))
    with paging.counting() as seen, paging.computing(PrefillStep(layout, zeros, zeros)):
        module.base_model(input_ids=zeros[None], position_ids=zeros[None], use_cache=False)
    for layer, shape in seen.items():
        parts = []
        for size, dtype in shape.page_parts(PAGE_SIZE, cache_dtype or module.dtype):
            parts.append(torch.full((pages, *size), float("nan")).to(dtype))
        paging.layers[layer] = LayerPages(*parts)
    small = {part.dtype for part in module.modules() if isinstance(part, EightBitLinear)}
    names = [name for name, dtype in DTYPES.items() if dtype in small]
    twin = cast(Any, Twin(dtype=module.dtype, quantization=names[0] if names else None))
    return TritonDecoder(twin, module, paging, dict(seen), max_positions=64)


def make_step(
    positions: Tensor, table: Tensor, num_splits: int = 1, *, takes_fresh: bool = True
) -> DeviceStep:
    """Build a step in which row i is slot i."""
    rows = len(positions)
    state = Slots.allocate(rows, WIDTH, torch.device("cpu"))
    state.positions.copy_(positions)
    state.table.copy_(table)
    pages = table[torch.arange(rows), positions // PAGE_SIZE].long()
    workspace = split_workspace(rows, 4, 16, num_splits, "cpu") if num_splits > 1 else None
    slots = torch.arange(rows, dtype=torch.int32)
    return DeviceStep(
        slots, state, pages, positions % PAGE_SIZE, num_splits, None, workspace, takes_fresh
    )


def product_of_halves(one: Tensor, other: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Replace torch.bmm, which has no `out_dtype` on the CPU."""
    return torch.matmul(one.to(out_dtype), other.to(out_dtype))


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        pytest.param("qwen2", torch.float16, 3e-2, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.float32, 1e-4, marks=pytest.mark.slow),
        ("qwen3_moe", torch.float32, 1e-4),
        pytest.param("qwen2_moe", torch.float32, 1e-4, marks=pytest.mark.slow),
        pytest.param("mixtral", torch.float32, 1e-4, marks=pytest.mark.slow),
        pytest.param("gemma2", torch.float32, 1e-4, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.float32, 1e-4, marks=pytest.mark.slow),
        pytest.param("gemma3", torch.float16, 6e-2, marks=pytest.mark.slow),
        pytest.param("gpt_oss", torch.float32, 1e-4, marks=pytest.mark.slow),
    ],
)
@interpreted
def test_decode_steps_equal_transformers(family: str, dtype: torch.dtype, tolerance: float):
    model = make_model(family, dtype)
    decoder = make_decoder(model)
    ids = torch.randint(50, (ROWS, LENGTH))
    truth = cast(Any, model).model(input_ids=ids).last_hidden_state.float()
    with (
        patch.object(cuda_decoder, "_SHORTEST", 16),
        patch.object(torch, "bmm", wraps=product_of_halves) as products,
    ):
        # The second sequence is ahead: it leaves the window and enters its second page.
        places = torch.arange(AHEAD)
        ends = torch.tensor([0, AHEAD], dtype=torch.int32)
        pages = TABLE[1, places // PAGE_SIZE].long()
        first = PrefillStep(Layout((AHEAD,), ends), pages, places % PAGE_SIZE)
        with decoder.paging.computing(first):
            decoder(ids[1, :AHEAD], places, first)
        products.reset_mock()

        for step_number in range(STEPS):
            place = torch.tensor([step_number, AHEAD + step_number])
            step = make_step(place, TABLE, num_splits=1 + step_number % 2)
            states = decoder(ids[BOTH, place], place, step)
            torch.testing.assert_close(states.float(), truth[BOTH, place], rtol=0, atol=tolerance)
        assert products.call_count == (0 if dtype == torch.float32 else STEPS * 2 * 2), (
            "products were to be split"
        )

        # New tokens of both sequences after some that have their keys in pages.
        cached = (3, 9)
        rows = []
        places = []
        for row, start in enumerate(cached):
            first_page = int(TABLE[row, start // PAGE_SIZE])
            for cache in (
                cache for layer in decoder.paging.layers.values() for cache in layer.tensors
            ):
                cache[TABLE[row, start // PAGE_SIZE + 1 :].long()] = float("nan")
                cache[first_page, :, start % PAGE_SIZE :] = float("nan")
            rows += [row] * (LENGTH - start)
            places += range(start, LENGTH)

        row = torch.tensor(rows)
        place = torch.tensor(places)
        counts = tuple(LENGTH - start for start in cached)
        layout = Layout(counts, torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32))
        pages = TABLE[row, place // PAGE_SIZE].long()
        new = DevicePrefillStep(layout, pages, place % PAGE_SIZE)
        step = extend_step(new, cached, TABLE.tolist(), PAGE_SIZE)
        states = decoder(ids[row, place], place, step)
        torch.testing.assert_close(states.float(), truth[row, place], rtol=0, atol=tolerance)


DROPPED: dict[str, dict[str, Any]] = {
    "gemma2": {"cap": None, "window": None},
    "gemma3": {"window": None},
    "gpt_oss": {"sinks": None, "window": None},
}


@pytest.mark.parametrize("family", list(DROPPED))
@interpreted
def test_prefill_equals_transformers_and_parts_of_attention_matter(family: str):
    """Compute whole sequences at once, and again without the window, the cap or the sinks."""
    model = make_model(family, torch.float32)
    decoder = make_decoder(model)
    ids = torch.randint(50, (LENGTH,))
    truth = cast(Any, model).model(input_ids=ids[None]).last_hidden_state[0]
    positions = torch.arange(LENGTH)
    ends = torch.tensor([0, LENGTH], dtype=torch.int32)
    pages = TABLE[0, positions // PAGE_SIZE].long()
    step = PrefillStep(Layout((LENGTH,), ends), pages, positions % PAGE_SIZE)

    def computed() -> Tensor:
        with decoder.paging.computing(step):
            return decoder(ids, positions, step)

    torch.testing.assert_close(computed(), truth, rtol=0, atol=1e-4)
    layers = decoder.layers
    for name, value in DROPPED[family].items():
        changed = []
        for layer in layers:
            changed.append(dataclasses.replace(layer, facts=layer.facts._replace(**{name: value})))
        for old, new in zip(layers, changed):
            decoder._projections[id(new)] = decoder._projections[id(old)]
        decoder.layers = changed
        assert (computed() - truth).abs().max() > 0.02, f"{name} changes nothing"
    decoder.layers = layers
