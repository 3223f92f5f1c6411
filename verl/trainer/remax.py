"""ReMax, Li et al. 2023 (arXiv:2310.10505): the baseline of a prompt is the score of its greedy
response."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from verl.protocol import DataProto
from verl.rewards.results import call_reward
from verl.trainer import setup
from verl.trainer.episodes import add_turn_rewards, whole_episodes
from verl.trainer.ppo_trainer import GENERATED, PPOTrainer
from verl.trainer.rows import counted_rows
from verl.utils.errors import RewardError
from verl.utils.phases import phase

# Greedy episodes are recorded under steps above it: their rows have the numbers of sampled ones.
_MOST_STEPS = 1_000_000_000


class ReMaxTrainer(PPOTrainer):
    """Adds the column `reward_baselines` (B,), which `adv_estimator=remax` reads."""

    @phase(writes=GENERATED + " token_level_scores rm_scores reward_baselines", chooses_rows=True)
    def collect(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """Score a greedy response to each prompt, then collect as `PPOTrainer` does.

        A prompt without a score for its greedy response has no baseline: its samples are dropped.
        """
        greedy = self.timed("gen_max", self.generate_greedy, prompts, first_row)
        result = self.timed("reward_max", self.score_greedy, greedy)
        scores = result["reward_tensor"].sum(-1)
        counted = counted_rows(greedy)  # an episode of agents may fail
        counted[result["dropped"]] = False
        _require_any(counted)

        batch = super().collect(prompts, first_row)
        places = _places_in(greedy, batch)
        batch.batch["reward_baselines"] = torch.where(places >= 0, scores[places], 0.0)
        batch.batch["response_mask"][(places < 0) | ~counted[places]] = 0
        _require_any(batch.batch["response_mask"])

        for name, count in result["metrics"].items():
            if name.startswith("reward/num_"):
                self.metrics[name] = self.metrics.get(name, 0.0) + count

        self.metrics["critic/greedy_score/mean"] = scores[counted].mean().item()
        return batch

    def generate_greedy(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """Generate the likeliest tokens for (B,) prompts.

        Returns one row for each prompt, or for each of its roles where agents have some.
        """
        rollout = self.config.actor_rollout_ref.rollout
        draw = replace(setup.sampling_params(rollout), temperature=0.0)
        step = self.global_step
        greedy = self._generate(
            prompts.select(),
            1,
            draw,
            rollout.seed,
            step,
            first_row,
            record_step=_MOST_STEPS + step,
        )
        return whole_episodes(greedy)

    def score_greedy(self, greedy: DataProto) -> Mapping[str, Any]:
        """Score greedy responses and check the result."""
        result = call_reward(self.reward_fn, self.add_rm_scores(greedy))
        if self.config.algorithm.turn_rewards:
            # as the scores that they are the baseline of
            greedy.batch["token_level_scores"] = result["reward_tensor"].clone()
            add_turn_rewards(greedy)
            result = {**result, "reward_tensor": greedy.batch["token_level_scores"]}
        return result


def _places_in(greedy: DataProto, batch: DataProto) -> torch.Tensor:
    """Return the row of the greedy response to the prompt of each row of `batch`; -1: none."""
    place_of = {uid: place for place, uid in enumerate(greedy.non_tensor_batch["uid"])}
    return torch.tensor([place_of.get(uid, -1) for uid in batch.non_tensor_batch["uid"]])


def _require_any(counted: torch.Tensor) -> None:
    if not counted.any():
        raise RewardError(
            "All samples of this step were dropped: the reward function failed for each of them or "
            "for the greedy response to its prompt. Fix the reward function (the warning above "
            "names the first failure), or set reward_model.on_error=zero or stop."
        )
