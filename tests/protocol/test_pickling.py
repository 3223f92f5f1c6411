"""A pickled batch holds all of its rows and not one byte more."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st

import verl.protocol
from tests.protocol.batches import as_rows, batches, dtypes, make_batch
from verl.protocol import DataProto
from verl.utils.errors import BatchError


@settings(max_examples=30)
@given(batches, st.sampled_from([2, 4, 5]))
def test_pickle_round_trip(data, protocol):
    for part in (data, data[1:], data[::-2]):
        again = pickle.loads(pickle.dumps(part, protocol=protocol))
        assert as_rows(again) == as_rows(part)
        assert dtypes(again) == dtypes(part)
        assert again.meta_info == part.meta_info
        again.repeat(2).padding(0)
        if again.batch is not None:
            again.batch["scores"] += 1  # tensors read back are writable


@pytest.mark.parametrize("kind", ["both", "tensors", "objects"])
def test_torch_save_round_trip(kind, tmp_path):
    data = make_batch(5, kind)
    for part in (data, data[1:3], data[:0]):
        torch.save(part, tmp_path / "batch.pt")
        again = torch.load(tmp_path / "batch.pt", weights_only=False)
        assert as_rows(again) == as_rows(part)
        assert dtypes(again) == dtypes(part)
        assert again.meta_info == {"step": 3}


def test_a_batch_without_columns_is_pickled():
    again = pickle.loads(pickle.dumps(DataProto()))
    assert again.batch is None
    assert len(again) == 0


def test_a_row_is_pickled():
    item = make_batch(3)[1]
    again = pickle.loads(pickle.dumps(item))
    assert again.non_tensor_batch == item.non_tensor_batch
    assert again.batch["ids"].tolist() == item.batch["ids"].tolist()


@pytest.mark.parametrize("protocol", [4, 5])
@pytest.mark.parametrize("share", [False, True])
def test_a_slice_carries_only_its_own_bytes(protocol, share):
    whole = torch.zeros(1000, 1000)
    data = DataProto.from_dict(
        {"x": whole.share_memory_() if share else whole, "y": whole[:, :500]}
    )
    rows = data[10:20]
    content = 10 * (1000 + 500) * 4
    assert content < len(pickle.dumps(rows, protocol=protocol)) < content + 2000


def test_protocol_5_hands_contiguous_tensors_over_without_a_copy():
    data = DataProto.from_dict({"x": torch.arange(100_000), "z": torch.ones(100_000).bfloat16()})
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 2000
    assert sum(len(buffer.raw()) for buffer in buffers) == 100_000 * (8 + 2)
    again = pickle.loads(head, buffers=buffers)
    assert again.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    assert again.batch["z"].dtype == torch.bfloat16


@pytest.mark.filterwarnings("error")
def test_a_read_only_buffer_is_copied_so_that_writing_is_safe():
    data = DataProto.from_dict({"x": torch.arange(5)})
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    frozen = [memoryview(bytes(buffer.raw())) for buffer in buffers]
    again = pickle.loads(head, buffers=frozen)
    again.batch["x"].zero_()
    assert frozen[0][8] == 1


def test_gradients_are_not_pickled():
    leaf = torch.ones(3, requires_grad=True)
    again = pickle.loads(pickle.dumps(DataProto.from_dict({"x": leaf * 2})))
    assert again.batch["x"].tolist() == [2.0, 2.0, 2.0]
    assert not again.batch["x"].requires_grad


def test_several_batch_dimensions_and_subclasses_survive():
    again = pickle.loads(
        pickle.dumps(DataProto.from_dict({"x": torch.ones(2, 3)}, num_batch_dims=2))
    )
    assert again.batch.batch_size == (2, 3)
    assert type(pickle.loads(pickle.dumps(Special()))) is Special


class Special(DataProto):
    """A subclass that must keep its type."""


def test_deepcopy_owns_its_memory():
    data = make_batch(2)
    twin = copy.deepcopy(data)
    data.batch["ids"].zero_()
    data.non_tensor_batch["pair"][0].append(9)
    assert as_rows(twin) == as_rows(make_batch(2))


def _zero(queue, done):
    queue.get().batch["x"].zero_()
    done.put(True)


def test_shared_memory_travels_as_a_handle():
    context = mp.get_context("fork")
    queue = context.Queue()
    done = context.Queue()
    data = DataProto.from_dict({"x": torch.ones(1000).share_memory_()}, {"o": list(range(1000))})
    process = context.Process(target=_zero, args=(queue, done))
    process.start()
    queue.put(data[500:])
    assert done.get(timeout=60)
    process.join()
    assert data.batch["x"].sum() == 500


@settings(max_examples=10)
@given(batches)
def test_disk_round_trip(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("protocol") / "batch.pkl"
    data.save_to_disk(path)
    again = DataProto.load_from_disk(str(path))
    assert as_rows(again) == as_rows(data)
    assert again.meta_info == data.meta_info
    assert [file.name for file in path.parent.iterdir()] == ["batch.pkl"]


def test_batches_of_the_time_when_the_package_was_one_file_load():
    data = make_batch(3)
    now = pickle.dumps(data, protocol=0)
    then = now.replace(b"verl.protocol.data_proto\n", b"verl.protocol\n")
    assert then != now
    assert as_rows(pickle.loads(then)) == as_rows(data)


def test_load_rejects_other_files(tmp_path):
    path = tmp_path / "other.pkl"
    path.write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(ValueError, match="Expected a DataProto.*dict"):
        DataProto.load_from_disk(path)


@pytest.mark.parametrize("kept", [0, 40])
def test_a_file_that_was_cut_is_named(tmp_path, kept):
    path = tmp_path / "batch.pkl"
    make_batch(3).save_to_disk(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BatchError, match=r"batch\.pkl', found no whole pickle .*save_to_disk"):
        DataProto.load_from_disk(path)


def test_the_package_imports_neither_ray_nor_collectives():
    files = list(Path(verl.protocol.__file__).parent.glob("*.py"))
    assert len(files) > 1
    for file in files:
        source = file.read_text()
        assert "import ray" not in source
        assert "torch.distributed" not in source
