"""Folders of weights: those of killed runs go, those of running ones stay."""

import subprocess
import sys

import torch

from tests.tiny_models import tiny_model
from verl.rollout.servers import weights
from verl.rollout.servers.weights import WeightFolder

RUN = """
import sys
from pathlib import Path
import torch
from tests.tiny_models import tiny_model
from verl.rollout.servers import weights
weights._SHARED_MEMORY = Path(sys.argv[1])
folder = weights.WeightFolder(None, tiny_model("llama"), torch.float32)
print(folder._root, flush=True)
input()
"""


def start(parent):
    """Start a process that has a folder. Return it, and the folder's name."""
    command = [sys.executable, "-c", RUN, str(parent)]
    run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return run, run.stdout.readline().strip()


def test_folders_of_killed_runs_are_removed_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)
    killed, _ = start(tmp_path)
    alive, of_alive = start(tmp_path)
    unclaimed = tmp_path / "verl-weights-just-made"
    unclaimed.mkdir()
    killed.kill()
    killed.communicate()

    first = WeightFolder(None, tiny_model("llama"), torch.float32)
    second = WeightFolder(None, tiny_model("llama"), torch.float32)
    other, of_other = start(tmp_path)  # which looks for folders, too
    left = {str(folder) for folder in tmp_path.iterdir()}
    alive.communicate("\n")
    other.communicate("\n")
    assert left == {of_alive, of_other, str(unclaimed), str(first._root), str(second._root)}
    assert not (tmp_path / of_alive).exists(), "a run that ends removes its own"
