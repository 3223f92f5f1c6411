"""Several gloo ranks match one process: gradients, norms, metrics, log-probs and checkpoints."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.distributed import jobs
from tests.distributed.jobs import WHOLE, Setup
from tests.distributed.ranks import Ranks
from verl.engine.microbatch import TokenBudget

ALONE = Setup()
SHAPES = [(5, 9), (2, 3), (12, 20), (7, 1), (3, 14)]
UNEVEN = ((0, 1, 2, 4), (3,))  # with one row per micro-batch: four micro-batches and one
ALL_ROWS = ((0, 1, 2, 3, 4),)
OFFLOAD = {"checkpointing": True, "activation_offload": True, "param_offload": True}


def worst_relative_l2(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(
        ((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-30)).item()
        for name in one
    )


def assert_same(found: list[dict], expected: dict, deal: jobs.Deal, tolerance: float) -> None:
    data, sequence = found[0]["mesh"]
    # The summation order of BLAS depends on the batch, which shows most in the entropy of
    # scaled-up weights.
    token_tolerance = 1e-5 if tolerance < 1e-6 else 5e-5
    for rank, answer in enumerate(found):
        assert worst_relative_l2(answer["gradient"], expected["gradient"]) <= tolerance
        assert answer["norm"] == pytest.approx(expected["norm"], rel=tolerance)
        assert answer["metrics"] == pytest.approx(
            expected["metrics"], rel=max(tolerance, 1e-9), abs=tolerance
        )
        rows = list(deal[rank // sequence])
        torch.testing.assert_close(
            answer["log_probs"], expected["log_probs"][:, rows], rtol=0, atol=token_tolerance
        )

    assert data * sequence == len(found)


MESHES = {
    "fsdp": {},
    "ulysses, offload": {"sequence": 2, **OFFLOAD},
    "hsdp": {"fsdp_size": 1},
    "ulysses": {"sequence": 2},
    "offload": OFFLOAD,
    "offload policy": {"offload_policy": True},
}


# Two of them have every feature but a mesh of two axes and torch's own offload, which float64
# covers.
@pytest.mark.parametrize(
    ("settings", "double"),
    [
        *(pytest.param(settings, True, id=f"{name}, float64") for name, settings in MESHES.items()),
        *(
            pytest.param(
                settings,
                False,
                marks=() if name in ("fsdp", "ulysses, offload") else pytest.mark.slow,
                id=f"{name}, fp32",
            )
            for name, settings in MESHES.items()
        ),
    ],
)
def test_two_ranks_match_the_gradient_of_one(two_ranks: Ranks, settings: dict, double: bool):
    expected = jobs.gradient(Setup(double=double), SHAPES, ALL_ROWS, WHOLE)
    deal = ALL_ROWS if "sequence" in settings else UNEVEN
    found = two_ranks.call(
        jobs.gradient, Setup(double=double, **settings), SHAPES, deal, TokenBudget(rows=1)
    )
    assert_same(found, expected, deal, 1e-9 if double else 1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"fsdp_size": 2}, {"sequence": 2, "fsdp_size": 2, **OFFLOAD}, {"sequence": 4}],
    ids=["hsdp", "hsdp x ulysses", "fewer key heads than ranks"],
)
def test_four_ranks_match_the_gradient_of_one(four_ranks: Ranks, settings: dict):
    deal = {1: ((0, 2), (1,), (3,), (4,)), 2: UNEVEN, 4: ALL_ROWS}[settings.get("sequence", 1)]
    found = four_ranks.call(
        jobs.gradient, Setup(**settings), SHAPES, deal, TokenBudget(max_tokens=40)
    )
    assert_same(found, jobs.gradient(ALONE, SHAPES, ALL_ROWS, WHOLE), deal, 1e-9)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2", "mistral"])
def test_ulysses_supports_windows_caps_and_sinks(two_ranks: Ranks, family: str):
    shapes = [(20, 25), (3, 9), (11, 30)]  # longer than the window
    deal = ((0, 1, 2),)
    expected = jobs.gradient(Setup(family), shapes, deal, WHOLE)
    found = two_ranks.call(
        jobs.gradient, Setup(family, sequence=2, checkpointing=True), shapes, deal, WHOLE
    )
    # norms and rotations of transformers round to fp32
    assert_same(found, expected, deal, 1e-7)


@pytest.mark.parametrize(
    "settings", [{}, {"sequence": 2}, OFFLOAD], ids=["fsdp", "ulysses", "offload"]
)
@pytest.mark.parametrize("family", ["deepseek_v3", "bloom", "mpt"])
def test_two_ranks_train_latent_attention_and_biases(two_ranks: Ranks, family: str, settings: dict):
    expected = jobs.gradient(Setup(family), SHAPES, ALL_ROWS, WHOLE)
    deal = ALL_ROWS if "sequence" in settings else UNEVEN
    found = two_ranks.call(
        jobs.gradient, Setup(family, **settings), SHAPES, deal, TokenBudget(max_tokens=100)
    )
    assert_same(found, expected, deal, 1e-6)


def test_ulysses_matches_the_gradient_of_the_critic(two_ranks: Ranks):
    expected = jobs.values_gradient(1, SHAPES, ALL_ROWS)
    for found in two_ranks.call(jobs.values_gradient, 2, SHAPES, ALL_ROWS):
        assert worst_relative_l2(found, expected) <= 1e-9


@pytest.mark.parametrize("sequence", [1, 2])
@pytest.mark.parametrize(
    "settings", [{"lora": True}, {"family": "qwen3_moe"}], ids=["LoRA", "experts"]
)
def test_adapters_and_experts_compose_with_sharding(
    two_ranks: Ranks, settings: dict, sequence: int
):
    deal = ALL_ROWS if sequence > 1 else UNEVEN
    expected = jobs.gradient(Setup(**settings), SHAPES, ALL_ROWS, WHOLE)
    setup = Setup(sequence=sequence, **OFFLOAD, **settings)
    found = two_ranks.call(jobs.gradient, setup, SHAPES, deal, TokenBudget(rows=2))
    assert_same(found, expected, deal, 1e-7)


def test_ulysses_with_shared_prompts(two_ranks: Ranks):
    """Use an odd number of tokens: padding must not separate prompts from their responses."""
    shapes = [(21, 7), (21, 12), (21, 4), (21, 5)]
    deal = ((0, 1, 2, 3),)
    found = two_ranks.call(
        jobs.gradient, Setup(sequence=2, checkpointing=True), shapes, deal, WHOLE, True
    )
    assert_same(found, jobs.gradient(ALONE, shapes, deal, WHOLE, True), deal, 1e-9)
    # With shared prompts, norms of transformers round the gradient to fp32 after the sum.
    assert_same(
        found, jobs.gradient(Setup(share_prompts=False), shapes, deal, WHOLE, True), deal, 1e-6
    )


SETUPS = [
    Setup(shard=True, **OFFLOAD),
    Setup(),
    Setup(fsdp_size=1, **OFFLOAD),
    Setup(sequence=2),
    Setup(sequence=2, **OFFLOAD),
]


@st.composite
def dealt_rows(draw: st.DrawFn) -> tuple[list[tuple[int, int]], jobs.Deal, jobs.Deal]:
    """Draw row lengths, an order of all rows, and a split of that order over two ranks."""
    shapes = draw(
        st.lists(st.tuples(st.integers(2, 20), st.integers(1, 20)), min_size=2, max_size=7)
    )
    order = draw(st.permutations(range(len(shapes))))
    cut = draw(st.integers(1, len(shapes) - 1))
    return shapes, (tuple(order),), (tuple(order[:cut]), tuple(order[cut:]))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=dealt_rows(),
    setup=st.sampled_from(SETUPS),
    max_tokens=st.integers(40, 150),
    by_rows=st.integers(0, 3),
)
def test_gradient_depends_only_on_the_mini_batch(
    two_ranks: Ranks, rows, setup: Setup, max_tokens, by_rows
):
    """Vary micro-batches, packing order, rank count, sequence parallelism and offload."""
    shapes, in_order, dealt = rows
    budget = TokenBudget(rows=by_rows) if by_rows else TokenBudget(max_tokens=max_tokens)
    expected = jobs.gradient(ALONE, shapes, (tuple(range(len(shapes))),), WHOLE)
    if setup.shard:
        found = [jobs.gradient(setup, shapes, in_order, budget)]
        deal = in_order
    else:
        deal = in_order if setup.sequence > 1 else dealt
        found = two_ranks.call(jobs.gradient, setup, shapes, deal, budget)
    assert_same(found, expected, deal, 1e-9)


@pytest.mark.parametrize("settings", [{}, {"sequence": 2, **OFFLOAD}, {"offload_policy": True}])
def test_two_ranks_train_like_one_rank(two_ranks: Ranks, settings: dict):
    expected = jobs.train(ALONE, SHAPES, ALL_ROWS, WHOLE, 3)
    deal = ALL_ROWS if "sequence" in settings else UNEVEN
    for found in two_ranks.call(
        jobs.train, Setup(**settings), SHAPES, deal, TokenBudget(rows=2), 3
    ):
        assert found["log"] == [pytest.approx(line, rel=1e-6) for line in expected["log"]]
        assert worst_relative_l2(found["parameters"], expected["parameters"]) <= 1e-7


@pytest.mark.parametrize(
    ("settings", "row", "where"), [({}, 4, (1, 1)), ({}, 0, (0, 0)), ({"sequence": 2}, 4, (0, 4))]
)
def test_all_ranks_skip_a_bad_step_and_name_its_row(
    two_ranks: Ranks, settings: dict, row: int, where
):
    deal = ALL_ROWS if "sequence" in settings else ((0, 1, 2), (3, 4))
    rank, own_row = where
    place = "" if "sequence" in settings else f" of data-parallel rank {rank}"
    found = two_ranks.call(jobs.spoilt_step, Setup(**settings), SHAPES, deal, row)
    for answer in found:
        assert answer["spoilt"].skipped
        assert answer["spoilt"].offenders == [f"row {own_row} (uid prompt-{row // 2}){place}"]
        assert answer["unchanged"]
        assert not answer["next"].skipped
    assert found[0]["next"] == found[1]["next"]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        pytest.param({}, None, marks=pytest.mark.slow),
        (None, {}),
        ({"sequence": 2, **OFFLOAD}, {"fsdp_size": 1}),
        pytest.param({"offload_policy": True}, {"offload_policy": True}, marks=pytest.mark.slow),
    ],
    ids=["2 to 1", "1 to 2", "ulysses with off-load to hsdp", "off-load policy"],
)
def test_checkpoint_loads_on_another_number_of_ranks(
    two_ranks: Ranks, tmp_path: Path, saver, loader
):
    def on(settings: dict | None, job) -> dict:
        if settings is None:
            return job(Setup(double=False), tmp_path, SHAPES, ALL_ROWS)
        deal = ALL_ROWS if "sequence" in settings else UNEVEN
        return two_ranks.call(job, Setup(double=False, **settings), tmp_path, SHAPES, deal)[1]

    saved = on(saver, jobs.save)
    loaded = on(loader, jobs.load)
    assert all(
        torch.equal(loaded["parameters"][name], value)
        for name, value in saved["parameters"].items()
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(loaded["moments"], saved["moments"], strict=True)
    )
    assert loaded["log"] == [pytest.approx(line, rel=1e-4) for line in saved["log"]]


@pytest.mark.parametrize(
    "mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_update_is_normalized_over_all_ranks(two_ranks: Ranks, mode: str):
    shapes = [*SHAPES, (4, 6)]
    expected = jobs.update(ALONE, shapes, ((0, 1, 2, 3, 4, 5),), mode, 6)
    for found in two_ranks.call(jobs.update, Setup(), shapes, ((0, 2, 4), (1, 3, 5)), mode, 6):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6)
        assert worst_relative_l2(found["parameters"], expected["parameters"]) <= 1e-6


def test_other_metrics_on_another_rank_are_an_error_on_all_ranks(two_ranks: Ranks):
    error = "AlgorithmError: A loss must return the same metrics on every rank, got only_here on"
    for found in two_ranks.call(jobs.error_of_metrics, SHAPES, UNEVEN):
        assert found.startswith(error)


def test_indivisible_mini_batches_are_errors_on_all_ranks(two_ranks: Ranks):
    assert (
        two_ranks.call(jobs.error_of_update, SHAPES, UNEVEN, None) == ["DataError: got 1 to 4"] * 2
    )
    six = [*SHAPES, (4, 6)], ((0, 1, 2), (3, 4, 5))
    assert two_ranks.call(jobs.error_of_update, *six, 3) == ["ConfigError: got 2 and 3"] * 2
    # One mini-batch, with a row of padding in the batch.
    assert two_ranks.call(jobs.error_of_update, *six, 5) == ["none"] * 2
    assert two_ranks.call(jobs.error_of_heads) == ["ModelError: got 2 and 3"] * 2
