"""ReMax compares each response with a greedy one of its prompt."""

from typing import Any

import pytest
import torch

from tests.trainer.runs import (
    start_trainer,
    varied_reward,
)
from verl.protocol import DataProto
from verl.trainer.remax import ReMaxTrainer
from verl.utils.errors import RewardError


def test_remax_compares_with_the_greedy_response(tmp_path):
    trainer = start_trainer(
        tmp_path, "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=3"
    )
    assert isinstance(trainer, ReMaxTrainer)
    trainer.load_checkpoint()
    prompts = next(iter(trainer.train_loader))
    greedy = trainer.reward_fn(trainer.generate_greedy(prompts)).sum(-1)
    batch = trainer.estimate_advantages(trainer.collect(prompts))
    trainer.tracker.finish()
    assert torch.equal(batch.batch["reward_baselines"], greedy.repeat_interleave(3))
    scores = batch.batch["token_level_scores"].sum(-1)
    torch.testing.assert_close(
        batch.batch["advantages"][:, 0], scores - greedy.repeat_interleave(3)
    )


def test_remax_drops_a_prompt_if_its_greedy_response_has_no_score(tmp_path):
    lost = {0}  # rows of greedy responses, one for each prompt

    def reward(data: DataProto, return_dict: bool = False) -> Any:
        result = varied_reward(data, return_dict=True)
        dropped = sorted(lost) if len(data) == 4 else [11]
        result["reward_tensor"][dropped] = 0
        result |= {"dropped": dropped, "metrics": {"reward/num_errors": len(dropped), "own": 1.0}}
        return result if return_dict else result["reward_tensor"]

    own = ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=3", "trainer.logger=[]"]
    trainer = start_trainer(tmp_path, *own, reward_fn=reward, val_reward_fn=reward)
    trainer.load_checkpoint()
    prompts = next(iter(trainer.train_loader))
    batch = trainer.estimate_advantages(trainer.collect(prompts))
    counted = batch.batch["response_mask"].any(-1)
    assert (~counted).nonzero().flatten().tolist() == [0, 1, 2, 11]
    assert not batch.batch["advantages"][:3].any()
    assert (trainer.metrics["reward/num_errors"], trainer.metrics["own"]) == (2, 1.0)
    kept = batch.batch["reward_baselines"][3:]
    assert trainer.metrics["critic/greedy_score/mean"] == pytest.approx(kept.mean().item())
    lost |= {1, 2, 3}
    with pytest.raises(
        RewardError, match="All samples of this step were dropped: .* greedy response"
    ):
        trainer.collect(prompts)
