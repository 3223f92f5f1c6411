"""Pages of prompts that are read once for many rows: attention, and whole rollouts."""

import importlib
from types import ModuleType

import pytest
import torch

from tests.gpu.test_paged_attention_gpu import attend, expected, make_batch, relative_l2
from tests.rollout.engines import forward_log_probs, make_engine, run, talkative_model
from verl.rollout.embedded.prefix_blocks import prefix_blocks

pytestmark = pytest.mark.gpu
PAGE_SIZE = 16
ROWS = 400
# rows of a prompt; full blocks, parts of them, and prompts without
SIZES = (16, 5, 1, 9, 30, 3)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    """Import them when a test runs: collecting this file must not need Triton."""
    return importlib.import_module("verl.rollout.embedded.kernels.paged_attention")


@pytest.mark.parametrize(
    ("shape", "dtype", "tolerance"),
    [
        ((14, 2, 64), torch.bfloat16, 5e-3),
        ((12, 2, 128), torch.bfloat16, 5e-3),
        ((28, 4, 128), torch.bfloat16, 5e-3),
        ((32, 32, 80), torch.bfloat16, 5e-3),
        ((32, 2, 96), torch.bfloat16, 5e-3),
        ((8, 4, 256), torch.bfloat16, 5e-3),
        ((12, 2, 128), torch.float16, 1e-3),
        ((12, 4, 64), torch.float32, 1e-5),
    ],
)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_attention(kernels, shape, dtype, tolerance, cap):
    shared_prefix = importlib.import_module("verl.rollout.embedded.kernels.shared_prefix")
    heads, kv_heads, dim = shape
    batch = make_batch(ROWS, heads, kv_heads, dim, dtype=dtype)
    order = batch.positions[batch.slots.long()].argsort()
    batch = batch._replace(slots=batch.slots[order])  # neighbors are about as long
    # Every prompt has as many pages as its shortest row leaves it.
    ends, tokens = [], []
    hidden = batch._replace(table=batch.table.clone())
    first = 0
    while first < ROWS:
        count = min(SIZES[len(set(ends)) % len(SIZES)], ROWS - first)
        slots = batch.slots[first : first + count].long()
        pages = int(batch.positions[slots].min()) // PAGE_SIZE
        batch.table[slots, :pages] = batch.table[slots[0], :pages].clone()
        ends += [first if pages else -1] * count
        tokens += [pages * PAGE_SIZE] * count
        first += count

    blocks = prefix_blocks(
        torch.tensor(ends).numpy(),
        torch.tensor(tokens).numpy(),
        fewest=shared_prefix.FEWEST_ROWS,
        most=shared_prefix.BLOCK_ROWS,
    )
    prefixes, _ = shared_prefix.SharedPrefixes.allocate(ROWS, "cuda")
    for tensor, numbers in zip(prefixes, blocks):
        tensor[: len(numbers)] = torch.from_numpy(numbers).cuda()
    truth = expected(batch, cap=cap)
    assert blocks.saved > 100
    for row in set(range(ROWS)) - set(blocks.rows.tolist()):
        pages = int(blocks.covered[row]) // PAGE_SIZE
        hidden.table[batch.slots[row].long(), pages:] = batch.table[batch.slots[row].long(), pages:]
    for row in blocks.rows.tolist():
        hidden.table[batch.slots[row].long()] = batch.table[batch.slots[row].long()]

    for _ in range(3):
        out = attend(kernels, hidden, cap=cap, prefixes=prefixes)
        assert relative_l2(out, truth) < tolerance
    assert relative_l2(attend(kernels, hidden, cap=cap), truth) > 0.1, "other pages are not theirs"


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"num_pages": 1800}])
def test_rollouts_of_many_samples_a_prompt(family, settings):
    """Samples start late, end early and are pre-empted while others share their pages."""
    model = talkative_model(family).cuda()
    prompts = [[5 + (step * i) % 90 for i in range(170)] for step in range(1, 61)]
    engine = make_engine(
        model,
        device="cuda",
        dtype="float16",
        prompt_length=180,
        response_length=64,
        max_num_seqs=700,
        **settings,
    )
    sampled = run(engine, prompts, n=14, max_new_tokens=40)
    if not engine.runner.enforce_eager:
        assert any(kind.shares for kind, *_ in engine.runner._graphs)
    if "num_pages" in settings:
        assert engine.statistics()["preemptions"] > 0

    assert len(sampled) == 60 * 14
    errors = []
    for completion in sampled[::11]:
        prompt = prompts[completion.sample_id // 14]
        truth = forward_log_probs(model, prompt, completion.token_ids)
        errors.append((torch.tensor(completion.log_probs) - truth).abs().mean())
    # The median: a router of experts may choose otherwise in half precision.
    assert torch.stack(errors).median() < 0.02
    engine.check_integrity()


def test_a_deterministic_engine_reads_pages_row_by_row():
    model = talkative_model("qwen2").cuda()
    engine = make_engine(
        model, device="cuda", deterministic=True, prompt_length=180, max_num_seqs=600
    )
    run(engine, [list(range(5, 90)) * 2], n=600, max_new_tokens=4)
    assert engine.runner._graphs
    assert not any(kind.shares for kind, *_ in engine.runner._graphs)
