"""Memory of the driver does not grow with the number of steps."""

import gc
import sys

import torch

from tests.trainer.runs import PPO, run
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils import timeline


def test_a_trainer_keeps_no_objects_of_finished_steps(tmp_path, monkeypatch):
    """Count Python objects, because resident memory varies by 50 MiB with torch's allocator."""
    blocks: list[int] = []
    tensors: list[int] = []
    run_step = PPOTrainer.run_step

    def counted(self, prompts):
        run_step(self, prompts)
        if self.global_step not in (15, 25):
            return
        self.recorder.wait()  # it holds the batch of the step until that is written
        timeline._latest.clear()  # the one list that grows, up to its limit
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
    # The metrics of a step alone are more than 100 objects; Python's free lists are still filling.
    assert blocks[1] - blocks[0] < 10 * 50, f"blocks of memory: {blocks}"
    assert tensors[0] == tensors[1]
