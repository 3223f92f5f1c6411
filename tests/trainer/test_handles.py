"""The trainers' handles of worker groups: a group offers only registered methods, which a type
checker cannot see."""

import ast
import inspect
from typing import Any, get_args, get_type_hints

import pytest

from verl.jobs.sft_trainer import SFTTrainer
from verl.single_controller import WorkerGroup
from verl.single_controller.dispatch import registered_methods
from verl.trainer import PPOTrainer


def workers_of(trainer: type) -> dict[str, list[type]]:
    """Return the worker classes behind each handle."""
    found: dict[str, list[type]] = {}
    for name, hint in get_type_hints(trainer, include_extras=True).items():
        choices = [hint, *get_args(hint)]
        groups = [each for each in choices if WorkerGroup in getattr(each, "__metadata__", ())]
        if groups:
            found[name] = [each.__origin__ for each in groups]
    return found


def calls_on_handles(trainer: type, handles: Any) -> set[tuple[str, str]]:
    """Return (handle, attribute) for every `self.<handle>.<attribute>` of the trainer."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(trainer))):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Attribute):
            continue
        if node.value.attr in handles:
            found.add((node.value.attr, node.attr))
    return found


@pytest.mark.parametrize(("trainer", "number"), [(PPOTrainer, 6), (SFTTrainer, 1)])
def test_every_call_is_a_registered_method_of_its_worker(trainer: type, number: int):
    workers = workers_of(trainer)
    assert len(workers) == number
    calls = calls_on_handles(trainer, workers)
    assert calls
    for handle, name in calls:
        if name in ("num_shares", "world_size"):
            continue
        for worker in workers[handle]:
            assert name in registered_methods(worker), f"{worker.__name__}.{name}"
