"""Code, preferences and tool use: the scripts' files load, and gold answers get full scores."""

import gzip
import json
from pathlib import Path

import pytest

from tests.data.scripts import load_script
from tests.data.test_preprocess import load_rows
from tests.shared_files import SHARED, needs_shared
from verl.rewards.rules import default_compute_score
from verl.utils.errors import DataError


def gold_score(row: dict, text: str) -> float:
    result = default_compute_score(
        row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"]
    )
    return result["score"] if isinstance(result, dict) else result


def write_lines(path: Path, rows: list[dict]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@needs_shared("data/humaneval")
def test_humaneval_rows_and_solutions(tmp_path, tokenizer):
    main = load_script("data_preprocess/code_problems.py").main
    raw = str(SHARED / "data" / "humaneval")
    main(["--dataset", "humaneval", "--local_dataset_path", raw, "--local_save_dir", str(tmp_path)])
    rows = load_rows(tmp_path, "test", tokenizer)
    assert len(rows) == 164
    for row in rows[::10]:
        assert gold_score(row, f"```python\n{row['extra_info']['solution']}```") == 1.0
        assert row["extra_info"]["solution"].startswith(
            json.loads(row["reward_model"]["ground_truth"])["prompt"]
        )
    assert "from typing import List" in rows[0]["raw_prompt"][0]["content"]
    assert [row["extra_info"]["index"] for row in rows] == list(range(164))


@needs_shared("data/mbpp")
def test_mbpp_rows_use_the_split_of_the_paper(tmp_path, tokenizer):
    main = load_script("data_preprocess/code_problems.py").main
    raw = str(SHARED / "data" / "mbpp")
    main(["--dataset", "mbpp", "--local_dataset_path", raw, "--local_save_dir", str(tmp_path)])
    splits = {split: load_rows(tmp_path, split, tokenizer) for split in ("train", "val", "test")}
    assert {split: len(rows) for split, rows in splits.items()} == {
        "train": 374,
        "val": 90,
        "test": 500,
    }
    for row in splits["train"][::40]:
        assert gold_score(row, row["extra_info"]["solution"]) == 1.0
        assert "assert " in row["raw_prompt"][0]["content"]


def test_code_problems_from_small_files(tmp_path, tokenizer):
    main = load_script("data_preprocess/code_problems.py").main
    problem = {
        "text": "Add.",
        "code": "def f(x): return x + 1",
        "test_list": ["assert f(1) == 2"],
        "test_setup_code": "",
    }
    write_lines(
        tmp_path / "mbpp.jsonl.gz", [{**problem, "task_id": number} for number in (3, 11, 700)]
    )

    main(["--dataset", "mbpp", "--local_dataset_path", str(tmp_path), "--local_dir", str(tmp_path)])
    assert [len(load_rows(tmp_path, split, tokenizer)) for split in ("test", "train")] == [1, 1], (
        "3 is a few-shot example"
    )
    with pytest.raises(SystemExit, match="must hold HumanEval.jsonl"):
        main(
            [
                "--dataset",
                "humaneval",
                "--local_dataset_path",
                str(tmp_path),
                "--local_save_dir",
                str(tmp_path),
            ]
        )


def written_by(script, raw, folder, tokenizer, split):
    """Return the only row that a script for GSM8K writes from one raw row."""
    for each in ("train", "test"):
        write_lines(folder / f"{each}.jsonl", [raw])
    main = load_script(f"data_preprocess/{script}.py").main
    main(["--local_dataset_path", str(folder), "--local_save_dir", str(folder / "out")])
    (row,) = load_rows(folder / "out", split, tokenizer)
    return row


SUM = {"question": "How many are 1,000 and 200?", "answer": "1,000 + 200 = 1,200\n#### 1,200"}


def test_gsm8k_with_a_tool(tmp_path, tokenizer):
    row = written_by("gsm8k_multiturn_w_tool", SUM, tmp_path, tokenizer, "train")
    assert [message["role"] for message in row["raw_prompt"]] == ["system", "user"]
    assert "calc_gsm8k_reward" in row["raw_prompt"][0]["content"]

    extra = row["extra_info"]
    assert extra["need_tools_kwargs"] is True
    assert extra["tools_kwargs"] == {
        "calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1200"}}
    }
    assert extra["interaction_kwargs"] == {
        "name": "gsm8k",
        "query": SUM["question"],
        "ground_truth": "1200",
    }

    assert row["agent_name"] == "tool_agent"
    assert gold_score(row, SUM["answer"]) == 1.0


