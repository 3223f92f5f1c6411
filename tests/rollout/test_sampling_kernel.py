"""The fused draw, interpreted on the CPU and compared with `verl.rollout.sampling.sample`;
tests/gpu has real sizes."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import cases
from tests.rollout.interpreter import interpreted
from verl.rollout.embedded.kernels import sampling_kernels, threshold_kernels
from verl.rollout.embedded.kernels.sampling import DrawState, Tuning, Workspace, draw
from verl.rollout.embedded.kernels.sampling_kernels import (
    _draw_key,
    _gumbel,
    _mixed_bits,
    _noise_integers,
)
from verl.rollout.embedded.kernels.threshold_kernels import _search
from verl.rollout.sampling import (
    column_hashes,
    noise_integers,
    row_keys,
    sample,
    sample_keys,
    smallest_kept_weight,
)
from verl.rollout.types import SamplingParams

# Not imports at the top: those would fail before the module is skipped for a missing Triton.
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

# several chunks of several blocks in a small vocabulary
SMALL = Tuning(chunk=256, block=128, search_block=512)
VOCABULARY = 500
SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 0},
    {"top_k": 20},
    {"top_p": 0.9, "temperature": 1.7},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
]


def run(
    logits: torch.Tensor, sample_ids: Any = None, *, tuning: Tuning = SMALL, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Workspace]:
    """Return tokens and log-probs of the kernel and of `sample`, and the workspace after it."""
    rows, vocabulary = logits.shape
    params = SamplingParams(max_new_tokens=1, **settings)
    keys = sample_keys(1, 2, np.arange(rows) if sample_ids is None else np.asarray(sample_ids))
    positions = np.arange(rows) * 1000
    # Slots in descending order, and one more than rows.
    state = DrawState(
        slots=torch.arange(rows, 0, -1, dtype=torch.int32),
        keys=torch.from_numpy(np.append(keys, np.uint64(0))[::-1].view(np.int64).copy()),
        drawn=torch.from_numpy(np.append(positions, 0)[::-1].astype(np.int32)),
        settings=torch.tensor(
            [params.temperature, params.top_p, params.min_p, float(params.top_k)]
        ),
        tokens=torch.full((rows,), -1),
        log_probs=torch.full((rows,), 7.0),
    )

    workspace = Workspace(rows + 3, vocabulary, torch.device("cpu"), tuning)
    filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    draw(logits, state, workspace, filtered=filtered, greedy=params.temperature == 0)
    noise_keys = torch.from_numpy(row_keys(keys, positions))

    return state.tokens, state.log_probs, *sample(logits, params, noise_keys), workspace


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        *((settings, torch.bfloat16) for settings in SETTINGS),
        pytest.param({}, torch.float32, marks=pytest.mark.slow),
        (SETTINGS[-1], torch.float32),
        pytest.param(SETTINGS[-1], torch.float16, marks=pytest.mark.slow),
    ],
)
@interpreted
def test_tokens_and_log_probs_equal_those_of_sample(settings, dtype):
    torch.manual_seed(0)
    wide = (torch.randn(4, VOCABULARY + 8) * torch.tensor([[0.1], [1.0], [3.0], [8.0]])).to(dtype)
    tokens, log_probs, expected_tokens, expected_log_probs, _ = run(
        wide[:, :VOCABULARY], **settings
    )
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-6, atol=2e-6)


@interpreted
def test_a_single_row_gives_the_same_bits():
    torch.manual_seed(1)
    logits = torch.randn(3, VOCABULARY).bfloat16()
    tokens, log_probs, *_ = run(logits, sample_ids=np.zeros(3), top_p=0.95)
    alone_tokens, alone_log_probs, *_ = run(logits[:1], sample_ids=[0], top_p=0.95)
    assert torch.equal(tokens[:1], alone_tokens)
    assert torch.equal(log_probs[:1], alone_log_probs)


def launch(kernel: Any, programs: int, *arguments: Any, **sizes: int) -> None:
    kernel[(programs,)](*arguments, **sizes)


@triton.jit
def noise_kernel(
    slots, keys, drawn, hashes, integers, gumbel, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr
):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    key_low, key_high = _draw_key(slots, keys, drawn, row)
    noise = _noise_integers(_mixed_bits(hashes, columns, key_low, key_high, VOCABULARY))
    tl.store(
        integers + row * VOCABULARY + columns,
        noise.to(tl.int32, bitcast=True),
        mask=columns < VOCABULARY,
    )
    tl.store(gumbel + row * VOCABULARY + columns, _gumbel(noise), mask=columns < VOCABULARY)


@interpreted
def test_noise_integers_are_the_same_bits():
    keys = np.array([0, 1, 2**32, 2**63, 2**64 - 1, *sample_keys(-3, 7, np.arange(3))], np.uint64)
    positions = np.array([0, 1, 2**16, 2**31 - 1, 5, 0, 1, 2])
    count = len(keys)
    vocabulary = 100
    integers = torch.empty(count, vocabulary, dtype=torch.int32)
    launch(
        noise_kernel,
        count,
        torch.arange(count, dtype=torch.int32),
        torch.from_numpy(keys.view(np.int64)),
        torch.from_numpy(positions.astype(np.int32)),
        column_hashes(vocabulary, torch.device("cpu"))[0],
        integers,
        torch.empty(count, vocabulary),
        VOCABULARY=vocabulary,
        BLOCK=128,
    )

    assert torch.equal(
        integers, noise_integers(torch.from_numpy(row_keys(keys, positions)), vocabulary)
    )


@triton.jit
def gumbel_kernel(integers, gumbel, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    tl.store(gumbel + columns, _gumbel(tl.load(integers + columns).to(tl.uint32, bitcast=True)))


@interpreted
def test_gumbel_noise_is_exact_at_both_ends():
    edges = np.array(
        [0, 1, 2, 100, 2**20, 2**28 - 1, 2**28, 2**28 + 2**5, 2**30, 2**31 - 2**20, 2**31 - 2**10]
    )
    integers = np.concatenate(
        [edges, np.random.default_rng(0).integers(0, 2**31 - 128, 256 - len(edges))]
    )
    gumbel = torch.empty(256)
    launch(gumbel_kernel, 1, torch.from_numpy(integers.astype(np.int32)), gumbel, BLOCK=256)
    # The definition computes the uniform in fp32; its logarithms are compared.
    uniform = (torch.from_numpy(integers).float() + 0.5).double() * 2.0**-31
    torch.testing.assert_close(gumbel.double(), -(-(-uniform).log1p()).log(), rtol=1e-6, atol=1e-6)


def reference_kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    weights = ((logits - logits.amax(-1, keepdim=True)) / params.temperature).exp()
    return weights >= smallest_kept_weight(weights, params)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 30},
    {"top_k": 99},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.97},
    {"top_k": 7, "top_p": 0.6},
    {"top_k": 50, "top_p": 0.9, "temperature": 2.0},
]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    cases(
        FILTERS,
        [torch.float32, torch.bfloat16, torch.float16],
        quick=lambda settings, dtype: dtype == torch.bfloat16 or settings == FILTERS[-1],
    ),
)
@interpreted
def test_the_threshold_keeps_the_tokens_of_sample_with_ties(settings, dtype):
    """Use multiples of 1/8 around zero as logits: many ties, both signs, zeros.

    The second row has only three values.
    """
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(-40, 41, (2, 99), generator=generator)
    logits[1] = logits[1].sign()
    logits = (logits / 8).to(dtype)
    *_, workspace = run(logits, tuning=Tuning(chunk=128, block=128, search_block=128), **settings)
    kept = logits.float() >= workspace.rows[:2, 2:]
    assert torch.equal(
        kept, reference_kept(logits.float(), SamplingParams(max_new_tokens=1, **settings))
    )


@triton.jit
def search_kernel(
    logits,
    first,
    found,
    VOCABULARY: tl.constexpr,
    DROPPED_BITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    low, high, wanted = tl.load(first), tl.load(first + 1), tl.program_id(0) + 1.0
    key = _search(
        logits, low, high, wanted, 0.0, 1.0, VOCABULARY, VOCABULARY, DROPPED_BITS, WEIGHTED
    )
    tl.store(found + tl.program_id(0), key)


@pytest.mark.parametrize("lowest", [0x4000 - 16, -0x4000 - 16], ids=["2", "-2"])
@interpreted
def test_the_search_finds_every_rank_among_neighboring_bf16_numbers(lowest):
    keys = lowest + torch.randperm(32, generator=torch.Generator().manual_seed(5))
    bits = torch.where(keys < 0, keys ^ 0x7FFF, keys).to(torch.int16)
    found = torch.empty(32, dtype=torch.int64)
    bounds = torch.tensor([lowest, lowest + 32])
    sizes = {"VOCABULARY": 32, "DROPPED_BITS": 16, "WEIGHTED": False}
    launch(search_kernel, 32, bits.view(torch.bfloat16), bounds, found, **sizes)
    assert found.tolist() == [lowest + 31 - rank for rank in range(32)]


@interpreted
def test_the_search_takes_few_passes():
    """Search around zero, where half of all floating-point numbers are.

    Bisection of keys would take 8 passes a row.
    """
    passes = []
    plain = threshold_kernels._sums_above
    torch.manual_seed(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            threshold_kernels,
            "_sums_above",
            lambda *arguments: passes.append(1) or plain(*arguments),
        )
        run((torch.randn(4, VOCABULARY) * 3).bfloat16(), top_k=20)
    assert 4 <= len(passes) <= 4 * 6


@interpreted
def test_the_search_ends_if_the_threshold_is_zero_or_far_below():
    logits = torch.zeros(2, 300, dtype=torch.bfloat16)
    logits[0, :4] = torch.tensor([5.0, 4.0, 3.0, -2.0])
    # ten tokens are in reach; the rest of the twenty can never be drawn
    logits[1, 10:] = -200.0
    *_, workspace = run(logits, top_k=20)
    assert (logits.float() >= workspace.rows[:2, 2:]).sum(-1).tolist() == [299, 10]


@interpreted
def test_min_p_keeps_the_tokens_of_sample():
    """Check that the last logit kept wins for some sample, and that the next one never does."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(24, -1)
    tokens, _, expected, *_ = run(logits, min_p=math.exp(-2.0) * 0.999)
    assert torch.equal(tokens, expected)
    assert set(tokens.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}]
)
@interpreted
def test_bad_logits_give_a_log_prob_that_is_not_finite(settings):
    torch.manual_seed(3)
    logits = torch.randn(5, VOCABULARY).bfloat16()
    logits[0, 499] = torch.nan
    logits[1, 0] = torch.inf
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4, :200] = -torch.inf  # masked tokens are no error
    tokens, log_probs, expected_tokens, expected_log_probs, _ = run(logits, **settings)
    assert log_probs.isfinite().tolist() == [False, False, False, False, True]
    assert (tokens >= 0).all()
    assert (tokens < VOCABULARY).all()
    assert torch.equal(tokens[4:], expected_tokens[4:])
    torch.testing.assert_close(log_probs[4:], expected_log_probs[4:])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"temperature": 0}])
