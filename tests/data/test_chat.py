"""Messages become the token ids that transformers makes; without a template, plain text."""

import copy
import logging

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.shared_files import SHARED, needs_shared
from verl.data.chat import (
    apply_chat_template,
    as_messages,
    encode_conversations,
    plain_text,
    render_conversation,
)
from verl.utils.errors import DataError
from verl.utils.logging import say_once

ONE = [{"role": "user", "content": "Hi"}]
THREE = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hi <|end|> there"},
    {"role": "assistant", "content": "Hello"},
]


@needs_shared("models/qwen2-tokenizer")
def test_ids_match_transformers():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "qwen2-tokenizer")
    for messages in (ONE, THREE):
        expected = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )
        assert apply_chat_template(tokenizer, messages) == expected
        without = tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, return_dict=False
        )
        assert (
            apply_chat_template(tokenizer, messages, add_generation_prompt=False)
            == without
            != expected
        )


def test_toy_template_adds_the_generation_prompt(tokenizer):
    assert tokenizer.decode(apply_chat_template(tokenizer, ONE)) == "<|user|>Hi<|end|><|assistant|>"


def test_custom_template_is_used(tokenizer):
    custom = copy.deepcopy(tokenizer)
    custom.chat_template = "Q: {{ messages[0]['content'] }} A:"
    assert custom.decode(apply_chat_template(custom, ONE)) == "Q: Hi A:"


def test_missing_template_gives_plain_text_and_one_log_line(tokenizer, caplog):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="verl"):
        assert [bare.decode(ids) for ids in encode_conversations(bare, [ONE, THREE])] == [
            "Hi",
            "system: Be short.\nuser: Hi <|end|> there\nassistant: Hello\nassistant:",
        ]
        encode_conversations(bare, [ONE])
    assert caplog.text.count("has no chat template") == 1
    assert plain_text(THREE, add_generation_prompt=False).endswith("assistant: Hello")


@needs_shared("models/stories260K")
def test_plain_text_begins_with_the_bos_token():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "stories260K")
    assert tokenizer.chat_template is None
    ids = apply_chat_template(tokenizer, ONE)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] != tokenizer.eos_token_id


def test_prompt_has_no_eos_token(tokenizer):
    ending = copy.deepcopy(tokenizer)
    ending.chat_template = None
    ending.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", 1)]
    )
    assert ending("Hi")["input_ids"][-1] == ending.eos_token_id
    assert ending.decode(apply_chat_template(ending, ONE)) == "Hi"


def test_template_exception_is_a_data_error(tokenizer):
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="roles must alternate"):
        apply_chat_template(strict, ONE)


def test_unsupported_content_parts_are_a_data_error(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    with pytest.raises(
        DataError, match=r"refuses these messages \(can only concatenate str.*accept only texts"
    ):
        apply_chat_template(tokenizer, parts)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "must be a list of messages .* got NoneType"),
        ([], "must be a list of messages"),
        ('[{"role": "user", "content": "Hi"}]', "got the JSON text of one.*Apply json.loads"),
        (7, "got int"),
        (b"Hi", r"got bytes: .*\. Decode it: column\.map\(bytes\.decode\)$"),
        ([{"role": "user", "content": b"Hi"}], r"lacks its content .*\. Decode it: column\.map"),
        (["Hi"], "message 0 must be a dict"),
        ([*ONE, {"content": "x"}], "message 1 lacks its role"),
        ([{"role": "user"}], "message 0 lacks its content"),
        ([{"role": "user", "content": 3}], "message 0 lacks its content"),
        ("Hi \ud83d", r"message 0 must be text .* half a character .* at place 3"),
        (
            [*ONE, {"role": "user", "content": "\ud83d"}],
            "message 1 must be text .* half a character",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}],
            "message 0 must be text",
        ),
    ],
)
def test_invalid_conversation_is_an_error(prompt, message):
    with pytest.raises(DataError, match=message):
        as_messages(prompt)


IMAGE = {"type": "image", "image": "cat.png", "text": None}
TEXT = {"type": "text", "text": "What is this?", "image": None}


