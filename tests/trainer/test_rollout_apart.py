"""A rollout on ranks of its own gives the tokens and weights of a run that colocates it with the
actor. tests/trainer/test_placement.py has a rollout on Ray."""

import os
import signal
from functools import wraps
from itertools import count
from pathlib import Path

import pytest

from tests.cases import cases
from tests.launches import launch
from tests.trainer.runs import PPO, command_line, metric_lines, same_bits, weights, without_times
from verl.config import load_config
from verl.config.placement import ranks_of_roles
from verl.diagnostics.memory_plan import plan_memory
from verl.protocol import DataProto
from verl.trainer import PPOTrainer
from verl.trainer.main_ppo import main
from verl.utils.errors import ConfigError
from verl.utils.launcher import LAUNCHED_RANKS
from verl.workers import RolloutWorker

STEPS = ["trainer.max_steps=3", "trainer.save_freq=3", "trainer.test_freq=2"]
APART = "trainer.placement.rollout=[1]"


def train(ranks: int, folder: Path, *more: str) -> list[dict]:
    """Run the main job. Returns the metrics that depend on neither clocks nor copies."""
    done = launch(ranks, main, command_line(folder, *STEPS, *more))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = without_times(metric_lines(folder))
    for line in lines:
        # The weights are a copy on ranks of their own, and the cache is never freed.
        line.pop("rollout/memory_gib", None)
        line.pop("rollout/num_pages", None)
    return lines


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("together")
    return folder, train(1, folder)


@pytest.mark.parametrize(
    "transport", cases(["null", "broadcast", "disk"], quick=lambda transport: transport == "disk")
)
def test_under_torchrun(together, tmp_path, transport):
    folder, expected = together
    way = f"actor_rollout_ref.rollout.weight_transport={transport}"
    assert train(2, tmp_path, APART, way) == expected
    assert same_bits(weights(tmp_path, 3), weights(folder, 3))


def train_until_killed(command: list[str]) -> int:
    """Run the main job until SIGKILL ends it within its second step."""
    step = PPOTrainer.run_step

    def die(self: PPOTrainer, prompts: DataProto) -> None:
        step(self, prompts)
        os.kill(os.getpid(), signal.SIGKILL)

    PPOTrainer.run_step = die
    return main(command)


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(together, tmp_path):
    folder, expected = together
    killed = command_line(tmp_path, *STEPS[1:], APART, "trainer.save_freq=1", "trainer.max_steps=3")
    done = launch(2, train_until_killed, killed)
    assert done.returncode != 0
    assert (tmp_path / "global_step_1").exists()
    assert not (tmp_path / "global_step_2").exists()

    assert train(2, tmp_path, APART, "trainer.save_freq=1") == expected
    assert same_bits(weights(tmp_path, 3), weights(folder, 3))


def train_until_a_receiver_dies(command: list[str]) -> int:
    """Run the main job until SIGKILL ends rank 1 at the second hand-over of weights."""
    receive = RolloutWorker.receive_weights
    rounds = count(1)

    @wraps(receive)
    def die(self: RolloutWorker) -> None:
        if next(rounds) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        receive(self)

    RolloutWorker.receive_weights = die
    return main(command)


def test_a_death_during_the_hand_over_names_the_rank(tmp_path):
    done = launch(2, train_until_a_receiver_dies, command_line(tmp_path, *STEPS, APART))
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if "Error: " in line]
    assert "WorkerLostError: rollout.receive_weights: rank 1" in errors[0]


def test_the_rollout_is_with_the_actor_unless_it_is_placed():
    config = load_config(["data.dataset_name=toy", "trainer.n_gpus_per_node=4"])
    ranks = ranks_of_roles(config)
    assert ranks["rollout"] == ranks["actor"] == [0, 1, 2, 3]
    placed = ["trainer.placement.rollout=[2,3]", "trainer.n_gpus_per_node=4", *PPO]
    ranks = ranks_of_roles(load_config(["data.dataset_name=toy", *placed]))
    assert ranks == {
        "actor": [0, 1],
        "rollout": [2, 3],
        "critic": [0, 1],
        "reference": [0, 1],
    }


def test_an_engine_is_shared_by_ranks_of_the_rollout():
    placed = ["trainer.placement.rollout=[1,2,3]", "trainer.n_gpus_per_node=4"]
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    with pytest.raises(ConfigError, match="must divide the number of ranks, got 2 and 3"):
        load_config(["data.dataset_name=toy", *placed, shared])


def test_the_plan_counts_the_rollout_at_its_place():
    command = ["data.dataset_name=toy", "trainer.n_gpus_per_node=2", "trainer.device=cuda"]
    together = plan_memory(load_config(command), device_gib=80)
    apart = plan_memory(load_config([*command, APART]), device_gib=80)
    phases = {(each.role, each.phase): each.device for each in apart.phases}
    assert phases["rollout", "rollout"]["rollout weights"] == apart.rollout.weights > 0
    assert "actor parameters" not in phases["rollout", "rollout"]
    assert "rollout weights" not in phases["actor", "actor update"]
    assert apart.rollout.samples == 2 * together.rollout.samples, "one engine instead of two"


def test_a_part_of_a_launch_places_roles_as_the_whole(monkeypatch: pytest.MonkeyPatch):
    """WORLD_SIZE is that of a part, once the rollout has a part of its own."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(LAUNCHED_RANKS, "2")
    ranks = ranks_of_roles(load_config(["data.dataset_name=toy", "trainer.placement.rollout=[0]"]))
    assert (ranks["rollout"], ranks["actor"]) == ([0], [1])
