"""The fused gated MLP: the modules that use it, and when. The formula replaces its kernel."""

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.tiny_models import tiny_model
from verl.models.families import LLAMA_FAMILIES
from verl.models.kernels import swiglu
from verl.models.kernels.swiglu import use_fused_swiglu
from verl.models.lora import apply_lora

CUDA = torch.device("cuda")
calls: list[torch.Size] = []


def formula(x: Tensor, weight: Tensor, **options: Any) -> tuple[None, Tensor]:
    """Compute the results of `gemm_gated`."""
    assert options == {
        "activation": "swiglu",
        "store_preact": False,
        "tuned": False,
        "concat_layout": ("B",),
    }
    calls.append(x.shape)
    gate, up = (x @ weight).chunk(2, dim=-1)
    return None, F.silu(gate) * up


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swiglu, "_kernel", lambda: formula)
    monkeypatch.setattr(swiglu, "is_available", lambda device: True)
    monkeypatch.setattr(swiglu, "_is_proved", lambda *size: True)
    calls.clear()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("family", "compiled"),
    [
        *((family, False) for family in sorted(LLAMA_FAMILIES)),
        pytest.param("qwen2", True, marks=pytest.mark.slow),
    ],
)
def test_the_outputs_of_a_model_do_not_change(family: str, compiled: bool):
    # With compilation, each layer is compiled three times.
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=1 if compiled else 2)
    ids = torch.arange(12)[None]
    want = model(ids).logits
    layers = model.config.num_hidden_layers
    assert use_fused_swiglu(model, CUDA) == layers
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    model(ids).logits.sum().backward()

    assert not calls, "with gradients as before"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, want, rtol=0.05, atol=0.05)
        assert calls == [(12, model.config.hidden_size)] * layers
        model.float()
        assert model(ids).logits.dtype == torch.float32
        assert len(calls) == layers, "other dtypes as before"

    assert use_fused_swiglu(model, CUDA) == 0, "twice changes nothing"


@pytest.mark.usefixtures("installed")
def test_unsupported_modules_are_unchanged():
    assert use_fused_swiglu(tiny_model("gemma2"), CUDA) == 0, "another activation"
    adapted = tiny_model("qwen2")
    apply_lora(adapted, rank=2, alpha=4)
    assert use_fused_swiglu(adapted, CUDA) == 0, "adapters"
    assert use_fused_swiglu(tiny_model("llama", mlp_bias=True), CUDA) == 0, "biases"


def test_a_kernel_that_fails_or_errs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(swiglu, "is_available", lambda device: True)
    caplog.set_level(logging.INFO, logger="verl")

    def wrong(x: Tensor, weight: Tensor, **options: Any) -> tuple[None, Tensor]:
        return None, 1.1 * formula(x, weight, **options)[1]

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such architecture")

    for kernel, message in (
        (wrong, "differ from PyTorch by 1"),
        (failing, "no such architecture"),
        (formula, "SwiGLU within its products"),
    ):
        swiglu._is_proved.cache_clear()
        monkeypatch.setattr(swiglu, "_kernel", lambda kernel=kernel: kernel)
        caplog.clear()
        count = use_fused_swiglu(tiny_model("qwen2"), torch.device("cpu"))
        assert count == (2 if kernel is formula else 0)
        assert message in caplog.text
    swiglu._is_proved.cache_clear()


def test_no_fusion_on_a_cpu():
    assert not swiglu.is_available(torch.device("cpu"))
    assert use_fused_swiglu(tiny_model("qwen2"), torch.device("cpu")) == 0
