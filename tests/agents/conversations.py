"""Messages, tokenizers and boundaries of model families, for tests of chat templates."""

import functools

from tests.agents.templates import FAMILIES
from tests.agents.tokenizers import minimind_tokenizer, word_tokenizer
from verl.agents.boundary import ChatBoundary

USER = {"role": "user", "content": "Hello?"}
NEXT = {"role": "user", "content": "And next?"}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
ID = "call0000a"


def call(arguments, call_id=ID):
    function = {"name": "search", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(content, call_id=ID):
    return {"role": "tool", "name": "search", "tool_call_id": call_id, "content": content}


def saying(content, calls=()):
    message = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(calls)} if calls else message


@functools.cache
def tokenizer_of(name, real=False):
    family = FAMILIES[name]
    build = minimind_tokenizer if real else word_tokenizer
    return build(family.specials, eos=family.eos, template=family.template)


@functools.cache
def boundary_of(name, real=False):
    return ChatBoundary(tokenizer_of(name, real))


def rendered(tokenizer, messages, tools=None, generate=True):
    """Render messages with the template, with the arguments of calls in its format."""
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=generate
    )
