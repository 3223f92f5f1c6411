"""Only the assistant's text is trained on, with any template; bad rows are named."""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.shared_files import SHARED, needs_shared
from tests.tiny_models import tiny_tokenizer
from verl.config.sft import SFTDataConfig, SFTMultiTurnConfig
from verl.data.collate import collate, pad_examples
from verl.data.conversations import Conversation, Example, encode
from verl.data.sft_dataset import SFTDataset
from verl.data.toy import toy_files
from verl.utils.errors import DataError

MADE_UP = "made-up"
TOKENIZERS = [
    MADE_UP,
    *(
        pytest.param(name, marks=needs_shared(f"models/{name}"))
        for name in ("qwen2-tokenizer", "minimind-tokenizer")
    ),
]
DIALOGUE = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi  "},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "And?\n"},
    {"role": "assistant", "content": "Yes.\nIndeed"},
]
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}{% if message['role'] == "
    "'assistant' %}{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else "
    "%}{{ message['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows a thought only in the last turn, as Qwen3 does.
FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}{% if loop.last and "
    "message['role'] == 'assistant' %}<thought>{% endif %}{{ message['content'] }}<|im_end|>\n{% "
    "endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def load(name: str) -> Any:
    return (
        tiny_tokenizer()
        if name == MADE_UP
        else AutoTokenizer.from_pretrained(SHARED / "models" / name)
    )


def with_template(template: str | None) -> Any:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return tokenizer


def learnt_texts(tokenizer: Any, example: Example) -> list[str]:
    """Return each run of trained tokens as text."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.learnt, [0]])))
    return [tokenizer.decode(example.ids[start:end]) for start, end in zip(edges[::2], edges[1::2])]


def encode_one(
    tokenizer: Any, messages: list[dict[str, Any]], first_learnt: int = 0, **arguments: Any
) -> Example:
    [example] = encode(tokenizer, [Conversation(messages, first_learnt, arguments)])
    return example


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., SFTDataset]:
    """Return a function that makes a dataset from rows, a tokenizer and keys of `data`."""

    def make(rows: list[dict[str, Any]], tokenizer: Any = None, **keys: Any) -> SFTDataset:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SFTDataset(str(file), tokenizer or tiny_tokenizer(), SFTDataConfig(**keys))

    return make


@pytest.mark.parametrize("name", TOKENIZERS)
def test_only_assistant_turns_are_trained(name):
    tokenizer = load(name)
    example = encode_one(tokenizer, DIALOGUE)
    whole = tokenizer.apply_chat_template(DIALOGUE, return_dict=False)
    assert example.ids.tolist() == whole, "the tokens of transformers"
    assert learnt_texts(tokenizer, example) == ["Hello there<|im_end|>", "Yes.\nIndeed<|im_end|>"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_only_the_answer_to_a_prompt_is_trained(name):
    tokenizer = load(name)
    example = encode_one(tokenizer, DIALOGUE, first_learnt=4)
    assert learnt_texts(tokenizer, example) == ["Yes.\nIndeed<|im_end|>"]
    opened = tokenizer.apply_chat_template(
        DIALOGUE[:4], add_generation_prompt=True, return_dict=False
    )
    assert example.ids[: len(opened)].tolist() == opened, "the prompt of a rollout"
    assert example.learnt.argmax() == len(opened)


@needs_shared("models/minimind-tokenizer")
def test_answer_is_trained_from_its_first_difference():
    tokenizer = load("minimind-tokenizer")  # begins answers with empty reasoning
    thinking = [
        DIALOGUE[1],
        {"role": "assistant", "content": "Hello", "reasoning_content": "A greeting."},
    ]
    assert learnt_texts(tokenizer, encode_one(tokenizer, thinking)) == [
        "A greeting.\n</think>\n\nHello<|im_end|>"
    ]


@needs_shared("models/qwen2-tokenizer")
def test_token_across_the_boundary_is_trained():
    tokenizer = load("qwen2-tokenizer")
    example = encode_one(tokenizer, [DIALOGUE[1], {"role": "assistant", "content": "\nHello"}])
    assert learnt_texts(tokenizer, example) == ["\n\nHello<|im_end|>"]


def test_generation_marks_of_a_template_are_used():
    plain = tiny_tokenizer()
    marked = with_template(MARKED)
    for first in (0, 4):
        expected = encode_one(plain, DIALOGUE, first)
        found = encode_one(marked, DIALOGUE, first)
        assert found.ids.tolist() == expected.ids.tolist()
        assert found.learnt.tolist() == expected.learnt.tolist()


def test_rewritten_history_is_an_error_except_for_the_last_answer():
    tokenizer = with_template(FORGETFUL)
    with pytest.raises(DataError, match="rewrites history: message 2 alone ends in '<thought>"):
        encode_one(tokenizer, DIALOGUE)
    assert learnt_texts(tokenizer, encode_one(tokenizer, DIALOGUE, 4)) == [
        "<thought>Yes.\nIndeed<|im_end|>"
    ]


def test_template_exception_is_a_data_error():
    refusing = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="roles must alternate"):
        encode_one(refusing, DIALOGUE)
    with pytest.raises(DataError, match="begins with the assistant"):
        encode_one(tiny_tokenizer(), DIALOGUE[2:])


def test_whitespace_at_the_end_of_a_turn_is_trained():
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    assert learnt_texts(tokenizer, encode_one(tokenizer, DIALOGUE)) == [
        "Hello there\n",
        "Yes.\nIndeed\n",
    ]


def test_answer_without_a_template_ends_with_eos():
    tokenizer = with_template(None)
    example = encode_one(tokenizer, [DIALOGUE[1], DIALOGUE[2]], first_learnt=1)
    assert tokenizer.decode(example.ids) == "Hi  Hello there<eos>"
    assert learnt_texts(tokenizer, example) == ["Hello there<eos>"]
    with pytest.raises(DataError, match="no chat template"):
        encode_one(tokenizer, DIALOGUE)


def test_template_receives_the_extra_columns_of_a_row(dataset):
    template = (
        "{% if tools %}{{ tools[0]['name'] }}{% endif %}{% if enable_thinking %}!{% endif %}"
        + str(tiny_tokenizer().chat_template)
    )
    tokenizer = with_template(template)
    rows = [
        {"messages": DIALOGUE, "tools": [{"name": "add"}], "enable_thinking": True},
        {"messages": DIALOGUE},
    ]
    made = dataset(rows, tokenizer, multiturn=SFTMultiTurnConfig(enable=True))
    texts = [tokenizer.decode(made[row]["raw_prompt_ids"]) for row in (0, 1)]
    assert texts[0] == "add!" + texts[1]


def tool(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"}}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


def dialogue_with_call(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [DIALOGUE[1], {"role": "assistant", "content": "", "tool_calls": [call]}]


TOOL_ROWS = [
    {"messages": dialogue_with_call("find", {"city": "Rome"}), "tools": [tool("find", "city")]},
    {"messages": dialogue_with_call("add", {"terms": "1, 2"}), "tools": [tool("add", "terms")]},
]
WITH_CALLS = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %}"
    "{{ m.tool_calls | tojson }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_calls_and_tools_are_learnt_as_the_user_wrote_them(tmp_path, form, is_text):
    """Schemas, and arguments as OpenAI's, may be JSON texts."""
    rows = copy.deepcopy(TOOL_ROWS)
    if is_text:
        for row in rows:
            row["tools"] = json.dumps(row["tools"])
            [call] = row["messages"][1]["tool_calls"]
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    file = tmp_path / f"rows.{form}"
    if form == "parquet":
        # Arrow gives both calls the arguments of both.
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    tokenizer = with_template(WITH_CALLS)
    config = SFTDataConfig(multiturn=SFTMultiTurnConfig(enable=True))
    made = SFTDataset(str(file), tokenizer, config)
    for item, row in zip((made[0], made[1]), TOOL_ROWS):
        text = tokenizer.decode(item["raw_prompt_ids"] + item["response_ids"])
        asked, answer = row["messages"]
        tools, calls = json.dumps(row["tools"]), json.dumps(answer["tool_calls"])
        assert text == f"{tools}{asked['content']}{calls}<|im_end|>"


@pytest.mark.parametrize("tools", ["weather", '{"name": "weather"}', ["weather"], "[1]"])
def test_tools_that_are_no_schemas_are_an_error_of_their_row(dataset, tools):
    rows = [{"messages": DIALOGUE, "tools": []}, {"messages": DIALOGUE, "tools": tools}]
    with pytest.raises(DataError, match="row 1, column 'tools': .*JSON text"):
        dataset(rows, multiturn=SFTMultiTurnConfig(enable=True))


def test_item_is_split_at_the_first_trained_token(dataset):
    made = dataset([{"question": "2+2?", "answer": "4"}, {"question": "Sky?", "answer": "blue"}])
    tokenizer = made.tokenizer
    assert len(made) == 2
    item = made[1]
    assert (
        tokenizer.decode(item["raw_prompt_ids"])
        == "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(item["response_ids"]) == "blue<|im_end|>\n"
    assert item["learnt"] == [True] * 5 + [False]
    assert item["uid"].endswith("rows.jsonl, row 1")


def test_nested_prompts_and_answers_are_found():
    keys: dict[str, Any] = {"prompt_key": "extra_info", "response_key": "extra_info"}
    config = SFTDataConfig(**keys, prompt_dict_keys=["question"], response_dict_keys=["answer"])
    item = SFTDataset(toy_files(), tiny_tokenizer(), config)[0]
    assert "3 + 11 = ?" in tiny_tokenizer().decode(item["raw_prompt_ids"])
    assert tiny_tokenizer().decode(item["response_ids"]) == "14<|im_end|>\n"


def test_fingerprints_distinguish_datasets(dataset):
    rows = [{"question": "2+2?", "answer": "4"}, {"question": "Sky?", "answer": "blue"}]
    fingerprint = dataset(rows).fingerprint
    assert fingerprint == dataset(rows).fingerprint
    assert fingerprint != dataset(rows[::-1]).fingerprint
    assert fingerprint != dataset(rows, with_template(MARKED.replace("<|im_end|>", ""))).fingerprint


def test_long_row_is_truncated_on_request(dataset, caplog):
    rows = [{"question": "2+2?", "answer": "fourteen"}]
    whole = dataset(rows)[0]
    assert "cut" not in caplog.text
    answer = "fourteen<|im_end|>\n"
    left = dataset(rows, max_length=12, truncation="left")[0]
    assert "1 of 1 rows have more than data.max_length=12 tokens and are cut" in caplog.text
    assert left["raw_prompt_ids"] == whole["raw_prompt_ids"][-2:]
    assert tiny_tokenizer().decode(left["response_ids"]) == answer
    length = len(whole["raw_prompt_ids"])
    right = dataset(rows, max_length=length + 3, truncation="right")[0]
    assert right["raw_prompt_ids"] == whole["raw_prompt_ids"]
    assert tiny_tokenizer().decode(right["response_ids"]) == "fou"
    inside = dataset(rows, max_length=6, truncation="left")[0]
    assert tiny_tokenizer().decode(inside["raw_prompt_ids"]) == "t", (
        "the first token has no prediction"
    )


GOOD = {"question": "2+2?", "answer": "4"}
TURNS: dict[str, Any] = {"multiturn": SFTMultiTurnConfig(enable=True)}


@pytest.mark.parametrize(
    ("rows", "keys", "message"),
    [
        (
            [GOOD],
            {"prompt_key": "prompt"},
            "column 'prompt' is missing; columns found: question.*data.prompt_key",
        ),
        (
            [{"messages": []}],
            {},
            "'question' is missing, but .* 'messages'. Set data.multiturn.enable=True",
        ),
        ([GOOD], {"response_key": "a"}, "column 'a' is missing.*data.response_key"),
        ([GOOD], TURNS, "column 'messages' is missing.*data.multiturn.messages_key"),
        (
            [GOOD, {"question": "x"}],
            {},
            "row 1, column 'answer': must be a text that is not empty, got None",
        ),
        (
            [{"question": "x", "answer": ""}],
            {},
            "row 0, column 'answer': must be a text that is not empty",
        ),
        (
            [{"question": 3, "answer": "x"}],
            {},
            "row 0, column 'question': must be a list of messages",
        ),
        (
            [GOOD, {"question": "x", "answer": "\ud83d"}],
            {},
            "row 1, column 'answer': must be text .* half a character",
        ),
        (
            [GOOD],
            {"response_dict_keys": ["text"]},
            "row 0, column 'answer': must be a dict with the key 'text'",
        ),
        (
            [GOOD, {"question": "x" * 90, "answer": "y"}],
            {"max_length": 60},
            r"row 1: \d+ tokens, .* allows 60",
        ),
        (
            [GOOD],
            {"max_length": 9, "truncation": "right"},
            "row 0: no token to learn .within data.max_length=9",
        ),
        (
            [{"messages": DIALOGUE}, {"messages": DIALOGUE[:2]}],
            TURNS,
            r"row 1: no token to learn: no message has the role assistant, got system, user\.",
        ),
        (
            [{"messages": DIALOGUE, "enable_thinking": value} for value in (True, None, "false")],
            TURNS,
            "row 2, column 'enable_thinking': must be true or false, got str: 'false'",
        ),
        (
            [{"messages": DIALOGUE}, {"messages": "Hi"}],
            TURNS,
            "row 1, column 'messages': must be a list of messages",
        ),
        (
            [{"messages": DIALOGUE}, {"messages": DIALOGUE[2:]}],
            TURNS,
            "row 1: the conversation begins with",
        ),
    ],
)
def test_untrainable_row_is_named(dataset, rows, keys, message):
    with pytest.raises(DataError, match=message):
        dataset(rows, **keys)


def test_omitted_images_and_roles_are_errors(dataset):
    row = {"question": "<image>Hi", "answer": "Hello", "images": ["cat.png"]}
    with pytest.raises(DataError, match=r"row 0, column 'images': must be empty"):
        dataset([row])

    template = (
        "{% for m in messages %}{% if m['role'] in ['user', 'assistant'] %}<|im_start|>"
        "{{ m['role'] + '\\n' + m['content'] }}<|im_end|>\\n{% endif %}{% endfor %}"
    )
    turns = [{"role": "human", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with pytest.raises(DataError, match=r"row 0: message 0 has the role 'human'"):
        dataset(
            [{"messages": turns}],
            with_template(template),
            multiturn=SFTMultiTurnConfig(enable=True),
        )


def test_padded_columns_hold_the_rows(dataset):
    rows = [{"question": "2+2?", "answer": "fourteen"}, {"question": "A longer one", "answer": "4"}]
    made = dataset(rows)
    batch = pad_examples(collate([made[0], made[1]])).batch
    ids = batch["input_ids"]
    real = batch["attention_mask"].bool()
    learnt = batch["response_mask"]

    for row in (0, 1):
        item = made[row]
        assert ids[row][real[row]].tolist() == item["raw_prompt_ids"] + item["response_ids"]
        assert learnt[row].sum() == sum(item["learnt"])
        response = ids[row, -learnt.shape[1] :]
        assert response[learnt[row].bool()].tolist() == [
            token for token, counts in zip(item["response_ids"], item["learnt"]) if counts
        ]

    assert real[:, 0].sum() == 1 == real[:, -1].sum(), (
        "prompts end, and responses begin, in one column"
    )
