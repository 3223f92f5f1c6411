"""Every format gives the same rows, and unreadable files are named."""

import gzip
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict

from tests.data.rows import make_rows
from verl.data.files import as_file_list, content_fingerprint, has_split, open_rows
from verl.utils.errors import DataError, OutOfMemoryError

ROWS = make_rows(3)


def test_a_saved_folder_is_mapped_again_after_pickling(tmp_path: Path):
    rows = [{"prompt": "a" * 50_000 + str(number)} for number in range(4)]
    splits = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[2:])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    for split in ("train", "val"):
        opened = open_rows(tmp_path / "both", split)
        packed = pickle.dumps(opened)
        assert len(packed) < 10_000, "the rows may be larger than the memory"
        again = pickle.loads(packed)
        assert [again.row(row) for row in range(len(again))] == [
            opened.row(row) for row in range(len(opened))
        ]


def write_all_formats(folder: Path, parquet) -> list[str]:
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "lines.json").write_text("\n\n".join(json.dumps(row) for row in ROWS))
    (folder / "array.json").write_text(json.dumps(ROWS, indent=2))
    Dataset.from_list(ROWS[::-1]).select([2, 1, 0]).with_format("numpy").save_to_disk(
        str(folder / "saved")
    )
    return [
        parquet(ROWS),
        *(str(folder / name) for name in ("lines.jsonl", "lines.json", "array.json", "saved")),
    ]


def test_every_format_gives_the_same_rows(tmp_path: Path, parquet):
    for file in write_all_formats(tmp_path, parquet):
        rows = open_rows(file)
        assert [rows.row(number) for number in range(len(rows))] == ROWS, file
        assert list(rows.column("prompt")) == [row["prompt"] for row in ROWS], file
        assert type(rows.row(0)["extra_info"]["tags"]) is list, file
        assert rows.columns == list(ROWS[0]), file


def test_home_folder_is_expanded(tmp_path: Path, parquet, monkeypatch: pytest.MonkeyPatch):
    parquet(ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_rows("~/rows.parquet")) == 3
    assert content_fingerprint("~/rows.parquet") == content_fingerprint(tmp_path / "rows.parquet")


