"""Items are prompts with everything a reward needs; a bad row is named before training starts."""

import copy
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.rows import make_row, make_rows
from verl.config import DataConfig
from verl.data import RLDataset
from verl.data.files import ArrowRows
from verl.data.prompt_limit import truncate
from verl.data.rl_dataset import check_rows
from verl.data.roles import RoleCheck
from verl.utils.errors import DataError
from verl.utils.logging import say_once


def make_config(**settings) -> DataConfig:
    return DataConfig(**{"max_prompt_length": 64, **settings})


def write_lines(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_item_has_ids_messages_and_all_columns(parquet, tokenizer):
    dataset = RLDataset(
        parquet([{**row, "level": 3} for row in make_rows(3)]), tokenizer, make_config()
    )
    item = dataset[2]
    assert tokenizer.decode(item["raw_prompt_ids"]) == "<|user|>2 + 1 = ?<|end|><|assistant|>"
    row = make_row(2)
    messages = row.pop("prompt")
    assert item == {
        "raw_prompt_ids": item["raw_prompt_ids"],
        "raw_prompt": messages,
        "index": 2,
        "level": 3,
        **row,
    }


def test_keys_that_parquet_adds_to_messages_do_not_reach_the_template(parquet, tokenizer):
    calls = [{"function": {"name": "add", "arguments": {"terms": 2}}}]
    called = [
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "2", "name": "add"},
    ]
    plain = make_row(1)
    # As Llama 3.1 asks: a null `tool_calls` would be taken for calls.
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls | length }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    files = parquet([plain, {**make_row(2), "prompt": called}])
    dataset = RLDataset(files, tokenizer, make_config(filter_overlong_prompts=True))
    assert [item["raw_prompt"] for item in dataset] == [plain["prompt"], called]
    texts = [tokenizer.decode(item["raw_prompt_ids"]) for item in dataset]
    assert texts == ["1 + 1 = ?", "1 + 1 = ?12"]


def test_several_files_are_concatenated(parquet, tokenizer, tmp_path):
    lines = write_lines(tmp_path / "b.jsonl", [{"prompt": "Hi", "source_file": "b"}])
    dataset = RLDataset([parquet(make_rows(2)), lines], tokenizer, make_config())
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 1, 0]
    assert dataset[2]["raw_prompt"] == [{"role": "user", "content": "Hi"}]
    assert (dataset[2]["data_source"], dataset[0]["source_file"]) == (None, None)
    assert dataset[0].keys() == dataset[2].keys()


def test_prompt_column_alone_is_enough(parquet, tokenizer):
    item = RLDataset(parquet([{"question": "Hi"}]), tokenizer, make_config(prompt_key="question"))[
        0
    ]
    assert item.keys() == {"raw_prompt_ids", "raw_prompt", "index"}


def test_reserved_column_is_dropped(parquet, tokenizer):
    item = RLDataset(
        parquet([{"prompt": "Hi", "responses": ["x"], "uid": 1}]), tokenizer, make_config()
    )[0]
    assert item.keys() == {"raw_prompt_ids", "raw_prompt", "index"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt": [{"role": "user"}]},
            r"rows\.jsonl, row 1, column 'prompt': message 0 lacks its content",
        ),
        ({"prompt": [{"content": "x"}]}, r"row 1, column 'prompt': message 0 lacks its role"),
        (
            {"prompt": " "},
            r"row 1, column 'prompt': ends with an empty message, so there is nothing to answer",
        ),
        (
            {
                "prompt": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": ""},
                ]
            },
            r"row 1, column 'prompt': ends with an empty message.*'role': 'user'",
        ),
        ({"prompt": 3}, r"row 1, column 'prompt': must be a list of messages .* got int"),
        ({"prompt": None}, r"row 1, column 'prompt': must be a list of messages .* got NoneType"),
        ({"data_source": 3}, r"row 1, column 'data_source': must be a text .* got int"),
        ({"data_source": "to\ud800y"}, r"row 1, column 'data_source': must be text .* half a char"),
        ({"reward_model": "5"}, r"row 1, column 'reward_model': must be a dict, got str: '5'\.$"),
        (
            {"reward_model": '{"ground_truth": "5"}'},
            r"got str: .*\. Apply json\.loads to the column",
        ),
        ({"extra_info": [1]}, r"row 1, column 'extra_info': must be a dict, got list"),
        (
            {"images": [{"bytes": "x"}], "prompt": "<image>Hi"},
            r"row 1, column 'images': must be empty, .* does not read it, got list",
        ),
        ({"videos": ["a.mp4"]}, r"row 1, column 'videos': must be empty"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            r"row 1, column 'prompt': message 0 has a part of type 'image'",
        ),
    ],
)
def test_bad_row_is_named_with_file_row_and_column(tmp_path, tokenizer, change, message):
    rows = make_rows(3)
    rows[1] |= change
    with pytest.raises(DataError, match=message):
        RLDataset(write_lines(tmp_path / "rows.jsonl", rows), tokenizer, make_config())


