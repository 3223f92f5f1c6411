"""The order of checkpoints, and damaged or edited manifests."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.test_manager import names, save
from verl.checkpoint.manager import CheckpointManager
from verl.utils.errors import CheckpointError


def test_clock_set_back_does_not_change_the_order(tmp_path, monkeypatch):
    clock = iter(range(10**18, 0, -(10**15)))
    monkeypatch.setattr(time, "time_ns", clock.__next__)
    for step in (2, 4, 6):
        manager = CheckpointManager(tmp_path, max_to_keep=2)  # as in a new process
        folder = save(manager, step)
        os.utime(folder, ns=(10**18 - step, 10**18 - step))
        assert manager.latest() == folder
        assert manager.newest_name() == folder.name
    assert names(tmp_path) == {
        "global_step_4",
        "global_step_6",
        "latest_checkpointed_iteration.txt",
    }


def test_checkpoints_without_a_sequence_number_come_first(tmp_path):
    manager = CheckpointManager(tmp_path)
    for step in (50, 100, 2):
        save(manager, step)
    for folder in tmp_path.glob("global_step_*"):
        edit_manifest(folder, lambda manifest: manifest.pop("sequence"))
    assert manager.latest() == tmp_path / "global_step_2", "the one that was written last"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert manager.latest() == tmp_path / "global_step_100"
    folder = save(manager, 4)
    assert manager.latest() == folder


def edit_manifest(folder: Path, edit) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


ODD_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory) -> Path:
    """Save steps 2 and 4 once; tests copy the folder, because a save waits for the disk."""
    folder = tmp_path_factory.mktemp("whole")
    manager = CheckpointManager(folder)
    for step in (2, 4):
        save(manager, step)
    return folder


@given(
    value=ODD_JSON,
    place=st.sampled_from(["", "step", "sequence", "saved_at_ns", "format", "files", "entry"]),
)
@settings(max_examples=50)
def test_odd_manifest_is_valid_or_skipped(tmp_path_factory, two_checkpoints, value, place):
    folder = tmp_path_factory.mktemp("odd")
    shutil.copytree(two_checkpoints, folder, dirs_exist_ok=True)
    manager = CheckpointManager(folder)
    good = folder / "global_step_2"
    odd = folder / "global_step_4"

    def edit(manifest):
        if place == "entry":
            manifest["files"]["actor/weights.bin"] = value
        elif place:
            manifest[place] = value

    edit_manifest(odd, edit)
    if not place:
        (odd / "manifest.json").write_text(json.dumps(value))
    found = manager.resolve("auto")
    still_valid = place in ("step", "saved_at_ns", "sequence") and type(value) is int
    assert found in ({good, odd} if still_valid else {good})
    save(manager, 6)


ODD_MANIFESTS = {
    "deep": "[" * 100_000,
    "huge number": '{"format": 2, "step": ' + "9" * 5000 + "}",
    "null entries": '{"format": 2, "step": 4, "saved_at_ns": 1, "files": {"trainer/x": null}}',
    "list of files": '{"format": 2, "step": 4, "saved_at_ns": 1, "files": []}',
    "no files": '{"format": 2, "step": 4, "saved_at_ns": 1, "files": {}}',
    "later format": '{"format": 3, "step": 4, "saved_at_ns": 1, "files": {"a": {}}}',
    "elsewhere": '{"format": 2, "step": 4, "saved_at_ns": 1, "files": {"../../a": {}}}',
    "no text": "\x00\xff",
}


@pytest.mark.parametrize("kind", ODD_MANIFESTS)
def test_invalid_manifest_is_named_and_skipped(tmp_path, kind, caplog):
    manager = CheckpointManager(tmp_path)
    good = save(manager, 2)
    odd = save(manager, 4)
    (odd / "manifest.json").write_bytes(ODD_MANIFESTS[kind].encode("latin-1"))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(kind)
    with caplog.at_level("WARNING", logger="verl"):
        assert manager.resolve("auto") == good
    (message,) = caplog.messages
    assert "global_step_4/manifest.json is damaged" in message
    assert len(message) < 500
    assert manager.newest_name() == "global_step_2"
    with pytest.raises(CheckpointError, match=r"global_step_4/manifest\.json is damaged"):
        manager.resolve("resume_path", odd)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_stray_file_with_a_temporary_name_does_no_harm(tmp_path, kind):
    stray = tmp_path / ".tmp-global_step_4-1"
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    if kind == "file":
        stray.write_text("mine")
    else:
        stray.symlink_to(folder)
    manager = CheckpointManager(tmp_path)
    assert manager.resolve("auto") is None
    save(manager, 4)
    assert stray.exists()