def test_line_separator_inside_a_string_does_not_end_the_line(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\u2028two\u0085three"}\n', encoding="utf-8")
    assert open_rows(tmp_path / "a.jsonl").row(0) == {"prompt": "one\u2028two\u0085three"}


def test_a_mark_of_the_byte_order_is_left_out(tmp_path: Path):
    for name, text in (("rows.jsonl", '{"a": "1"}\n{"a": "2"}\n'), ("rows.json", '[{"a": "1"}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert open_rows(tmp_path / name).row(0) == {"a": "1"}


def test_one_row_with_lists_alone_is_no_table_of_columns(tmp_path: Path):
    row = {"messages": [{"role": "user", "content": "Hi"}], "tools": [{"type": "function"}]}
    (tmp_path / "row.json").write_text(json.dumps(row))
    assert open_rows(tmp_path / "row.json").row(0) == row


def test_missing_column_is_none(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "level": 2}\n')
    assert [open_rows(tmp_path / "a.jsonl").row(i)["level"] for i in range(2)] == [None, 2]


def test_requested_split_of_a_folder_is_read(tmp_path: Path):
    splits: Any = {"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}
    DatasetDict(splits).save_to_disk(str(tmp_path / "both"))
    DatasetDict({"train": splits["train"]}).save_to_disk(str(tmp_path / "train_only"))
    assert len(open_rows(tmp_path / "both", "train")) == 3
    assert len(open_rows(tmp_path / "both", "val")) == 1
    assert has_split(tmp_path / "both", "val")
    assert not has_split(tmp_path / "train_only", "val")
    with pytest.raises(DataError, match="has the splits train, but none for val"):
        open_rows(tmp_path / "train_only", "val")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.parquet", None, r"does not exist; data files in that folder: beside\.jsonl"),
        ("absent.parquet", None, r"Correct the path \(data\.train_files\), or make the file with"),
        ("*.jsonl", None, r"not expanded. Name the files: data\.train_files=\[.*/beside\.jsonl\]$"),
        ("**.par?uet", None, r"does not exist; data files in that folder: beside\.jsonl"),
        ("none/absent.parquet", None, r"nor does .*\. Correct the path \(data\.train_files\)\.$"),
        ("empty.parquet", b"", r"empty\.parquet' is empty \(0 bytes\)"),
        ("blank.jsonl", b"\n \n", "has no rows"),
        ("not.parquet", b"PAR0 nothing", r"not readable as Parquet: .*[^.]\. Write it again\.$"),
        (
            "rows.parquet",
            b'{"prompt": "a"}\n',
            r"not readable as Parquet: .*begins as JSON does: give it a name that ends in \.jsonl",
        ),
        (
            "half.jsonl",
            b'{"prompt": "a"}\n{"prompt": ',
            r"half\.jsonl', line 2, must be one JSON object .*: Expecting value \(column 12\)\.$",
        ),
        (
            "rows.jsonl",
            b"PAR1\x15\x04\x15\x9c",
            r"must be text, got a Parquet file\. Give it a name that ends in \.parquet\.$",
        ),
        (
            "list.jsonl",
            b'{"prompt": "a"}\n"b"\n',
            r"list\.jsonl', line 2, must be a JSON object .* got str",
        ),
        ("array.json", b"[1]", r"element 1, must be a JSON object .* got int"),
        ("array.json", b"[{]", "not a JSON array"),
        (
            "latin.jsonl",
            b'{"prompt": "a"}\n{"prompt": "\xe9"}\n',
            r"latin\.jsonl', line 2, .* UTF-8, got the byte 0xe9",
        ),
        (
            "wide.jsonl",
            '{"prompt": "a"}'.encode("utf-16"),
            r"line 1, must be text in UTF-8, got the byte 0xff",
        ),
        (
            "packed.jsonl",
            gzip.compress(b'{"prompt": "a"}', mtime=0),
            r"packed\.jsonl' must be plain text, got one packed by gzip",
        ),
        (
            "columns.json",
            b'{"prompt": {"0": "a", "1": "b"}, "answer": {"0": "c", "1": "d"}}',
            r"got one for each column, .* DataFrame\.to_json\(path, orient='records', lines=True\)",
        ),
        (
            "lists.json",
            b'{"prompt": ["a", "b"], "answer": ["c", "d"]}',
            r"one JSON object for each row, got lists of 2 values for the columns prompt, answer\. "
            r"Write it with datasets\.Dataset\.from_dict\(columns\)\.to_json\(path\)",
        ),
        (
            "twice.jsonl",
            b'{"prompt": "a"}\n{"prompt": "b", "id": 1, "prompt": "c"}\n',
            r"twice\.jsonl', line 2, .*: it has the key 'prompt' 2 times; keep one of them\.$",
        ),
        (
            "twice.jsonl",
            b'{"prompt": "a", "info": {"a": 1, "a": 2}}\n{"prompt": "b"}\n',
            r"twice\.jsonl', the object at its start: it has the key 'a' 2 times",
        ),
        ("twice.json", b'[{"a": 1, "a": 2}]', r"array: it has the key 'a' 2 times"),
        ("rows.csv", b"a,b", r"got the suffix '\.csv'"),
        ("deep.json", b"[" * 10**5, r"deep\.json' is not a JSON array: it is nested too deeply"),
        ("long.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1, .* write it as a text, in quotes"),
        ("deep.jsonl", b"{}\n" + b'{"a":' * 10**5, r"deep\.jsonl', line 2, .* nested too deeply"),
        ("long.json", b"[" + b"9" * 5000 + b"]", r"long\.json' is not a JSON array: .*4300 digits"),
        ("long.jsonl", b"9" * 5000, r"long\.jsonl', line 1, .*4300 digits"),
    ],
)
def test_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes | None, message: str):
    (tmp_path / "beside.jsonl").write_text("{}")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path / name)


def test_one_row_over_several_lines_is_read(tmp_path: Path):
    file = tmp_path / "row.json"
    file.write_text(json.dumps({"prompt": "a", "extra_info": {"index": 0}}, indent=2))
    assert open_rows(file).row(0) == {"prompt": "a", "extra_info": {"index": 0}}


