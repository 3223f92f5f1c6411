"""Batch-invariant computation on CUDA, bit for bit: products at the sizes of real models,
attention, whole families."""

import importlib
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rollout.test_invariant import check_family, invariant_model, offsets
from tests.tiny_models import DETERMINISTIC_FAMILIES
from verl.models.attention import Facts, Layout, block_attention, varlen_can
from verl.models.logprobs import Head
from verl.rollout.embedded import invariant

pytestmark = pytest.mark.gpu
# (N, K) of Qwen2.5 1.5B (q/k/v, output, gate and up, down), 0.5B (output, head) and 7B (q/k/v,
# down); tiny; odd.
WEIGHTS = [
    (2048, 1536),
    (1536, 1536),
    (17920, 1536),
    (1536, 8960),
    (896, 896),
    (151936, 896),
    (4608, 3584),
    (3584, 18944),
    (48, 32),
    (301, 777),
]
ROWS = (1, 2, 3, 16, 63, 64, 65, 128, 200, 256, 1000, 2047)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Import them when a test runs: collecting this file must not need Triton."""
    return importlib.import_module("verl.rollout.embedded.kernels.linear")


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)
    ).to(dtype)


def product(kernels, columns: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = random(2048, inner, dtype=dtype)
    weight = random(columns, inner, dtype=dtype, seed=1) / inner**0.5
    return x, weight, random(columns, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "inner"), WEIGHTS)
def test_a_row_of_a_product_has_the_same_bits_in_every_number_of_rows(
    kernels, columns, inner, dtype
):
    x, weight, bias = product(kernels, columns, inner, dtype)
    whole = kernels.linear(x, weight, bias)
    exact = F.linear(x[:64].double(), weight.double(), bias.double())
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}[dtype]
    assert (whole[:64].double() - exact).norm() <= tolerance * exact.norm()
    for rows in ROWS:
        assert torch.equal(kernels.linear(x[:rows], weight, bias), whole[:rows]), rows
        last = x[2048 - rows :]
        assert torch.equal(kernels.linear(last, weight, bias), whole[2048 - rows :]), rows
    order = torch.randperm(2048, device="cuda")
    assert torch.equal(kernels.linear(x[order], weight, bias), whole[order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("columns", "inner"), WEIGHTS)
def test_no_tile_and_no_location_of_the_splits_changes_a_bit(kernels, columns, inner, dtype):
    """Compare all tiles. If this fails, SMALL must serve every number of rows: then `plan` may only
    choose `in_grid`."""
    x, weight, _ = product(kernels, columns, inner, dtype)
    plan = kernels.plan(1, columns, inner, dtype)
    reference = None
    for rows in (300, 2048):
        for tile in (kernels.SMALL, kernels.LARGE, *([kernels.WIDE] if plan.splits == 1 else [])):
            for in_grid in (False, True) if plan.splits > 1 else (False,):
                out = torch.empty(rows, columns, dtype=torch.float32, device="cuda")
                kernels._launch(
                    x[:rows], weight, None, out, plan._replace(tile=tile, in_grid=in_grid)
                )
                reference = out if reference is None else reference
                assert torch.equal(out[:300], reference), (tile, in_grid)


def test_every_layout_of_a_product_is_tested(kernels):
    plans = {
        kernels.plan(rows, columns, inner, torch.bfloat16)[0::3]
        for rows in (*ROWS, 2048)
        for columns, inner in WEIGHTS
    }
    assert plans >= {
        (kernels.SMALL, True),
        (kernels.SMALL, False),
        (kernels.LARGE, False),
        (kernels.WIDE, False),
    }


def test_a_product_by_a_transposed_weight_from_and_into_parts_of_rows(kernels):
    x, weight, bias = product(kernels, 2048, 1536, torch.bfloat16)
    whole = kernels.linear(x, weight, bias, out_dtype=torch.float32)
    wide = random(100, 4000)
    wide[:, 16 : 16 + 1536] = x[:100]
    out = torch.zeros(100, 3000, device="cuda")
    kernels.linear(wide[:, 16 : 16 + 1536], weight.t().contiguous().t(), bias, out[:, 8 : 8 + 2048])
    assert torch.equal(out[:, 8 : 8 + 2048], whole[:100])
    assert bool((out[:, :8] == 0).all())
    assert bool((out[:, 2056:] == 0).all())


def test_a_product_is_captured_and_replayed(kernels):
    x, weight, bias = product(kernels, 1536, 8960, torch.bfloat16)
    static = x[:24].clone()
    out = torch.empty(24, 1536, dtype=torch.bfloat16, device="cuda")
    kernels.linear(static, weight, bias, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.linear(static, weight, bias, out)
    static.copy_(x[100:124])
    graph.replay()
    assert torch.equal(out, kernels.linear(x, weight, bias)[100:124])


@pytest.mark.parametrize("columns", [7, 896, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_sum_of_a_row_has_the_same_bits_in_every_number_of_rows(kernels, columns, dtype):
    x = random(2048, columns, dtype=dtype)
    whole = kernels.row_sum(x)
    torch.testing.assert_close(whole.double(), x.double().sum(-1), rtol=1e-4, atol=1e-3)
    for rows in ROWS:
        assert torch.equal(kernels.row_sum(x[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_trusted_torch_operations_are_invariant_by_row(dtype):
    x = random(2048, 896, dtype=dtype)
    weight = random(896, dtype=dtype, seed=1)
    heads = x.view(-1, 14, 64)
    operations = {
        "silu": lambda start, stop: F.silu(x[start:stop]),
        "gelu": lambda start, stop: F.gelu(x[start:stop], approximate="tanh"),
        "sigmoid of odd rows": lambda start, stop: torch.sigmoid(x[start:stop, :333].contiguous()),
        "softmax": lambda start, stop: x[start:stop].softmax(-1),
        "softmax of few": lambda start, stop: x[start:stop, :8].softmax(-1),
        "log_softmax": lambda start, stop: x[start:stop].float().log_softmax(-1),
        "layer norm": lambda start, stop: F.layer_norm(x[start:stop], (896,), weight, weight),
        "rms norm": lambda start, stop: F.rms_norm(x[start:stop], (896,), weight, 1e-6),
        "rms norm of heads": lambda start, stop: F.rms_norm(
            heads[start:stop], (64,), weight[:64], 1e-6
        ),
    }

    for name, operation in operations.items():
        whole = operation(0, 2048)
        for rows in ROWS:
            assert torch.equal(operation(0, rows), whole[:rows]), (name, rows)
            assert torch.equal(operation(2048 - rows, 2048), whole[2048 - rows :]), (name, rows)


@pytest.mark.parametrize("window", [None, 16, 500])
@pytest.mark.parametrize(
    ("heads", "key_heads", "dim"), [(12, 2, 128), (14, 2, 64), (8, 8, 64), (8, 1, 256)]
)
def test_the_variable_length_kernel_computes_a_sequence_independently(
    heads, key_heads, dim, window
):
    lengths = (37, 1, 130, 64, 5, 700, 1, 256, 2, 129)
    ends = offsets(lengths).cuda()
    q, k, v = (
        random(sum(lengths), count, dim, seed=count) for count in (heads, key_heads, key_heads)
    )
    facts = Facts(scale=dim**-0.5, window=window, cap=None, sinks=None)
    assert varlen_can(q, v, facts)
    layout = Layout(lengths, ends)

    together = invariant.prefill_attention(q, k, v, layout, facts)
    exact = block_attention(q.double(), k.double(), v.double(), layout, facts)
    assert (together.double() - exact).norm() / exact.norm() < 1e-2

    for start, length in zip(ends.tolist(), lengths):
        mine = slice(start, start + length)
        own = Layout((length,), offsets([length]).cuda())
        alone = invariant.prefill_attention(q[mine], k[mine], v[mine], own, facts)
        assert torch.equal(alone, together[mine]), length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_do_not_depend_on_the_other_rows(dtype):
    hidden = random(300, 896, dtype=dtype)
    weight = random(10_007, 896, dtype=dtype, seed=1) / 30
    for head in (Head(scale=0.7), Head(scale=1.3, cap=3.0)):
        logits = invariant.head_logits(hidden, weight, None, head)
        assert logits.dtype == torch.float32
        for rows in (1, 7, 64, 150):
            assert torch.equal(
                invariant.head_logits(hidden[:rows], weight, None, head), logits[:rows]
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", DETERMINISTIC_FAMILIES)
def test_the_hidden_states_of_a_sequence_do_not_depend_on_its_batch(family, dtype):
    check_family(invariant_model(family, "cuda", dtype=dtype))
