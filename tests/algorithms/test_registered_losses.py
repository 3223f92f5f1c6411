"""Every registered policy loss: loss and gradient of the papers, and the same ones however the
mini-batch is cut.

The properties run over the registry, so that a new loss is tested by being registered.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms.references import LOSSES, SETTINGS, aggregate
from tests.algorithms.tensors import random_columns, random_mask, seeds, shapes
from verl.algorithms.covariance_losses import covariances
from verl.algorithms.masked import AGGREGATION_MODES, aggregation_weights
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    SelectionInputs,
    policy_losses,
    selections,
)
from verl.utils.errors import ConfigError

few = settings(max_examples=15)
NAMES = sorted(name for name in policy_losses if not name.startswith("test_"))
modes = st.sampled_from(AGGREGATION_MODES)


class MiniBatch:
    """(B, R) columns of one update, and what packed parts of it give."""

    def __init__(self, seed: int, rows: int, width: int) -> None:
        self.mask = random_mask(seed, rows, width)
        new, drift, advantages = random_columns(seed, rows, width, 3)
        # Log-probs below 0, ratios on both sides of every bound, one advantage a response.
        self.new, self.old = -new.abs(), -new.abs() + 0.4 * drift
        self.advantages = advantages[:, :1].expand(rows, width).contiguous()
        self.noise = torch.rand(
            rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )

    def selected(self, name: str) -> torch.Tensor | None:
        """(B, R), from the one pass over the whole mini-batch that goes before."""
        if name not in selections:
            return None
        own = self.mask.bool()
        selected = torch.zeros(self.mask.shape)
        inputs = SelectionInputs(
            *(column[own] for column in (self.new, self.old, self.advantages, self.noise))
        )
        selected[own] = selections.get(name)(inputs, **SETTINGS).float()
        return selected

    def loss(
        self, name: str, mode: str, parts: list[torch.Tensor], present: torch.Tensor | None = None
    ) -> Any:
        """(loss, gradient by the (B, R) log-probs) over the micro-batches `parts`; `present` are
        the packed tokens."""
        weights = aggregation_weights(self.mask, mode).double()
        selected = self.selected(name)
        present = self.mask.bool() if present is None else present
        leaf = self.new.clone().requires_grad_()
        total = 0.0

        for rows in parts:
            keep = present[rows]
            packed = [column[rows][keep] for column in (leaf, self.old, self.advantages, weights)]
            number = rows[:, None].expand_as(keep)[keep]
            chosen = None if selected is None else selected[rows][keep]
            inputs = PolicyLossInputs(*packed, number, mask=self.mask[rows][keep], selected=chosen)
            output = policy_losses.get(name)(inputs, **SETTINGS, loss_agg_mode=mode)
            output.loss.backward()
            total += output.loss.item()
            assert all(
                mean.shape == number.shape and not mean.requires_grad
                for mean in output.means.values()
            )

        return total, leaf.grad


@pytest.mark.parametrize("name", NAMES)
@few
@given(seeds, shapes, modes)
def test_loss_and_gradient_are_those_of_the_paper(name, seed, shape, mode):
    assert name in LOSSES, "a loss comes with its reference"
    batch = MiniBatch(seed, *shape)
    own = batch.mask.bool()
    selected = batch.selected(name)
    leaf = batch.new.clone().requires_grad_()
    rows = []

    for row in range(shape[0]):
        tokens = own[row].nonzero().flatten().tolist()
        columns = [
            [column[row, t] for t in tokens] for column in (leaf, batch.old, batch.advantages)
        ]
        chosen = [selected is not None and bool(selected[row, t]) for t in tokens]
        if tokens:
            rows.append(LOSSES[name](*columns, chosen))

    loss, gradient = batch.loss(name, mode, [torch.arange(shape[0])])
    if not rows:
        assert loss == 0
        assert not gradient.any()
        return

    expected = aggregate(rows, mode, shape[1])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6, abs=1e-7)  # terms near 1 may cancel
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@few
@given(seeds, shapes, modes, st.randoms(use_true_random=False))
def test_micro_batches_order_and_padding_change_nothing(name, seed, shape, mode, rng):
    batch = MiniBatch(seed, *shape)
    loss, gradient = batch.loss(name, mode, [torch.arange(shape[0])])
    order = list(range(shape[0]))
    rng.shuffle(order)
    cut = rng.randint(1, shape[0])
    parts = [torch.tensor(part) for part in (order[:cut], order[cut:]) if part]
    # Tool tokens are packed too; what they hold must not count.
    other_loss, other_gradient = batch.loss(
        name, mode, parts, torch.ones_like(batch.mask, dtype=torch.bool)
    )
    assert other_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_and_empty_inputs_are_finite(name):
    far = torch.tensor([-1e4, -1e-9, -1e4, 0.0])
    for size, weight in ((4, 1.0), (4, 0.0), (0, 1.0)):
        new = far[:size].clone().requires_grad_()
        inputs = PolicyLossInputs(
            new,
            far.flip(0)[:size],
            torch.tensor([1.0, 1, -1, -1])[:size],
            torch.full((size,), weight),
            torch.arange(size) // 2,
            selected=torch.ones(size),
        )

        output = policy_losses.get(name)(inputs, **SETTINGS, loss_agg_mode="token-mean")
        output.loss.backward()
        assert output.loss.isfinite()
        assert new.grad is not None
        assert new.grad.isfinite().all()
        assert weight == 1.0 or not new.grad.any()


@pytest.mark.parametrize("name", NAMES)
def test_the_first_update_is_a_policy_gradient(name):
    """At pi = pi_old every loss pushes along A, gpg and cispo by way of log pi."""
    (old, advantages) = (column[0] for column in random_columns(3, 1, 6, 2))
    advantages = advantages[:1].expand(6).contiguous()
    new = old.clone().requires_grad_()
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    inputs = PolicyLossInputs(
        new, old, advantages, weights, torch.zeros(6, dtype=torch.int64), selected=torch.zeros(6)
    )
    policy_losses.get(name)(inputs, **SETTINGS).loss.backward()
    torch.testing.assert_close(new.grad, -advantages * weights)


# ---------------------------------------------------------------- what single losses promise


def test_the_penalty_of_kl_cov_has_no_gradient_at_its_kink():
    """log r of rounding size, of either sign, gives the gradient of r = 1."""
    drift = torch.tensor([1e-6, -1e-6, 9e-5, 2e-4, -2e-4], dtype=torch.float64)
    old = torch.full_like(drift, -1.0)
    weights = torch.ones_like(drift)
    new = (old + drift).requires_grad_()
    inputs = PolicyLossInputs(
        new, old, 0 * drift, weights, torch.zeros(5, dtype=torch.int64), selected=weights
    )
    policy_losses.get("kl_cov")(inputs, **SETTINGS).loss.backward()
    coef = SETTINGS["ppo_kl_coef"]
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, coef, -coef])


def test_gspo_by_tokens_is_gspo_by_sequences():
    """Eq. (5): the loss of whole sequences, differentiated as such."""
    batch = MiniBatch(5, 4, 6)
    own = batch.mask.bool()
    leaf = batch.new.clone().requires_grad_()
    lengths = own.sum(-1).clamp(min=1)
    s = (torch.where(own, leaf - batch.old, 0.0).sum(-1) / lengths).exp()
    advantage = batch.advantages[:, 0]
    each = -torch.minimum(s * advantage, s.clamp(0.8, 1.28) * advantage)
    counted = own.any(-1)
    expected = each[counted].sum() / counted.sum()
    expected.backward()
    loss, gradient = batch.loss("gspo", "seq-mean-token-mean", [torch.arange(4)])
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-6, atol=1e-9)


def test_the_binary_kl_of_dppo():
    old = torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64)
    new = torch.tensor([0.6, 0.55, 1.0], dtype=torch.float64)
    divergence = [
        0.5 * (torch.tensor(0.5 / p).log() + torch.tensor(0.5 / (1 - p)).log()).item()
        for p in (0.6, 0.55)
    ]
    between = sum(divergence) / 2
    inputs = PolicyLossInputs(
        new.log(), old.log(), torch.ones(3).double(), torch.ones(3).double(), torch.arange(3)
    )

    output = policy_losses.get("dppo")(inputs, dppo_divergence="kl", dppo_threshold=between)
    assert output.means["pg_clipfrac"].tolist() == [1.0, 0.0, 0.0]
    assert output.loss.item() == pytest.approx(-0.55 / 0.5 - 1.0)
    with pytest.raises(ConfigError, match="tv or kl, got 'js'"):
        policy_losses.get("dppo")(inputs, dppo_divergence="js", dppo_threshold=0.1)


@few
# two tokens have the same covariance
@given(seeds, st.integers(1, 40).filter(lambda size: size != 2))
def test_selections_pick_what_the_paper_says(seed, size):
    new, drift, advantages = (column[0] for column in random_columns(seed, 1, size, 3))
    old = new + 0.3 * drift
    noise = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inputs = SelectionInputs(new, old, advantages, noise)
    mean_new = new.mean()
    mean_advantage = advantages.mean()
    covariance = [
        (n - mean_new).item() * (a - mean_advantage).item() for n, a in zip(new, advantages)
    ]
    torch.testing.assert_close(covariances(new, advantages).tolist(), covariance)
    count = max(1, int(0.3 * size))
    largest = sorted(range(size), key=lambda t: covariance[t], reverse=True)[:count]
    picked = selections.get("kl_cov")(inputs, **SETTINGS)
    assert picked.nonzero().flatten().tolist() == sorted(largest)

    candidates = [
        t
        for t in range(size)
        if 0.05 < covariance[t] < 5.0
        and not (advantages[t] > 0 and (new[t] - old[t]).exp() > 1.28)
        and not (advantages[t] < 0 and (new[t] - old[t]).exp() < 0.8)
    ]
    picked = set(selections.get("clip_cov")(inputs, **SETTINGS).nonzero().flatten().tolist())
    assert len(picked) == min(count, len(candidates))
    assert picked <= set(candidates)
    other = (
        selections.get("clip_cov")(inputs._replace(noise=1 - noise), **SETTINGS)
        .nonzero()
        .flatten()
        .tolist()
    )
    assert len(candidates) < 2 * count or not picked & set(other), "other noise, other picks"


def test_a_sequence_mean_needs_no_order_and_sees_own_tokens_alone():
    values = torch.tensor([1.0, 10.0, 3.0, 99.0, 20.0], requires_grad=True)
    rows = torch.tensor([70, 4, 70, 70, 4])
    own = torch.tensor([1, 1, 1, 0, 1])
    inputs = PolicyLossInputs(values, values, values, torch.ones(5), rows, mask=own)
    means = inputs.sequence_mean(values)
    assert means.tolist() == [2.0, 15.0, 2.0, 2.0, 15.0]
    means[0].backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0, 0.5, 0.0, 0.0]
