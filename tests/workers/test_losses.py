"""The configuration determines the terms of the actor's loss and the columns that the engine
reads."""

import numpy as np
import pytest
import torch

from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_losses import (
    PolicyLossOutput,
    extra_losses,
    policy_losses,
    weighted,
)
from verl.config import ActorConfig, ExtraLossConfig, PolicyLossConfig
from verl.distributed.collectives import ALONE, Axis
from verl.protocol import DataProto
from verl.utils.errors import AlgorithmError
from verl.utils.logging import say_once
from verl.workers.objective import ValueObjective
from verl.workers.policy_objective import PolicyObjective
from verl.workers.policy_terms import DistillationTerm
from verl.workers.selection import token_noise


@extra_losses.register("test_sum_of_returns")
def _sum_of_returns(inputs, columns):
    return (inputs.log_probs * columns["returns"] * inputs.weights).sum()


def packed(tokens: int = 6) -> tuple[dict, dict, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(tokens, generator=generator)  # noqa: E731
    outputs = {"log_probs": -draw().abs().requires_grad_(), "entropy": draw().abs()}
    columns = {
        name: draw() for name in ("advantages", "ref_log_prob", "rollout_log_probs", "returns")
    }
    columns["old_log_probs"] = outputs["log_probs"].detach() + 0.3 * draw()
    columns["weights"] = torch.full((tokens,), 1 / tokens)
    columns["response_mask"] = torch.ones(tokens)
    return outputs, columns, torch.zeros(tokens, dtype=torch.int64)


def test_the_terms_add_up():
    outputs, columns, sequence = packed()
    plain = PolicyObjective(ActorConfig())(outputs, columns, sequence)
    config = ActorConfig(
        entropy_coeff=0.5,
        use_kl_loss=True,
        kl_loss_coef=0.25,
        kl_loss_type="k2",
        loss_extra=[ExtraLossConfig(name="test_sum_of_returns", coef=2.0)],
    )

    everything = PolicyObjective(config)(outputs, columns, sequence)
    kl = kl_penalty(outputs["log_probs"], columns["ref_log_prob"], "k2").mean()
    extra = (outputs["log_probs"] * columns["returns"]).mean()
    expected = plain.loss - 0.5 * outputs["entropy"].mean() + 0.25 * kl + 2.0 * extra
    torch.testing.assert_close(everything.loss, expected)
    torch.testing.assert_close(everything.sums["actor/kl_loss"], kl.detach())
    torch.testing.assert_close(everything.sums["actor/pg_loss"], plain.loss.detach())
    assert {"actor/pg_clipfrac", "actor/ppo_kl", "actor/entropy"} <= set(everything.means)


def test_a_policy_loss_reports_numbers_of_its_own():
    returned: dict = {}

    @policy_losses.register("test_reports")
    def reports(inputs, **_):
        return PolicyLossOutput(weighted(-inputs.log_probs, inputs), returned)

    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="test_reports"))
    objective = PolicyObjective(config)
    outputs, columns, sequence = packed()
    returned = {
        "share": np.float32(0.5),
        "mine/spread": torch.tensor(2.0),
        "mine/gain": columns["advantages"],
    }
    means = objective(outputs, columns, sequence).means
    assert means["actor/share"].tolist() == [0.5] * 6
    assert means["mine/spread"].tolist() == [2.0] * 6
    assert means["mine/gain"].tolist() == columns["advantages"].tolist()

    for wrong, message in (
        ({"share": 0.5}, "must return the same metrics each time, got share after mine/gain, mine"),
        (
            {"share": torch.zeros(2)},
            r"as means\['share'\], got torch.float32 Tensor of shape \(2,\)",
        ),
        ({"share": "half"}, r"as means\['share'\], got str"),
        (None, "a dict of metrics as means, got NoneType"),
        ({1: 0.5}, "a dict of metrics by name as means, got int"),
    ):
        returned = wrong
        with pytest.raises(AlgorithmError, match=message):
            objective(outputs, columns, sequence)


