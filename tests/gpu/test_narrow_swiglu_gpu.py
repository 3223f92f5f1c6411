"""SwiGLU of few rows on a device, at the sizes of models, against fp32."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.test_engine_gpu import relative_l2
from verl.rollout.embedded.kernels.narrow_swiglu import gated_product

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
SIZES = [(896, 4864), (1536, 8960), (3584, 18_944)]  # hidden and intermediate


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 16, 17, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_product(rows: int, size: tuple[int, int], dtype: torch.dtype):
    hidden, intermediate = size
    x = draw(rows, hidden, dtype=dtype)
    weight = draw(2 * intermediate, hidden, dtype=dtype)
    gate, up = (x.float() @ weight.float().t() / hidden**0.5).chunk(2, dim=-1)
    found = gated_product(x, weight / hidden**0.5).float()
    assert relative_l2(found, F.silu(gate) * up) < 1e-2