def test_gsm8k_with_a_simulated_user(tmp_path, tokenizer):
    row = written_by("gsm8k_multiturn_w_interaction", SUM, tmp_path, tokenizer, "test")
    assert [message["role"] for message in row["raw_prompt"]] == ["system", "user"]

    extra = row["extra_info"]
    expected = {"name": "gsm8k", "query": SUM["question"], "ground_truth": "1200"}
    assert extra["interaction_kwargs"] == expected
    assert "tools_kwargs" not in extra
    assert row["agent_name"] == "tool_agent"
    assert gold_score(row, SUM["answer"]) == 1.0


@needs_shared("data/hh-rlhf")
def test_hh_rlhf_rows_of_the_real_file(tmp_path, tokenizer, capsys):
    main = load_script("data_preprocess/hh_rlhf.py").main
    main(
        [
            "--local_dataset_path",
            str(SHARED / "data" / "hh-rlhf"),
            "--local_save_dir",
            str(tmp_path),
        ]
    )

    rows = load_rows(tmp_path, "test", tokenizer)
    assert len(rows) > 2000
    assert f"wrote {len(rows):,} rows" in capsys.readouterr().out

    for row in rows:
        roles = [message["role"] for message in row["raw_prompt"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert row["extra_info"]["answer"] == row["reward_model"]["ground_truth"]


def test_hh_rlhf_pairs(tmp_path, tokenizer, capsys):
    script = load_script("data_preprocess/hh_rlhf.py")
    prompt = "\n\nHuman: One?\n\nTwo paragraphs.\n\nAssistant: Yes.\n\nHuman: And?"
    pair = {"chosen": f"{prompt}\n\nAssistant: Good.", "rejected": f"{prompt}\n\nAssistant: Bad."}
    other = {"chosen": pair["chosen"], "rejected": "\n\nHuman: Else?\n\nAssistant: Bad."}
    write_lines(tmp_path / "train.jsonl", [pair, other, {"chosen": "text", "rejected": "text"}])
    script.main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path)])
    assert "wrote 1 rows" in (said := capsys.readouterr().out)
    assert "left out 2" in said

    (row,) = load_rows(tmp_path, "train", tokenizer)
    assert row["raw_prompt"] == [
        {"role": "user", "content": "One?\n\nTwo paragraphs."},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "And?"},
    ]
    assert row["reward_model"] == {"style": "model", "ground_truth": "Good."}
    assert row["extra_info"]["rejected"] == "Bad."

    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        script.main(
            ["--local_dataset_path", str(tmp_path / "empty"), "--local_save_dir", str(tmp_path)]
        )

    assert "no pairs in" in capsys.readouterr().err


def test_a_split_of_hh_rlhf_without_a_dialogue_is_an_error(tmp_path):
    main = load_script("data_preprocess/hh_rlhf.py").main
    prompt = "\n\nHuman: One?"
    pair = {"chosen": f"{prompt}\n\nAssistant: 1.", "rejected": f"{prompt}\n\nAssistant: 2."}
    write_lines(tmp_path / "test.jsonl", [pair])
    write_lines(tmp_path / "train.jsonl", [{"chosen": "Human: One?", "rejected": "Human: One?"}])
    with pytest.raises(DataError, match="No pair of train has a dialogue .* got 1 pairs"):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "new")])
    assert not (tmp_path / "new").exists()


@needs_shared("data/gsm8k")
def test_gold_answers_of_gsm8k_and_countdown_get_full_scores(tmp_path, tokenizer):
    load_script("data_preprocess/gsm8k.py").main(
        [
            "--local_dataset_path",
            str(SHARED / "data" / "gsm8k"),
            "--local_save_dir",
            str(tmp_path / "gsm8k"),
        ]
    )
    load_script("data_preprocess/countdown.py").main(
        ["--local_save_dir", str(tmp_path / "countdown"), "--train_size", "50", "--test_size", "20"]
    )
    for row in load_rows(tmp_path / "gsm8k", "test", tokenizer)[::10]:
        assert gold_score(row, row["extra_info"]["answer"]) == 1.0

    for row in load_rows(tmp_path / "countdown", "test", tokenizer):
        assert gold_score(row, f"<answer>{row['extra_info']['solution']}</answer>") == 1.0
        assert gold_score(row, "<answer>1</answer>") == 0.0
