"""Pickles of a checkpoint hold only data; names that would run code are rejected."""

import datetime
import importlib.resources
import io
import os
import pickle
import random
import zoneinfo
from collections import Counter, OrderedDict
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
import torch

from verl.checkpoint.sharded import SavedTensors, write_sharded
from verl.checkpoint.unpickling import load_state, save_state
from verl.utils.errors import CheckpointError, OutOfMemoryError
from verl.utils.seeding import rng_state

MOMENT = datetime.datetime(2026, 1, 2, 3, 4, tzinfo=datetime.timezone.utc)


class Malicious:
    """Create a file when unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


def test_generator_and_sampler_states_are_restored(tmp_path):
    state = {
        "rng": rng_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "python": random.Random(3).getstate(),
        "numbers": [np.float32(3), np.int64(4), 2**200, 1.5, None, True, b"bytes", (1, "text")],
        "arrays": {"texts": np.array(["a", "bc"]), "objects": np.array(["a", None], dtype=object)},
        "containers": [{1, 2}, frozenset("a"), Counter("abca"), OrderedDict(a=1)],
        "dates": [
            MOMENT,
            MOMENT.date(),
            MOMENT.time(),
            MOMENT - MOMENT,
            Decimal("1.25"),
            UUID(int=7),
        ],
        "tensor": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    }
    save_state(tmp_path / "state.pt", state)

    loaded = load_state(tmp_path / "state.pt")
    assert repr(loaded) == repr(state)
    assert loaded["rng"]["python"] == state["rng"]["python"]
    assert np.array_equal(loaded["rng"]["numpy"][1], state["rng"]["numpy"][1])
    assert torch.equal(loaded["rng"]["torch"], state["rng"]["torch"])


def test_a_lack_of_memory_at_the_read_back_is_no_fault_of_the_values(tmp_path, monkeypatch):
    def fail(*arguments, **keywords):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64")

    monkeypatch.setattr("torch.load", fail)
    with pytest.raises(OutOfMemoryError, match=r"ran out while '.*state\.pt' was read"):
        save_state(tmp_path / "state.pt", {"number": 1})


def test_dates_of_parquet_keep_their_time_zone(tmp_path):
    """Pyarrow gives each the zone that its column names."""
    dates = []
    for zone in ("UTC", "Europe/Berlin", "+01:00"):
        dates += pa.array([MOMENT], pa.timestamp("us", zone)).to_pylist()
    save_state(tmp_path / "state.pt", {"rows": dates})

    loaded = load_state(tmp_path / "state.pt")["rows"]
    assert loaded == dates
    assert [str(date.tzinfo) for date in loaded] == ["UTC", "Europe/Berlin", "UTC+01:00"]


def test_a_time_zone_of_a_file_is_refused(tmp_path):
    data = io.BytesIO(importlib.resources.files("tzdata.zoneinfo").joinpath("UTC").read_bytes())
    zone = zoneinfo.ZoneInfo.from_file(data, key="Europe/Berlin")
    with pytest.raises(CheckpointError, match=r"state\['zone'\] is a zoneinfo\.ZoneInfo"):
        save_state(tmp_path / "state.pt", {"zone": zone})


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_state_that_runs_code_is_rejected(tmp_path, kind):
    file = tmp_path / "state.pt"
    content = {"sampler": Malicious(tmp_path / "canary")}
    if kind == "plain pickle":
        file.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, file, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(CheckpointError, match=r"state\.pt cannot be read") as caught:
        load_state(file)
    assert len(str(caught.value).splitlines()) == 1
    assert "weights_only" not in str(caught.value), "no advice to trust the file"
    assert not (tmp_path / "canary").exists()


def test_unreadable_state_is_rejected_on_save(tmp_path):
    state = {"sampler": Malicious(tmp_path / "canary")}
    with pytest.raises(CheckpointError, match=r"\['sampler'\] is a .*Malicious\. Return"):
        save_state(tmp_path / "state.pt", state)


@pytest.mark.parametrize("value", [range(3), lambda: 1], ids=["unreadable", "unpicklable"])
def test_the_place_of_an_unreadable_value_is_named(tmp_path, value):
    state = {"step": 1, "ahead": {"objects": {"extra_info": [{"x": 1}, {"x": value}]}}}
    place = r"state\['ahead'\]\['objects'\]\['extra_info'\]\[1\]\['x'\] is a builtins\."
    with pytest.raises(CheckpointError, match=place):
        save_state(tmp_path / "state.pt", state)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_that_runs_code_is_rejected(tmp_path, protocol):
    write_sharded(tmp_path, {"model.weight": torch.ones(3)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.planner_data = Malicious(tmp_path / "canary")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read.*posix\.mkdir"):
        SavedTensors(tmp_path)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/hostname", "a/b"])
def test_metadata_with_outside_paths_is_rejected(tmp_path, name):
    write_sharded(tmp_path, {"model.weight": torch.ones(3)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.relative_path = name
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="names a file outside its folder"):
        SavedTensors(tmp_path)


def test_shards_that_run_code_are_rejected(tmp_path):
    write_sharded(tmp_path, {"model.weight": torch.ones(3)})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    (place,) = metadata.storage_data.values()
    torch.save(Malicious(tmp_path / "canary"), tmp_path / "__0_0.distcp")
    place.length = (tmp_path / "__0_0.distcp").stat().st_size
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=f"While reading {tmp_path}") as caught:
        SavedTensors(tmp_path).read({"model.weight": torch.empty(3)})
    assert len(str(caught.value).splitlines()) == 1
    assert not (tmp_path / "canary").exists()
