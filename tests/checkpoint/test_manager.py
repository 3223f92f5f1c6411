"""Checkpoints survive kills, full disks and damaged files; pruning keeps the last good one."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from verl.checkpoint import manager as module
from verl.checkpoint import sharded
from verl.checkpoint.folders import step_of
from verl.checkpoint.manager import CheckpointManager
from verl.utils.errors import CheckpointError


def write(content: bytes):
    return lambda folder: (folder / "weights.bin").write_bytes(content)


def save(manager: CheckpointManager, step: int) -> Path:
    return manager.save(step, {"actor": write(b"a" * 1000 + bytes([step])), "trainer": write(b"t")})


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_layout_and_content(tmp_path):
    manager = CheckpointManager(tmp_path / "run")
    folder = save(manager, 20)
    assert folder == tmp_path / "run" / "global_step_20"
    assert (folder / "actor" / "weights.bin").read_bytes().endswith(bytes([20]))
    assert names(tmp_path / "run") == {"global_step_20", "latest_checkpointed_iteration.txt"}
    assert names(folder) == {"actor", "trainer", "manifest.json"}
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "20"
    assert manager.latest() == folder
    assert step_of(folder) == 20


def test_nothing_exists_before_the_first_save(tmp_path):
    manager = CheckpointManager(tmp_path / "none")
    assert manager.latest() is None
    assert manager.resolve("auto") is None
    assert not (tmp_path / "none").exists()


def test_files_in_subfolders_have_checksums(tmp_path):
    def writer(folder):
        (folder / "shards" / "deep").mkdir(parents=True)
        (folder / "shards" / "deep" / "x.bin").write_bytes(b"123")

    manager = CheckpointManager(tmp_path)
    folder = manager.save(1, {"actor": writer})
    (folder / "actor" / "shards" / "deep" / "x.bin").write_bytes(b"124")
    with pytest.raises(CheckpointError, match=r"actor/shards/deep/x.bin has another checksum"):
        manager.verify(folder)


def damage(folder: Path, kind: str) -> None:
    file = folder / "actor" / "weights.bin"
    if kind == "truncated":
        os.truncate(file, 100)
    elif kind == "missing":
        file.unlink()
    elif kind == "checksum":
        content = bytearray(file.read_bytes())
        content[500] ^= 1
        file.write_bytes(content)
    elif kind == "too long":
        file.write_bytes(file.read_bytes() + b"x")
    elif kind == "damaged":
        (folder / "manifest.json").write_text('{"step": 4')
    elif kind == "no manifest":
        (folder / "manifest.json").unlink()


KINDS = ["truncated", "missing", "checksum", "too long", "damaged", "no manifest"]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoint_is_skipped_for_the_previous_one(tmp_path, kind, caplog):
    manager = CheckpointManager(tmp_path)
    good = save(manager, 2)
    bad = save(manager, 4)
    damage(bad, kind)
    with pytest.raises(CheckpointError, match=kind):
        manager.verify(bad)
    with caplog.at_level("WARNING", logger="verl"):
        assert manager.resolve("auto") == good
    assert [("global_step_4" in message, kind in message) for message in caplog.messages] == [
        (True, True)
    ]
    with pytest.raises(CheckpointError, match=kind):
        manager.resolve("resume_path", bad)
    assert manager.resolve("resume_path", good) == good


def test_no_valid_checkpoint_is_an_error(tmp_path):
    manager = CheckpointManager(tmp_path)
    damage(save(manager, 2), "truncated")
    with pytest.raises(CheckpointError, match="disable"):
        manager.resolve("auto")
    assert manager.resolve("disable") is None


HOLDER = """
    import sys, time
    from pathlib import Path
    from verl.checkpoint.manager import CheckpointManager
    root = Path(sys.argv[1])
    manager = CheckpointManager(root)
    manager.claim()
    (root / ".tmp-global_step_3-1").mkdir()
    print("claimed", flush=True)
    time.sleep(100)
