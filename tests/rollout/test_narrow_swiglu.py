"""SwiGLU of few rows by Triton's interpreter: cut tiles, activations, broken rows."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.rollout.interpreter import interpreted
from verl.rollout.embedded.kernels.narrow_swiglu import can_gate, gated_product


@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 8, 64), (17, 100, 192), (64, 64, 128)])
@pytest.mark.parametrize("gelu", [False, True])
@interpreted
def test_gated_products_are_those_of_torch(rows: int, columns: int, inner: int, gelu: bool):
    x = torch.randn(rows, inner).half()
    weight = torch.randn(2 * columns, inner).half() / inner**0.5
    gate, up = F.linear(x.float(), weight.float()).half().float().chunk(2, dim=1)
    active = F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)
    found = gated_product(x, weight, gelu=gelu)
    # A sum in another order may round a product to its neighbor.
    torch.testing.assert_close(found.float(), active * up, rtol=4e-3, atol=2e-3)


@interpreted
def test_broken_rows_stay_alone():
    x = torch.randn(5, 128).half()
    x[2, 7] = math.nan
    finite = gated_product(x, torch.randn(16, 128).half()).isfinite().all(1)
    assert finite.tolist() == [True, True, False, True, True]


def test_sizes_without_a_kernel(monkeypatch: pytest.MonkeyPatch):
    cpu = torch.device("cpu")
    assert can_gate(64, 896, cpu)
    assert not can_gate(65, 896, cpu)
    assert not can_gate(1, 900, cpu)

    for kib, fits in ((227, True), (99, False)):
        properties = SimpleNamespace(shared_memory_per_block_optin=kib * 1024)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert can_gate(64, 896, torch.device("cuda", kib)) is fits
