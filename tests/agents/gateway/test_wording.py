"""Replies of the gateway: tool calls are read as those of agents in training."""

import asyncio

from tests.tiny_models import tiny_tokenizer
from verl.agents.boundary import ChatBoundary
from verl.agents.engine_client import Generated
from verl.agents.formats import FunctionCall, ToolParser, tool_format
from verl.agents.gateway.wording import Wording

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def reply_of(tokenizer, call_format, ids):
    drawn = Generated(token_ids=ids, log_probs=[0.0] * len(ids), finish_reason="stop")
    wording = Wording(tokenizer, ChatBoundary(tokenizer), call_format)
    return asyncio.run(wording.reply([1], drawn, tools=TOOLS))


def test_a_closing_tag_may_be_a_special_token():
    tokenizer = tiny_tokenizer()
    tags = ["<tool_call>", "</tool_call>"]
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [*tokenizer.all_special_tokens[3:], *tags]}
    )
    ids = tokenizer.encode(f"{CALL}<|im_end|>", add_special_tokens=False)

    reply = reply_of(tokenizer, tool_format("hermes", tokenizer), ids)
    assert [call["function"]["arguments"] for call in reply.tool_calls] == ['{"a": 1}']
    assert reply.content == ""
    assert reply.finish_reason == "tool_calls"


def test_a_parser_of_a_user_reads_the_drawn_ids():
    tokenizer = tiny_tokenizer()
    seen = []

    @ToolParser.register("noting")
    class Noting(ToolParser):
        async def extract_tool_calls(self, responses_ids, tools=None):
            seen.append(responses_ids)
            return "text", [FunctionCall(name="f", arguments="{}")]

    # Ids that no text encodes to: an end in the middle.
    ids = [*tokenizer.encode("a b", add_special_tokens=False), tokenizer.pad_token_id, 4, 4]
    try:
        reply = reply_of(tokenizer, tool_format("noting", tokenizer), ids)
    finally:
        ToolParser._parsers.remove("noting")
    assert seen == [ids]
    assert reply.content == "text"
    assert len(reply.tool_calls) == 1
