"""SwiGLU within the product of gate and up, if quack-kernels is installed."""

import pytest
import torch

from tests.engine.batches import make_batch
from tests.gpu.test_engine_gpu import BUDGET, SHAPES, gradient, make_engine, relative_l2
from verl.models.kernels import swiglu

DEVICE = torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not swiglu.is_available(DEVICE), reason="quack-kernels are not installed"),
]


@pytest.mark.parametrize("size", [(64, 96), (896, 4864), (1536, 8960), (3584, 18944)])
def test_output(size: tuple[int, int]):
    assert swiglu._difference(DEVICE, *size) < 5e-3


@pytest.mark.parametrize("rows", [65, 512, 1000])
def test_rows_of_a_decode_step(rows: int):
    x = torch.randn(rows, 1536, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(2 * 8960, 1536, device=DEVICE, dtype=torch.float16) / 1536**0.5
    gate, up = (x.float() @ weight.float().t()).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert relative_l2(swiglu.gated_product(x, weight).float(), exact) < 2e-3


def test_an_engine_with_the_fused_kernel():
    plain = make_engine("cuda", use_torch_compile=True)
    fused = make_engine("cuda", use_torch_compile=True, use_fused_kernels=True)
    assert relative_l2(gradient(fused), gradient(plain)) < 1e-3
    one, other = (
        engine.infer(make_batch(SHAPES), BUDGET)["log_probs"] for engine in (fused, plain)
    )
    assert 1e-5 < (one - other).abs().mean() < 0.03
