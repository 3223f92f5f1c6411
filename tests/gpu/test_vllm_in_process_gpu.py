"""Training with vLLM in process on one GPU: it sleeps while the trainer works. Needs vLLM next to
this package."""

import pytest
import torch

from tests.rollout_servers import toy
from verl.rollout.servers.in_process import InProcessVLLM

pytest.importorskip("vllm", reason="this environment has no vLLM")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
GIB = 1 << 30


def used_gib():
    """Memory of the device that all processes together have taken."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_the_toy_learns_while_vllm_gives_its_memory_back(tmp_path, monkeypatch, lora_rank):
    """Every push is proved; sleep frees the cache, and adapters keep the weights below them."""
    slept = []
    sleep, load = InProcessVLLM.sleep, InProcessVLLM.load

    def watched_sleep(self):
        before = used_gib()
        sleep(self)
        slept.append((before, used_gib()))
        # The trainer's allocator keeps this for later; vLLM must be able to wake up all the same.
        free, _ = torch.cuda.mem_get_info()
        torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")

    def watched_load(self, *args, **keywords):
        recorded = load(self, *args, **keywords)
        assert self.can_draw, "a load after sleep brings weights and cache"
        return recorded

    monkeypatch.setattr(InProcessVLLM, "sleep", watched_sleep)
    monkeypatch.setattr(InProcessVLLM, "load", watched_load)
    keys = {
        "actor_rollout_ref.rollout.in_process": True,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.3,
        "actor_rollout_ref.model.lora_rank": lora_rank,
        "trainer.device": "cuda",
    }
    if lora_rank:
        keys["actor_rollout_ref.actor.optim.lr"] = 1e-2
    steps = toy.train(tmp_path, **keys)

    assert len(steps) == 10
    gaps = [step["training/rollout_probs_diff_mean"] for step in steps]
    rewards = [step["critic/rewards/mean"] for step in steps]
    figures = f"slept (GiB before, after): {slept}; gaps: {gaps}; rewards: {rewards}"
    print(figures)
    assert len(slept) >= 10, figures
    total = torch.cuda.mem_get_info()[1] / GIB
    freed = [before - after for before, after in slept]
    assert min(freed) > 0.2 * total, figures
    assert max(gaps) < 0.02, figures
    assert sum(rewards[-3:]) > sum(rewards[:3]), figures