@pytest.mark.parametrize("name", ["entropy", "actor/grad_norm"])
def test_a_policy_loss_may_not_report_a_metric_of_the_update(name):
    @policy_losses.register(f"test_reports_{name}")
    def reports(inputs, **_):
        return PolicyLossOutput(weighted(-inputs.log_probs, inputs), {name: 1.0})

    loss_mode = PolicyLossConfig(loss_mode=f"test_reports_{name}")
    objective = PolicyObjective(ActorConfig(policy_loss=loss_mode))
    with pytest.raises(AlgorithmError, match=f"returns a metric '{name}', which every update"):
        objective(*packed())


def objective_of(loss, *, is_extra: bool) -> PolicyObjective:
    """Return the objective with a function as its policy loss, or as its extra term."""
    name = f"test_{len(list(policy_losses)) + len(list(extra_losses))}"
    if is_extra:
        extra_losses.register(name)(lambda inputs, columns: loss(inputs))
        return PolicyObjective(ActorConfig(loss_extra=[ExtraLossConfig(name=name, coef=1.0)]))
    policy_losses.register(name)(lambda inputs, **_: PolicyLossOutput(loss(inputs), {}))
    return PolicyObjective(ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name)))


def plain_loss(inputs):
    return (-inputs.advantages * inputs.log_probs * inputs.weights).sum()


def plain_loss_in_place(inputs):
    inputs.weights.mul_(0.5)
    return plain_loss(inputs)


@pytest.mark.parametrize("is_extra", [False, True])
def test_a_loss_of_ones_own_may_be_a_tensor_of_one_number(is_extra):
    result = objective_of(lambda inputs: plain_loss(inputs)[None], is_extra=is_extra)(*packed())
    assert result.loss.shape == ()
    assert all(value.shape == () for value in result.sums.values())


@pytest.mark.parametrize("is_extra", [False, True])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda inputs: plain_loss(inputs).detach(), "without a gradient"),
        (lambda inputs: None, "NoneType"),
        (lambda inputs: -inputs.log_probs, r"got torch.float32 Tensor of shape \(6,\)"),
        (plain_loss_in_place, r"changed weights in place. Change a copy: weights.clone\(\)"),
    ],
    ids=["detached", "nothing", "a vector", "in place"],
)
def test_a_loss_of_ones_own_that_cannot_be_learnt_from_is_an_error(loss, message, is_extra):
    with pytest.raises(AlgorithmError, match=message):
        objective_of(loss, is_extra=is_extra)(*packed())


def test_an_extra_term_of_zero_needs_no_gradient():
    result = objective_of(lambda inputs: 0.0, is_extra=True)(*packed())
    torch.testing.assert_close(result.loss, PolicyObjective(ActorConfig())(*packed()).loss)


def probed(objective, sequence, caplog) -> str:
    """Return the warning of a loss on responses, or an empty text."""
    say_once.cache_clear()
    outputs, columns, _ = packed()
    columns["selected"] = torch.zeros(6)
    before = torch.random.get_rng_state()
    objective(outputs, columns, torch.tensor(sequence))
    assert torch.equal(torch.random.get_rng_state(), before)
    return caplog.text


@pytest.mark.parametrize("sequence", [[0, 0, 1, 1, 1, 2], [0] * 6])
@pytest.mark.parametrize("is_extra", [False, True])
def test_a_loss_that_ignores_the_weights_is_warned_of(is_extra, sequence, caplog):
    def mean(inputs):
        return (-inputs.advantages * inputs.log_probs).mean()

    assert "number of ranks" in probed(objective_of(mean, is_extra=is_extra), sequence, caplog)


@pytest.mark.parametrize("is_extra", [False, True])
def test_a_loss_with_a_statistic_of_the_micro_batch_is_warned_of(is_extra, caplog):
    def centered(inputs):
        gains = inputs.advantages - inputs.advantages.mean()
        return (-gains * inputs.log_probs * inputs.weights).sum()

    sequence = [0, 0, 1, 1, 1, 2]
    assert "number of ranks" in probed(objective_of(centered, is_extra=is_extra), sequence, caplog)


