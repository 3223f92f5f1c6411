"""An estimator or a loss of the user that fails is named, and never ends in a traceback of the package."""

from pathlib import Path

import pytest

from tests.trainer.bad_inputs import message
from tests.trainer.runs import run, same_bits, step_lines, weights


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "lone",
            "rewards",
            "must return a pair (advantages, returns), both floats of shape (16, 8) (rows, "
            "response tokens), got torch.float32 Tensor of shape (16, 8).",
        ),
        (
            "flat",
            "(rewards.sum(-1), rewards)",
            "got a tuple of 2: torch.float32 Tensor of shape (16,), torch.float32 Tensor of shape "
            "(16, 8).",
        ),
        ("nothing", "None", "got NoneType."),
        (
            "divides",
            "(rewards / 0, rewards)",
            "gave NaN or infinity for finite rewards in 16 of 16 rows",
        ),
        (
            "raises",
            "rewards.nonsense",
            "raised AttributeError in line 6: 'Tensor' object has no attribute 'nonsense'",
        ),
    ],
)
def test_an_invalid_custom_estimator_is_named(tmp_path, capfd, name, answer, expected):
    path = tmp_path / "mine.py"
    path.write_text(f"""from verl.algorithms.advantages import advantage_estimators

@advantage_estimators.register("test_{name}")
def estimator(inputs):
    rewards = inputs.token_level_rewards
    return {answer}
""")
    own = [f"algorithm.adv_estimator=test_{name}", f"actor_rollout_ref.model.external_lib={path}"]
    text = message(capfd, run(tmp_path, *own))
    assert text.startswith(f"The advantage estimator 'test_{name}' ({path}) ")
    assert expected in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "answer", "expected"),
    [
        (
            "raises",
            "inputs.nonsense",
            "raised AttributeError in line 5: 'PolicyLossInputs' object has no",
        ),
        (
            "vector",
            "PolicyLossOutput(loss=terms, means={})",
            "a scalar tensor as loss, got torch.float32 Tensor of shape (",
        ),
        (
            "bare",
            "terms.sum()",
            "must return a PolicyLossOutput with a scalar tensor as loss, got torch.float32 Tensor "
            "of shape ().",
        ),
        ("number", "PolicyLossOutput(loss=1.0, means={})", "got float."),
        ("words", "'a loss'", "a scalar tensor as loss, got str."),
        (
            "detached",
            "PolicyLossOutput(loss=terms.detach().sum(), means={})",
            "got one without a gradient",
        ),
    ],
)
def test_an_invalid_custom_policy_loss_is_named(tmp_path, capfd, name, answer, expected):
    path, own = own_policy_loss(tmp_path, name, answer)
    text = message(capfd, run(tmp_path, *own))
    assert text.startswith(f"The policy loss 'test_{name}' ({path}) ")
    assert expected in text
    assert len(text.splitlines()) == 1


def test_a_custom_policy_loss_that_is_not_finite_is_named(tmp_path, capfd):
    path, own = own_policy_loss(
        tmp_path, "divides", "PolicyLossOutput(loss=terms.sum() * math.nan, means={})"
    )
    assert run(tmp_path, *own) == 0
    warning = (
        f"The policy loss 'test_divides' ({path}) gave nan for finite log-probs and advantages."
    )
    assert capfd.readouterr().out.count(warning) == 1


def own_policy_loss(tmp_path: Path, name: str, answer: str) -> tuple[Path, list[str]]:
    path = tmp_path / "mine.py"
    path.write_text(f"""import math; from verl.algorithms.policy_losses import PolicyLossOutput, policy_losses
@policy_losses.register("test_{name}")
def loss(inputs, **_):
    terms = inputs.log_probs * inputs.weights
    return {answer}
""")
    mode = f"actor_rollout_ref.actor.policy_loss.loss_mode=test_{name}"
    return path, [mode, f"actor_rollout_ref.model.external_lib={path}"]


def test_updates_that_are_never_finite_stop_the_run_and_keep_the_weights(tmp_path, capfd):
    library = tmp_path / "broken_term.py"
    library.write_text(
        "from verl.algorithms.policy_losses import extra_losses\n\n\n"
        "@extra_losses.register('broken')\n"
        "def broken(inputs, columns):\n"
        "    return (inputs.log_probs * float('nan')).sum()\n"
    )
    broken = [
        f"actor_rollout_ref.model.external_lib={library}",
        "actor_rollout_ref.actor.loss_extra=[{name: broken}]",
    ]

    limit = ["trainer.max_nonfinite_steps=2", "trainer.max_steps=5", "trainer.save_freq=1"]
    text = message(capfd, run(tmp_path, *broken, *limit))
    assert "2 steps in a row had a non-finite loss or gradient" in text
    (line,) = step_lines(tmp_path)
    assert line["actor/skipped_updates"] == 1
    assert run(tmp_path / "still", "actor_rollout_ref.actor.optim.lr=0", "trainer.save_freq=1") == 0
    assert same_bits(weights(tmp_path, 1), weights(tmp_path / "still", 1))
