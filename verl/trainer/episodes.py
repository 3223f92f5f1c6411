"""The rows that agent loops give: parts of episodes, their scores, and their numbers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl.config import RolloutConfig
from verl.protocol import DataProto
from verl.rollout.assemble import NO_TURN
from verl.rollout.trajectory import DROPPED_BECAUSE, ENVIRONMENT_INFO
from verl.trainer.rows import counted_rows, response_lengths
from verl.utils.arithmetic import ceil_div, round_up
from verl.utils.errors import RewardError, RolloutError
from verl.utils.logging import say_once

_MOST_NAMES = 32  # of metrics from `Observation.info`


def number_prompts(prompts: DataProto, step: int, first_row: int = 0) -> None:
    """Write `uid` and `prompt_row`: the place of (B,) prompts in a step, which fixes the noise."""
    numbers = range(first_row, first_row + len(prompts))
    uids = [f"{step}-{row}" for row in numbers]
    prompts.non_tensor_batch["uid"] = np.array(uids, dtype=object)
    prompts.non_tensor_batch["prompt_row"] = np.array(numbers, dtype=object)


def number_episodes(batch: DataProto, first: int) -> None:
    """Number the episodes of a batch from `first`, so that those of other rounds are others."""
    episodes = batch.non_tensor_batch.get("episode")
    if episodes is not None:
        batch.non_tensor_batch["episode"] = episodes - min(episodes) + first


def with_episodes(
    prompts: DataProto,
    played: DataProto,
    n: int,
    rows: Sequence[int] | None = None,
    *,
    gives_reward: bool = False,
) -> DataProto:
    """Put the columns of the prompts next to the trajectories of their episodes.

    Args:
        prompts: (B,) prompts with `prompt_row`.
        played: trajectories of `RolloutWorker.play_episodes`, in any order.
        n: episodes of a prompt.
        rows: numbers of the prompts that the episodes go by; None: `prompt_row`.
        gives_reward: whether every episode must bring a score.

    Returns the trajectories in the order of prompts, episodes and parts. Raises RolloutError for an
    episode that is missing or was played twice.
    """
    columns = played.non_tensor_batch
    keys = list(zip(columns["episode"], columns["episode_part"]))
    order = sorted(range(len(keys)), key=keys.__getitem__)
    if len(set(keys)) < len(keys):
        raise RolloutError("The agent loops returned an episode twice.")

    numbers = prompts.non_tensor_batch["prompt_row"] if rows is None else rows
    place_of_row: dict[int, int] = {}
    for place, row in enumerate(numbers):
        place_of_row[int(row)] = place

    prompt_of = []
    episodes = set()
    for place in order:
        sample = keys[place][0]
        prompt_of.append(place_of_row[sample // n])
        episodes.add(sample)
    if len(episodes) != len(prompts) * n:
        raise RolloutError(
            f"Expected {len(prompts) * n} episodes from the agent loops, got {len(episodes)}."
        )

    trajectories = played.select_idxs(np.array(order))
    metrics = played.meta_info
    repeated = prompts.select_idxs(np.array(prompt_of))
    if "prepared_pictures" in trajectories.non_tensor_batch:
        # Those of the trajectories begin with the prompt's.
        repeated.non_tensor_batch.pop("prepared_pictures", None)
    joined = repeated.union(trajectories)
    joined.meta_info.update(metrics)
    _compare_roles_apart(joined)
    return with_given_scores(joined, required=gives_reward)


def _compare_roles_apart(batch: DataProto) -> None:
    """Give the rows of each role a `uid` of their own, so that roles are groups of their own."""
    columns = batch.non_tensor_batch
    uids = []
    for uid, role in zip(columns["uid"], columns["agent_role"]):
        uids.append(f"{uid}/{role}" if role else uid)
    columns["uid"] = np.array(uids, dtype=object)


def with_given_scores(batch: DataProto, *, required: bool = False) -> DataProto:
    """Add `rm_scores` where the agent loops give the scores themselves.

    The score of an episode with several parts is that of the last one. Raises RewardError where
    only some episodes have one, or none has and it is `required`. Where all episodes failed there
    is nothing to score, and all scores are 0.
    """
    rewards = batch.non_tensor_batch["agent_reward"]
    is_counted = counted_rows(batch).tolist()
    episodes = _episodes_of_rows(batch) or range(len(rewards))
    reward_of = dict(zip(episodes, rewards))  # that of the last part stays
    learned = {episode for episode, counts in zip(episodes, is_counted) if counts}
    given = [reward_of[episode] is not None for episode in learned]

    if given and not any(given):
        if required:
            raise RewardError(
                "actor_rollout_ref.rollout.agent.gives_reward=True, but no episode has a score. "
                "Return it from the agent loop (reward_score) or from the gateway's agent (a "
                "number, or a dict with 'reward'), or leave gives_reward out."
            )
        return batch
    if not all(given):
        raise RewardError(
            f"{sum(given)} of {len(given)} episodes got a score from their agent loop, the others "
            "none. Return reward_score from every episode, or from none, so that the reward "
            "function scores all of them."
        )

    scores = []
    for reward in rewards:
        scores.append(0.0 if reward is None else float(reward))
    batch.batch["rm_scores"] = at_last_token(batch, scores)
    return batch


def require_episodes(batch: DataProto, rollout: RolloutConfig) -> None:
    """Raise RolloutError where agent loops left no token to learn from."""
    infos = batch.non_tensor_batch.get("agent_info")
    if infos is None or batch.batch["response_mask"].any():
        return
    _, causes = without_failed(batch)
    first = f" The first failed: {causes[0].rstrip('.')}." if causes else ""
    settings = []
    # Agents behind the gateway are dropped in every case.
    if rollout.agent.on_error != "stop" and rollout.agent_loop != "gateway_agent":
        settings.append("actor_rollout_ref.rollout.agent.on_error=stop shows the first error")
    if rollout.agent.tool_error != "text":
        settings.append("actor_rollout_ref.rollout.agent.tool_error=text lets the model read it")
    way_out = "; ".join(["Fix the tools, the environment or the agent", *settings])
    raise RolloutError(
        f"All {len(set(batch.non_tensor_batch['episode']))} episodes of this step were dropped or "
        f"masked, so there is nothing to learn from.{first} {way_out}."
    )


def at_last_token(batch: DataProto, scores: list[float]) -> torch.Tensor:
    """Place one score for each row on its last real token, (B, R) fp32."""
    placed = torch.zeros(batch.batch["responses"].shape)
    placed[torch.arange(len(batch)), response_lengths(batch) - 1] = torch.tensor(scores)
    return placed


def with_scores_of_episodes(batch: DataProto) -> None:
    """Give every part of an episode the score of its last part, which has the answer."""
    played = _episodes_of_rows(batch)
    if played is None:
        return
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    last = dict(zip(played, scores))  # the last of each stays
    batch.batch["token_level_scores"] = at_last_token(batch, [last[each] for each in played])


def add_turn_rewards(batch: DataProto) -> None:
    """Place the reward of every turn on its last token, in addition to the score of the episode.

    A score that the agent loop gave is the sum of its turns' rewards already: the last token keeps
    the score minus the rewards of the turns.
    """
    if episode_rows(batch) is not None:
        raise RolloutError(
            "algorithm.turn_rewards=True needs all turns of an episode in one row, but an agent "
            "loop returned several outputs for one. Return one, or leave turn_rewards out."
        )
    scores = batch.batch["token_level_scores"]
    turns = batch.batch["turn_of_token"]
    columns = batch.non_tensor_batch
    last = response_lengths(batch) - 1

    for row, rewards in enumerate(columns["turn_rewards"]):
        for turn, reward in rewards.items():
            own = (turns[row] == turn).nonzero()
            if not len(own):
                continue  # a dropped episode has no turn left
            scores[row, int(own[-1])] += reward
            if columns["agent_reward"][row] is not None:
                scores[row, last[row]] -= reward


@dataclass(frozen=True)
class EpisodeRows:
    """The rows of a batch in which some episodes have several.

    Args:
        last: (E,) row of the last part of each episode and role.
        episode: (B,) number of a row's episode and role, an index into `last`.
    """

    last: torch.Tensor
    episode: torch.Tensor


def episode_rows(batch: DataProto) -> EpisodeRows | None:
    """Return the rows of episodes; None where each row is an episode."""
    played = _episodes_of_rows(batch)
    if played is None:
        return None
    last: dict[tuple[Any, Any], int] = {}
    numbers: dict[tuple[Any, Any], int] = {}
    number_of_row: list[int] = []
    for row, episode in enumerate(played):
        last[episode] = row
        number_of_row.append(numbers.setdefault(episode, len(numbers)))
    return EpisodeRows(last=torch.tensor(list(last.values())), episode=torch.tensor(number_of_row))


def _episodes_of_rows(batch: DataProto) -> list[tuple[Any, Any]] | None:
    """Return the (episode, role) of every row; None where each row is an episode."""
    columns = batch.non_tensor_batch
    if "episode" not in columns or not any(columns["episode_part"]):
        return None
    return list(zip(columns["episode"], columns["agent_role"]))


def whole_episodes(batch: DataProto) -> DataProto:
    """Keep the last part of each episode, which has the answer."""
    rows = episode_rows(batch)
    if rows is None:
        return batch
    return batch.select_idxs(rows.last.sort().values)


def without_failed(batch: DataProto) -> tuple[DataProto, list[str]]:
    """Leave out the rows of failed episodes, which have no answer. Return their causes too."""
    infos = batch.non_tensor_batch.get("agent_info")
    if infos is None:
        return batch, []
    kept: list[int] = []
    causes: list[str] = []
    for row, info in enumerate(infos):
        if DROPPED_BECAUSE in info:
            causes.append(info[DROPPED_BECAUSE])
        else:
            kept.append(row)
    if causes:
        batch = batch.select_idxs(np.array(kept, dtype=np.int64))
    return batch, causes


def mini_batch_rows(
    batch: DataProto, num_rows: int, mini_prompts: int | None, n: int, group: Any
) -> int | None:
    """Return the rows of a mini-batch where episodes may have several rows.

    None where the configured `mini_prompts` prompts of n samples can stay: each episode of this
    batch has one row, and the shares of the worker group divide a mini-batch. Otherwise the rows
    are a multiple of the shares, and there are at most as many mini-batches as configured.

    Args:
        batch: all trajectories of the step.
        num_rows: number of the rows that are learned from.
        mini_prompts: prompts of a mini-batch.
        n: samples of a prompt.
        group: the workers that learn.
    """
    if mini_prompts is None or "episode" not in batch.non_tensor_batch:
        return None
    is_even = mini_prompts * n % group.num_shares == 0
    if is_even and episode_rows(batch) is None:
        return None

    num_episodes = len(set(batch.non_tensor_batch["episode"]))
    num_mini_batches = ceil_div(num_episodes, mini_prompts * n)
    rows = ceil_div(num_rows, num_mini_batches)
    return round_up(rows, group.num_shares)


def turn_metrics(num_turns: Sequence[int] | np.ndarray) -> dict[str, float]:
    """Summarize the turns of episodes; nothing without episodes."""
    turns = np.array(num_turns, dtype=float)
    if not turns.size:
        return {}
    return {
        "num_turns/min": float(turns.min()),
        "num_turns/max": float(turns.max()),
        "num_turns/mean": float(turns.mean()),
    }


def environment_metrics(infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of each number in the last `Observation.info` of episodes.

    Of more than 32 names, those that most episodes have stay: an environment may write names of its
    own making, such as one for each place that it visits.

    Args:
        infos: the column `agent_info`, a row for each episode. Failed ones do not count.
    """
    numbers: dict[str, list[float]] = {}
    for info in infos:
        if DROPPED_BECAUSE in info:
            continue
        for name, value in info.get(ENVIRONMENT_INFO, {}).items():
            if not isinstance(value, str):
                numbers.setdefault(name, []).append(value)

    names = sorted(numbers, key=lambda name: (-len(numbers[name]), name))
    if len(names) > _MOST_NAMES:
        say_once(
            f"Observation.info of the environment has more than {_MOST_NAMES} numbers. Those that "
            "most episodes have become metrics; the sample log has all."
        )
    metrics = {}
    for name in names[:_MOST_NAMES]:
        metrics[f"environment/{name}/mean"] = sum(numbers[name]) / len(numbers[name])
    return metrics