def test_empty_image_columns_are_accepted(tmp_path, tokenizer):
    rows = [{**make_row(0), "images": [], "videos": None}]
    assert len(RLDataset(write_lines(tmp_path / "rows.jsonl", rows), tokenizer, make_config())) == 1
    rows = [{**make_row(0), "pictures": ["cat.png"]}]
    file = write_lines(tmp_path / "other.jsonl", rows)
    with pytest.raises(DataError, match=r"other\.jsonl, row 0, column 'pictures'"):
        RLDataset(file, tokenizer, make_config(image_key="pictures"))


def test_subset_of_the_rows(parquet, tokenizer):
    file = parquet(make_rows(20))

    def kept(num_rows: int, **order) -> list[int]:
        dataset = RLDataset(file, tokenizer, make_config())
        dataset.keep_at_most(num_rows, **order)
        return [dataset[item]["index"] for item in range(len(dataset))]

    assert kept(3, shuffle=False, seed=1) == [0, 1, 2]
    assert kept(-1, shuffle=True, seed=1) == kept(99, shuffle=True, seed=1) == list(range(20))
    drawn = kept(5, shuffle=True, seed=1)
    assert drawn == kept(5, shuffle=True, seed=1) == sorted(set(drawn))
    assert len(drawn) == 5
    assert drawn != kept(5, shuffle=True, seed=2)
    assert drawn != list(range(5))


def test_row_rejected_by_the_chat_template_is_named(parquet, tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{% if messages | length > 1 %}{{ raise_exception('roles must alternate') }}{% endif %}"
        "{{ messages[0]['content'] }}"
    )
    rows = make_rows(4)
    rows[3]["prompt"] *= 2
    message = r"rows\.parquet, row 3: the tokenizer's chat template refuses these messages \(roles must alternate\)"
    with pytest.raises(DataError, match=message):
        RLDataset(parquet(rows), strict, make_config())
    unmeasured = RLDataset(parquet(rows), strict, make_config(truncation="left"))
    with pytest.raises(DataError, match=message):
        unmeasured[3]


@pytest.mark.parametrize(
    ("renamed", "to", "message"),
    [
        ("extra_info", "extro_info", "unknown column 'extro_info'; did you mean 'extra_info'"),
        ("reward_model", "reward_modle", "did you mean 'reward_model'"),
        (
            "prompt",
            "promt",
            "did you mean 'prompt', which is missing. Rename it, or set data.prompt_key=promt",
        ),
        (
            "prompt",
            "question",
            "the column 'prompt' is missing; columns found: data_source, .*question",
        ),
    ],
)
def test_missing_or_misspelled_column_is_named(parquet, tokenizer, renamed, to, message):
    rows = [
        {to if name == renamed else name: value for name, value in row.items()}
        for row in make_rows(2)
    ]
    with pytest.raises(DataError, match=message):
        RLDataset(parquet(rows), tokenizer, make_config())


@pytest.mark.parametrize("indent", [None, 2])
def test_rows_that_are_nested_in_one_object_are_named(tmp_path, tokenizer, indent):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": "1.0", "data": make_rows(2)}, indent=indent))
    with pytest.raises(
        DataError, match=r"'prompt' is missing, .* a list of them in 'data'\. Write"
    ):
        RLDataset(str(path), tokenizer, make_config())


