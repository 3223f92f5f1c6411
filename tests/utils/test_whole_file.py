"""A file is replaced at once, or stays as it was."""

import os
from pathlib import Path

import pytest

from verl.utils.whole_file import whole_file


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "made" / "facts.json"
    for text in ("old", "new"):
        with whole_file(path, flush=text == "new") as temporary:
            temporary.write_text(text)
            assert not path.exists() or path.read_text() == "old"
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text("old")
    with pytest.raises(OSError), whole_file(path) as temporary:
        temporary.write_text("half")
        raise OSError("the disk is full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_the_error_of_a_full_disk_names_the_file(tmp_path):
    path = tmp_path / "facts.json"
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"), whole_file(path):
        Path("/dev/full").write_text("facts")
    assert list(tmp_path.iterdir()) == []


def test_other_users_can_read_it_as_the_umask_allows(tmp_path):
    path = tmp_path / "facts.json"
    before = os.umask(0o022)
    try:
        with whole_file(path) as temporary:
            temporary.write_text("shared")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