@interpreted
def test_lanes_without_possible_tokens_change_no_draw(settings):
    """Where all logits are very negative, weights of such lanes are 0 times infinity."""
    torch.manual_seed(7)
    logits = 3 * torch.randn(16, VOCABULARY) - 300
    lanes = torch.arange(VOCABULARY) * 32 // SMALL.block % 32
    logits[:, lanes % 5 > 0] = -torch.inf
    logits[:8, SMALL.chunk :] = -torch.inf  # a chunk without any
    tokens, log_probs, expected_tokens, expected_log_probs, _ = run(logits, **settings)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-6, atol=1e-5)


@interpreted
def test_an_impossible_token_is_never_drawn():
    logits = torch.full((4, VOCABULARY), -torch.inf)
    logits[:, 417] = 3.0
    tokens, log_probs, *_ = run(logits)
    assert (tokens == 417).all()
    assert (log_probs == 0).all()


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.0}])
@interpreted
def test_a_single_remaining_token_wins_with_the_worst_noise(settings):
    keys = sample_keys(0, 0, np.array([43172]))
    noise = noise_integers(torch.from_numpy(row_keys(keys, np.array([0]))), 64)
    assert noise[0, 58].float() * 2.0**-31 == 1  # u = 1, E infinite
    state = DrawState(
        slots=torch.zeros(1, dtype=torch.int32),
        keys=torch.from_numpy(keys.view(np.int64)),
        drawn=torch.zeros(1, dtype=torch.int32),
        settings=torch.tensor(
            [1.0, settings.get("top_p", 1.0), settings.get("min_p", 0.0), settings.get("top_k", 0)]
        ),
        tokens=torch.full((1,), -1),
        log_probs=torch.empty(1),
    )

    logits = torch.zeros(1, 64)
    logits[0, 58] = 1.0
    draw(logits, state, Workspace(1, 64, torch.device("cpu"), SMALL), filtered=True, greedy=False)
    assert state.tokens.item() == 58


@interpreted
def test_greedy_takes_the_first_of_equals():
    logits = torch.zeros(3, VOCABULARY, dtype=torch.bfloat16)
    logits[0, [70, 300, 499]] = 2.0
    logits[1, [300, 310]] = 2.0
    tokens, _, expected, *_ = run(logits, temperature=0)
    assert tokens.tolist() == expected.tolist() == [70, 300, 0]


@interpreted
def test_few_tokens_take_logarithms():
    """Prune: without pruning, every token would take a logarithm."""
    calls = []
    plain = sampling_kernels._gumbel

    def counted(noise: Any) -> Any:
        calls.append(noise.shape)
        return plain(noise)

    torch.manual_seed(4)
    rows = 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_kernels, "_gumbel", counted)
        run(torch.randn(rows, VOCABULARY) * 2)
    assert set(calls) == {()}
    assert len(calls) < 6 * rows  # of VOCABULARY tokens each, in 4 blocks
