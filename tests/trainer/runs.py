"""Small whole runs: the command line in this process, and the files that it writes."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.checkpoint.sharded import MODEL, OPTIMIZER, SHARDED_FOLDER, SavedTensors
from verl.config import load_config
from verl.protocol import DataProto
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.variants import trainer_class
from verl.utils.logging import logger

# The packaged model on its ten prompts, smaller than its defaults: a step takes a tenth of a
# second.
TOY = [
    "data.dataset_name=toy",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "trainer.val_before_train=False",
    "trainer.max_steps=2",
]
PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"]


def command_line(folder: Path, *overrides: str, base: list[str] | None = None) -> list[str]:
    """Return the arguments of a run with metrics.jsonl and checkpoints in `folder`.

    `overrides` replace arguments of `base`.
    """
    where = [f"trainer.default_local_dir={folder}", 'trainer.logger=["console","file"]']
    given = {override.partition("=")[0] for override in overrides}
    first = [
        override
        for override in [*(TOY if base is None else base), *where]
        if override.split("=")[0] not in given
    ]
    return [*first, *overrides]


def run(folder: Path, *overrides: str, base: list[str] | None = None) -> int:
    """Run `python -m verl.trainer.main_ppo` in this process. Returns the exit code."""
    return main(command_line(folder, *overrides, base=base))


def start_trainer(
    folder: Path, *overrides: str, kind: type[PPOTrainer] | None = None, **parts: Any
) -> Any:
    """Make a trainer with `parts` and load its models. None: the class that the keys ask for."""
    config = load_config(command_line(folder, *overrides))
    trainer = (kind or trainer_class(config))(config, **parts)
    trainer.init_workers()
    return trainer


def varied_reward(data: DataProto, return_dict: bool = False) -> Any:
    """Return a reward that differs between samples: the fraction of tokens with an even number."""
    mask = data.batch["response_mask"]
    even = ((data.batch["responses"] % 2 == 0) & mask.bool()).sum(-1) / mask.sum(-1)
    scores = torch.zeros(mask.shape)
    scores[torch.arange(len(mask)), mask.sum(-1) - 1] = even
    extra = {"even": even.tolist(), "length": mask.sum(-1).tolist()}
    return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores


def run_in_child(action: Callable[[], int]) -> int:
    """Run `action` in a forked process, so that a kill does not end the tests.

    Returns the wait status of the process. Skips the test if torch cannot train in such a process.
    """
    if _status_of_fork(_differentiate) != 0:
        pytest.skip("after torch.compile, autograd of torch for CUDA does not work in a fork")

    def act() -> int:
        logger.handlers.clear()
        return action()

    return _status_of_fork(act)


def _status_of_fork(action: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = action()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def _differentiate() -> int:
    x = torch.ones(1, requires_grad=True)
    try:
        x.sum().backward()
    except RuntimeError:
        return 1
    return 0


def run_until_killed(step: int, train: Callable[[], int]) -> None:
    """Call `train` in a forked process, which a kill -9 ends after the update of a step."""

    def until_killed() -> int:
        update = PPOTrainer.update

        def die(self: PPOTrainer, batch: DataProto) -> None:
            update(self, batch)
            if self.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)

        PPOTrainer.update = die
        return train()

    assert os.WTERMSIG(run_in_child(until_killed)) == signal.SIGKILL


def metric_lines(folder: Path) -> list[dict[str, Any]]:
    """Read every line of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def step_lines(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of training steps, in order."""
    return [line for line in metric_lines(folder) if line["step"] > 0]


TIMES = (
    "timing_s/",
    "timing_per_token_ms/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/rollout_",
)


def without_times(lines: list[dict[str, Any]], *others: str) -> list[dict[str, Any]]:
    """Drop the timings from the lines, and all names that begin like one of `others`."""
    return [
        {name: value for name, value in line.items() if not name.startswith((*TIMES, *others))}
        for line in lines
    ]


def weights(folder: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    """Load all weights of a role from a checkpoint, including the value head."""
    return _saved(folder, step, role, MODEL)


def moments(folder: Path, step: int, role: str = "actor") -> dict[str, torch.Tensor]:
    """Load the optimizer state of a role from a checkpoint."""
    return _saved(folder, step, role, OPTIMIZER)


def _saved(folder: Path, step: int, role: str, prefix: str) -> dict[str, torch.Tensor]:
    place = folder / f"global_step_{step}" / role / SHARDED_FOLDER
    saved = SavedTensors(place)
    names = [name for name in saved.tensors if name.startswith(prefix)]
    assert names, f"nothing named {prefix}* of {role} in step {step} of {folder}"
    return saved.read_whole(names)


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Compare two sets of weights bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
