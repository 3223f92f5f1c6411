"""The record of a run: read as it was written, bounded, and whole after a crash."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.diagnostics.view.toy_records import toy_table, write_record
from verl.tracking.records import (
    RecordWriter,
    json_column,
    load_run,
    pack_digests,
    unpack_digests,
)
from verl.utils.errors import DataError, OutOfMemoryError


def test_a_record_reads_back_as_written(tmp_path: Path):
    write_record(tmp_path, steps=3, texts=["one", "two"])
    run = load_run(tmp_path / "records")
    assert run.kept_steps == [1, 2, 3]
    assert run.metric("critic/score/mean") == {1: 1 / 3, 2: 2 / 3, 3: 1.0}
    samples = run.samples(2)
    assert [sample.response for sample in samples][:2] == ["one", "two"]
    last = samples[-1]
    assert (last.uid, last.score, last.fields["data_source"]) == ("1-1", 3.0, "toy")
    lengths = {len(values) for values in last.tokens.values()}
    assert lengths == {len(last.tokens["response_ids"])}
    assert last.tokens["rollout_log_probs"].dtype == np.float32


def test_a_misspelled_metric_names_the_near_ones(tmp_path: Path):
    write_record(tmp_path, steps=1)
    run = load_run(tmp_path)
    with pytest.raises(DataError, match=r"metric 'critic/score/men'\. Nearest .*critic/score/mean"):
        run.metric("critic/score/men")
    assert run.find_metric("critic/score/men") == {}


def test_the_newest_steps_stay_within_the_bounds(tmp_path: Path):
    writer = write_record(tmp_path, steps=1)
    size = (writer.folder / "steps" / "1.arrow").stat().st_size
    few = RecordWriter(tmp_path, keep_steps=3, max_bytes=1 << 30)
    for step in range(2, 7):
        few.add_samples(step, toy_table(8, ["x"]))
    assert load_run(tmp_path).kept_steps == [4, 5, 6]
    RecordWriter(tmp_path, keep_steps=9, max_bytes=2.5 * size).add_samples(7, toy_table(8, ["x"]))
    assert load_run(tmp_path).kept_steps == [6, 7]
    RecordWriter(tmp_path, keep_steps=9, max_bytes=1).add_samples(8, toy_table(8, ["x"]))
    assert load_run(tmp_path).kept_steps == [8]
    with pytest.raises(DataError, match=r"step 7 .* are not kept"):
        load_run(tmp_path).samples(7)


def test_a_resumed_run_forgets_the_steps_after_its_checkpoint(tmp_path: Path):
    writer = write_record(tmp_path, steps=5)
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 6, "ti')  # killed in the middle of a line
    (writer.folder / "steps" / ".6.arrow.tmp-1").write_bytes(b"ARROW1")
    again = RecordWriter(tmp_path, keep_steps=20, max_bytes=1 << 30)
    again.start({"config": {}, "started": 0.0}, 3)
    run = load_run(tmp_path)
    assert (sorted(run.steps), run.kept_steps, run.damage) == ([1, 2, 3], [1, 2, 3], [])
    assert [path.name for path in (writer.folder / "steps").glob(".*")] == []


def test_a_reader_follows_a_run_that_trains_and_starts_over(tmp_path: Path):
    writer = write_record(tmp_path, steps=2)
    run = load_run(tmp_path)
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.write('{"step": 3, "time": 1.0, ')
        file.flush()
        run.refresh()
        assert sorted(run.steps) == [1, 2]
        file.write('"metrics": {}}\n')
    run.refresh()
    assert sorted(run.steps) == [1, 2, 3]
    writer.start({"config": {}, "started": 0.0}, 1)
    run.refresh()
    assert sorted(run.steps) == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_a_full_disk_is_reported_with_the_file(tmp_path: Path):
    writer = write_record(tmp_path, steps=1)
    lines = writer.folder / "steps.jsonl"
    lines.unlink()
    lines.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left.*steps\.jsonl"):
        writer.add_line({"step": 2})


def test_damage_is_named_and_the_rest_is_read(tmp_path: Path):
    writer = write_record(tmp_path, steps=2)
    (writer.folder / "steps" / "2.arrow").write_bytes(b"ARROW1 torn")
    with (writer.folder / "steps.jsonl").open("a") as file:
        file.write("[]\n{}\nnothing\n")
    run = load_run(tmp_path)
    assert len(run.damage) == 3
    assert len(run.samples(1)) == 8
    with pytest.raises(DataError, match="damaged"):
        run.samples(2)
    (writer.folder / "run.json").write_text('{"config"')
    with pytest.raises(DataError, match="cannot be read"):
        load_run(tmp_path)


def test_a_folder_without_a_record_is_reported(tmp_path: Path):
    write_record(tmp_path / "run", steps=1)
    with pytest.raises(DataError, match=r"but there is no folder .*/rum\. .*Nearest in .*: run\.$"):
        load_run(tmp_path / "rum")

    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="found no records/run.json in .*/other"):
        load_run(tmp_path / "other")

    (tmp_path / "run/global_step_1").mkdir()
    with pytest.raises(DataError, match=r"The folder above is one: .*/run\.$"):
        load_run(tmp_path / "run/global_step_1")


def test_a_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(file: pa.NativeFile) -> None:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    write_record(tmp_path, steps=1)
    monkeypatch.setattr("pyarrow.ipc.open_file", fail)
    with pytest.raises(OutOfMemoryError, match=r"ran out while '.*/1\.arrow' was read"):
        load_run(tmp_path).samples(1)


def test_a_folder_without_a_record_names_the_runs_in_it_or_next_to_it(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name / "records").mkdir(parents=True)
        (tmp_path / name / "records/run.json").write_text("{}")
    with pytest.raises(DataError, match=r"Recorded runs in it: first, second\."):
        load_run(tmp_path)
    with pytest.raises(DataError, match=rf"Nearest in {tmp_path}: second\."):
        load_run(tmp_path / "secnd")


def test_objects_become_json_and_shared_ones_are_written_once():
    shared = {"a": {1}, "half": "\ud800", 2: np.float32(0.5)}
    fields = {"same": [shared] * 3, "own": [float("nan"), np.bool_(True), None]}
    column = json_column({**fields, "twice": ["x", "y", "x"]}, 3)
    rows = [json.loads(text) for text in column.to_pylist()]
    assert rows[0]["same"] == {"a": [1], "half": "\ud800", "2": 0.5}
    assert [row["own"] for row in rows] == [None, True, None]
    assert [row["twice"] for row in rows] == ["x", "y", "x"]
    assert len(json_column({"same": fields["same"]}, 3).dictionary) == 1
    assert json_column({}, 2).to_pylist() == ["{}", "{}"]


def test_digests_survive_packing():
    digests = [0, 1, -1, 2**63 - 1, -(2**63)]
    assert unpack_digests(pack_digests(digests)) == digests
