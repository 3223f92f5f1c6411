"""Advantage estimators of a user's own: their inputs, and the checks of their answers."""

import math

import numpy as np
import pytest
import torch

from tests.trainer.runs import TOY, run, step_lines
from verl.algorithms.advantages import AdvantageInputs, advantage_estimators, formula, formula_of
from verl.algorithms.group_advantages import grpo
from verl.algorithms.policy_losses import output_of, policy_losses
from verl.compat.registries import register_adv_est
from verl.config import TrainConfig, load_config
from verl.diagnostics.parts import check_names
from verl.protocol import DataProto
from verl.trainer.algorithm import advantage_inputs, estimated, estimated_by_episode
from verl.trainer.episodes import EpisodeRows
from verl.utils.errors import AlgorithmError, ConfigError, RewardError

INPUTS = AdvantageInputs(
    token_level_rewards=torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]]),
    response_mask=torch.tensor([[1, 1, 0], [1, 0, 1], [1, 1, 1]]),
    group=torch.tensor([0, 0, 0]),
)


def centered(inputs: AdvantageInputs) -> torch.Tensor:
    scores = inputs.token_level_rewards.sum(-1, keepdim=True)
    return (scores - scores.mean()).expand(inputs.response_mask.shape)


def advantages_of(function, inputs: AdvantageInputs = INPUTS) -> torch.Tensor:
    return estimated(lambda inputs: (function(inputs),) * 2, TrainConfig(), inputs)[0]


def test_an_estimator_may_forget_the_mask():
    expected = centered(INPUTS) * INPUTS.response_mask
    assert torch.equal(advantages_of(centered), expected)

    def without_numbers(inputs):
        return torch.where(inputs.response_mask.bool(), centered(inputs), torch.nan)

    assert torch.equal(advantages_of(without_numbers), expected)


def test_an_estimator_may_return_arrays_and_leave_a_graph():
    expected = centered(INPUTS) * INPUTS.response_mask
    assert torch.equal(advantages_of(lambda inputs: centered(inputs).numpy()), expected)
    scale = torch.ones((), requires_grad=True)
    assert not advantages_of(lambda inputs: scale * centered(inputs)).requires_grad


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda column: column.long(), "torch.int64"),
        (lambda column: column > 0, "torch.bool"),
        (lambda column: column.numpy().astype(object), "object"),
        (lambda column: column[:, 0], r"Tensor of shape \(3,\)"),
        (lambda column: column.tolist(), "a list of 3"),
    ],
    ids=["integers", "booleans", "objects", "one a row", "lists"],
)
def test_advantages_are_floats_one_for_each_token(change, found):
    with pytest.raises(AlgorithmError, match=rf"floats of shape \(3, 3\) .* {found}"):
        advantages_of(lambda inputs: change(centered(inputs)))


@pytest.mark.parametrize("name", ["token_level_rewards", "response_mask", "responses"])
def test_an_estimator_leaves_the_batch_as_it_is(name):
    inputs = INPUTS._replace(
        token_level_rewards=INPUTS.token_level_rewards.clone(),
        response_mask=INPUTS.response_mask.clone(),
        columns={"responses": torch.ones(3, 3)},
    )

    def careless(inputs):
        column = inputs.columns[name] if name in inputs.columns else getattr(inputs, name)
        column[:, 0] = 0
        return centered(inputs)

    with pytest.raises(AlgorithmError, match=rf"changed {name} in place.*{name}.clone\(\)"):
        advantages_of(careless, inputs)


def test_braces_of_a_formula_stay():
    own = formula(r"\frac{r - \mu}{\sigma}, gamma = {gamma}")(lambda inputs: None)
    assert formula_of(own, "none", {"gamma": 0.5}) == r"\frac{r - \mu}{\sigma}, gamma = 0.5"
    assert formula_of(centered, "none", {"gamma": 0.5}) == "none"


def test_episodes_are_compared_by_the_fields_of_their_last_rows():
    rows = EpisodeRows(episode=torch.tensor([0, 0, 1]), last=torch.tensor([1, 2]))
    fields = np.array([{"a": 1}, {"a": 2}, {"a": 3}], dtype=object)
    seen = []

    def looks(inputs):
        seen.extend(inputs.columns["fields"])
        return centered(inputs), centered(inputs)

    estimated_by_episode(looks, TrainConfig(), INPUTS._replace(columns={"fields": fields}), rows)
    assert seen == [{"a": 2}, {"a": 3}]


