"""Sharded tensors are restored bit for bit, and missing parts are named."""

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from verl.checkpoint.sharded import SavedTensors, host_copy, write_sharded
from verl.utils.errors import CheckpointError


def test_tensors_are_restored_bit_for_bit_and_in_place(tmp_path):
    tensors = {
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "codes": torch.arange(7, dtype=torch.uint8),
        "step": torch.tensor(3.0),
        "row": torch.randn(4, 3)[1],  # a view of a larger storage
    }
    write_sharded(tmp_path, tensors)
    saved = SavedTensors(tmp_path)

    assert saved.tensors["half"] == ((5, 3), torch.bfloat16)
    whole = saved.read_whole(tensors)
    assert whole.keys() == tensors.keys()
    assert all(
        whole[name].dtype == tensor.dtype and torch.equal(whole[name], tensor)
        for name, tensor in tensors.items()
    )
    place = torch.zeros(4, 3)

    saved.read({"row": place[2]})
    assert torch.equal(place[2], tensors["row"])
    assert not place[1].any()


def test_mismatches_are_named(tmp_path):
    write_sharded(tmp_path, {"weight": torch.ones(3)})
    saved = SavedTensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"'bias' of shape \(3,\).*has none of that name"):
        saved.read({"bias": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"'weight' of shape \(4,\).*has it in shape \(3,\)"):
        saved.read({"weight": torch.ones(4)})
    (tmp_path / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=f"While reading {tmp_path}"):
        saved.read({"weight": torch.ones(3)})
    (tmp_path / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="lacks files that other ranks wrote: __0_0.distcp"):
        SavedTensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"found no \.metadata"):
        SavedTensors(tmp_path / "none")


def test_host_copy_has_its_own_memory():
    tensor = torch.ones(3)
    copy = host_copy(tensor)
    tensor.zero_()
    assert copy.all()


def test_ctrl_c_during_a_write_is_not_a_disk_error(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(FileSystemWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_sharded(tmp_path, {"weight": torch.ones(3)})
