"""Roles on ranks of their own: from the configuration, with the numbers of one process."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from tests.single_controller import workers
from tests.single_controller.launch import launch
from tests.trainer.runs import PPO, without_times
from tests.trainer.test_ranks import train
from verl.config import load_config
from verl.config.placement import ranks_of_roles
from verl.distributed.mesh import init_mesh
from verl.single_controller import Dispatch, Worker, register
from verl.trainer import pools
from verl.utils.errors import ConfigError, WorkerError
from verl.utils.launcher import rank_title, run_rank

KL = ["algorithm.use_kl_in_reward=True", "trainer.max_steps=2"]
APART = [
    "trainer.placement.actor=[0]",
    "trainer.placement.critic=[1]",
    "trainer.placement.reference=[1]",
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return without_times(train(1, tmp_path_factory.mktemp("alone"), *KL))


def test_an_actor_apart_from_critic_and_reference_learns_the_same(alone, tmp_path):
    apart = train(2, tmp_path, *KL, *APART, "trainer.profile_steps=[2]")
    assert without_times(apart) == alone
    assert alone[1]["actor/reward_kl_penalty"] != 0
    events = json.loads((tmp_path / "timeline" / "global_step_2.json").read_text())["traceEvents"]
    processes = sorted(event["args"]["name"] for event in events if event["name"] == "process_name")
    assert [name.partition(" (")[0] for name in processes] == [
        "critic 0, reference 0",
        "driver, actor 0, rollout 0",
    ]

    begun, ended = (
        {event["name"]: event["ts"] for event in events if event["ph"] == phase} for phase in "be"
    )
    assert begun["reference.compute_ref_log_prob"] < ended["actor.compute_log_prob"], (
        "at the same time"
    )


@pytest.mark.slow
def test_ray_actors_in_pools_of_their_own_learn_the_same(alone, tmp_path):
    pytest.importorskip("ray", reason="the optional backend is not installed")
    on_second = "trainer.placement.rollout=[1]"
    apart = train(1, tmp_path, *KL, *APART, on_second, "ray_init.num_cpus=2")
    # The weights are a copy on ranks of their own, and the cache is never freed.
    of_copy = {"rollout/memory_gib", "rollout/num_pages"}
    ours, expected = (
        [{name: line[name] for name in line.keys() - of_copy} for line in lines]
        for lines in (without_times(apart), alone)
    )
    assert ours == expected


class Meeting(Worker):
    """Report which ranks compute together."""

    def __init__(self) -> None:
        self.mesh = init_mesh(torch.device("cpu"))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_pids(self) -> tuple[int, int, int, int]:
        pids = torch.tensor(os.getpid())
        if self.mesh.world.size > 1:
            torch.distributed.all_reduce(pids)
        return self.rank, self.world_size, os.getpid(), int(pids)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def title(self) -> str:
        return rank_title(self.rank, self.world_size)


def meet(pool, parts):
    pools = pool.split(parts)
    groups = [part.start(f"role {number}", Meeting) for number, part in enumerate(pools)]
    again = pools[1].start("again", Meeting)
    futures = [group.sum_of_pids(blocking=False) for group in [*groups, again]]
    try:
        workers.trouble_within(pools[1], 20.0, "only_rank_raises", 1)
    except WorkerError as error:
        message = str(error)
    titles = [group.title() for group in groups]
    return [future.result() for future in futures], message, titles


def test_every_part_of_a_launch_is_a_separate_world():
    run = launch(meet, [[0, 3], [1, 2]], size=4)
    assert run.error is None
    (first, second, again), message, titles = run.value
    for part in (first, second, again):
        assert [(rank, size) for rank, size, _, _ in part] == [(0, 2), (1, 2)]
        assert {total for *_, total in part} == {sum(pid for _, _, pid, _ in part)}
    assert again == second
    assert not {pid for _, _, pid, _ in first} & {pid for _, _, pid, _ in second}
    assert "raised on rank 2" in message, "errors count as torchrun does"
    assert titles[0][1] == "rank 3 of the run (rank 1 of 2 in its group)"
    assert titles[1][0] == "rank 1 of the run (rank 0 of 2 in its group)"


def test_a_rank_is_named_by_its_number_in_the_run(monkeypatch):
    monkeypatch.delenv("VERL_RANKS_OF_GROUP", raising=False)
    assert (rank_title(0, 1), rank_title(1, 2), run_rank(1)) == ("", "rank 1 of 2", 1)
    monkeypatch.setenv("VERL_RANKS_OF_GROUP", "3")
    assert (rank_title(0, 1), run_rank(0)) == ("rank 3 of the run", 3)


def placed(*overrides: str) -> dict[str, list[int]]:
    without_reference = "actor_rollout_ref.actor.use_kl_loss=False"
    return ranks_of_roles(load_config(["data.dataset_name=toy", without_reference, *overrides]))


def test_roles_are_with_the_actor_or_at_their_configured_place(monkeypatch):
    assert placed(*PPO) == {"actor": [0], "rollout": [0], "critic": [0]}
    assert placed("trainer.placement.actor=[1,0]", "trainer.placement.critic=[2,3]", *PPO) == {
        "actor": [0, 1],
        "rollout": [0, 1],
        "critic": [2, 3],
    }
    on_four = ("trainer.n_gpus_per_node=2", "trainer.nnodes=2", *KL)
    assert placed("trainer.placement.reference=[3]", *on_four, *PPO) == {
        "actor": [0, 1, 2],
        "rollout": [0, 1, 2],
        "critic": [0, 1, 2],
        "reference": [3],
    }

    assert placed("trainer.placement.critic=[3]", *on_four)["actor"] == [0, 1, 2, 3], (
        "there is no critic"
    )
    lora = "actor_rollout_ref.model.lora_rank=4"
    assert set(placed("trainer.placement.reference=[3]", lora, *on_four)) == {"actor", "rollout"}
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert placed("trainer.placement.critic=[3]", *PPO) == {
        "actor": [0, 1, 2],
        "rollout": [0, 1, 2],
        "critic": [3],
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["critic=[0,1]", "actor=[1,2]"],
            r"share all their ranks or none, got \[1, 2\] for actor and \[0, 1\]",
        ),
        (["critic=[0,0]"], r"placement.critic must list different ranks from 0 to 3, got \[0, 0\]"),
        (["critic=[4]"], r"from 0 to 3, got \[4\]"),
        (["critic=[]"], r"got \[\]"),
    ],
)
def test_invalid_placements_are_reported(overrides, message):
    with pytest.raises(ConfigError, match=message):
        placed(
            *PPO,
            "trainer.n_gpus_per_node=4",
            *(f"trainer.placement.{override}" for override in overrides),
        )


def test_rank_below_zero_leaves_the_range_of_ranks():
    with pytest.raises(ConfigError, match=r"different ranks from 0 to 0, got \[-1\]"):
        placed("trainer.placement.actor=[-1]")


def test_sizes_divide_the_ranks_of_their_role():
    apart = ["trainer.placement.actor=[0,1]", "trainer.placement.critic=[2,3,4]", *PPO]
    placed(*apart, "critic.ulysses_sequence_parallel_size=3", "data.max_prompt_length=32")
    with pytest.raises(
        ConfigError, match="critic.ulysses_sequence_parallel_size must divide.*got 2 and 3"
    ):
        placed(*apart, "critic.ulysses_sequence_parallel_size=2")


def test_idle_ranks_are_reported(caplog):
    placed("trainer.placement.actor=[0,2]", *PPO, "trainer.n_gpus_per_node=3")
    assert "gives no role to the ranks [1]: they stay idle" in caplog.text


def test_ray_pools_have_their_ranks_on_their_nodes(monkeypatch):
    made = []
    backend = SimpleNamespace(
        connect=lambda **_: None,
        RayResourcePool=lambda counts, use_gpu, run_ranks: (
            made.append((counts, use_gpu)) or SimpleNamespace(world_size=sum(counts))
        ),
    )
    options = [
        *PPO,
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        "trainer.placement.critic=[2,3,4]",
    ]

    config = load_config(["data.dataset_name=toy", *options])
    monkeypatch.setattr(pools, "require", lambda *_: None)
    monkeypatch.setattr(pools.importlib, "import_module", lambda _: backend)
    pool = pools.join_pool(config, torch.device("cuda"))
    assert made == [([2, 3], True), ([2, 1], True)]
    assert pool.world_size == 8