@pytest.mark.parametrize("name", [name for name in policy_losses if not name.startswith("test_")])
def test_our_losses_do_not_depend_on_micro_batches(name, caplog):
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name))
    assert probed(PolicyObjective(config), [0, 0, 1, 1, 1, 2], caplog) == ""


@pytest.mark.parametrize("kind", ["k3", "reverse_kl"])
def test_distillation_is_added_with_its_coefficient_or_stands_alone(kind):
    outputs, columns, sequence = packed()
    outputs["teacher_divergence"] = 0.3 * outputs["log_probs"].square()
    columns["teacher_log_prob"] = columns["ref_log_prob"]
    plain = PolicyObjective(ActorConfig())(outputs, columns, sequence).loss
    distance = {
        "k3": kl_penalty(outputs["log_probs"], columns["teacher_log_prob"], "k3").mean(),
        "reverse_kl": outputs["teacher_divergence"].mean(),
    }[kind]

    objective = PolicyObjective(ActorConfig())
    for is_whole_loss, expected in ((False, plain + 0.7 * distance), (True, 0.7 * distance)):
        objective.distillation = DistillationTerm(kind=kind, coef=0.7, is_whole_loss=is_whole_loss)
        result = objective(outputs, columns, sequence)
        torch.testing.assert_close(result.loss, expected)
        torch.testing.assert_close(result.sums["actor/distillation_loss"], distance.detach())

    wanted = objective.columns({"advantages", "teacher_log_prob", "teacher_states"})
    assert ("teacher_states" in wanted) == (kind == "reverse_kl")


def test_the_ratio_is_taken_against_old_log_probs():
    outputs, columns, sequence = packed()
    result = PolicyObjective(
        ActorConfig(clip_ratio=100.0, clip_ratio_low=1.0, clip_ratio_high=100.0)
    )(outputs, columns, sequence)
    ratio = (outputs["log_probs"] - columns["old_log_probs"]).exp()
    torch.testing.assert_close(result.loss, -(ratio * columns["advantages"]).mean())


def test_without_old_log_probs_the_ratio_is_one():
    outputs, columns, sequence = packed()
    objective = PolicyObjective(ActorConfig())
    del columns["old_log_probs"]
    result = objective(outputs, columns, sequence)
    torch.testing.assert_close(result.loss, -(columns["advantages"] * columns["weights"]).sum())
    (gradient,) = torch.autograd.grad(result.loss, outputs["log_probs"])
    torch.testing.assert_close(gradient, -columns["advantages"] * columns["weights"])
    mismatch = objective.take_mismatch()
    expected = (outputs["log_probs"].exp() - columns["rollout_log_probs"].exp()).abs().max().item()
    assert mismatch["training/rollout_probs_diff_max"] == pytest.approx(expected)
    assert objective.take_mismatch() == {}, "reported once"


def test_a_restart_forgets_the_tokens_of_one_mini_batch_alone():
    undisturbed = PolicyObjective(ActorConfig())
    restarted = PolicyObjective(ActorConfig())
    for number in range(3):
        outputs, columns, sequence = packed()
        columns["rollout_log_probs"] += number
        columns["token_age"] = torch.tensor([0, 0, 0, 1, 1, 1])
        for objective in (undisturbed, restarted):
            objective.begin(mini_batch(number), dict, ALONE)
            objective(outputs, columns, sequence)
        restarted.restart()
        restarted(outputs, columns, sequence)
        undisturbed.end()
        restarted.end()

    expected = undisturbed.take_mismatch()
    assert {"fully_async/age_0/kl", "fully_async/age_1/ess"} <= expected.keys()
    assert restarted.take_mismatch() == expected


def test_only_columns_that_are_read_are_packed():
    available = {
        "advantages",
        "old_log_probs",
        "rollout_log_probs",
        "ref_log_prob",
        "returns",
        "input_ids",
        "prompts",
    }
    assert "ref_log_prob" not in PolicyObjective(ActorConfig()).columns(available)

    assert "ref_log_prob" in PolicyObjective(ActorConfig(use_kl_loss=True)).columns(available)
    extra = PolicyObjective(
        ActorConfig(loss_extra=[ExtraLossConfig(name="test_sum_of_returns")])
    ).columns(available)
    assert "returns" in extra
    assert not {"input_ids", "prompts"} & set(extra)
    assert len(extra) == len(set(extra))
    assert ValueObjective(0.5).columns(available) == ["values", "returns"]


