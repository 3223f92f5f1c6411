"""Workers on tiny models, and prompts for them."""

from pathlib import Path

import numpy as np
import torch

from tests.tiny_models import save_tiny, tiny_tokenizer
from verl.config import TrainConfig, config_from_dict
from verl.protocol import DataProto
from verl.rollout.types import SamplingParams
from verl.workers import ActorWorker, CriticWorker, ReferenceWorker, RolloutWorker

P = 12
R = 10
CPU = torch.device("cpu")


def config(folder: Path, **actor: object) -> TrainConfig:
    """Return a PPO configuration of a tiny Qwen2 in `folder`; keywords set keys of the actor."""
    if not (folder / "config.json").exists():
        save_tiny(folder)

    return config_from_dict(
        {
            "data": {
                "train_files": "none.parquet",
                "train_batch_size": 4,
                "max_prompt_length": P,
                "max_response_length": R,
            },
            "actor_rollout_ref": {
                "model": {"path": str(folder)},
                "rollout": {"n": 2},
                "actor": {"use_kl_loss": True, "optim": {"lr": 1e-3}, **actor},
            },
            "critic": {"optim": {"lr": 1e-3}},
            "algorithm": {"adv_estimator": "gae"},
        }
    )


def actor_of(config: TrainConfig, total_steps: int = 4) -> ActorWorker:
    return ActorWorker(
        config.actor_rollout_ref, total_steps=total_steps, device=CPU, tokenizer=tiny_tokenizer()
    )


def rollout_of(actor: ActorWorker) -> RolloutWorker:
    """Build a rollout next to the actor."""
    return RolloutWorker(actor.config, device=CPU, tokenizer=tiny_tokenizer(), actor=actor)


def critic_of(config: TrainConfig) -> CriticWorker:
    return CriticWorker(
        config.critic, max_length=P + R, total_steps=4, device=CPU, tokenizer=tiny_tokenizer()
    )


def reference_of(config: TrainConfig) -> ReferenceWorker:
    return ReferenceWorker(config.actor_rollout_ref, device=CPU)


def prompts(count: int = 4, first_row: int = 0) -> DataProto:
    """Return prompts of 3, 4, ... tokens; row numbers count from `first_row`."""
    texts = [
        [5 + (7 * row + i) % 90 for i in range(3 + row % 5)]
        for row in range(first_row, first_row + count)
    ]
    return DataProto.from_dict(
        tensors={},
        non_tensors={
            "raw_prompt_ids": np.array([*texts, None], dtype=object)[:-1],
            "prompt_row": np.arange(first_row, first_row + count).astype(object),
            "uid": np.array(
                [f"1-{row}" for row in range(first_row, first_row + count)], dtype=object
            ),
        },
    )


def trajectories(actor: ActorWorker, count: int = 4, n: int = 2) -> DataProto:
    """Generate a batch, and add random advantages and returns."""
    asked = prompts(count)
    answer = rollout_of(actor).generate_sequences(
        asked, n=n, params=SamplingParams(max_new_tokens=R), seed=0, step=1
    )
    answer.meta_info.clear()
    batch = asked.repeat(n, interleave=True).union(answer)
    noise = torch.randn(len(batch), R, generator=torch.Generator().manual_seed(0))
    batch.batch["advantages"] = noise * batch.batch["response_mask"]
    batch.batch["returns"] = noise * batch.batch["response_mask"]
    return batch
