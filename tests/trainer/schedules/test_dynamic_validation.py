"""Validation by the rollout's ranks while the trainer goes on."""

import os
import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.launches import launch
from tests.trainer.runs import (
    command_line,
    metric_lines,
    run,
    same_bits,
    step_lines,
    weights,
    without_times,
)
from verl.protocol import DataProto
from verl.tracking import WRITTEN_IN_STEP
from verl.tracking.records import load_run
from verl.trainer.main_ppo import main
from verl.trainer.ppo_trainer import PPOTrainer

STEPS = 6
BASE = [
    f"trainer.max_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "trainer.test_freq=2",
    "data.train_batch_size=3",
    "trainer.placement.rollout=[1]",
]
DYNAMIC = "trainer.dynamic_validation=True"
ZERO = ["trainer.mode=fully_async", "async_training.staleness_threshold=0"]
ONE_STEP_OFF = ["trainer.mode=one_step_off"]
SCHEDULES = {"fully_async": ZERO, "one_step_off": ONE_STEP_OFF}
OF_A_SCHEDULE = ("rollout/", "fully_async/", "trainer/", "rollouter/", WRITTEN_IN_STEP)


def train(folder: Path, *more: str, action=main) -> None:
    """Run the main job on two ranks."""
    done = launch(2, action, command_line(folder, *BASE, *more))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def numbers(folder: Path) -> list[dict]:
    """Return the metrics of every step, from all of its lines, without those of a schedule."""
    by_step: dict[int, dict] = {}
    for line in without_times(step_lines(folder), *OF_A_SCHEDULE):
        by_step.setdefault(line["step"], {}).update(line)
    return [by_step[step] for step in sorted(by_step)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an uninterrupted run of a schedule, created once."""
    folders: dict[str, Path] = {}

    def folder_of(schedule: str) -> Path:
        if schedule not in folders:
            folders[schedule] = tmp_path_factory.mktemp(schedule)
            train(folders[schedule], *SCHEDULES[schedule], DYNAMIC)
        return folders[schedule]

    return folder_of


@pytest.mark.parametrize(
    ("schedule", "awaited"),
    [pytest.param("fully_async", [], marks=pytest.mark.slow), ("one_step_off", ONE_STEP_OFF)],
)
def test_scores_are_those_of_a_validation_that_is_waited_for(tmp_path, whole, schedule, awaited):
    """The samples of the same weights, logged at the same steps; and the training is the same."""
    train(tmp_path, *awaited)
    ours = numbers(whole(schedule))
    assert ours == numbers(tmp_path)
    validated = [line["step"] for line in ours if any("val-core" in name for name in line)]
    assert validated == [2, 4, 6]
    assert same_bits(weights(whole(schedule), STEPS), weights(tmp_path, STEPS))

    written = {}
    for line in metric_lines(whole(schedule)):
        if WRITTEN_IN_STEP in line:
            written[line["step"]] = line[WRITTEN_IN_STEP]
    assert written == {2: 3, 4: 5}, "drawn during the next step; no step follows the last one"
    recorded = load_run(whole(schedule)).metric("val-core/toy/reward/mean@8")
    assert list(recorded) == [2, 4, 6]


def killed_after(name: str, command: list[str]) -> int:
    """Run the main job, and kill the driver after a method of step 5."""
    method = getattr(PPOTrainer, name)

    def die(self: PPOTrainer, batch: DataProto) -> None:
        method(self, batch)
        if self.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(PPOTrainer, name, die)
    return main(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "save_freq", "method"),
    [
        ("fully_async", 1, "update"),
        ("one_step_off", 3, "update"),
        ("one_step_off", 1, "after_step"),
    ],
    ids=["fully_async", "older_checkpoint", "logged_already"],
)
def test_a_validation_in_flight_begins_anew_after_a_kill(
    tmp_path, whole, schedule, save_freq, method
):
    keys = [*SCHEDULES[schedule], DYNAMIC, f"trainer.save_freq={save_freq}"]
    command = command_line(tmp_path, *BASE, *keys)
    assert launch(2, partial(killed_after, method), command).returncode != 0
    train(tmp_path, *keys)
    assert numbers(tmp_path) == numbers(whole(schedule))
    lines = Counter(line["step"] for line in metric_lines(tmp_path))
    assert lines == {1: 1, 2: 2, 3: 1, 4: 2, 5: 1, 6: 1}, "no line is lost or written twice"
    assert same_bits(weights(tmp_path, STEPS), weights(whole(schedule), STEPS))


@pytest.mark.slow
def test_agents_validate_while_their_episodes_wait(tmp_path):
    agents = [
        f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('turn_loop.py')}",
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.agent.default_agent_loop=uneven_turns",
        "actor_rollout_ref.rollout.agent.gives_reward=True",
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8",
        "actor_rollout_ref.rollout.ignore_eos=True",
    ]
    train(tmp_path, *agents, "trainer.mode=fully_async", DYNAMIC)
    scores = load_run(tmp_path).metric("val-core/toy/reward/mean@8")
    assert list(scores) == [2, 4, 6]
    lines = [line for line in step_lines(tmp_path) if "fully_async/age/max" in line]
    assert max(line["fully_async/age/max"] for line in lines) == 1
    assert lines[-1]["fully_async/book/consumed"] == STEPS * 3 * 4


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["trainer.placement.rollout=null", "trainer.mode=fully_async"], "ranks of its own"),
        (["trainer.mode=sync"], "trainer.mode=one_step_off or fully_async"),
        (
            ["trainer.mode=fully_async", "async_training.trigger_parameter_sync_step=3"],
            "Set test_freq=3",
        ),
    ],
)
def test_impossible_validations_are_refused(tmp_path, keys, message, capfd):
    ranks = "trainer.n_gpus_per_node=2"
    assert run(tmp_path, *BASE, ranks, DYNAMIC, *keys) != 0
    assert message in capfd.readouterr().err