def test_parquet_file_with_text_in_another_encoding_is_an_error(tmp_path: Path):
    """Other programs write Parquet files without checking texts."""
    ends = pa.array([0, 1, 2], pa.int32()).buffers()[1]
    latin = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xe9")])
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": latin}), tmp_path / "latin.parquet")
    with pytest.raises(DataError, match=r"latin\.parquet' is not readable .*UTF8 .* index 1"):
        open_rows(tmp_path / "latin.parquet")


def test_empty_parquet_file_is_an_error(tmp_path: Path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "none.parquet")
    with pytest.raises(DataError, match="has no rows"):
        open_rows(tmp_path / "none.parquet")


def test_a_lack_of_memory_is_no_damage(tmp_path: Path, parquet, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    file = parquet(ROWS)
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    monkeypatch.setattr("pyarrow.parquet.read_table", fail)
    monkeypatch.setattr("datasets.load_from_disk", fail)
    for path in (file, tmp_path / "saved"):
        with pytest.raises(OutOfMemoryError, match=rf"ran out while '{path}' was read \(malloc"):
            open_rows(path)


def test_unknown_folder_is_an_error(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(
        DataError, match=r"not written by datasets' save_to_disk \(it holds notes.txt\)"
    ):
        open_rows(tmp_path)


ODD_JSON = ["[]", "null", "3", '"text"', "[null]", "[" * 10**5, "9" * 5000, "{", "\x00"]


@pytest.mark.parametrize("content", [*ODD_JSON, '{"features": 3}', '{"features": {"prompt": []}}'])
@pytest.mark.parametrize("name", ["dataset_info.json", "state.json"])
def test_saved_dataset_with_invalid_json_is_an_error(tmp_path: Path, name: str, content: str):
    Dataset.from_list([{"prompt": "a"}]).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / name).write_text(content)
    with pytest.raises(DataError, match=r"must be complete, as datasets' save_to_disk"):
        open_rows(tmp_path / "saved")


@pytest.mark.parametrize("marker", [*ODD_JSON, '{"splits": 3}'])
def test_damaged_folder_is_an_error(tmp_path: Path, marker: str):
    (tmp_path / "dataset_dict.json").write_text(marker)
    for read in (has_split, open_rows):
        with pytest.raises(
            DataError, match=r"must be complete, as datasets' save_to_disk .* Save it again"
        ):
            read(tmp_path, "val")


def test_fingerprint_depends_on_the_content(tmp_path: Path):
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text(text)
    a, b, c = (content_fingerprint(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.parametrize("files", [None, [], "", [3], [""]])
def test_no_files_is_an_error(files):
    with pytest.raises(DataError, match="must be a path or a list of paths"):
        as_file_list(files)


@pytest.mark.parametrize(("suffix", "separator"), [(".csv", ","), (".tsv", "\t")])
def test_the_error_for_a_table_in_text_has_the_command_that_converts_it(
    tmp_path, suffix, separator
):
    file = tmp_path / f"my rows{suffix}"
    file.write_text(f'prompt{separator}answer\n"1 +{separator}\n2"{separator}3\n', encoding="utf-8")
    with pytest.raises(DataError, match="Convert it: ") as raised:
        open_rows(file)

    command = str(raised.value).partition("Convert it: ")[2]
    _, *arguments = shlex.split(command)
    subprocess.run([sys.executable, *arguments], check=True)
    row = open_rows(file.with_suffix(".parquet")).row(0)
    assert row == {"prompt": f"1 +{separator}\n2", "answer": 3}


def test_columns_of_one_name_are_named(tmp_path: Path):
    names = ["prompt", "ability", "prompt"]
    table = pa.Table.from_arrays([pa.array(["a"])] * 3, names=names)
    pq.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"one column of each name, got several named 'prompt'"):
        open_rows(tmp_path / "twice.parquet")


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path):
    file = tmp_path / name
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
    with pytest.raises(DataError, match=rf"{name}' is a pointer of Git LFS.* git -C .* lfs pull"):
        open_rows(file)
