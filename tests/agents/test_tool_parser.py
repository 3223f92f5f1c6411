"""User parser classes are formats, and built-in formats have the interface of such classes."""

import asyncio
import textwrap

import pytest

from tests.agents.replies import WEATHER, write
from tests.agents.tokenizers import word_tokenizer
from verl.agents.formats import FunctionCall, ToolParser, parse_reply, tool_format
from verl.utils.errors import ConfigError
from verl.utils.imports import load_module

USER_FILE = """
    import asyncio

    from verl.agents.formats.tool_parser import FunctionCall, ToolParser

    @ToolParser.register("angle")
    class AngleParser(ToolParser):
        async def extract_tool_calls(self, responses_ids):
            loop = asyncio.get_running_loop()
            text = await loop.run_in_executor(None, self.tokenizer.decode, responses_ids)
            before, _, call = text.partition(">>")
            name, _, arguments = call.partition(" ")
            return before, [FunctionCall(name=name, arguments=arguments)] if name else []
"""


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture
def angle(tmp_path):
    path = tmp_path / "angle.py"
    path.write_text(textwrap.dedent(USER_FILE))
    load_module(str(path))
    yield "angle"
    ToolParser._parsers.remove("angle")


def test_a_class_of_a_users_file_is_a_format(angle, tokenizer):
    fmt = tool_format(angle, tokenizer)
    text = 'hi >>weather {"days": 2}'
    ids = tokenizer.encode(text)

    parsed = asyncio.run(parse_reply(fmt, ids, "", [WEATHER]))
    assert parsed.content == "hi "
    assert [(call.name, call.arguments) for call in parsed.calls] == [("weather", {"days": 2})]

    for bad in ("{", "[1]", ""):
        ids = tokenizer.encode(f">>weather {bad}")
        (call,) = asyncio.run(parse_reply(fmt, ids, "", [])).calls
        assert call.arguments is None
        assert call.error
        assert call.raw == bad


def test_a_class_may_take_the_tools(tokenizer):
    @ToolParser.register("first-tool")
    class FirstTool(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            return "", [FunctionCall(name=tools[0]["function"]["name"], arguments="{}")]

    try:
        fmt = tool_format("first-tool", tokenizer)
        (call,) = asyncio.run(parse_reply(fmt, [1], "", [WEATHER])).calls
        assert call.name == "weather"
    finally:
        ToolParser._parsers.remove("first-tool")


def test_built_in_formats_have_the_parser_interface(tokenizer):
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    good = write("weather", "hermes", {"city": "Zürich"})
    ids = tokenizer.encode("Hi." + good + "<tool_call>{</tool_call>" + "<|im_end|>")

    content, calls = asyncio.run(parser.extract_tool_calls(ids))
    assert content == "Hi."
    assert calls == [FunctionCall(name="weather", arguments='{"city": "Zürich"}')]

    typed = ToolParser.get_tool_parser("glm", tokenizer)
    ids = tokenizer.encode(write("weather", "glm", {"days": 2}))
    _, calls = asyncio.run(typed.extract_tool_calls(ids, [WEATHER]))
    assert calls[0].arguments == '{"days": 2}'


def test_an_unknown_name_is_an_error(tokenizer):
    with pytest.raises(ConfigError, match=r"Nearest: mistral\. Known: deepseek"):
        ToolParser.get_tool_parser("mistrall", tokenizer)
