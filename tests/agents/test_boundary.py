"""The next prompt extends the drawn ids, and reads as the template itself writes it."""

import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.agents.conversations import (
    NEXT,
    TOOLS,
    USER,
    boundary_of,
    call,
    rendered,
    result,
    saying,
    tokenizer_of,
)
from tests.agents.templates import FAMILIES, Family
from tests.shared_files import SHARED, needs_shared
from verl.agents.boundary import ChatBoundary

ODD = "ab C.\n\n\t  {}\"'\\/<>:é好🙂"
CONTENTS = st.text(st.sampled_from(ODD), max_size=12)
QUESTIONS = CONTENTS.filter(str.strip)


@st.composite
def conversations(draw, family: Family):
    """Draw the first messages, the turns, and the tools.

    A turn is (reply, new messages, how the reply ended).
    """
    start = [{"role": "user", "content": draw(QUESTIONS)}]
    if family.system and draw(st.booleans()):
        start.insert(0, {"role": "system", "content": draw(QUESTIONS)})
    offers_tools = family.tools and draw(st.booleans())

    turns = []
    for turn in range(draw(st.integers(1, 3))):
        count = draw(st.integers(0, 2 if family.parallel else 1)) if offers_tools else 0
        ids = [f"call{turn:03d}{number:02d}" for number in range(count)]
        calls = [call({"query": draw(CONTENTS)}, call_id) for call_id in ids]
        new = [result(draw(CONTENTS), call_id) for call_id in ids]
        new = new or [{"role": "user", "content": draw(QUESTIONS)}]

        thought = draw(st.sampled_from(["", "", "<think>\nHm.\n</think>\n\n"]))
        content = draw(CONTENTS) if not calls or draw(st.booleans()) else ""
        ended = draw(st.sampled_from(["own", "other", "cut"]))
        turns.append((saying(thought + content, calls), new, ended))
    return start, turns, TOOLS if offers_tools else None


def as_template_takes(family, messages):
    """Write arguments as text where the template requires it, as DeepSeek's does."""
    if family is not FAMILIES["deepseek"]:
        return messages
    converted = []
    for message in messages:
        calls = []
        for each in message.get("tool_calls", ()):
            arguments = str(each["function"]["arguments"]).replace("'", '"')
            calls.append({**each, "function": {"name": "search", "arguments": arguments}})
        converted.append({**message, "tool_calls": calls} if calls else message)
    return converted


def drawn_ids(tokenizer, text, end):
    """Return ids of a reply drawn word by word, unlike `encode` of the whole text."""
    ids = []
    for piece in re.split(r"(\s+)", text):
        ids.extend(tokenizer.encode(piece, add_special_tokens=False))
    return [*ids, tokenizer.convert_tokens_to_ids(end)] if end else ids


def written_text(tokenizer, family, history, reply, tools):
    """Return the text of a reply: its content, or the template's text of its calls."""
    if not reply.get("tool_calls"):
        return family.header + reply["content"]
    prompt = rendered(tokenizer, history, tools)
    alone = rendered(tokenizer, [*history, reply], tools, generate=False)
    text = alone[len(prompt) :].removesuffix("\n").removesuffix(family.call_end)
    # Qwen3 writes empty reasoning while nothing follows.
    return text.removeprefix("<think>\n\n</think>\n\n")


def check_conversation(boundary, tokenizer, family, conversation):
    """Walk over the turns, and compare with the template after each of them.

    Returns whether the ids of the whole walk are the template's own text to the end.
    """
    start, turns, tools = conversation
    history = as_template_takes(family, start)
    ids = boundary.prompt(history, tools)
    intact = True

    for reply, new, ended in turns:
        (reply,) = as_template_takes(family, [reply])
        calls = bool(reply.get("tool_calls"))
        own_end = family.call_end if calls else family.end
        end = {"own": own_end, "other": family.other_end, "cut": ""}[ended]
        text = written_text(tokenizer, family, history, reply, tools)
        drawn = drawn_ids(tokenizer, text, end)

        extension = boundary.extension(history, reply, new, tools, drawn=drawn)
        prompt = rendered(tokenizer, history, tools)
        whole = rendered(tokenizer, [*history, reply, *new], tools)

        # The end of the turn appears once: drawn or appended.
        closes = family.call_closes if calls else family.closes
        behind = boundary.extension(history, reply, new, tools, drawn=[])
        (own_id,) = tokenizer.encode(own_end, add_special_tokens=False)
        assert own_id in behind
        if end == own_end or (end and closes):
            assert extension == behind[behind.index(own_id) + 1 :]
        else:
            assert extension == behind

        same = tokenizer.decode([*boundary.prompt(history, tools), *drawn, *extension]) == whole
        if end in ("", own_end) and whole.startswith(prompt + text + own_end):
            assert same
            assert tokenizer.encode(whole, add_special_tokens=False)[-len(extension) :] == extension
        assert boundary.rewrites(history, reply, new, tools, drawn=drawn) == (not same)

        place = len(ids)
        ids = [*ids, *drawn, *extension]
        assert ids[place : place + len(drawn)] == drawn
        intact = intact and same
        if intact:
            assert tokenizer.decode(ids) == whole
        history = [*history, reply, *new]
    return intact


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=25)
def test_any_conversation_continues_as_the_template_writes_it(name, data):
    conversation = data.draw(conversations(FAMILIES[name]))
    check_conversation(boundary_of(name), tokenizer_of(name), FAMILIES[name], conversation)