"""


def test_folder_belongs_to_one_run_until_it_ends_or_is_killed(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(
            CheckpointError, match=rf"Another run \(pid {other.pid} on .*trainer\.experiment_name"
        ):
            CheckpointManager(tmp_path).claim()
        reader = CheckpointManager(tmp_path)
        reader.clean()
        assert (tmp_path / ".tmp-global_step_3-1").exists(), "it is being written"
        other.kill()

    reader.clean()
    assert names(tmp_path) == {".in_use"}
    reader.claim()
    reader.claim()
    reader.release()


def test_resume_modes(tmp_path):
    manager = CheckpointManager(tmp_path)
    first = save(manager, 2)
    second = save(manager, 4)
    assert manager.resolve("auto") == second
    assert manager.resolve("disable") is None
    assert manager.resolve("resume_path", str(first)) == first
    with pytest.raises(CheckpointError, match="found none"):
        manager.resolve("resume_path", tmp_path / "global_step_9")
    with pytest.raises(CheckpointError, match="global_step_N"):
        step_of(tmp_path)


def test_old_checkpoints_are_deleted(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=2)
    for step in (1, 2, 3, 10):
        save(manager, step)
    assert names(tmp_path) == {
        "global_step_3",
        "global_step_10",
        "latest_checkpointed_iteration.txt",
    }


def checkpoints(root: Path) -> set[str]:
    return {name for name in names(root) if name.startswith("global_step")}


def test_a_lowered_limit_makes_room_before_the_next_checkpoint(tmp_path):
    before = CheckpointManager(tmp_path)
    for step in (1, 2, 3, 4):
        save(before, step)
    damage(tmp_path / "global_step_4", "checksum")

    manager = CheckpointManager(tmp_path, max_to_keep=2)
    assert manager.resolve("auto") == tmp_path / "global_step_3"
    seen: list[set[str]] = []

    def look(folder: Path) -> None:
        seen.append(checkpoints(tmp_path))
        (folder / "weights.bin").touch()

    manager.save(5, {"actor": look})
    assert seen == [{"global_step_2", "global_step_3"}]
    assert checkpoints(tmp_path) == {"global_step_3", "global_step_5"}


def test_a_named_checkpoint_leaves_newer_ones_until_the_next_is_written(tmp_path):
    before = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        save(before, step)
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    manager.resolve("resume_path", tmp_path / "global_step_1")
    seen: list[set[str]] = []

    def look(folder: Path) -> None:
        seen.append(checkpoints(tmp_path))
        (folder / "weights.bin").touch()

    manager.save(2, {"actor": look})
    assert seen == [{"global_step_1", "global_step_2", "global_step_3"}]
    assert checkpoints(tmp_path) == {"global_step_2"}


def test_fresh_run_in_a_used_folder_resumes_from_its_own_checkpoints(
    tmp_path,
):
    old = CheckpointManager(tmp_path)
    save(old, 50)
    save(old, 100)
    again = CheckpointManager(tmp_path, max_to_keep=1)
    assert again.resolve("disable") is None
    folder = save(again, 2)
    assert again.latest() == folder
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}


def test_step_saved_twice_is_replaced(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(2, {"actor": write(b"one"), "critic": write(b"c")})
    folder = manager.save(2, {"actor": write(b"two")})
    manager.verify(folder)
    assert (folder / "actor" / "weights.bin").read_bytes() == b"two"
    assert names(folder) == {"actor", "manifest.json"}
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}


def test_file_with_the_name_of_a_checkpoint_is_refused_before_anything_is_written(tmp_path):
    manager = CheckpointManager(tmp_path)
    first = save(manager, 1)
    (tmp_path / "global_step_2").write_text("notes")
    before = names(tmp_path)
    refused = "global_step_2 must be a folder.*Move it away"
    with pytest.raises(CheckpointError, match=refused):
        manager.require_writable()  # the check at the start of a run
    with pytest.raises(CheckpointError, match=refused):
        save(manager, 2)
    assert names(tmp_path) == before
    assert (tmp_path / "global_step_2").read_text() == "notes"

    save(manager, 3)
    assert manager.latest() == tmp_path / "global_step_3"
    assert first.is_dir()


def test_failing_writer_leaves_no_files_and_deletes_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    good = save(manager, 2)

    def broken(folder):
        (folder / "half").write_bytes(b"x")
        raise KeyError("a bug of the writer")

    with pytest.raises(KeyError, match="a bug"):
        manager.save(4, {"actor": write(b"a"), "trainer": broken})
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}
    manager.verify(good)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_folder_that_is_removed_during_a_run_is_claimed_again(tmp_path, caplog):
    root = tmp_path / "run"
    root.mkdir()
    manager = CheckpointManager(root)
    manager.claim()
    save(manager, 2)
    assert not caplog.messages

    shutil.rmtree(root)
    save(manager, 4)
    assert names(root) == {".in_use", "global_step_4", "latest_checkpointed_iteration.txt"}
    assert caplog.messages == [
        f"{root} was removed while this run wrote there. Earlier checkpoints are gone; the folder "
        "is created again."
    ]
    save(manager, 6)
    assert len(caplog.messages) == 1
    manager.release()


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_full_disk_is_reported_and_the_earlier_checkpoint_is_intact(tmp_path):
    def fill(folder):
        (folder / "weights.bin").write_bytes(b"x" * 100)
        with open("/dev/full", "wb") as file:
            file.write(b"x" * 100_000)

    manager = CheckpointManager(tmp_path, max_to_keep=1)
    good = save(manager, 2)
    with pytest.raises(
        CheckpointError, match=rf"global_step_4.*no space left.*{tmp_path}.*MiB free"
    ) as caught:
        manager.save(4, {"actor": fill})
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}
    assert manager.latest() == good


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: Disk quota exceeded (os error 122)"),
    ],
)
def test_used_up_quota_is_reported_on_a_disk_with_space(tmp_path, error):
    def fail(folder):
        raise error

    with pytest.raises(CheckpointError, match=r"not written: the disk quota.*default_local_dir"):
        CheckpointManager(tmp_path).save(4, {"actor": fail})


def test_full_disk_is_recognized_behind_other_errors(tmp_path, monkeypatch):
    """Recognize the RuntimeError about file positions that torch.save raises on a full disk."""

    def fail(folder):
        raise RuntimeError("unexpected pos 576 vs 534")

    manager = CheckpointManager(tmp_path)
    save(manager, 2)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        manager.save(4, {"actor": fail})
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="no space left"):
        manager.save(4, {"actor": fail})


def test_file_size_limit_is_reported(tmp_path):
    def fail(folder):
        (folder / "weights.bin").write_bytes(b"x" * 3000)

    manager = CheckpointManager(tmp_path)
    good = save(manager, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    try:
        with pytest.raises(
            CheckpointError, match=r"global_step_4 was not written: no file may grow.*ulimit -f"
        ):
            manager.save(4, {"actor": fail})
        with pytest.raises(KeyError, match="a bug"):
            manager.save(4, {"actor": lambda folder: {}["a bug of the writer"]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}
    assert manager.latest() == good


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EIO, "Input/output error"),
        (errno.EMFILE, r"Raise the limit on open files \(ulimit -n\)"),
    ],
)
def test_other_disk_errors_name_the_path(tmp_path, number, message):
    def fail(folder):
        raise OSError(number, os.strerror(number), str(folder / "x"))

    with pytest.raises(CheckpointError, match=rf"global_step_4.*{message}"):
        CheckpointManager(tmp_path).save(4, {"actor": fail})


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointError, match="file"):
        CheckpointManager(blocked / "run").save(1, {"actor": write(b"a")})


def begin(manager: CheckpointManager, step: int) -> list[bool]:
    """Start a background checkpoint.

    The last entry of the returned list says whether its files are written.
    """
    written = [False]
    manager.save(step, {"actor": write(b"a")}, is_written=lambda wait: wait or written[-1])
    return written


def test_background_checkpoint_is_renamed_when_complete(tmp_path):
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    former = save(manager, 2)
    written = begin(manager, 4)
    manager.advance()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"], (
        "checksums were computed too early"
    )
    assert manager.latest() == former
    written.append(True)
    manager.advance()
    manager.finish()
    assert names(tmp_path) == {"global_step_4", "latest_checkpointed_iteration.txt"}
    manager.verify(tmp_path / "global_step_4")
    manager.advance()  # does nothing


def test_next_save_waits_for_the_previous_one(tmp_path):
    manager = CheckpointManager(tmp_path)
    begin(manager, 2)
    begin(manager, 4)
    assert manager.latest() == tmp_path / "global_step_2"
    manager.finish()
    assert manager.latest() == tmp_path / "global_step_4"


def test_ctrl_c_during_a_wait_does_not_lose_the_checkpoint(tmp_path):
    interrupts = iter([KeyboardInterrupt()])

    def is_written(wait):
        for interrupt in interrupts:
            raise interrupt
        return True

    manager = CheckpointManager(tmp_path)
    manager.save(2, {"actor": write(b"a")}, is_written=is_written)
    with pytest.raises(KeyboardInterrupt):
        save(manager, 4)
    manager.rescue()
    assert manager.latest() == tmp_path / "global_step_2"


def test_background_failure_is_raised_once_and_leaves_no_files(tmp_path, caplog):
    def fails(wait):
        raise OSError(errno.ENOSPC, "No space left on device")

    manager = CheckpointManager(tmp_path)
    good = save(manager, 2)
    manager.save(4, {"actor": write(b"a")}, is_written=fails)
    with pytest.raises(CheckpointError, match=r"global_step_4.*no space left"):
        manager.advance()

    manager.finish()
    manager.save(6, {"actor": write(b"a")}, is_written=fails)
    with caplog.at_level("WARNING", logger="verl"):
        manager.rescue()
    assert "global_step_6" in caplog.messages[-1]
    assert names(tmp_path) == {"global_step_2", "latest_checkpointed_iteration.txt"}
    assert manager.latest() == good


def test_background_checksum_error_is_raised(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    begin(manager, 2)
    monkeypatch.setattr(module, "write_manifest", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        manager.finish()
    assert names(tmp_path) == set()


def test_files_on_another_host_are_reported(tmp_path):
    def elsewhere(folder):
        sharded.write_sharded(folder / "sharded", {"model.weight": torch.ones(3)})
        (folder / "sharded" / "__0_0.distcp").unlink()

    manager = CheckpointManager(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"lacks files that other ranks wrote: __0_0\.distcp.*all of them share",
    ):
        manager.save(2, {"actor": elsewhere})
    with pytest.raises(
        CheckpointError, match=r"actor are not visible from this host.*all of them share"
    ):
        manager.save(2, {"actor": lambda folder: None, "trainer": write(b"t")})
    assert names(tmp_path) == set()


def test_run_folder_is_not_a_checkpoint(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (2, 10):
        save(manager, step)
    with pytest.raises(
        CheckpointError, match=r"resume_from_path=.*/global_step_10 \(or one of the steps 2\)"
    ):
        manager.resolve("resume_path", tmp_path)


def killed_save(root: Path, where: str) -> None:
    """Run a process that saves step 2 and is killed at `where` while it saves step 4."""
    code = textwrap.dedent(
        f"""
        import os, signal, shutil
        from pathlib import Path
        from verl.checkpoint import manager as module
        from verl.checkpoint.manager import CheckpointManager

        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        def half(folder):
            (folder / "weights.bin").write_bytes(b"x" * 1000)
            if {where!r} == "writer":
                die()

        def whole(folder):
            (folder / "weights.bin").write_bytes(b"x" * 1000)

        manager = CheckpointManager({str(root)!r}, max_to_keep=1)
        manager.save(2, {{"actor": whole}})
        if {where!r} == "manifest":
            module.write_manifest = die
        if {where!r} == "after rename":
            module.sync = die
        if {where!r} == "replacing":
            rename = os.replace
            os.replace = lambda a, b: die() if ".tmp-global" in str(a) else rename(a, b)
        if {where!r} == "pointer":
            rename = os.replace
            os.replace = lambda a, b: die() if ".tmp-global" not in str(a) else rename(a, b)
        if {where!r} == "pruning":
            shutil.rmtree = die
        manager.save(2 if {where!r} == "replacing" else 4, {{"actor": half, "critic": half}})
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("where", "newest"),
    [
        *(("writer", 2), ("manifest", 2), ("after rename", 4)),
        *(("replacing", 2), ("pointer", 4), ("pruning", 4)),
    ],
)
def test_sigkill_leaves_a_valid_newest_checkpoint(tmp_path, where, newest):
    killed_save(tmp_path, where)
    manager = CheckpointManager(tmp_path, max_to_keep=1)
    found = manager.resolve("auto")
    assert found is not None
    assert step_of(found) == newest
    manager.verify(found)
    assert {name for name in names(tmp_path) if name.startswith(".")} <= {".in_use"}

    last = save(manager, 6)
    assert manager.latest() == last
    assert {name for name in names(tmp_path) if not name.startswith(".")} == {
        "global_step_6",
        "latest_checkpointed_iteration.txt",
    }


def test_reader_does_not_disturb_a_checkpoint_being_written(tmp_path):
    manager = CheckpointManager(tmp_path)
    save(manager, 2)
    reader = CheckpointManager(tmp_path)

    def writer(folder):
        (folder / "x").write_bytes(b"x")
        assert reader.latest() == tmp_path / "global_step_2"

    assert step_of(manager.save(4, {"actor": writer})) == 4