def test_a_list_of_messages_is_no_list_of_rows(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": make_rows(1)[0]["prompt"]}])
    with pytest.raises(DataError, match="columns found: messages. Rename yours"):
        RLDataset(path, tokenizer, make_config())


def test_a_named_reward_column_must_exist(parquet, tokenizer):
    file = parquet([{**make_row(0), "source": "gsm8k"}])
    assert len(RLDataset(file, tokenizer, make_config(reward_fn_key="source"))) == 1
    with pytest.raises(DataError, match=r"'sorce' is missing.*source.*data\.reward_fn_key"):
        RLDataset(parquet([make_row(0)]), tokenizer, make_config(reward_fn_key="sorce"))


def test_similar_column_names_are_accepted(parquet, tokenizer):
    dataset = RLDataset(
        parquet([{**make_row(0), "prompts": "x", "extra_infos": 1}]), tokenizer, make_config()
    )
    assert dataset[0]["extra_infos"] == 1


LONG = [make_row(0), make_row(1, "x" * 100), make_row(2), make_row(3, "y" * 200)]


def test_a_prompt_that_ends_with_an_answer_is_warned_of(parquet, tokenizer, caplog):
    say_once.cache_clear()
    answered = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    RLDataset(parquet([{"prompt": answered}, {"prompt": answered}]), tokenizer, make_config())
    assert caplog.text.count("ends with a message of the assistant") == 1


def test_long_prompt_is_an_error_with_a_way_out(parquet, tokenizer):
    message = (
        r"rows\.parquet, row 1: the prompt has 103 tokens, data\.max_prompt_length allows 64 "
        r"\(2 rows .*filter_overlong_prompts=true.*truncation=left"
    )
    with pytest.raises(DataError, match=message):
        RLDataset(parquet(LONG), tokenizer, make_config())


def test_long_prompts_are_dropped_on_request(parquet, tokenizer, caplog):
    with caplog.at_level("INFO", logger="verl"):
        dataset = RLDataset(parquet(LONG), tokenizer, make_config(filter_overlong_prompts=True))
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 2]
    assert "Kept 2 of 4 rows" in caplog.text


def test_dropping_every_row_is_an_error(parquet, tokenizer):
    with pytest.raises(DataError, match=r"All prompts of .*rows\.parquet are longer than .*=5"):
        RLDataset(
            parquet(LONG), tokenizer, make_config(filter_overlong_prompts=True, max_prompt_length=5)
        )


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_long_prompts_are_truncated_on_request(parquet, tokenizer, side, caplog):
    whole = RLDataset(parquet(LONG), tokenizer, make_config(max_prompt_length=999))
    cut = RLDataset(parquet(LONG), tokenizer, make_config(truncation=side, max_prompt_length=21))
    assert len(cut) == 4
    assert cut[0]["raw_prompt_ids"] == whole[0]["raw_prompt_ids"]
    expected = {
        "left": whole[1]["raw_prompt_ids"][-21:],
        "right": whole[1]["raw_prompt_ids"][:21],
        "middle": whole[1]["raw_prompt_ids"][:10] + whole[1]["raw_prompt_ids"][-11:],
    }
    assert caplog.text == ""
    assert cut[1]["raw_prompt_ids"] == expected[side]
    assert cut[1]["raw_prompt_ids"] == expected[side]
    assert (
        caplog.text.count(f"data.max_prompt_length=21 tokens are cut, as data.truncation={side}")
        == 1
    )


@given(ids=st.lists(st.integers(0, 9), max_size=30), limit=st.integers(1, 20))
def test_truncation_keeps_the_correct_ends(ids, limit):
    kept = min(len(ids), limit)
    left, right, middle = (truncate(ids, limit, side) for side in ("left", "right", "middle"))
    assert [len(left), len(right), len(middle)] == [kept] * 3
    assert left == ids[len(ids) - kept :]
    assert right == ids[:kept]
    if len(ids) > limit:
        assert middle[: limit // 2] == ids[: limit // 2]
        assert middle[limit // 2 :] == ids[len(ids) - (limit - limit // 2) :]


def test_fingerprint_depends_on_rows_and_order(parquet, tokenizer):
    first = parquet(LONG, "a.parquet")
    same = parquet(LONG, "b.parquet")
    other = parquet(LONG[::-1], "c.parquet")
    prints = [
        RLDataset(
            file, tokenizer, make_config(filter_overlong_prompts=True, **settings)
        ).fingerprint
        for file, settings in (
            (first, {}),
            (same, {}),
            (other, {}),
            (first, {"max_prompt_length": 150}),
        )
    ]

    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_only_prompts_are_read_row_by_row_where_the_columns_are_sound(monkeypatch, tokenizer):
    """Sources and dicts of a million rows would take seconds."""
    rows = ArrowRows(pa.Table.from_pylist([*make_rows(3), {**make_row(3), "data_source": None}]))
    read = []
    column = ArrowRows.column
    monkeypatch.setattr(
        ArrowRows, "column", lambda self, name: read.append(name) or column(self, name)
    )
    check_rows("x.parquet", rows, make_config(), None, RoleCheck(tokenizer))
    assert read == ["prompt"]

    wrong = ArrowRows(pa.table({"prompt": ["Hi", "Ho"], "data_source": [None, 3]}))
    with pytest.raises(DataError, match="row 1, column 'data_source': must be a text .* got int"):
        check_rows("x.parquet", wrong, make_config(), None, RoleCheck(tokenizer))
