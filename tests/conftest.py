"""One thread, no network, and a separate log: tests are fast and give the same results
everywhere."""

import gc
import logging
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray would start a process for each CPU in advance; actors with their own environment cannot use
# those.
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")

import importlib
import pkgutil

import hypothesis
import pytest
import torch
from hypothesis.strategies import _internal as strategies
from jaxtyping import install_import_hook

from tests.algorithms import typecheck
from verl.utils.logging import logger, say_once

torch.set_num_threads(1)

# Imports and test items live until the process exits: the collector would scan them in vain. It
# starts after the collection of tests.
gc.disable()

# pytest parses the modules of hypothesis when they are imported, some of them during a test. In
# Python 3.11.7 a garbage collection that runs Python code meanwhile breaks the parser.
for module in pkgutil.iter_modules(strategies.__path__, f"{strategies.__name__}."):
    importlib.import_module(module.name)

# No deadline: an example may be slow on a busy machine.
hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")

# Shapes in signatures of algorithms are checked while tests run, and only then. Here, before any
# other module imports them.
with install_import_hook("verl.algorithms", f"{typecheck.__name__}.checked"):
    importlib.import_module("verl.algorithms.padded")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Isolate the log: settings of a test would keep its output stream, and hide the records of the
    next test from `caplog`."""
    say_once.cache_clear()
    yield
    left_disabled = logger.disabled or logging.root.manager.disable > 0
    logger.disabled = False
    logging.disable(logging.NOTSET)
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
    assert not left_disabled, "this test left the log disabled, which would hide the next one's"


# Files that start ranks or compute for long come first, the longest at the head: at the end, one
# would leave the other of two processes without work.
_LONG = (
    "test_types.py",
    "test_compile.py",
    "test_ray.py",
    "test_ranks.py",
    "test_sample.py",
    "test_ray_workers.py",
    "test_resume.py",
    "test_policies.py",
    "test_reward_processes.py",
    "test_reward_policies.py",
    "test_servers.py",
    "test_agents.py",
    "test_readme.py",
    "test_embedded.py",
    "test_hostile_programs.py",
    "test_spmd.py",
    "test_cuda_decoder.py",
    "test_dynamic_validation.py",
    "test_algorithms.py",
    "test_placement.py",
    "test_runs.py",
    "test_versions_of_tokens.py",
    "test_in_process.py",
    "test_reserved_memory.py",
    "test_apart.py",
    "test_ray_upload.py",
    "test_hostile_rewards.py",
    "test_plan.py",
    "test_rollout_apart.py",
    "test_training.py",
    "test_api.py",
    "test_api_ranks.py",
    "test_distillation.py",
    "test_generation.py",
    "test_sft.py",
)


def pytest_collection_finish() -> None:
    """Start garbage collection, seldom, and exempt modules and test items from it.

    They live until the process exits. The package collects garbage when memory runs out, and each
    time the collector would scan a million of these objects.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.path.name, len(_LONG)))
