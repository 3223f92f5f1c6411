"""Every format reads the calls of its models, and no text raises an exception."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.replies import END, FORMATS, WEATHER, write
from verl.agents.formats import (
    ToolCall,
    new_call_id,
    recognise_format,
    tool_format,
    tool_formats,
)
from verl.agents.formats.base import NEXT_ROLES, OTHER_NAMES, TURN_ENDS
from verl.agents.formats.typed import convert
from verl.utils.errors import ConfigError

ARGUMENTS = {
    "city": "Zürich\n a, {b}: [c]",
    "days": 3,
    "detailed": True,
    "extra": {"deep": {"list": [1, "two", None]}},
    "places": ["x", 2.5, False],
    "ratio": None,
}
# In this format the whole reply is JSON, so text around a call makes it content.
BARE = "llama3_json"


def parse(format_name, text):
    return tool_format(format_name, None).parse(text, [WEATHER])


def only(reply) -> ToolCall:
    assert len(reply.calls) == 1, reply
    return reply.calls[0]


def assert_malformed(call: ToolCall, mentions: str = "") -> None:
    assert call.arguments is None
    assert call.error is not None
    assert call.error.startswith("The tool call could not be read: ")
    assert "Expected " in call.error
    assert mentions in call.error


# ---------------------------------------------------------------- well-formed calls


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("ended", [True, False])
def test_a_call_is_read_with_and_without_the_token_that_ends_the_turn(format_name, ended):
    text = write("weather", format_name, ARGUMENTS)
    text = text.removesuffix(END[format_name]) + (END[format_name] if ended else "")
    reply = parse(format_name, text)

    call = only(reply)
    assert call.error is None
    assert call.name == "weather"
    assert call.arguments == ARGUMENTS
    assert "weather" in call.raw
    assert reply.content == ""


@pytest.mark.parametrize("format_name", [name for name in FORMATS if name != BARE])
def test_several_calls_come_in_order_and_the_text_around_them_stays(format_name):
    before, between = "Let me look.\n", "\nand\n"
    if format_name == "gpt-oss":
        before = "<|channel|>commentary<|message|>Let me look.\n<|end|>"
        between = "<|start|>assistant<|channel|>final<|message|>\nand\n<|end|>"
    first = write("weather", format_name, {"days": 1})
    second = write("weather", format_name, {"days": 2}, number=1)
    reply = parse(format_name, before + first + between + second + END[format_name])

    assert [call.arguments for call in reply.calls] == [{"days": 1}, {"days": 2}]
    assert reply.content.split() == ["Let", "me", "look.", "and"]


def test_llama_separates_calls_by_semicolons_and_takes_a_tag():
    first = write("weather", BARE, {"days": 1})
    second = write("weather", BARE, {"days": 2}, number=1)
    for text in (first + second, "<|python_tag|>" + first + second + "<|eom_id|>"):
        reply = parse(BARE, text)
        assert [call.arguments for call in reply.calls] == [{"days": 1}, {"days": 2}]
        assert reply.content == ""

    reply = parse(BARE, "Let me look.\n" + first + "\nDone.")
    assert only(reply).arguments == {"days": 1}
    assert reply.content == "Let me look.\n\nDone."


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("text", ["", " Hi {there}: 2 < 3.\n", "a</tool_call>b", '{"answer": 5}'])
def test_text_without_calls_is_unchanged(format_name, text):
    reply = parse(format_name, text + END[format_name])
    assert reply.calls == ()
    assert reply.content == text


@pytest.mark.parametrize("format_name", [name for name in FORMATS if name not in ("gpt-oss",)])
def test_reasoning_is_not_searched_for_calls(format_name):
    tags = {
        "gemma": ("<|channel>thought\n", "<channel|>"),
        "mistral": ("[THINK]", "[/THINK]"),
        "seed": ("<seed:think>", "</seed:think>"),
    }
    opening, closing = tags.get(format_name, ("<think>", "</think>"))
    thought = write("weather", format_name, {"days": 1})
    written = write("weather", format_name, {"days": 2})

    # The prompt of some models opens the reasoning already.
    for reasoning in (f"{opening}\n{thought}\n{closing}", f"\n{thought}\n{closing}"):
        reply = parse(format_name, f"{reasoning}\n\n{written}")
        assert only(reply).arguments == {"days": 2}
        assert reply.content == reasoning.strip()
        assert parse(format_name, reasoning).calls == ()
    assert parse(format_name, f"{opening}\n{thought}").calls == ()


def test_tag_in_reasoning_does_not_hide_a_call():
    written = write("weather", "hermes", {"days": 2})
    reply = parse("hermes", f"I might write <tool_call> now.</think>{written}")
    assert only(reply).arguments == {"days": 2}


@pytest.mark.parametrize("format_name", ["hermes", "llama3_json", "mistral", "qwen3_coder", "glm"])
def test_an_argument_may_hold_tags(format_name):
    arguments = {"city": "a </think> b <think> c"}
    assert only(parse(format_name, write("weather", format_name, arguments))).arguments == arguments


def test_a_json_text_may_hold_the_closing_tag():
    arguments = {"city": "print('</tool_call><tool_call>')"}
    reply = parse("hermes", "Hi " + write("weather", "hermes", arguments) + " you")
    assert only(reply).arguments == arguments
    assert reply.content == "Hi  you"


def test_ids_are_kept():
    assert only(parse("mistral", write("f", "mistral", {}, number=7))).call_id == "abcde0007"
    assert only(parse("kimi", write("f", "kimi", {}, number=7))).call_id == "functions.f:7"
    assert only(parse("mistral", "[TOOL_CALLS]f[CALL_ID]abcde1234[ARGS]{}")).call_id == "abcde1234"
    # The templates of the family refuse any other.
    assert only(parse("mistral", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{}")).call_id is None
    assert only(parse("hermes", write("f", "hermes", {}))).call_id is None


def test_a_new_id_has_nine_digits():
    assert new_call_id(2, 1) == "000020001"
    assert len({new_call_id(turn, number) for turn in range(50) for number in range(50)}) == 2500


def test_other_spellings_of_a_family():
    block = (
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
    )
    reply = parse("deepseek", f"Hi<｜tool▁calls▁begin｜>{block}<｜tool▁calls▁end｜>")
    assert (only(reply).name, only(reply).arguments, reply.content) == ("f", {"a": 1}, "Hi")

    invoke = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    reply = parse("deepseek", invoke)
    assert (only(reply).arguments, reply.content) == ({"a": "1", "b": [1]}, "")

    block = (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>'
    )
    reply = parse("minimax", f"<think>\nHm.\n</think>\n\nHi\n{block}[e~[\n")
    assert [(call.name, call.arguments) for call in reply.calls] == [("f", {"a": "1"}), ("g", {})]
    assert reply.content == "<think>\nHm.\n</think>\n\nHi"

    text = "<start_function_call>call:f.g{a:<escape>x,y<escape>,b:[1,true]}<end_function_call>"
    assert only(parse("gemma", text)).name == "f.g"
    assert only(parse("gemma", text)).arguments == {"a": "x,y", "b": [1, True]}

    for text in ('[TOOL_CALLS]f[ARGS]{"a": 1}', '[TOOL_CALLS] f{"a": 1}</s>'):
        assert only(parse("mistral", text)).arguments == {"a": 1}
    named = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
    assert [call.name for call in parse("mistral", named).calls] == ["f", "g"]

    header = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
    for text in (header + '{"a": 1}', header.removeprefix("<|start|>assistant") + '{"a": 1}'):
        assert only(parse("gpt-oss", text)).arguments == {"a": 1}


def test_harmony_separates_reasoning_from_content():
    reply = parse(
        "gpt-oss",
        "<|channel|>analysis<|message|>call functions.f?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
    )
    assert (reply.reasoning, reply.content, reply.calls) == ("call functions.f?", "Hello.", ())


# ---------------------------------------------------------------- malformed calls


@pytest.mark.parametrize("format_name", FORMATS)
def test_truncated_call_is_malformed(format_name):
    """Allow a missing end only in formats without a closing tag."""
    whole = write("weather", format_name, {"city": "Bern", "days": 3})
    closing = {"gpt-oss": "<|call|>", BARE: "", "mistral": ""}.get(format_name)
    needed = len(whole) if closing is None else len(whole.removesuffix(closing))

    for length in range(needed):
        for call in parse(format_name, "Hi. " * (format_name != BARE) + whole[:length]).calls:
            assert_malformed(call)
    assert only(parse(format_name, whole[:needed])).error is None


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_malformed_call_does_not_hide_the_next(format_name):
    good = write("weather", format_name, {"days": 2}, number=1)
    for old, new in (('"days": 1', '"days": '), ("days:1", "days:"), ("</parameter>", "")):
        bad = write("weather", format_name, {"days": 1}).replace(old, new)
        bad = bad.replace("</arg_value>", "")
        calls = parse(format_name, bad + good).calls
        if format_name in (BARE, "mistral") and '"days": ' in old and calls[0].arguments is None:
            continue  # nothing marks where broken JSON ends
        assert calls[-1].arguments == {"days": 2}
        assert len(calls) == 2


@pytest.mark.parametrize(
    ("format_name", "text", "mentions"),
    [
        ("hermes", "<tool_call>{'name': 1}</tool_call>", "invalid JSON"),
        ("hermes", "<tool_call>[1]</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "'name'"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "'arguments' must be a JSON object"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', "'arguments'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "unexpected text"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "ends before </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "number"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\uD800"}}</tool_call>', "half"),
        ("llama3_json", '{"name": "f", "parameters": [1]}', "'parameters' must be a JSON object"),
        ("llama3_json", '{"parameters": {}}', "'name'"),
        ("llama3_json", '{"name": "f", "parameters": {', "invalid JSON"),
        ("llama3_json", "<|python_tag|>search('x')", "invalid JSON"),
        ("mistral", "[TOOL_CALLS]", "name of the tool is missing"),
        ("mistral", "[TOOL_CALLS]f", "arguments are missing"),
        ("mistral", "[TOOL_CALLS][]", "empty"),
        ("mistral", "[TOOL_CALLS][1]", "not a JSON object"),
        ("mistral", '[TOOL_CALLS]f{"a":', "invalid JSON"),
        ("qwen3_coder", "<tool_call>f()</tool_call>", "must begin with <function="),
        ("qwen3_coder", "<tool_call><function=f></tool_call>", "must end with </function>"),
        ("qwen3_coder", "<tool_call><function=f>x</function></tool_call>", "unexpected text"),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=days>two</parameter></function></tool_call>",
            "parameter 'days' must be of type integer, got 'two'",
        ),
        ("seed", "<seed:tool_call>f()</seed:tool_call>", "must begin with <function="),
        ("minimax", "<invoke name=></invoke>", "name of the tool is missing"),
        ("minimax", '<invoke name="f">x</invoke>', "unexpected text before <parameter name="),
        ("minimax", '<invoke name="f"><parameter name="a"></invoke>', "'a' is not closed"),
        ("glm", "<tool_call><arg_key>a</arg_key></tool_call>", "name of a tool"),
        ("glm", "<tool_call>f<arg_key>a</arg_key></tool_call>", "<arg_value>"),
        ("gemma", "<|tool_call>f{}<tool_call|>", "call:TOOL{"),
        ("gemma", "<|tool_call>call:f{a}<tool_call|>", "key"),
        ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', "not closed"),
        ("gemma", "<|tool_call>call:f{a:" + "[" * 99 + "<tool_call|>", "too deeply"),
        ("kimi", "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>", "is missing"),
        ("deepseek", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "is missing"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>[1]<|call|>", "JSON object"),
        ("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>json", "<|message|>"),
    ],
)
def test_an_error_names_the_problem(format_name, text, mentions):
    assert_malformed(only(parse(format_name, text)), mentions)


def test_an_error_stays_short():
    for format_name in ("qwen3_coder", "glm", "gemma", "kimi"):
        bad = write("f" * 5000, format_name, {"k" * 5000: 1}).replace("1", "", 1)
        bad = bad.replace("</arg_value>", "").replace("</parameter>", "")
        call = only(parse(format_name, bad))
        assert_malformed(call)
        assert len(call.error) + len(call.name) < 700


@pytest.mark.parametrize("deep", ['{"a":' * 50_000, "[" * 100_000])
def test_unterminated_json_is_an_error(deep):
    assert_malformed(only(parse("hermes", f"<tool_call>{deep}</tool_call>")))


TAGS = [
    *TURN_ENDS,
    *NEXT_ROLES,
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
    *("<invoke name=", "</invoke>", "<parameter name=", "<seed:tool_call>", "</seed:tool_call>"),
    *("<parameter=", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", "call:f{", '<|"|>', "<escape>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜DSML｜invoke"),
    *("<|channel|>", "to=functions.f", "<|message|>", "<|call|>", "<|start|>", "<|python_tag|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "</s>"),
    *(
        '{"name": "f", ',
        '"arguments": {',
        '"parameters": {',
        '"',
        "{",
        "}",
        "[",
        "]",
        ":",
        ",",
        "\\",
    ),
]


@pytest.mark.parametrize("format_name", FORMATS)
@given(pieces=st.lists(st.sampled_from(TAGS) | st.text(max_size=5), max_size=25))
@settings(max_examples=60)
def test_no_text_raises_an_exception(format_name, pieces):
    text = "".join(pieces)
    reply = parse(format_name, text)
    assert len(reply.content) <= len(text)
    for call in reply.calls:
        assert (call.arguments is None) == (call.error is not None)


# Openings and partial calls on which a naive search takes quadratic time.
HALVES = [
    *("<tool_call>{", '<tool_call>{"', '<tool_call>{"a":', '<tool_call>{"a":"</tool_call>'),
    *('<tool_call>{"x</tool_call>', '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    *('{"a":\n', '{"name": "f", "parameters": {}}\n', '[TOOL_CALLS]{"', "[TOOL_CALLS]f{"),
    *("<|tool_call>call:f{a:[", "<tool_call>f<arg_key>a", "<tool_call><function=f><parameter=a>"),
    *("<｜tool▁call▁begin｜>f<｜tool▁sep｜>{", '<｜DSML｜invoke name="', "<|start|>assistant to="),
    *(
        '"name" :',
        "<think></think>",
        "\n{",
        "\n \n\t",
        '<｜DSML｜invoke name="f">x</｜DSML｜invoke>',
    ),
]


@pytest.mark.parametrize("format_name", FORMATS)
def test_parsing_takes_linear_time(format_name):
    fmt = tool_format(format_name, None)
    opening = write("weather", format_name, {"city": "a"})[:30]
    for piece in [*'a<{["\\ \n:,=', *TAGS, *HALVES, opening]:
        for before in ("", opening):
            assert _is_linear(fmt, before, piece), piece


def _is_linear(fmt, before, piece):
    """Return whether 100,000 characters take less than 0.1 s, or no more than twice their share.

    A busy machine may take longer for all texts. In quadratic time four times as many characters
    take 16 times as long.
    """
    text = before + piece * (100_000 // len(piece))
    seconds = float("inf")
    for _ in range(3):
        seconds = min(seconds, _seconds(fmt, text))
        if seconds < 0.1:
            return True
    quarter = before + piece * (25_000 // len(piece))
    return seconds < 8 * min(_seconds(fmt, quarter) for _ in range(3))


def _seconds(fmt, text):
    started = time.process_time()
    fmt.parse(text, [WEATHER])
    return time.process_time() - started


# ---------------------------------------------------------------- types, names


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3", {"type": "number"}, 3),
        ("-2.5e1", {"type": "number"}, -25.0),
        ("True", {"type": "boolean"}, True),
        ("false ", {"type": "boolean"}, False),
        ("3", {"type": "string"}, "3"),
        (" a\n", {"type": "string"}, " a\n"),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 3),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1]", {"type": "array"}, [1]),
        ("[1]", {"type": "tuple"}, "[1]"),
        ("[1]", {"$ref": "#/x"}, "[1]"),
        ("__import__('os')", {"enum": ["a"]}, "__import__('os')"),
        ("3", None, "3"),
    ],
)
def test_texts_are_converted_by_the_schema(text, schema, value):
    converted = convert(text, schema)
    assert converted == value
    assert type(converted) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("3.5", "integer"),
        ("true", "integer"),
        ("9" * 5000, "integer"),
        ("1e999", "integer"),
        ("NaN", "number"),
        ("1", "boolean"),
        ("{'a': 1}", "object"),
        ("[1]", "object"),
        ("{}", "array"),
        ("", "integer"),
    ],
)
def test_a_text_of_another_type_is_refused(text, kind):
    with pytest.raises(ValueError, match=f"must be of type {kind}"):
        convert(text, {"type": kind})


def test_types_come_from_the_tool_that_is_called():
    text = write("weather", "glm", {"city": "1", "days": 1, "free": "1"})
    assert only(parse("glm", text)).arguments == {"city": "1", "days": 1, "free": "1"}
    other = write("other", "glm", {"days": 1})
    assert only(parse("glm", other)).arguments == {"days": "1"}


def test_names():
    assert set(FORMATS) | {"qwen"} == set(tool_formats)
    assert tool_formats.get("qwen") is tool_formats.get("hermes")
    with pytest.raises(ConfigError, match=r"'hermess'\. Nearest: hermes.*Known: deepseek, gem"):
        tool_format("hermess", None)
    with pytest.raises(ConfigError, match=r"got 'XYZ'\. Known: deepseek, gemma, glm, gpt-oss"):
        tool_format("XYZ", None)


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("gemma4", "gemma"),
        ("deepseek_v4", "deepseek"),
        ("minimax_m2", "minimax"),
        ("seed_oss", "seed"),
        ("kimi_k2", "kimi"),
    ],
)
def test_names_of_later_versions_and_of_engines_are_taken(name, own):
    assert only(tool_format(name, None).parse(write("f", own, {"a": 1}), [WEATHER])).name == "f"
    assert set(OTHER_NAMES.values()) <= set(tool_formats)
    assert not set(OTHER_NAMES) & set(tool_formats)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}</tool_call>", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=a></tool_call>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>k</arg_key><arg_value></tool_call>", "glm"),
        ("<|channel|>commentary to=functions.{{ name }}", "gpt-oss"),
        ('<|start_header_id|>{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call>call:{{ name }}<tool_call|>", "gemma"),
        ("<|tool_call_begin|><|tool_call_argument_begin|>", "kimi"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("<|im_start|>{{ role }}", None),
        ("<seed:tool_call><function=example><parameter=a></seed:tool_call>", "seed"),
        ('<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>', "minimax"),
        ('<tool_call><invoke name="f"></invoke></tool_call>', None),
        ("", None),
        (None, None),
    ],
)
def test_format_is_recognized_by_the_template(template, name):
    assert recognise_format(template) == name
