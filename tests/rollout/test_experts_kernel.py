"""Kernels of mixtures of experts, interpreted on the CPU and compared with transformers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.cases import cases
from tests.rollout.interpreter import interpreted
from verl.models.experts import Mixture, Routing
from verl.rollout.embedded.kernels.experts import mix_experts
from verl.rollout.embedded.kernels.routing import route, sort_pairs

ROWS = 13
SIZES: dict[str, Any] = {"hidden_size": 40, "intermediate_size": 24, "num_experts_per_tok": 3}
FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss")


def make_block(family: str) -> nn.Module:
    block: Any
    if family == "mixtral":
        block = MixtralSparseMoeBlock(MixtralConfig(**SIZES, num_local_experts=6))
    elif family == "gpt_oss":
        block = GptOssMLP(GptOssConfig(**SIZES, num_local_experts=6, swiglu_limit=0.5))
    else:
        config = Qwen3MoeConfig(
            **SIZES,
            num_experts=6,
            moe_intermediate_size=24,
            norm_topk_prob=family == "qwen3_moe",  # olmoe's block has the same code
        )
        block = Qwen3MoeSparseMoeBlock(config)
    block.experts.config._experts_implementation = "eager"
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block.eval().requires_grad_(False)


def mixed(block: nn.Module, family: str, states: Tensor, routing: Routing) -> Tensor:
    mixture = Mixture.of(block, family)
    assert mixture is not None
    router = mixture.router
    logits = F.linear(states, router.weight, getattr(router, "bias", None))
    ids, scores = route(logits, routing)
    return mix_experts(states, ids, scores, mixture.weights).sum(0)


@pytest.mark.parametrize(
    "family", cases(FAMILIES, quick=lambda family: family in {"mixtral", "gpt_oss"})
)
@interpreted
def test_experts_equal_those_of_transformers(family: str):
    block = make_block(family)
    states = torch.randn(1, ROWS, 40)
    expected = block(states)
    expected = expected[0] if isinstance(expected, tuple) else expected
    mixture = Mixture.of(block, family)
    assert mixture is not None
    out = mixed(block, family, states[0], mixture.routing)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)

    # A router that normalizes its scores otherwise is far off.
    wrong = Routing(3, normalized=family == "olmoe")
    assert (mixed(block, family, states[0], wrong) - expected[0]).abs().max() > 0.1


@pytest.mark.parametrize("rows", [1, 50])
@interpreted
def test_pairs_are_sorted_and_cut_into_tiles(rows: int):
    experts, tile = 5, 16
    ids = torch.stack([torch.randperm(experts)[:2] for _ in range(rows)]).int()
    ids[: rows // 2, 0] = 3  # an expert with more pairs than a tile
    order = sort_pairs(ids, experts, tile)
    flat = ids.flatten().long()
    assert torch.equal(order.pairs.long(), flat.sort(stable=True).indices)

    covered = []
    for expert, start, stop in zip(*(part.tolist() for part in order[1:])):
        if expert < 0:
            continue
        stop = min(stop, start + tile)
        assert start < stop
        assert set(flat[order.pairs[start:stop].long()].tolist()) == {expert}
        covered += range(start, stop)
    assert covered == list(range(2 * rows))
