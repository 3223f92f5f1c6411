"""The automatic size of passes: predicted, then measured, and equal on all ranks."""

import pytest
import torch

from tests.diagnostics.live_bytes import LiveBytes
from tests.engine.batches import COLUMNS, gradients_of, make_batch, smooth_loss
from tests.tiny_models import tiny_model
from verl.config import OptimConfig
from verl.distributed.collectives import ALONE
from verl.engine import budget as budget_module
from verl.engine.base import TrainEngine
from verl.engine.budget import (
    DEFAULT_TOKENS,
    FILLED_SHARE,
    MEASURED_CALLS,
    MOST_TOKENS,
    TOKEN_STEP,
    AutomaticBudgets,
)
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM

KEY = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
AUTOMATIC = TokenBudget(key=KEY)


class FakeMeter:
    """A device with memory use linear in the tokens of a pass."""

    def __init__(self, room: int, constant: int, a_token: int) -> None:
        self.left = room
        self.constant = constant
        self.a_token = a_token
        self.tokens = 0

    def room(self) -> int:
        return self.left

    def start(self) -> None:
        self.tokens = 0

    def taken(self) -> int:
        return self.constant + self.a_token * self.tokens


def run(budgets: AutomaticBudgets, meter: FakeMeter, predict, calls: int) -> list[int]:
    """Run calls with passes that fill the budget."""
    sizes = []
    for _ in range(calls):
        size = budgets.begin(AUTOMATIC, [10, 700], predict).max_tokens
        assert size is not None
        sizes.append(size)
        meter.tokens = budgets._largest = size
        budgets.end(AUTOMATIC)
    return sizes


@pytest.mark.parametrize("mistake", [0.4, 1.0, 3.0])
def test_measurements_correct_a_wrong_prediction(mistake: float):
    meter = FakeMeter(room=40_000_000, constant=5_000_000, a_token=1000)
    budgets = AutomaticBudgets(meter, ALONE)
    sizes = run(budgets, meter, lambda tokens: int(mistake * (5_000_000 + 1000 * tokens)), 8)
    fits = (FILLED_SHARE * 40_000_000 - 5_000_000) / 1000
    assert 0.85 * fits < sizes[-1] <= fits
    assert len(set(sizes[MEASURED_CALLS:])) == 1
    assert all(size % TOKEN_STEP == 0 for size in sizes)
    if mistake >= 1:
        assert all(meter.constant + 1000 * size <= meter.left for size in sizes)


def test_budget_is_extrapolated_from_a_small_batch():
    meter = FakeMeter(room=50_000_000, constant=0, a_token=1000)
    budgets = AutomaticBudgets(meter, ALONE)
    budgets.begin(AUTOMATIC, [500], lambda tokens: 10_000 * tokens)
    meter.tokens = budgets._largest = 500
    budgets.end(AUTOMATIC)
    assert budgets.tokens[KEY] == int(0.85 * 50_000) // TOKEN_STEP * TOKEN_STEP


def test_sizes_have_bounds():
    roomy = AutomaticBudgets(FakeMeter(10**15, 0, 1), ALONE)
    assert roomy.begin(AUTOMATIC, [5], lambda tokens: tokens).max_tokens == MOST_TOKENS
    tight = AutomaticBudgets(FakeMeter(1, 0, 1), ALONE)
    assert tight.begin(AUTOMATIC, [5], lambda tokens: tokens).max_tokens == TOKEN_STEP
    assert tight.begin(AUTOMATIC, [5000], lambda tokens: tokens).max_tokens == 5000, (
        "a row is never split"
    )
    assert (
        AutomaticBudgets(None, ALONE).begin(AUTOMATIC, [5], lambda tokens: tokens).max_tokens
        == DEFAULT_TOKENS
    )


def test_explicit_budgets_are_unchanged():
    meter = FakeMeter(10**9, 0, 1)
    budgets = AutomaticBudgets(meter, ALONE)
    for given in (TokenBudget(max_tokens=77, key=KEY), TokenBudget(rows=3, key=KEY)):
        assert budgets.begin(given, [5], lambda tokens: tokens) is given
        budgets.end(given)
    assert budgets.tokens == {}


def test_all_ranks_get_the_smallest_budget(monkeypatch: pytest.MonkeyPatch):
    """Simulate another rank with half the free memory."""
    monkeypatch.setattr(
        budget_module, "max_of", lambda number, world: number // 2 if number < 0 else number
    )
    meter = FakeMeter(room=40_000_000, constant=0, a_token=1000)
    budgets = AutomaticBudgets(meter, ALONE)
    assert run(budgets, meter, lambda tokens: 1000 * tokens, 1) == [11_776]


def test_resumed_run_keeps_the_measured_budget():
    meter = FakeMeter(room=40_000_000, constant=5_000_000, a_token=1000)
    first, second, other = (AutomaticBudgets(meter, ALONE) for _ in range(3))
    sizes = run(first, meter, lambda tokens: 1000 * tokens, 5)
    second.load_state_dict(first.state_dict())
    meter.left //= 2
    assert run(second, meter, lambda tokens: 1000 * tokens, 2) == sizes[-1:] * 2
    other.load_state_dict({**first.state_dict(), "ranks": 8})
    assert other.tokens == {}, "another number of ranks"
    fresh = AutomaticBudgets(meter, ALONE)
    run(fresh, meter, lambda tokens: 1000 * tokens, 1)
    assert fresh.state_dict() == {"ranks": 1}, "not settled yet"


def make_engine() -> TrainEngine:
    return TrainEngine(
        PackedCausalLM(tiny_model("qwen2")),
        EngineOptions(device=torch.device("cpu"), optim=OptimConfig(lr=1e-2), grad_clip=1.0),
        total_steps=5,
    )


def test_engine_fills_the_measured_memory(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(budget_module, "TOKEN_STEP", 8)
    expected = make_engine()
    batch = make_batch([(5, 9), (1, 3), (12, 20), (7, 1), (3, 14), (6, 6), (9, 2), (4, 4)])
    expected.forward_backward(batch, TokenBudget(max_tokens=1000), smooth_loss, COLUMNS)
    engine = make_engine()
    sizes: list[int] = []
    engine.module.register_forward_pre_hook(
        lambda module, args: sizes.append(len(args[0].input_ids))
    )

    with LiveBytes(engine.module.parameters(), room=900_000) as meter:
        engine.sizes.budgets = AutomaticBudgets(meter, ALONE)
        for _ in range(MEASURED_CALLS + 1):
            sizes.clear()
            engine.forward_backward(batch, AUTOMATIC, smooth_loss, COLUMNS)
        assert meter.taken() < 900_000

    assert 32 <= max(sizes) < 106, "several passes with several rows each"
    for name, gradient in gradients_of(engine).items():
        torch.testing.assert_close(gradient, gradients_of(expected)[name], rtol=1e-4, atol=1e-6)
    engine.step()
    engine.save(tmp_path)
    resumed = make_engine()
    resumed.load(tmp_path)
    assert resumed.sizes.budgets.tokens == engine.sizes.budgets.tokens != {}