def agent_metrics(batch: DataProto) -> dict[str, float]:
    """Summarize the turns of a batch that agent loops played."""
    if "num_turns" not in batch.non_tensor_batch:
        return {}
    episodes = whole_episodes(batch).non_tensor_batch
    metrics = turn_metrics(episodes["num_turns"])
    metrics |= environment_metrics(episodes.get("agent_info", ()))
    columns: Any = batch.batch
    old = columns.get("old_log_probs", None)
    if old is not None:
        metrics |= turn_mismatch(columns["rollout_log_probs"], old, columns["turn_of_token"])
    return metrics


def turn_mismatch(
    rollout: torch.Tensor, trainer: torch.Tensor, turns: torch.Tensor
) -> dict[str, float]:
    """Compare the log-probs of rollout and trainer, (B, R) each, turn by turn.

    `training/turn_<k>/rollout_kl` is the mean of log p_rollout - log p_trainer over the tokens of
    turn k, an estimate of the KL divergence; `rollout_diff_max` is the largest difference.
    """
    metrics = {}
    for turn in sorted(set(turns.flatten().tolist()) - {NO_TURN}):
        own = turns == turn
        difference = (rollout - trainer)[own]
        metrics[f"training/turn_{turn}/rollout_kl"] = difference.mean().item()
        metrics[f"training/turn_{turn}/rollout_diff_max"] = difference.abs().max().item()
    return metrics