@needs_shared("models/minimind-tokenizer")
@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(max_examples=10)
def test_any_conversation_continues_with_a_real_vocabulary(name, data):
    conversation = data.draw(conversations(FAMILIES[name]))
    boundary, tokenizer = boundary_of(name, True), tokenizer_of(name, True)
    check_conversation(boundary, tokenizer, FAMILIES[name], conversation)


PLAIN = (
    [USER],
    [(saying("Hi."), [NEXT], "own"), (saying("A\n\nb"), [USER], "cut")],
    None,
)
CALLING = (
    [USER],
    [
        (saying("", [call({"query": "x y"})]), [result("found")], "own"),
        (saying("Hi."), [NEXT], "cut"),
    ],
    TOOLS,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_rewrites_a_plain_conversation(name):
    """Check that plain conversations need no exception from the property."""
    family = FAMILIES[name]
    arguments = (boundary_of(name), tokenizer_of(name), family)
    assert check_conversation(*arguments, PLAIN)
    if family.tools and name != "mistral":  # which moves its tools to the newest question
        assert check_conversation(*arguments, CALLING)


@needs_shared("models/qwen2-tokenizer")
@given(
    answer=st.text(alphabet=" \nax1é字\u0301<|im_end>", min_size=1, max_size=20),
    times=st.integers(1, 100),
    enough=st.integers(1, 60),
)
@settings(max_examples=100)
def test_a_long_answer_is_cut_only_where_it_is_too_long(answer, times, enough):
    """Check `enough` on a vocabulary that composes characters and has tokens of 128.

    A cut within a special token makes several ids of one.
    """
    boundary = boundary_of_qwen()
    new = [{"role": "user", "content": answer * times}]
    arguments = ([USER], saying("Hi."), new)
    whole = boundary.extension(*arguments, drawn=[])
    cut = boundary.extension(*arguments, drawn=[], enough=enough)
    assert cut == whole or min(len(cut), len(whole)) >= enough

    prompt = boundary.prompt(new)
    cut_prompt = boundary.prompt(new, enough=enough)
    assert cut_prompt == prompt or min(len(cut_prompt), len(prompt)) >= enough


@cache
def boundary_of_qwen() -> ChatBoundary:
    return ChatBoundary(AutoTokenizer.from_pretrained(SHARED / "models" / "qwen2-tokenizer"))


class _WithoutNewline(ChatBoundary):
    """A mutation: the newline that the template writes behind the end of a turn is lost."""

    def extension(self, *arguments, drawn, **keywords):
        ids = super().extension(*arguments, drawn=drawn, **keywords)
        newline = self._template.encode_part("\n")
        return ids[1:] if ids[:1] == newline else ids


class _EndsTwice(ChatBoundary):
    """A mutation: the end of a turn is appended also where it was drawn."""

    def extension(self, *arguments, drawn, **keywords):
        return super().extension(*arguments, drawn=[], **keywords)


@pytest.mark.parametrize(
    ("mutation", "name"),
    [(_WithoutNewline, name) for name in ("qwen2.5", "qwen3", "gemma", "gemma4", "glm")]
    + [(_EndsTwice, name) for name in FAMILIES],
)
def test_property_fails_for_a_wrong_boundary(mutation, name):
    boundary = mutation(tokenizer_of(name))
    with pytest.raises(AssertionError):
        check_conversation(boundary, tokenizer_of(name), FAMILIES[name], PLAIN)