def scored(field: list) -> DataProto:
    """Return four scored samples of two prompts, the last one dropped, with a field "acc"."""
    mask = torch.ones(4, 2)
    mask[3] = 0
    return DataProto.from_dict(
        tensors={"token_level_rewards": torch.ones(4, 2), "response_mask": mask},
        non_tensors={"uid": ["a", "a", "b", "b"], "acc": field},
    )


GDPO = TrainConfig()
GDPO.algorithm.gdpo_reward_keys = ["acc", "score"]


def test_kinds_of_reward_may_be_any_numbers():
    field = [np.float32(0.5), np.int64(2), np.bool_(True), None]
    components = advantage_inputs(scored(field), GDPO).components
    assert components.tolist() == [[0.5, 2.0], [2.0, 2.0], [1.0, 2.0], [0.0, 2.0]]


@pytest.mark.parametrize("absent", [math.nan, np.float32("nan"), None, "high"])
def test_a_sample_without_a_kind_of_reward_is_named(absent):
    """Expect no NaN to reach the estimator, whose error would blame its divisor."""
    with pytest.raises(RewardError, match=r"a number as field 'acc', got .* for row 2\. Return it"):
        advantage_inputs(scored([1.0, 0.0, absent, 1.0]), GDPO)


@advantage_estimators.register("test_scaled")
def scaled(inputs, *, scale=1.0):
    advantages = scale * grpo(inputs)[0]
    return advantages, advantages


@policy_losses.register("test_scaled")
def scaled_loss(inputs, *, scale=1.0, **_):
    return output_of(inputs, -scale * inputs.advantages * inputs.log_ratio().exp())


def test_parts_of_ones_own_take_keywords_of_the_configuration(tmp_path):
    loss = "actor_rollout_ref.actor.policy_loss"
    own = ["algorithm.adv_estimator=test_scaled", f"{loss}.loss_mode=test_scaled"]
    norms = []
    for name, keys in (
        ("plain", []),
        ("estimator", ["algorithm.adv_kwargs.scale=2.0"]),
        ("loss", [f"{loss}.loss_kwargs.scale=2.0"]),
    ):
        assert run(tmp_path / name, *own, *keys, "trainer.max_steps=1") == 0
        norms.append(step_lines(tmp_path / name)[0]["actor/grad_norm"])
    assert norms[1:] == pytest.approx([2 * norms[0]] * 2)


@pytest.mark.parametrize(
    "key", ["algorithm.adv_kwargs.size", "actor_rollout_ref.actor.policy_loss.loss_kwargs.size"]
)
def test_a_keyword_that_no_part_takes_is_an_error(key):
    with pytest.raises(ConfigError, match=rf"{key}: the function takes inputs"):
        check_names(load_config([*TOY, f"{key}=2.0"]))


def test_a_policy_loss_that_does_not_take_its_settings_is_an_error():
    @policy_losses.register("test_two_settings")
    def narrow(inputs, clip_ratio_low, clip_ratio_high):
        return output_of(inputs, -inputs.advantages * inputs.log_probs)

    keys = [*TOY, "actor_rollout_ref.actor.policy_loss.loss_mode=test_two_settings"]
    with pytest.raises(
        ConfigError, match=r"does not take all settings .* such as clip_ratio_c\. .*`\*\*_`"
    ):
        check_names(load_config(keys))


@register_adv_est("test_padded_scale")
def padded_scale(token_level_rewards, response_mask, scale=1.0, **_):
    advantages = scale * token_level_rewards.sum(-1, keepdim=True) * response_mask
    return advantages, advantages


def test_an_estimator_of_verls_signature_takes_them_by_name():
    config = load_config(
        [*TOY, "algorithm.adv_estimator=test_padded_scale", "algorithm.adv_kwargs.scale=3.0"]
    )
    check_names(config)
    advantages, _ = estimated(advantage_estimators.get("test_padded_scale"), config, INPUTS)
    assert advantages.max() == 3.0


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
"""


@advantage_estimators.register("test_length_of_the_reward")
def length_of_the_reward(inputs):
    lengths = torch.tensor(inputs.columns["length"].astype(np.float32))[:, None]
    return grpo(inputs)[0] + lengths * inputs.response_mask, lengths * inputs.response_mask


def test_an_estimator_reads_the_fields_of_the_reward(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(REWARD)
    keys = [
        f"custom_reward_function.path={file}",
        "algorithm.adv_estimator=test_length_of_the_reward",
    ]
    assert run(tmp_path / "run", *keys, "trainer.max_steps=1") == 0
    (line,) = step_lines(tmp_path / "run")
    assert line["critic/returns/max"] >= line["reward/length/mean"] > 0
