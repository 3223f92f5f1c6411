"""Every available attention kernel against PyTorch's own, and the choice among them."""

import pytest
import torch

from verl.models.kernels import attention as attention_kernels
from verl.models.kernels.attention import (
    choose_kernel,
    cudnn_attention,
    flash4_attention,
    torch_attention,
)
from verl.utils.imports import is_installed

pytestmark = pytest.mark.gpu

SHAPES = [(12, 2, 128), (28, 4, 128), (14, 2, 64)]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cudnn(shape: tuple[int, int, int], dtype: torch.dtype):
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("cuDNN's attention is chosen on Hopper and later")
    difference = attention_kernels._difference(cudnn_attention, DEVICE, dtype, *shape)
    assert difference < attention_kernels._TOLERANCE[dtype]


@pytest.mark.skipif(not is_installed("flash-attn-4"), reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("shape", SHAPES)
def test_flash4(shape: tuple[int, int, int]):
    difference = attention_kernels._difference(flash4_attention, DEVICE, torch.bfloat16, *shape)
    assert difference < attention_kernels._TOLERANCE[torch.bfloat16]


def test_a_wrong_kernel_is_not_chosen(monkeypatch, caplog):
    def shifted(*arguments):
        return torch_attention(*arguments) * 1.1

    monkeypatch.setitem(attention_kernels._FUNCTIONS, "cudnn", shifted)
    monkeypatch.setattr(attention_kernels, "_candidates", lambda device: iter(["cudnn"]))
    assert choose_kernel("auto", DEVICE, torch.bfloat16, 6, 2, 64) is torch_attention
    assert "differs" in caplog.text
