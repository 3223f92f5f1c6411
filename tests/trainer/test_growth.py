"""A driver after many steps keeps what it kept after few."""

import gc
import sys

import torch

from tests.trainer.runs import PPO, run
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils import timeline


def test_a_trainer_keeps_nothing_of_the_steps_that_are_over(tmp_path, monkeypatch):
    """Python objects rather than resident memory, of which torch's allocator takes and gives some
    50 MiB at will."""
    blocks: list[int] = []
    tensors: list[int] = []
    run_step = PPOTrainer.run_step

    def counted(self, prompts):
        run_step(self, prompts)
        if self.global_step not in (15, 25):
            return
        timeline._latest.clear()  # the one list that grows, up to its bound
        gc.collect()
        blocks.append(sys.getallocatedblocks())
        tensors.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    monkeypatch.setattr(PPOTrainer, "run_step", counted)
    smallest = [
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "data.max_response_length=4",
    ]
    assert run(tmp_path, *PPO, *smallest, "trainer.max_steps=25", "trainer.test_freq=8") == 0
    # A step's metrics alone are more than 100; Python's own free lists are still filling.
    assert blocks[1] - blocks[0] < 10 * 50, f"blocks of memory: {blocks}"
    assert tensors[0] == tensors[1]
