"""Bad data ends in one clear message and exit code 1, and never in a traceback of the package."""

import math
from pathlib import Path

import pytest

from tests.trainer.bad_inputs import folder_without_weights, message, on_files, toy_rows
from tests.trainer.runs import run, step_lines, write_lines
from verl.data.toy import toy_files


def test_a_file_without_the_prompt_column(tmp_path, capfd):
    rows = [{name: value for name, value in row.items() if name != "prompt"} for row in toy_rows()]
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert str(path) in text
    assert "'prompt'" in text
    assert len(text.splitlines()) == 1


def test_an_empty_file(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", [])
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert str(path) in text
    assert len(text.splitlines()) == 1


def test_a_missing_file(tmp_path, capfd):
    text = message(capfd, run(tmp_path, base=on_files(tmp_path / "train.parquet")))
    assert "train.parquet" in text
    assert len(text.splitlines()) == 1


def test_fewer_rows_than_a_batch(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", toy_rows()[:3])
    assert "batch of 4 rows does not fit a dataset of 3" in message(
        capfd, run(tmp_path, base=on_files(path))
    )


def test_a_prompt_longer_than_allowed(tmp_path, capfd):
    rows = toy_rows()
    rows[7]["prompt"][0]["content"] *= 9
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert "row 7" in text
    assert "64" in text
    assert "data.truncation" in text or "data.filter_overlong_prompts" in text
    assert len(text.splitlines()) == 1


def test_a_sampler_that_calls_sys_exit(tmp_path, capfd):
    path = tmp_path / "order.py"
    path.write_text("""import sys

class Order:
    def __init__(self, data_source, data_config):
        pass

    def __len__(self):
        return 10

    def __iter__(self):
        yield from range(4)
        sys.exit(0)
""")
    named = [f"data.sampler.class_path={path}", "data.sampler.class_name=Order"]
    text = message(capfd, run(tmp_path, *named))
    assert f"sampler 'Order' ({path}) called sys.exit(0) in line 12. Raise an error" in text
    assert len(step_lines(tmp_path)) == 1


def test_a_data_source_without_a_rule(tmp_path, capfd):
    path = write_lines(
        tmp_path / "train.jsonl", [{**row, "data_source": "tey"} for row in toy_rows()]
    )
    # Reported before weights are loaded.
    model = f"actor_rollout_ref.model.path={folder_without_weights(tmp_path)}"
    text = message(capfd, run(tmp_path, model, base=on_files(path)))
    assert "No reward rule for data_source 'tey'. Nearest: toy" in text


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"data_source": "tey"}, "No reward rule for data_source 'tey'"),
        ({"data_source": None}, "There is no data_source"),
        ({"reward_model": None}, "needs reward_model.ground_truth"),
        ({"reward_model": {"ground_truth": math.nan}}, "needs reward_model.ground_truth"),
    ],
)
def test_a_row_that_no_rule_scores_is_named_at_start(tmp_path, capfd, change, expected):
    """Find the row at start, whether or not it is among the sampled rows."""
    rows = toy_rows()
    rows[3] |= change
    path = write_lines(tmp_path / "train.jsonl", rows)
    model = f"actor_rollout_ref.model.path={folder_without_weights(tmp_path)}"
    text = message(capfd, run(tmp_path, model, base=on_files(path)))
    assert text.startswith(f"{path}, row 3: ")
    assert expected in text
    valid = [f"data.val_files={path}", "trainer.test_freq=1"]
    assert "row 3" in message(
        capfd, run(tmp_path, model, *valid, base=on_files(Path(toy_files()[0])))
    )


def test_a_data_set_without_validation_split(tmp_path, capfd):
    path = write_lines(tmp_path / "train.jsonl", toy_rows())
    base = [*on_files(path)[1:], "data.train_batch_size=4", f"data.dataset_name={path}"]
    base = [override for override in base if not override.startswith("data.train_files")]
    text = message(capfd, run(tmp_path, "trainer.test_freq=1", base=base))
    assert "has no validation split" in text


def test_a_row_is_named_with_its_file(tmp_path, capfd):
    rows = toy_rows()
    rows[7]["prompt"] = 7
    path = write_lines(tmp_path / "train.jsonl", rows)
    text = message(capfd, run(tmp_path, base=on_files(path)))
    assert text.startswith(f"{path}, row 7, column 'prompt': must be a list of messages")
