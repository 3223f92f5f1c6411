"""An untrusted checkpoint runs no code, whichever of its files was changed."""

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer.runs import PPO, run
from verl.checkpoint.manifest import MANIFEST, write_manifest
from verl.jobs.main_merge import main as model_merger

RUNS = {"ppo": PPO, "lora": ["actor_rollout_ref.model.lora_rank=2"]}
COMMAND = ["trainer.save_freq=1", "trainer.max_steps=1", "trainer.test_freq=-1"]


class Malicious:
    """Create a folder when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a finished run, created once."""
    folders: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            assert run(folders[kind], *COMMAND, *RUNS[kind]) == 0
        return folders[kind]

    return folder_of


@pytest.mark.parametrize("kind", RUNS)
def test_no_file_of_a_checkpoint_runs_code(tmp_path, saved, kind, capfd):
    checkpoint = Path("global_step_1")
    files = [
        file.relative_to(saved(kind))
        for file in sorted((saved(kind) / checkpoint).rglob("*"))
        if file.is_file() and file.name != MANIFEST
    ]
    assert {"state.pt", ".metadata", "__0_0.distcp", "progress.json"} <= {f.name for f in files}
    canary = tmp_path / "canary"
    stream = io.BytesIO()
    torch.save(Malicious(canary), stream)
    plain = [file for file in files if file.suffix in (".json", ".jinja")]
    alone = [[file] for file in files if file not in plain]
    for number, changed in enumerate((plain, *alone)):
        folder = tmp_path / str(number)
        shutil.copytree(saved(kind), folder)
        for file in changed:
            is_zip = file.suffix in (".pt", ".distcp")
            content = stream.getvalue() if is_zip else pickle.dumps(Malicious(canary))
            (folder / file).write_bytes(content)
        write_manifest(folder / checkpoint, step=1)

        assert run(folder, *COMMAND, *RUNS[kind], "trainer.max_steps=2") == 1, changed
        role = folder / checkpoint / "actor"
        target = ["--local_dir", str(role), "--target_dir", str(folder / "merged")]
        model_merger(["merge", "--backend", "fsdp", *target])
        assert "Traceback" not in capfd.readouterr().err, changed
        assert not canary.exists(), changed
        shutil.rmtree(folder)
