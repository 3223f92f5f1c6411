"""Asynchronous schedules with a rollout on ranks of its own: two ranks under gloo."""

from pathlib import Path

import pytest

from tests.launches import launch
from tests.trainer.runs import command_line, same_bits, step_lines, weights, without_times
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
    return [
        {key: value for key, value in line.items() if not key.startswith(OF_COPIES)}
        for line in without_times(lines)
    ]


def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path):
    sync = train(tmp_path / "sync")
    zero = ["trainer.mode=fully_async", "async_training.staleness_threshold=0"]
    ours = train(tmp_path / "async", *zero)
    assert numbers(ours) == numbers(sync)
    assert same_bits(weights(tmp_path / "async", STEPS), weights(tmp_path / "sync", STEPS))


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
