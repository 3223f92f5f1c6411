"""One program: one process alone, two ranks of torchrun, and two actors of Ray give the same
run."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import cases
from tests.launches import Done, launch
from tests.trainer.runs import command_line, same_bits, step_lines, weights, without_times
from tests.trainer.test_overlap import scoring_begins_within_generation
from verl.checkpoint.manager import CheckpointManager
from verl.trainer.main_ppo import main

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
# Odd numbers: three prompts for two ranks in generation, and four mini-batches with rows that the
# ranks do divide.
COMMAND = [
    "data.train_batch_size=3",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.deterministic=True",
    "actor_rollout_ref.rollout.temperature=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.ppo_mini_batch_size=3",
    "trainer.num_threads=1",
    "trainer.test_freq=-1",
]
# Metrics that depend on the number of engines, or on a clock.
OF_THE_ENGINES = ("rollout/", "perf/", "timing_")


def train(ranks: int, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run the main job. Returns the metrics of its training steps."""
    done = launch(ranks, main, command_line(folder, *COMMAND, *more))
    on_ray = any(override.startswith("ray_init.") for override in more)
    return lines_of(done, folder, 2 if on_ray else ranks)


def train_by_torchrun(folder: Path, *more: str) -> list[dict[str, Any]]:
    """Call `train` on two ranks, started as users start them."""
    command = [*TORCHRUN, "-m", "verl.trainer.main_ppo", *command_line(folder, *COMMAND, *more)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    return lines_of(Done(done.returncode, done.stdout, done.stderr), folder, 2)


def lines_of(done: Done, folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Return the metrics of the training steps of a successful run."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Training completed") == 1
    assert f"; {ranks} rank" in done.stdout
    return step_lines(folder)


def assert_same(ours: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(ours) == len(expected) > 0
    for lines in zip(ours, expected):
        line, other = (
            {k: v for k, v in each.items() if not k.startswith(OF_THE_ENGINES)} for each in lines
        )
        assert line.keys() == other.keys()
        for name, value in other.items():
            assert line[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def responses(folder: Path, step: int) -> list[str]:
    lines = (folder / f"{step}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["output"] for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alone")
    samples = f"trainer.rollout_data_dir={folder / 'samples'}"
    return folder, train(1, folder / "run", "trainer.max_steps=4", "trainer.save_freq=2", samples)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("on_two")
    samples = f"trainer.rollout_data_dir={folder / 'samples'}"
    # the first one; the last is waited for
    background = ["trainer.save_freq=1", "trainer.async_save=True"]
    background.append("trainer.profile_steps=[2]")
    return folder, train(2, folder / "run", "trainer.max_steps=2", *background, samples)


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_like_one_process(alone, tmp_path):
    assert_same(train_by_torchrun(tmp_path, "trainer.max_steps=2"), alone[1][:2])


def test_two_ranks_train_like_one_process(alone, on_two):
    assert_same(on_two[1], alone[1][:2])
    assert responses(on_two[0] / "samples", 1) == responses(alone[0] / "samples", 1)
    assert len(set(responses(alone[0] / "samples", 1))) > 3, "too dull to fail"


@pytest.mark.slow
def test_two_ranks_announce_responses_while_they_generate_others(on_two, tmp_path):
    """Compare the bits with a run that scores responses after their batch."""
    after = [
        "reward_model.launch_reward_fn_async=False",
        "trainer.save_freq=2",
        "trainer.profile_steps=[2]",
    ]
    lines = train(2, tmp_path, "trainer.max_steps=2", *after)
    assert without_times(lines) == without_times(on_two[1])
    assert same_bits(weights(tmp_path, 2), weights(on_two[0] / "run", 2))
    assert scoring_begins_within_generation(on_two[0] / "run", 2)
    assert not scoring_begins_within_generation(tmp_path, 2)


def test_two_ranks_save_their_shards_during_the_next_steps(on_two):
    for step in (1, 2):
        folder = on_two[0] / "run" / f"global_step_{step}"
        CheckpointManager(folder.parent).verify(folder)
        for role in ("actor", "critic"):
            shards = sorted(path.name for path in (folder / role / "sharded").glob("*.distcp"))
            assert shards == ["__0_0.distcp", "__1_0.distcp"]


def test_one_process_resumes_a_checkpoint_of_two_ranks(alone, on_two):
    resumed = train(1, on_two[0] / "run", "trainer.max_steps=4", "trainer.save_freq=2")
    assert_same(resumed, alone[1])
    for role in ("actor", "critic"):
        theirs = weights(alone[0] / "run", 4, role)
        for name, tensor in weights(on_two[0] / "run", 4, role).items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-5)


def test_two_ranks_resume_a_checkpoint_of_one_process(alone, tmp_path):
    start = f"trainer.resume_from_path={alone[0] / 'run' / 'global_step_2'}"
    resumed = train(2, tmp_path, "trainer.max_steps=4", "trainer.resume_mode=resume_path", start)
    assert_same(resumed, alone[1][2:])


@pytest.mark.parametrize("ranks_an_engine", cases([1, 2], quick=lambda ranks: ranks == 2))
def test_generation_is_distributed_over_engines_independently_of_training(
    alone, tmp_path, ranks_an_engine
):
    sequence = "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
    engines = f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks_an_engine}"
    [line] = train(2, tmp_path, "trainer.max_steps=1", sequence, engines)
    assert_same([line], alone[1][:1])
    for count in ("rollout/generated_tokens", "rollout/prefill_tokens"):
        assert line[count] == alone[1][0][count], "every sample is generated once"


RAY = [
    "ray_init.num_cpus=2",
    "ray_init.address=local",
    "ray_init.namespace=tests",
    "ray_init.runtime_env={env_vars: {A: b}}",
]


@pytest.mark.slow
def test_two_ray_actors_train_like_one_process(alone, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the optional backend is not installed")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    # a path short enough for the sockets of Ray
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("RAY_TMPDIR", short)
        two = "trainer.n_gpus_per_node=2"
        on_ray = train(1, tmp_path / "run", "trainer.max_steps=2", two, *RAY)
        assert not [*Path(short).glob("ray/session_*")], "the run has started this Ray"
    assert_same(on_ray, alone[1][:2])
    assert not [*temporary.glob("verl-*")]


def test_a_wrong_number_of_ranks_is_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command_line(tmp_path, "trainer.n_gpus_per_node=3")) == 1
    assert "torchrun launched 2 ranks" in capsys.readouterr().err
