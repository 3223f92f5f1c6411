"""A checkpoint is whole or absent, whatever happens to the process or the disk."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from verl.checkpoint import CheckpointManager
from verl.utils.errors import CheckpointError, ConfigError


def write(text: str):
    def writer(folder: Path) -> None:
        (folder / "weights.bin").write_text(text)
        (folder / "inner").mkdir()
        (folder / "inner" / "more.bin").write_text(text * 2)

    return writer


def save(manager: CheckpointManager, step: int) -> Path:
    return manager.save(step, {"actor": write(f"actor {step}"), "trainer": write(f"trainer {step}")})


def test_the_newest_checkpoint_is_found(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    assert manager.latest() is None
    for step in (2, 10):
        save(manager, step)
    newest = manager.latest()
    assert newest == tmp_path / "run" / "global_step_10"
    assert (newest / "actor" / "weights.bin").read_text() == "actor 10"
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "10"


def truncate(path: Path) -> None:
    path.write_text(path.read_text()[:-1])


def corrupt(path: Path) -> None:
    path.write_text("x" + path.read_text()[1:])


@pytest.mark.parametrize(("damage", "message"), [(truncate, "bytes"), (corrupt, "checksum"), (Path.unlink, "missing")])
@pytest.mark.parametrize("file", ["actor/inner/more.bin", "trainer/weights.bin"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, caplog, monkeypatch, damage, message, file):
    monkeypatch.setattr("verl.checkpoint.manager.logger.propagate", True)
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    damage(save(manager, 2) / file)
    assert manager.latest() == tmp_path / "global_step_1"
    assert file in caplog.text
    assert message in caplog.text


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path, content):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    manifest = save(manager, 2) / "manifest.json"
    manifest.unlink() if content is None else manifest.write_text(content)
    assert manager.latest() == tmp_path / "global_step_1"


def test_only_damaged_checkpoints_stop_the_run(tmp_path):
    manager = CheckpointManager(tmp_path)
    truncate(save(manager, 1) / "actor" / "weights.bin")
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        manager.resolve("auto")
    assert manager.resolve("disable") is None


def test_old_checkpoints_go_and_the_one_just_written_stays(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (1, 2, 3):
        save(manager, step)
    assert manager.steps() == [2, 3]


def test_steps_of_an_earlier_run_that_was_not_resumed_are_not_the_newest(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (2, 100, 4):
        save(manager, step)
    assert manager.latest() == tmp_path / "global_step_4"


def test_a_step_written_again_replaces_the_old_one(tmp_path):
    manager = CheckpointManager(tmp_path)
    corrupt(save(manager, 4) / "actor" / "weights.bin")
    save(manager, 4)
    manager.verify(tmp_path / "global_step_4")


def test_a_process_killed_while_writing_leaves_the_previous_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from verl.checkpoint import CheckpointManager\n"
        "def die(folder):\n"
        "    (folder / 'weights.bin').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "CheckpointManager(Path(sys.argv[1])).save(2, {'actor': die})\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == -9
    assert manager.latest() == tmp_path / "global_step_1"
    save(manager, 2)
    assert manager.latest() == tmp_path / "global_step_2"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step_1", "global_step_2", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 1)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"GiB free"):
        manager.save(2, {"actor": write("a"), "critic": full})
    assert manager.latest() == tmp_path / "global_step_1"
    assert len(list(tmp_path.iterdir())) == 2


def test_a_given_path_is_checked(tmp_path):
    manager = CheckpointManager(tmp_path)
    folder = save(manager, 1)
    assert manager.resolve("resume_path", str(folder)) == folder
    with pytest.raises(CheckpointError, match="found none"):
        manager.resolve("resume_path", str(tmp_path / "global_step_9"))
    with pytest.raises(ConfigError, match="resume_path with the path"):
        manager.resolve("resume_path", None)
