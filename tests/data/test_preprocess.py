"""The scripts write files that the dataset loads and the reward rules can score."""

import ast
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.scripts import EXAMPLES, load_script
from tests.shared_files import SHARED, needs_shared
from verl.config import DataConfig
from verl.data import RLDataset
from verl.utils.errors import DataError


def load_rows(folder: Path, split: str, tokenizer) -> list[dict]:
    dataset = RLDataset(
        str(folder / f"{split}.parquet"), tokenizer, DataConfig(max_prompt_length=9999)
    )
    return [dataset[i] for i in range(len(dataset))]


@needs_shared("data/gsm8k")
def test_gsm8k_has_all_rows(tmp_path):
    main = load_script("data_preprocess/gsm8k.py").main
    main(
        ["--local_dataset_path", str(SHARED / "data" / "gsm8k"), "--local_save_dir", str(tmp_path)]
    )
    tables = {split: pq.read_table(tmp_path / f"{split}.parquet") for split in ("train", "test")}
    assert {split: table.num_rows for split, table in tables.items()} == {
        "train": 7473,
        "test": 1319,
    }
    truths = [row["ground_truth"] for row in tables["train"].column("reward_model").to_pylist()]
    assert all(float(truth.replace(",", "")) is not None for truth in truths)


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("gsm8k", []),
        ("math_dataset", []),
        ("hh_rlhf", []),
        ("code_problems", ["--dataset", "mbpp"]),
    ],
)
def test_unreachable_hub_gives_a_short_error(tmp_path, monkeypatch, script, arguments):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it on the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(
        DataError, match="cannot be loaded from the hub: Couldn't reach .* --local_dataset_path"
    ):
        load_script(f"data_preprocess/{script}.py").main(
            [*arguments, "--local_save_dir", str(tmp_path)]
        )


