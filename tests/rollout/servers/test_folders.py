"""Folders of weights: those of killed runs go, those of running ones stay."""

import atexit
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tests.launches import fork_server
from tests.tiny_models import tiny_model
from verl.rollout.servers import weights
from verl.rollout.servers.weights import WeightFolder


def keep_a_folder(parent: Path, ours: Connection) -> None:
    """Own a folder until the other side says a word, then end like a program."""
    weights._SHARED_MEMORY = parent
    folder = WeightFolder(None, tiny_model("llama"), torch.float32)
    ours.send(str(folder._root))
    ours.recv()
    atexit._run_exitfuncs()  # unlike a child of multiprocessing


class Owner:
    """A process that has a folder."""

    def __init__(self, parent: Path) -> None:
        self.link, theirs = fork_server().Pipe()
        self.process = fork_server().Process(
            target=keep_a_folder, args=(parent, theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.folder: str = self.link.recv()

    def end(self) -> None:
        self.link.send("end")
        self.process.join()
        assert self.process.exitcode == 0


def test_folders_of_killed_runs_are_removed_and_others_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_SHARED_MEMORY", tmp_path)
    killed = Owner(tmp_path)
    alive = Owner(tmp_path)
    killed.process.kill()
    killed.process.join()

    first = WeightFolder(None, tiny_model("llama"), torch.float32)
    second = WeightFolder(None, tiny_model("llama"), torch.float32)
    other = Owner(tmp_path)  # which looks for folders, too
    left = {str(folder) for folder in tmp_path.iterdir()}
    alive.end()
    other.end()
    owned = {alive.folder, other.folder, str(first._root), str(second._root)}
    assert left == owned
    assert not Path(alive.folder).exists(), "a run that ends removes its own"