def test_the_value_loss_is_clipped():
    values = torch.tensor([0.0, 2.0], requires_grad=True)
    columns = {
        "values": torch.tensor([0.0, 0.0]),
        "returns": torch.tensor([1.0, 0.0]),
        "weights": torch.tensor([0.5, 0.5]),
    }
    result = ValueObjective(0.5)({"values": values}, columns, torch.zeros(2, dtype=torch.int64))
    # 1/2 max((v - r)^2, (clip(v) - r)^2): 1 for the first token, 4 for the second
    assert result.loss.item() == pytest.approx(0.5 * (0.5 * 1.0 + 0.5 * 4.0))
    assert result.sums["critic/vf_loss"].item() == pytest.approx(result.loss.item())


def mini_batch(seed: int, rows: int = 3, width: int = 5) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    columns = {
        name: torch.randn(rows, width, generator=generator)
        for name in ("advantages", "old_log_probs", "now")
    }
    columns["response_mask"] = (
        torch.arange(width) < torch.randint(1, width + 1, (rows, 1), generator=generator)
    ).long()
    columns["input_ids"] = torch.randint(0, 99, (rows, 4 + width), generator=generator)
    return DataProto.from_dict(
        columns, {"uid": np.array([f"1-{row}" for row in range(rows)], dtype=object)}
    )


def test_the_selected_tokens_have_the_largest_covariance_on_all_ranks(monkeypatch):
    """Select tokens among the mini-batches of two ranks; each rank finds its own."""
    batches = [mini_batch(0), mini_batch(1, rows=2)]
    own = [batch.batch["response_mask"].bool() for batch in batches]
    now, advantages = (
        torch.cat([b.batch[name][m] for b, m in zip(batches, own)])
        for name in ("now", "advantages")
    )
    covariance = (now - now.mean()) * (advantages - advantages.mean())
    count = int(0.4 * len(now))
    chosen = covariance >= covariance.sort(descending=True).values[count - 1]

    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.4))
    objective = PolicyObjective(config)
    sent: list[list[torch.Tensor]] = []

    def gather(mine, axis):
        sent.append(mine)
        # in the first round, neither rank has the other's values
        return sent[:2] if len(sent) > 2 else [mine] * 2

    monkeypatch.setattr("verl.workers.selection.gather_objects", gather)
    for rank in (0, 1, 0, 1):
        columns = batches[rank].batch
        objective.begin(
            batches[rank],
            lambda columns=columns: {"log_probs": columns["now"]},
            Axis(size=2, rank=rank),
        )
    for batch, mask, expected in zip(batches, own, chosen.split([int(mask.sum()) for mask in own])):
        assert torch.equal(batch.batch["selected"][mask], expected.float())
        assert not batch.batch["selected"][~mask].any()
    assert "selected" in objective.columns(set(batches[0].batch.keys()))


def test_the_noise_of_a_token_is_its_own():
    """Make noise depend on step, response and position, but not on row order, padding or rank."""
    batch = mini_batch(0)
    noise = token_noise(batch)
    mask = batch.batch["response_mask"].bool()
    assert torch.equal(token_noise(batch.select_idxs([2, 0])), noise[[2, 0]])
    wide = DataProto.from_dict(
        {
            "response_mask": torch.nn.functional.pad(mask.long(), (0, 3)),
            "input_ids": torch.nn.functional.pad(batch.batch["input_ids"], (0, 3)),
        },
        {"uid": batch.non_tensor_batch["uid"]},
    )
    assert torch.equal(token_noise(wide)[:, :5], noise)
    wide.non_tensor_batch["uid"] = np.array([f"2-{row}" for row in range(3)], dtype=object)
    assert not (token_noise(wide)[:, :5] == noise).any(), "another step, another draw"
