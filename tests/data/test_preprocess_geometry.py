"""The script of Geometry3K writes rows with pictures, and names rows that lack a part."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictured import png
from tests.data.scripts import load_script
from verl.config import DataConfig
from verl.data.pictures import PictureReader
from verl.data.rl_dataset import RLDataset
from verl.rewards.rules import default_compute_score
from verl.utils.errors import DataError


def test_geometry_rows_have_their_pictures(
    tmp_path: Path, folder: Path, reader: PictureReader
) -> None:
    main = load_script("data_preprocess/geo3k.py").main
    raw = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "12 \\sqrt { 3 }"}
    (tmp_path / "a.png").write_bytes(png())
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(raw) + "\n")
    target = tmp_path / "out"
    main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(target)])
    file = str(target / "train.parquet")
    rows = RLDataset(file, reader.tokenizer, DataConfig(max_prompt_length=512), pictures=reader)
    assert rows[0]["prepared_pictures"][0] is reader.prepare(png())
    truth = rows[0]["reward_model"]["ground_truth"]
    answer = "so \\boxed{12\\sqrt{3}}"
    assert default_compute_score(rows[0]["data_source"], answer, truth) == 1.0
    assert default_compute_score(rows[0]["data_source"], "\\boxed{12}", truth) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "row 0: the column 'images' must be a list of at least one picture"),
        ({"images": None}, "row 0: the column 'images' must have a value"),
        ({"images": ["missing.png"]}, r"row 0: a picture cannot be read \(FileNotFoundError"),
        ({"images": ["train.jsonl"]}, "row 0: a picture cannot be read: .* bytes are no image"),
        ({"images": [{"url": "a"}]}, r"row 0: a picture cannot be read \(KeyError: 'path'"),
        ({"answer": None}, "row 0: the column 'answer' must have a value"),
        ({"problem": 3}, "row 0: the column 'problem' must be a text, got 3"),
    ],
)
def test_geometry_rows_that_lack_a_part_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    main = load_script("data_preprocess/geo3k.py").main
    raw = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "12", **change}
    given = {name: value for name, value in raw.items() if value is not None}
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "train.jsonl").write_text(json.dumps(given) + "\n")
    with pytest.raises(DataError, match=f"train.jsonl, {message}"):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])
