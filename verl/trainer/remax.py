"""ReMax, Li et al. 2023 (arXiv:2310.10505): the baseline of a prompt is the score of its greedy response."""

from dataclasses import replace

from verl.protocol import DataProto
from verl.trainer import setup
from verl.trainer.ppo_trainer import PPOTrainer


class ReMaxTrainer(PPOTrainer):
    """Adds the column `reward_baselines` (B,), which `adv_estimator=remax` reads."""

    def collect(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """See `PPOTrainer.collect`; before it, a greedy response to each prompt is scored."""
        greedy = self.timed("gen_max", self.generate_greedy, prompts)
        scores = self.timed("reward_max", lambda: self.reward_fn(self.add_rm_scores(greedy))).sum(-1)
        batch = super().collect(prompts, first_row)
        batch.batch["reward_baselines"] = scores.repeat_interleave(len(batch) // len(scores))
        self.metrics["critic/greedy_score/mean"] = scores.mean().item()
        return batch

    def generate_greedy(self, prompts: DataProto) -> DataProto:
        """(B,) prompts to (B,) trajectories of the likeliest tokens."""
        rollout = self.config.actor_rollout_ref.rollout
        draw = replace(setup.sampling_params(rollout), temperature=0.0)
        return self._generate(prompts.select(), 1, draw, rollout.seed, self.global_step)