@pytest.mark.parametrize(
    "part", [IMAGE, {"type": "image_url", "image_url": {"url": "x"}}, {"video": "a.mp4"}]
)
def test_non_text_part_is_an_error(part):
    with pytest.raises(DataError, match=r"message 1 has a part of type '(image|image_url|video)'"):
        as_messages([*ONE, {"role": "user", "content": [TEXT, part]}])


def test_text_parts_are_joined(tokenizer):
    """Join text parts even for a template that would print the Python list."""
    lenient = copy.deepcopy(tokenizer)
    lenient.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    parts = [{"role": "user", "content": [TEXT, " Be brief."], "name": "me"}]
    messages = as_messages(parts)
    assert messages == [{"role": "user", "content": "What is this? Be brief.", "name": "me"}]
    assert lenient.decode(apply_chat_template(lenient, messages)) == "What is this? Be brief."
    with pytest.raises(DataError, match="message 0 has a text part without its text"):
        as_messages([{"role": "user", "content": [{"type": "text"}]}])
    with pytest.raises(DataError, match="message 0 must have parts that are dicts, got int"):
        as_messages([{"role": "user", "content": [1]}])


SELECTIVE = (
    "{% for m in messages %}{% if m['role'] in ['user', 'developer'] %}{{ m['content'] }}"
    "{% endif %}{% endfor %}"
)


CALLS = "{% for m in messages %}{% for c in m.tool_calls or () %}WRITTEN;{% endfor %}{% endfor %}"
AS_OBJECT = CALLS.replace("WRITTEN", "{{ c.function | tojson }}")
AS_TEXT = CALLS.replace("WRITTEN", "{{ c.function.name }}{{ c.function.arguments }}")


@pytest.mark.parametrize(
    ("template", "texts"),
    [
        (AS_OBJECT, ('{"name": "add", "arguments": {"a": [1, null]}};', '{"name": "now"};')),
        (AS_TEXT, ('add{"a": [1, null]};', "now;")),
    ],
)
def test_templates_get_arguments_in_the_form_that_they_write(tokenizer, template, texts):
    """Both forms of data are the same; a call without arguments stays without."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    with_text, without = texts
    for arguments in ({"a": [1, None]}, '{"a": [1, null]}'):
        call = {"function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        assert render_conversation(tokenizer, [message]) == with_text
    message["tool_calls"] = [{"function": {"name": "now"}}]
    assert render_conversation(tokenizer, [message]) == without


@pytest.mark.parametrize("wrong", ["{{ m['contents'] }}", "{{ m.text }}", ""])
def test_a_template_that_writes_no_contents_is_an_error(tokenizer, wrong: str):
    """Jinja writes nothing for a misspelled name, and all prompts would be the same."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>" + wrong + "{% endfor %}"
    message = "writes the same text for all contents: '<user>'.*or set data.custom_chat_template"
    with pytest.raises(DataError, match=message):
        apply_chat_template(tokenizer, ONE)

    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    assert render_conversation(tokenizer, ONE) == "HI"


@pytest.mark.parametrize(("role", "is_written"), [("developer", True), ("human", False)])
def test_role_omitted_by_the_template_is_an_error(tokenizer, role: str, is_written: bool):
    selective = copy.deepcopy(tokenizer)
    selective.chat_template = SELECTIVE
    # The same text in another message must not hide the omitted one.
    messages = [{"role": role, "content": "Hi"}, *ONE]
    if is_written:
        assert selective.decode(apply_chat_template(selective, messages)) == "HiHi"
    else:
        with pytest.raises(
            DataError, match=r"message 0 has the role 'human', .* Expected one of system, user"
        ):
            apply_chat_template(selective, messages)


def test_string_becomes_one_user_message(caplog):
    say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="verl"):
        assert as_messages("Hi") == ONE == as_messages("Hi")
    assert caplog.text.count("plain string") == 1


def test_no_conversations_give_no_ids(tokenizer):
    assert encode_conversations(tokenizer, []) == []
