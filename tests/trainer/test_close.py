"""A closed trainer leaves no process, thread or model behind, so a program can make the next one."""

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.launches import launch
from verl.rollout.base import RolloutEngine
from verl.tracking.backends import FileBackend, TrackerBackend
from verl.trainer import RLTrainer
from verl.utils.errors import ConfigError, WorkerError

TOY = {"data.dataset_name": "toy", "data.train_batch_size": 4, "trainer.val_before_train": False}
TOOL = """
def add(first: int, second: int) -> int:
    '''Add two numbers.

    Args:
        first: a number.
        second: another number.
    '''
    return first + second
"""
REWARD = """
{keyword} compute_score(data_source, solution_str, ground_truth, extra_info):
    return 1.0
"""


def trainer_in(folder: Path, keys: dict[str, Any] | None = None, **parts: Any) -> RLTrainer:
    where = {"trainer.default_local_dir": str(folder), "trainer.logger": []}
    return RLTrainer({**TOY, **where, **(keys or {})}, max_new_tokens=4, max_steps=1, **parts)


def children() -> set[psutil.Process]:
    """Return the processes of this one, those of multiprocessing's own bookkeeping aside."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        if "resource_tracker" not in " ".join(process.cmdline()):
            found.add(process)
    return found


@pytest.mark.parametrize("kind", ["plain", "reward", "async reward", "tools", "row processes"])
def test_nothing_is_left_of_a_closed_trainer(tmp_path, kind):
    (tmp_path / "reward.py").write_text(REWARD.format(keyword="def"))
    (tmp_path / "async_reward.py").write_text(REWARD.format(keyword="async def"))
    (tmp_path / "tools.py").write_text(TOOL)
    keys = {
        "plain": {},
        "reward": {"custom_reward_function.path": str(tmp_path / "reward.py")},
        "async reward": {"custom_reward_function.path": str(tmp_path / "async_reward.py")},
        "tools": {
            "actor_rollout_ref.model.path": "calculator",
            "actor_rollout_ref.rollout.multi_turn.function_tool_path": str(tmp_path / "tools.py"),
        },
        "row processes": {"data.dataloader_num_workers": 1},
    }[kind]
    gc.collect()
    threads = set(threading.enumerate())
    processes = children()

    with trainer_in(tmp_path / "run", keys) as trainer:
        trainer.train()
        trainer.rollout(["1 + 1 = ?"])
        trainer.compute_reward(["1"], data_source="toy", ground_truth="1")
        parts = [trainer.ppo, trainer.ppo.actor_wg.worker, trainer.ppo.actor_wg.worker.engine]
        left = [weakref.ref(part) for part in parts]
        del parts

    assert [part() for part in left] == [None] * 3
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5.0)
        assert not thread.is_alive(), thread.name
    psutil.wait_procs(children() - processes, timeout=5.0)
    assert children() <= processes


def test_a_closed_trainer_can_be_read_and_not_used(tmp_path):
    with trainer_in(tmp_path) as trainer:
        metrics = trainer.train()
    trainer.close()  # a second time
    assert trainer.metrics == metrics
    assert trainer.tokenizer.decode(trainer.tokenizer("1")["input_ids"])
    assert trainer.show().text

    message = r"was called after close\(\), which has freed the models. Make a new RLTrainer"
    for call in (
        trainer.train,
        trainer.__enter__,
        lambda: trainer.rollout(["1 + 1 = ?"]),
        lambda: trainer.compute_reward(["1"], data_source="toy", ground_truth="1"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_models_of_a_dropped_trainer_are_freed_before_the_next_are_loaded(tmp_path):
    """A cell of a notebook that runs again drops the trainer, and does not close it."""
    gc.disable()  # Python's collector may run at any time, or not for a long time
    try:
        trainer = trainer_in(tmp_path / "first")
        trainer.rollout(["1 + 1 = ?"])
        model = weakref.ref(trainer.ppo.actor_wg.worker.engine.hf_model)
        trainer = trainer_in(tmp_path / "second")
        trainer.rollout(["1 + 1 = ?"])
    finally:
        gc.enable()
    assert model() is None


def test_a_trainer_closes_after_an_error(tmp_path):
    with pytest.raises(KeyError, match="mine"), trainer_in(tmp_path) as trainer:
        trainer.rollout(["1 + 1 = ?"])
        raise KeyError("mine")
    with pytest.raises(ConfigError, match="after close"):
        trainer.train()


def test_a_reward_cannot_close_its_trainer(tmp_path):
    def reward(batch, return_dict=False):
        with pytest.raises(WorkerError, match=r"close\(\) was called within train\(\) of the same"):
            trainer.close()
        return {"reward_tensor": torch.zeros(batch.batch["responses"].shape)}

    trainer = trainer_in(tmp_path, reward_fn=reward)
    assert trainer.train()["training/global_step"] == 1
    trainer.close()


@pytest.mark.parametrize("action", ["train", "rollout"])
def test_trackers_end_once(tmp_path, monkeypatch, action):
    ends: list[TrackerBackend] = []
    monkeypatch.setattr(FileBackend, "finish", lambda self: ends.append(self))
    with trainer_in(tmp_path, {"trainer.logger": ["file"]}) as trainer:
        if action == "train":
            trainer.train()
        else:
            trainer.rollout(["1 + 1 = ?"])
    assert len(ends) == 1


def test_engines_are_closed(tmp_path, monkeypatch):
    with trainer_in(tmp_path) as trainer:
        trainer.rollout(["1 + 1 = ?"])
        engine: RolloutEngine = trainer.ppo.rollout_wg.worker.engine
        closed: list[bool] = []
        monkeypatch.setattr(engine, "close", lambda: closed.append(True))
    assert closed == [True]


def train_two_on_ray(folder: str) -> None:
    for name in ("first", "second"):
        with RLTrainer(
            {**TOY, "trainer.logger": []},
            default_local_dir=f"{folder}/{name}",
            max_steps=1,
            n_gpus_per_node=2,
            ray_config={"num_cpus": 2},
        ) as trainer:
            trainer.train()
    print("both trained")


@pytest.mark.slow
def test_a_second_trainer_takes_the_place_of_a_closed_one_on_ray(tmp_path):
    """Both need two CPUs, and this Ray has two."""
    pytest.importorskip("ray", reason="the optional backend is not installed")
    done = launch(1, train_two_on_ray, str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "both trained" in done.stdout