def test_invalid_target_folder_gives_a_short_error(tmp_path):
    (tmp_path / "file").touch()
    command = [
        sys.executable,
        EXAMPLES / "data_preprocess/countdown.py",
        "--local_save_dir",
        tmp_path / "file" / "x",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("NotADirectoryError: ")
    assert len(done.stderr.splitlines()) == 1


def test_gsm8k_rows(tmp_path, tokenizer):
    raw = {"question": "How many are 1,000 and 200?", "answer": "1,000 + 200 = 1,200\n#### 1,200"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(raw) + "\n")
    main = load_script("data_preprocess/gsm8k.py").main
    main(["--local_dataset_path", str(tmp_path), "--local_dir", str(tmp_path / "out")])
    (row,) = load_rows(tmp_path / "out", "test", tokenizer)
    expected = (
        "How many are 1,000 and 200? Let's think step by step and output the final answer after "
        '"####".'
    )
    assert row["raw_prompt"] == [{"role": "user", "content": expected}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert row["extra_info"] == {"split": "test", "index": 0, **raw}
    assert (row["data_source"], row["ability"]) == ("openai/gsm8k", "math")


@pytest.mark.parametrize(
    "script", ["gsm8k", "gsm8k_multiturn_w_tool", "gsm8k_multiturn_w_interaction"]
)
def test_missing_raw_gsm8k_files_are_reported(tmp_path, script):
    main = load_script(f"data_preprocess/{script}.py").main
    with pytest.raises(
        SystemExit, match=r"' must hold train\.jsonl, or main.*, for the split train, found neither"
    ):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("gsm8k", []),
        ("gsm8k_multiturn_w_tool", []),
        ("math_dataset", []),
        ("hh_rlhf", []),
        ("geo3k", []),
        ("code_problems", ["--dataset", "mbpp"]),
    ],
)
def test_a_missing_raw_folder_is_named_and_nothing_is_written(tmp_path, script, arguments):
    main = load_script(f"data_preprocess/{script}.py").main
    command = [*arguments, "--local_save_dir", str(tmp_path / "out"), "--local_dataset_path"]
    with pytest.raises(DataError, match=r"--local_dataset_path .* '.*none' does not exist"):
        main([*command, str(tmp_path / "none")])

    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"--local_dataset_path .*train\.jsonl' is a file"):
        main([*command, str(tmp_path / "train.jsonl")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "arguments", "name"),
    [
        ("gsm8k", [], "train"),
        ("gsm8k_multiturn_w_tool", [], "train"),
        ("code_problems", ["--dataset", "mbpp"], "mbpp"),
    ],
)
def test_a_raw_file_without_rows_is_an_error_and_nothing_is_written(
    tmp_path, script, arguments, name
):
    for file in ("train.jsonl", "test.jsonl", "mbpp.jsonl"):
        (tmp_path / file).touch()
    main = load_script(f"data_preprocess/{script}.py").main
    command = [*arguments, "--local_dataset_path", str(tmp_path)]
    with pytest.raises(DataError, match=f"'{name}' has no row to write, expected at least one"):
        main([*command, "--local_save_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_empty_paths_and_a_file_as_target_are_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        (raw / f"{split}.jsonl").write_text('{"question": "?", "answer": "#### 1"}\n')
    main = load_script("data_preprocess/gsm8k.py").main

    with pytest.raises(DataError, match="--local_dataset_path has an empty path"):
        main(["--local_dataset_path", "", "--local_save_dir", "out"])
    with pytest.raises(DataError, match="--local_save_dir has an empty path"):
        main(["--local_dataset_path", "raw", "--local_save_dir", " "])
    with pytest.raises(DataError, match=r"write to, but 'raw/train\.jsonl' is a file"):
        main(["--local_dataset_path", "raw", "--local_save_dir", "raw/train.jsonl"])
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


@pytest.mark.parametrize(
    ("script", "raw", "column"),
    [
        ("hh_rlhf", {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": 3}, "rejected"),
        ("math_dataset", {"problem": 5, "answer": "5"}, "problem"),
    ],
)
def test_a_number_where_a_text_belongs_is_named(tmp_path, script, raw, column):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(raw))
    main = load_script(f"data_preprocess/{script}.py").main
    with pytest.raises(DataError, match=f"train row 0: the column '{column}' must be a text"):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])


def test_a_copy_of_the_hubs_gsm8k_is_read(tmp_path):
    raw = pa.table({"question": ["How many?"], "answer": ["Two. #### 2"]})
    (tmp_path / "main").mkdir()
    for split in ("train", "test"):
        pq.write_table(raw, tmp_path / "main" / f"{split}-00000-of-00001.parquet")

    main = load_script("data_preprocess/gsm8k.py").main
    main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    (row,) = pq.read_table(tmp_path / "out/test.parquet").to_pylist()
    assert row["reward_model"]["ground_truth"] == "2"


def test_gsm8k_answer_without_a_number_is_named():
    with pytest.raises(DataError, match="train row 4: the answer must end in '#### number'"):
        load_script("data_preprocess/gsm8k.py").make_row(
            {"question": "?", "answer": "none"}, "train", 4
        )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?", "ans', r"train\.jsonl', line 2, must be one JSON object a line"),
        ('{"question": "?"}', r"train row 1: the column 'answer' must have a value, .*'question'"),
        ('{"question": 3, "answer": "#### 1"}', "'question' must be a text, got 3. Write the text"),
    ],
)
def test_incomplete_raw_gsm8k_line_is_named(tmp_path, line, message):
    (tmp_path / "train.jsonl").write_text(
        json.dumps({"question": "?", "answer": "#### 1"}) + "\n" + line
    )
    main = load_script("data_preprocess/gsm8k.py").main
    with pytest.raises(DataError, match=message):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("script", "name", "arguments"),
    [
        ("math_dataset", "train.jsonl", []),
        ("hh_rlhf", "train.jsonl.gz", []),
        ("code_problems", "mbpp.jsonl.gz", ["--dataset", "mbpp"]),
    ],
)
def test_incomplete_raw_lines_are_named(tmp_path, script, name, arguments):
    main = load_script(f"data_preprocess/{script}.py").main
    command = [
        *arguments,
        "--local_dataset_path",
        str(tmp_path),
        "--local_save_dir",
        str(tmp_path / "out"),
    ]

    line = b'{"problem": "?", "ans'
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    with pytest.raises(DataError, match=rf"{name}', line 1, must be one JSON object a line"):
        main(command)

    if name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(line)[:-9])
        with pytest.raises(DataError, match=rf"{name}' cannot be unpacked"):
            main(command)


@pytest.mark.parametrize(
    ("script", "name", "message", "arguments"),
    [
        ("math_dataset", "train.jsonl", "train row 0: the column 'problem'", []),
        ("hh_rlhf", "test.jsonl", "test row 0: the column 'chosen'", []),
        ("geo3k", "train.jsonl", "train.jsonl, row 0: the column 'problem'", []),
        ("code_problems", "mbpp.jsonl", "mbpp row 0: the column 'task_id'", ["--dataset", "mbpp"]),
    ],
)
def test_raw_rows_of_another_data_set_are_refused(tmp_path, script, name, message, arguments):
    (tmp_path / name).write_text(json.dumps({"question": "?", "answer": "#### 1"}) + "\n")
    folders = ["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")]
    with pytest.raises(DataError, match=rf"{message} must have a value.*\['question', 'answer'\]"):
        load_script(f"data_preprocess/{script}.py").main([*arguments, *folders])


