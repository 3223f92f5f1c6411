"""Agents in fully asynchronous runs: an episode goes on across updates."""

from collections import Counter
from pathlib import Path

import pytest

from tests.launches import launch
from tests.trainer.runs import (
    PPO,
    command_line,
    run,
    run_until_killed,
    same_bits,
    step_lines,
    weights,
    without_times,
)
from verl.tracking.records import load_run
from verl.trainer.main_ppo import main

STEPS = 6
PROMPTS = 3
SAMPLES = 4
BASE = [
    f"trainer.max_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"data.train_batch_size={PROMPTS}",
    "data.max_response_length=96",
    f"actor_rollout_ref.model.external_lib={Path(__file__).with_name('turn_loop.py')}",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.agent.default_agent_loop=uneven_turns",
    "actor_rollout_ref.rollout.agent.gives_reward=True",
    "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8",
    "actor_rollout_ref.rollout.ignore_eos=True",
]
ASYNC = "trainer.mode=fully_async"
APART = "trainer.placement.rollout=[1]"
ZERO = [ASYNC, "async_training.staleness_threshold=0"]
OF_A_SCHEDULE = ("fully_async/", "trainer/", "rollouter/", "agent_loop/", "rollout/")


def numbers(folder: Path) -> list[dict]:
    """Return the metrics that the synchronous run has, too."""
    return without_times(step_lines(folder), *OF_A_SCHEDULE)


def assert_learned_from_all_once(folder: Path) -> None:
    """Check that every episode is in exactly one batch."""
    record = load_run(folder)
    learned: Counter[str] = Counter()
    for step in record.kept_steps:
        samples = record.samples(step)
        learned.update(samples[row].uid for row in range(len(samples)))
    uids = [f"{step}-{row}" for step in range(1, STEPS + 1) for row in range(PROMPTS)]
    assert learned == dict.fromkeys(uids, SAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [[], PPO], ids=["grpo", "ppo"])
def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path, algorithm):
    # The bits of a log-prob depend on the turns that are drawn next to it.
    even = [*BASE, "actor_rollout_ref.rollout.agent.default_agent_loop=turns", *algorithm]
    assert run(tmp_path / "sync", *even) == 0
    assert run(tmp_path / "async", *even, *ZERO) == 0
    assert numbers(tmp_path / "async") == numbers(tmp_path / "sync")
    ours = weights(tmp_path / "async", STEPS)
    assert same_bits(ours, weights(tmp_path / "sync", STEPS))


def test_an_episode_goes_on_across_updates(tmp_path):
    assert run(tmp_path, *BASE, ASYNC) == 0
    lines = step_lines(tmp_path)
    assert sum(line["fully_async/partial/total_partial_num"] for line in lines) > 0
    assert max(line["fully_async/age/max"] for line in lines) == 1
    assert lines[-1]["fully_async/book/consumed"] == STEPS * PROMPTS * SAMPLES
    assert_learned_from_all_once(tmp_path)


def killed_and_resumed(folder: Path, command: list[str], step: int) -> None:
    """Run until a kill -9 in the update of a step, and once more to the end."""
    run_until_killed(step, lambda: run(folder, *command))
    assert run(folder, *command) == 0


def test_a_killed_run_plays_half_played_episodes_anew(tmp_path):
    """Nothing that had ended is lost or repeated."""
    killed_and_resumed(tmp_path, [*BASE, ASYNC, "trainer.save_freq=1"], step=3)
    lines = step_lines(tmp_path)
    assert lines[-1]["fully_async/replayed_episodes"] > 0
    assert max(line["fully_async/age/max"] for line in lines) == 1
    assert_learned_from_all_once(tmp_path)


@pytest.mark.slow
def test_a_killed_run_takes_the_whole_batch_of_its_checkpoint(tmp_path):
    """The first step then plays no episode: those of two steps were begun together."""
    ahead = ["async_training.staleness_threshold=1", "async_training.partial_rollout=false"]
    killed_and_resumed(tmp_path, [*BASE, ASYNC, "trainer.save_freq=1", *ahead], step=4)
    assert_learned_from_all_once(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [[APART, *ZERO], [APART, ASYNC], [ASYNC]])
def test_two_ranks_play_episodes(tmp_path, keys):
    """With ranks of its own the rollout goes on during the update, else both take turns."""
    command = command_line(tmp_path, *BASE, "trainer.test_freq=2", *keys)
    done = launch(2, main, command)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert_learned_from_all_once(tmp_path)
    bound = 0 if "async_training.staleness_threshold=0" in keys else 1
    assert max(line["fully_async/age/max"] for line in step_lines(tmp_path)) == bound
