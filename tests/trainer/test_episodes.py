"""Rows of agents: several per episode, scores by the loop, rewards of turns."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.algorithms.advantages import AdvantageInputs, advantage_estimators
from verl.algorithms.group_advantages import group_ids
from verl.config import AgentConfig, RolloutConfig, TrainConfig
from verl.config.gateway import GatewayConfig
from verl.protocol import DataProto
from verl.rollout.trajectory import DROPPED_BECAUSE, ENVIRONMENT_INFO, Trajectory
from verl.trainer.algorithm import chosen_samples, estimated_by_episode
from verl.trainer.dapo import first_prompts, rows_that_differ
from verl.trainer.episodes import (
    add_turn_rewards,
    agent_metrics,
    environment_metrics,
    episode_rows,
    mini_batch_rows,
    require_episodes,
    with_episodes,
    with_scores_of_episodes,
    without_failed,
)
from verl.trainer.metrics import data_metrics
from verl.trainer.rows import num_prompts
from verl.trainer.scored import reward_metrics
from verl.utils.errors import RewardError, RolloutError
from verl.workers.playing import episode_columns

WIDTH = 6


def objects(values: list[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def played(rows: list[tuple[int, int]], **columns: list[Any]) -> DataProto:
    """Return trajectories of the given (episode, part), each of two turns and four tokens."""
    size = len(rows)
    turns = torch.tensor([[0, 0, -1, 1, -1, -1]] * size, dtype=torch.int32)
    given: dict[str, list[Any]] = {
        "episode": [episode for episode, _ in rows],
        "episode_part": [part for _, part in rows],
        "agent_role": [""] * size,
        "agent_reward": [None] * size,
        "turn_rewards": [{}] * size,
        "num_turns": [4] * size,
    }
    given |= columns

    attention = torch.tensor([[1, 1, 1, 1, 1, 0, 0]] * size)
    return DataProto.from_dict(
        tensors={
            "responses": torch.arange(size)[:, None].expand(size, WIDTH).clone(),
            "attention_mask": attention,
            "response_mask": (turns >= 0).long(),
            "turn_of_token": turns,
            "rollout_log_probs": torch.full((size, WIDTH), -1.0),
        },
        non_tensors={name: objects(values) for name, values in given.items()},
    )


def prompts(count: int, first: int = 0) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.zeros(count, 1)},
        non_tensors={
            "prompt_row": objects(list(range(first, first + count))),
            "uid": objects([f"1-{first + row}" for row in range(count)]),
        },
    )


def test_rows_are_ordered_by_episode_and_part():
    given = played([(3, 0), (0, 1), (1, 0), (0, 0), (2, 0)])
    batch = with_episodes(prompts(2), given, n=2)
    columns = batch.non_tensor_batch
    found = list(zip(columns["uid"], columns["episode"], columns["episode_part"]))
    assert found == [
        ("1-0", 0, 0),
        ("1-0", 0, 1),
        ("1-0", 1, 0),
        ("1-1", 2, 0),
        ("1-1", 3, 0),
    ]
    assert batch.batch["responses"][:, 0].tolist() == [3, 1, 2, 4, 0]


def test_a_missing_or_doubled_episode_is_an_error():
    with pytest.raises(RolloutError, match="an episode twice"):
        with_episodes(prompts(1), played([(0, 0), (1, 0), (1, 0)]), n=2)
    with pytest.raises(RolloutError, match="Expected 4 episodes from the agent loops, got 3"):
        with_episodes(prompts(2), played([(0, 0), (1, 0), (3, 0)]), n=2)


def test_scores_of_the_loop_are_on_the_last_real_token():
    given = played([(0, 0), (1, 0)], agent_reward=[0.5, 2.0])
    batch = with_episodes(prompts(1), given, n=2)
    assert batch.batch["rm_scores"].tolist() == [[0, 0, 0, 0.5, 0, 0], [0, 0, 0, 2.0, 0, 0]]


def test_scores_for_only_some_episodes_are_an_error():
    with pytest.raises(RewardError, match="1 of 2 episodes got a score"):
        with_episodes(prompts(1), played([(0, 0), (1, 0)], agent_reward=[0.5, None]), n=2)


def test_reward_managers_of_users_find_the_columns_of_verl():
    rewards = {"search": 0.5, "user_turn_rewards": [1.0]}
    extras = [{"rollout_reward_scores": rewards}, {}]
    episodes = []
    for row, extra in enumerate(extras):
        episodes.append(
            Trajectory(
                row=row, part=0, prompt_ids=(1,), segments=[], num_turns=4 + row, extra=extra
            )
        )
    columns = episode_columns(episodes)
    assert list(columns["__num_turns__"]) == [4, 5]
    assert list(columns["reward_scores"]) == [rewards, {}]
    none = {"turn_scores": [], "tool_rewards": []}
    assert list(columns["agent_info"]) == [
        {**none, "rollout_reward_scores": rewards, "num_turns": 4},
        {**none, "rollout_reward_scores": {}, "num_turns": 5},
    ]


def test_episodes_that_all_failed_are_an_error_with_the_first_cause():
    infos = [{DROPPED_BECAUSE: "KeyError: 'answer'."}, {}]
    batch = with_episodes(prompts(1), played([(0, 0), (1, 0)], agent_info=infos), n=2)
    require_episodes(batch, RolloutConfig())
    batch.batch["response_mask"][:] = 0
    with pytest.raises(
        RolloutError, match=r"to learn from\. The first failed: KeyError: 'answer'\. Fix"
    ):
        require_episodes(batch, RolloutConfig())


@pytest.mark.parametrize(
    ("agent", "named"),
    [
        ({}, set()),
        ({"on_error": "drop", "tool_error": "drop"}, {"on_error=stop", "tool_error=text"}),
        ({"on_error": "drop", "gateway": GatewayConfig(path="agent.py")}, set()),
    ],
    ids=["defaults", "drop", "gateway"],
)
def test_a_step_without_episodes_names_settings_that_would_change_it(
    agent: dict[str, Any], named: set[str]
):
    batch = with_episodes(prompts(1), played([(0, 0)], agent_info=[{DROPPED_BECAUSE: "late"}]), n=1)
    batch.batch["response_mask"][:] = 0
    with pytest.raises(RolloutError) as caught:
        require_episodes(batch, RolloutConfig(agent=AgentConfig(**agent)))
    assert set(re.findall(r"agent\.(\w+=\w+)", str(caught.value))) == named


def test_episodes_that_all_failed_need_no_reward_function():
    """Also in a validation, where one batch may have none that was played to its end."""
    given = played([(0, 0), (1, 0)])
    given.batch["response_mask"][:] = 0
    batch = with_episodes(prompts(1), given, n=2)
    assert not batch.batch["rm_scores"].any()


def test_scores_of_the_log_count_an_episode_once():
    batch = with_episodes(prompts(1), played([(0, 0), (0, 1), (0, 2), (1, 0)]), n=2)
    batch = with_scores(batch, [0.0, 0.0, 0.0, 1.0])
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = batch.batch["token_level_scores"]
    batch.batch["prompts"] = torch.zeros(4, 1)
    batch.non_tensor_batch["num_turns"] = objects([2, 2, 2, 6])
    metrics = data_metrics(batch)
    assert metrics["critic/score/mean"] == pytest.approx(0.5)
    assert metrics["critic/rewards/mean"] == pytest.approx(0.5)
    assert agent_metrics(batch)["num_turns/mean"] == 4.0
    result = {"reward_extra_info": {"acc": [0.0, 0.0, 0.0, 1.0]}, "metrics": {}}
    assert reward_metrics(result, [2, 3]) == {"reward/acc/mean": 0.5}


def test_dapo_counts_a_prompt_once_whatever_roles_it_has():
    rows = [(episode, part) for episode in range(4) for part in range(2)]
    batch = with_episodes(prompts(2), played(rows, agent_role=["a", "b"] * 4), n=2)
    assert num_prompts(batch) == 2
    assert first_prompts(batch, 1).non_tensor_batch["episode"].tolist() == [0, 0, 1, 1]


def test_dapo_compares_the_last_parts_of_episodes():
    batch = with_episodes(prompts(1), played([(0, 0), (0, 1), (1, 0)]), n=2)
    batch.non_tensor_batch["acc"] = objects([False, True, True])
    assert not rows_that_differ(batch, "acc").any()
    batch.non_tensor_batch["acc"] = objects([False, True, False])
    assert rows_that_differ(batch, "acc").all()


def test_roles_form_separate_groups():
    given = played([(0, 0), (0, 1), (1, 0), (1, 1)], agent_role=["a", "b", "a", "b"])
    batch = with_episodes(prompts(1), given, n=2)
    assert batch.non_tensor_batch["uid"].tolist() == ["1-0/a", "1-0/b", "1-0/a", "1-0/b"]


def with_scores(batch: DataProto, scores: list[float]) -> DataProto:
    column = torch.zeros(len(batch), WIDTH)
    column[:, 3] = torch.tensor(scores)
    batch.batch["token_level_scores"] = column
    return batch


def test_every_part_has_the_score_of_the_last_one():
    batch = with_scores(
        with_episodes(prompts(1), played([(0, 0), (0, 1), (1, 0)]), n=2), [0.1, 0.7, 0.2]
    )
    with_scores_of_episodes(batch)
    assert batch.batch["token_level_scores"].sum(-1).tolist() == pytest.approx([0.7, 0.7, 0.2])


def estimates(batch: DataProto, name: str) -> torch.Tensor:
    config = TrainConfig()
    config.algorithm.adv_estimator = name
    inputs = AdvantageInputs(
        token_level_rewards=batch.batch["token_level_scores"],
        response_mask=batch.batch["response_mask"],
        group=group_ids(batch.non_tensor_batch["uid"]),
        columns={"turn_of_token": batch.batch["turn_of_token"]},
    )
    estimator = advantage_estimators.get(name)
    advantages, _ = estimated_by_episode(estimator, config, inputs, episode_rows(batch))
    return advantages


@pytest.mark.parametrize("name", ["grpo", "rloo", "opo"])
@pytest.mark.parametrize("split", [(0,), (1, 2), (0, 1, 2)])
def test_an_episode_counts_once_for_any_number_of_rows(name: str, split: tuple[int, ...]):
    scores = [0.3, 1.0, 0.0]
    whole = with_episodes(prompts(1), played([(0, 0), (1, 0), (2, 0)]), n=3)
    expected = estimates(with_scores(whole, scores), name)[:, 0]

    rows = []
    for episode in range(3):
        rows += [(episode, part) for part in range(3 if episode in split else 1)]
    parts = with_episodes(prompts(1), played(rows), n=3)
    batch = with_scores(parts, [scores[episode] for episode, _ in rows])
    advantages = estimates(batch, name)
    for row, (episode, _) in enumerate(rows):
        own = advantages[row][batch.batch["response_mask"][row].bool()]
        assert own.tolist() == pytest.approx([expected[episode].item()] * 3)


@pytest.mark.parametrize(("given", "last"), [(None, 1.0), (1.0, 0.25)])
def test_rewards_of_turns_are_placed_at_the_end_of_their_turn(given: float | None, last: float):
    """Expect a score given by the loop to be the sum of its turn rewards already."""
    rewards = [{0: 0.5, 1: 0.25}]
    batch = with_episodes(
        prompts(1), played([(0, 0)], turn_rewards=rewards, agent_reward=[given]), n=1
    )
    batch = with_scores(batch, [1.0])
    add_turn_rewards(batch)
    scores = batch.batch["token_level_scores"][0]
    assert scores[1] == 0.5
    assert scores[3] == pytest.approx(0.25 + last)


def test_the_number_of_mini_batches_is_the_configured_one():
    rows = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (3, 0)]
    batch = with_episodes(prompts(2), played(rows), n=2)
    assert mini_batch_rows(batch, 6, 1, 2, SimpleNamespace(num_shares=1)) == 3
    assert mini_batch_rows(batch, 6, 1, 2, SimpleNamespace(num_shares=2)) == 4
    assert mini_batch_rows(batch, 9, 1, 2, SimpleNamespace(num_shares=1)) == 5
    assert mini_batch_rows(batch, 6, None, 2, SimpleNamespace(num_shares=1)) is None
    single = with_episodes(prompts(2), played([(0, 0), (1, 0), (2, 0), (3, 0)]), n=2)
    assert mini_batch_rows(single, 4, 1, 2, SimpleNamespace(num_shares=1)) is None
    assert mini_batch_rows(single, 4, 1, 2, SimpleNamespace(num_shares=2)) is None


def test_mini_batches_are_even_where_each_episode_happens_to_have_one_row():
    """A loop that may give several rows passes the check at start, whatever the ranks divide."""
    batch = with_episodes(prompts(3), played([(episode, 0) for episode in range(9)]), n=3)
    assert mini_batch_rows(batch, 9, 1, 3, SimpleNamespace(num_shares=2)) == 4
    assert mini_batch_rows(batch, 9, 1, 3, SimpleNamespace(num_shares=3)) is None


@pytest.mark.parametrize("step", range(4))
def test_pf_ppo_draws_whole_episodes(step: int):
    rows = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (3, 0)]
    batch = with_episodes(prompts(2), played(rows), n=2)
    # The last part has the score: episodes 0 and 3 have none, whatever their other parts say.
    batch = with_scores(batch, [9.0, 9.0, 0.0, 1.0, 0.0, 2.0, 0.0])
    config = TrainConfig()
    config.algorithm.use_pf_ppo = True
    drawn = chosen_samples(batch, config, step).non_tensor_batch
    count = Counter(zip(drawn["episode"], drawn["episode_part"]))
    assert count[1, 0] + count[2, 0] == 4
    assert count[2, 0] == count[2, 1]
    assert set(count) <= {(1, 0), (2, 0), (2, 1)}


def test_failed_episodes_have_no_score():
    infos = [{"num_turns": 4}, {"num_turns": 4, DROPPED_BECAUSE: "the sandbox is gone"}]
    batch = with_episodes(prompts(1), played([(0, 0), (1, 0)], agent_info=infos), n=2)
    left, causes = without_failed(batch)
    assert causes == ["the sandbox is gone"]
    assert left.non_tensor_batch["episode"].tolist() == [0]
    assert len(without_failed(left)[0]) == 1


def test_numbers_of_an_environments_last_observation_become_metrics():
    infos = [
        {ENVIRONMENT_INFO: {"solved": 1.0, "place": "b7"}},
        {ENVIRONMENT_INFO: {"solved": 0.0, "steps": 5.0}},
        {ENVIRONMENT_INFO: {"solved": 9.0}, DROPPED_BECAUSE: "late"},
        {},
    ]
    found = environment_metrics(infos)
    assert found == {"environment/solved/mean": 0.5, "environment/steps/mean": 5.0}

    many: dict[str, Any] = {f"visits_of_{place:02}": 1.0 for place in range(40)}
    found = environment_metrics([{ENVIRONMENT_INFO: many}, *infos])
    assert len(found) == 32
    assert "environment/solved/mean" in found


def test_log_probs_are_compared_turn_by_turn():
    batch = with_episodes(prompts(1), played([(0, 0), (1, 0)]), n=2)
    old = torch.full((2, WIDTH), -1.0)
    old[0, 3] = -1.5
    batch.batch["old_log_probs"] = old
    metrics = agent_metrics(batch)
    assert metrics["training/turn_0/rollout_kl"] == 0.0
    assert metrics["training/turn_1/rollout_kl"] == pytest.approx(0.25)
    assert metrics["training/turn_1/rollout_diff_max"] == pytest.approx(0.5)
    assert metrics["num_turns/mean"] == 4.0