@pytest.mark.parametrize(
    "path", sorted((EXAMPLES / "data_preprocess").glob("*.py")), ids=lambda path: path.stem
)
def test_commands_of_the_help_are_whole_lines(path):
    description = ast.get_docstring(ast.parse(path.read_text())) or ""
    lines = [line.strip() for line in description.splitlines() if line.startswith("    ")]
    assert lines
    for line in lines:
        command, _, remark = line.partition("#")
        assert command.startswith(f"python examples/data_preprocess/{path.name}")
        assert "python" not in remark


@needs_shared("data/math")
def test_math_has_all_scorable_rows(tmp_path, capsys):
    main = load_script("data_preprocess/math_dataset.py").main
    main(["--local_dataset_path", str(SHARED / "data" / "math"), "--local_save_dir", str(tmp_path)])
    assert pq.read_table(tmp_path / "train.parquet").num_rows == 7470
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 500
    assert "left out 4 of 7,474 train problems" in capsys.readouterr().out


def test_math_rows(tmp_path, tokenizer):
    raw = [
        {"problem": "Half of 1?", "solution": "It is \\boxed{0}, no: \\boxed{\\frac{1}{2}}."},
        {"problem": "1 + 1?", "answer": 2},
        {"problem": "?", "solution": "unknown"},
    ]
    (tmp_path / "train.json").write_text(json.dumps(raw))
    (tmp_path / "math500.jsonl").write_text(json.dumps(raw[1]))
    main = load_script("data_preprocess/math_dataset.py").main

    main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)])
    rows = load_rows(tmp_path, "train", tokenizer)
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["\\frac{1}{2}", "2"]
    assert rows[0]["data_source"] == "lighteval/MATH"
    assert "\\boxed{}" in rows[0]["raw_prompt"][0]["content"]
    assert len(load_rows(tmp_path, "test", tokenizer)) == 1

    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="must hold one of train.json"):
        main(["--local_dataset_path", str(tmp_path / "empty"), "--local_save_dir", str(tmp_path)])


def test_countdown_is_solvable_seeded_and_split(tmp_path, tokenizer):
    main = load_script("data_preprocess/countdown.py").main
    for name in ("a", "b"):
        main(["--local_save_dir", str(tmp_path / name), "--train_size", "200", "--test_size", "20"])
    assert (tmp_path / "a" / "train.parquet").read_bytes() == (
        tmp_path / "b" / "train.parquet"
    ).read_bytes()
    train, test = (load_rows(tmp_path / "a", split, tokenizer) for split in ("train", "test"))
    assert (len(train), len(test)) == (200, 20)

    keys = [
        (
            tuple(sorted(row["reward_model"]["ground_truth"]["numbers"])),
            row["reward_model"]["ground_truth"]["target"],
        )
        for row in train + test
    ]
    assert len(set(keys)) == 220

    for row in train + test:
        truth = row["reward_model"]["ground_truth"]
        solution = row["extra_info"]["solution"]
        tree = ast.parse(solution, mode="eval")
        used: list[Any] = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert sorted(used) == sorted(truth["numbers"])
        assert eval(compile(tree, "solution", "eval")) == pytest.approx(truth["target"])


def test_math_without_an_answer_is_an_error(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "?", "solution": "no box"}\n')
    main = load_script("data_preprocess/math_dataset.py").main
    with pytest.raises(DataError, match="split train has no problem with an answer, got 1 rows"):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])


@pytest.mark.parametrize("name", ["train_size", "test_size", "num_numbers", "max_number"])
def test_countdown_refuses_numbers_that_are_too_small(tmp_path, capsys, name):
    main = load_script("data_preprocess/countdown.py").main
    with pytest.raises(SystemExit):
        main(["--local_save_dir", str(tmp_path), f"--{name}", "0"])
    assert f"--{name} must be at least " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_countdown_reports_too_few_problems(tmp_path, capsys):
    limits = ["--num_numbers", "2", "--max_number", "2", "--test_size", "1", "--train_size", "99"]
    with pytest.raises(SystemExit):
        load_script("data_preprocess/countdown.py").main(
            ["--local_save_dir", str(tmp_path), *limits]
        )
    assert "different train problems" in capsys.readouterr().err
