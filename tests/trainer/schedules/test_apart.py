"""Asynchronous schedules with a rollout on ranks of its own: two ranks under gloo."""

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from tests.launches import launch
from tests.trainer.runs import PPO, command_line, same_bits, step_lines, weights, without_times
from verl.rollout.twin import ModelTwin
from verl.trainer.main_ppo import main

STEPS = 5
BASE = [
    f"trainer.max_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "data.train_batch_size=3",
    "trainer.placement.rollout=[1]",
]
OF_COPIES = ("rollout/memory_gib", "rollout/num_pages", "fully_async/", "trainer/", "rollouter/")


def train(folder: Path, *more: str) -> list[dict]:
    """Run the main job on two ranks, and return the lines of its steps."""
    done = launch(2, main, command_line(folder, *BASE, *more))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return step_lines(folder)


def numbers(lines: list[dict]) -> list[dict]:
    return without_times(lines, *OF_COPIES)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [[], PPO], ids=["grpo", "ppo"])
def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path, algorithm):
    steps = 20
    length = [f"trainer.max_steps={steps}", f"trainer.save_freq={steps}", *algorithm]
    sync = train(tmp_path / "sync", *length)
    zero = ["trainer.mode=fully_async", "async_training.staleness_threshold=0"]
    ours = train(tmp_path / "async", *length, *zero)
    assert len(sync) == steps
    assert numbers(ours) == numbers(sync)
    for role in ("actor", "critic")[: 2 if algorithm else 1]:
        ours_of_role = weights(tmp_path / "async", steps, role)
        assert same_bits(ours_of_role, weights(tmp_path / "sync", steps, role))


@pytest.mark.parametrize("per_version", [1, 2])
def test_generation_goes_on_during_the_update(tmp_path, per_version):
    sync_step = f"async_training.trigger_parameter_sync_step={per_version}"
    lines = train(
        tmp_path,
        "trainer.mode=fully_async",
        sync_step,
        "trainer.test_freq=2",
    )
    assert len(lines) == STEPS
    ages = [line["fully_async/age/max"] for line in lines]
    assert ages[0] == 0
    assert max(ages) == 1, "what was drawn during an update, and no more than the bound"
    assert lines[-1]["fully_async/book/consumed"] == STEPS * 3 * 4
    for line in lines:
        assert 0 <= line["trainer/idle_ratio"] <= 1
        assert 0 <= line["rollouter/idle_ratio"] <= 1


def test_one_step_off_generates_during_the_update(tmp_path):
    """A run on two ranks has the numbers of one in which the two take turns."""
    lines = train(tmp_path / "apart", "trainer.mode=one_step_off", "trainer.test_freq=2")
    together = [*BASE[:-1], "trainer.mode=one_step_off", "trainer.test_freq=2"]
    assert main(command_line(tmp_path / "together", *together)) == 0
    assert numbers(lines) == numbers(step_lines(tmp_path / "together"))
    ours = weights(tmp_path / "apart", STEPS)
    assert same_bits(ours, weights(tmp_path / "together", STEPS))


def train_with_one_update_withheld(command: list[str]) -> int:
    """Run the main job with a rollout that drops the third hand-over of weights."""
    update = ModelTwin.update
    calls = 0

    def withheld(self: ModelTwin, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            deque(named_tensors, maxlen=0)
        else:
            update(self, named_tensors)

    ModelTwin.update = withheld
    return main(command)


def test_an_update_that_a_rollout_does_not_take_is_noticed(tmp_path):
    proved = "actor_rollout_ref.rollout.fingerprint_interval=1"
    command = command_line(tmp_path, *BASE, "trainer.mode=fully_async", proved)
    done = launch(2, train_with_one_update_withheld, command)
    assert done.returncode != 0
    assert "fingerprint" in done.stderr
