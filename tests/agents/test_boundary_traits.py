"""Each trait of a chat template that makes it hard to continue a conversation."""

import copy

import pytest
from transformers import AutoTokenizer

from tests.agents.conversations import (
    NEXT,
    TOOLS,
    USER,
    boundary_of,
    call,
    result,
    saying,
    tokenizer_of,
)
from tests.agents.templates import FAMILIES
from tests.agents.tokenizers import with_specials, word_tokenizer
from tests.shared_files import SHARED, needs_shared
from verl.agents.boundary import ChatBoundary
from verl.utils.errors import BoundaryError, DataError, VerlError


def continued(name, reply, new, drawn_text, tools=None, history=(USER,)):
    tokenizer = tokenizer_of(name)
    drawn = tokenizer.encode(drawn_text, add_special_tokens=False)
    return tokenizer.decode(
        boundary_of(name).extension(list(history), reply, new, tools, drawn=drawn)
    )


def rewritten(name, reply, new, drawn_text, tools=None, history=(USER,)):
    drawn = tokenizer_of(name).encode(drawn_text, add_special_tokens=False)
    return boundary_of(name).rewrites(list(history), reply, new, tools, drawn=drawn)


@pytest.mark.parametrize(
    ("drawn", "expected"),
    [
        ("Hi.<|im_end|>", "\n<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
        ("Hi.<|im_end|>\n", "<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
        ("Hi.<|endoftext|>", "\n<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
        ("Hi", "<|im_end|>\n<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
        ("Hi\n", "<|im_end|>\n<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
        ("", "<|im_end|>\n<|im_start|>user\nAnd next?<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_chatml_keeps_the_newline_behind_the_end_of_a_turn(drawn, expected):
    assert continued("qwen2.5", saying("Hi."), [NEXT], drawn) == expected


def test_results_of_several_calls_share_a_turn():
    reply = saying("", [call({}), call({}, "call0000b")])
    new = [result("one"), result("two", "call0000b")]
    assert continued("qwen2.5", reply, new, "x<|im_end|>", TOOLS) == (
        "\n<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo"
        "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_that_the_template_drops_stays_in_the_drawn_ids():
    boundary, tokenizer = boundary_of("qwen3"), tokenizer_of("qwen3")
    text = "<think>\nHm.\n</think>\n\nHi."
    drawn = tokenizer.encode(text + "<|im_end|>")
    reply = saying(text)
    assert boundary.rewrites([USER], reply, [NEXT], drawn=drawn)
    assert continued("qwen3", reply, [NEXT], text + "<|im_end|>").startswith("\n<|im_start|>user")

    # Within a turn that calls tools the reasoning stays.
    written = f'{text}\n<tool_call>\n{{"name": "search", "arguments": {{}}}}\n</tool_call>'
    drawn = tokenizer.encode(written + "<|im_end|>")
    called = saying(text, [call({})])
    assert not boundary.rewrites([USER], called, [result("a")], TOOLS, drawn=drawn)


def test_a_template_that_opens_reasoning_rewrites_it():
    tokenizer = copy.copy(tokenizer_of("qwen3"))
    tokenizer.chat_template = "{% set enable_thinking = false %}" + tokenizer.chat_template
    boundary = ChatBoundary(tokenizer)
    ids = boundary.prompt([USER])
    assert tokenizer.decode(ids).endswith("<think>\n\n</think>\n\n")
    drawn = tokenizer_of("qwen3").encode("Hi.")
    assert boundary.rewrites([USER], saying("Hi."), [NEXT], drawn=drawn)
    assert not boundary_of("qwen3").rewrites([USER], saying("Hi."), [NEXT], drawn=drawn)


def test_llama_accepts_both_ends_of_a_turn_and_a_date():
    expected = (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"a"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    reply = saying("", [call({"q": 1})])
    for end in ("<|eom_id|>", "<|eot_id|>"):
        assert continued("llama3", reply, [result("a")], "x" + end, TOOLS) == expected
    assert continued("llama3", reply, [result("a")], "x", TOOLS) == "<|eot_id|>" + expected

    # Its template writes one call a turn, but a model may draw two.
    two = saying("", [call({}), call({})])
    assert continued("llama3", two, [result("a")], "x<|eom_id|>", TOOLS) == expected


def test_gemma_merges_new_messages_and_knows_no_tools():
    assert continued("gemma", saying("Hi."), [NEXT, USER], "Hi.<end_of_turn>") == (
        "\n<start_of_turn>user\nAnd next?\n\nHello?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert not boundary_of("gemma").has_tools()
    with pytest.raises(BoundaryError, match=r"roles \[tool\].*refuses them.*unknown role tool"):
        continued("gemma", saying("Hi."), [result("a")], "Hi.")


def test_mistral_repeats_neither_its_tools_nor_its_system_message():
    system = {"role": "system", "content": "Be short."}
    for history in ([USER], [system, USER]):
        extension = continued("mistral", saying("Hi."), [NEXT], "Hi.</s>", TOOLS, history)
        assert extension == "[INST]And next?[/INST]"
    assert rewritten("mistral", saying("Hi."), [NEXT], "Hi.</s>", history=[system, USER])
    assert rewritten("mistral", saying("Hi."), [NEXT], "Hi.</s>", TOOLS)
    assert not rewritten("mistral", saying("Hi."), [NEXT], "Hi.</s>")

    called = saying("", [call({})])
    written = '[TOOL_CALLS][{"name": "search", "arguments": {}, "id": "call0000a"}]</s>'
    assert not rewritten("mistral", called, [result("a")], written, TOOLS)
    assert continued("mistral", called, [result("a")], "x</s>", TOOLS).startswith("[TOOL_RESULTS]")
    with pytest.raises(BoundaryError, match="IDs must have length 9"):
        continued("mistral", saying("", [call({}, "1")]), [result("a", "1")], "x</s>", TOOLS)


def test_gpt_oss_answers_a_call_that_was_malformed():
    expected = (
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"a"<|end|>'
        "<|start|>assistant"
    )
    for reply in (saying("", [call({})]), saying("to=functions.search {")):
        assert continued("gpt-oss", reply, [result("a")], "x<|call|>", TOOLS) == expected
        assert continued("gpt-oss", reply, [result("a")], "x", TOOLS) == "<|call|>" + expected

    # <|return|> ends a final answer, and history writes <|end|>: the drawn token stays.
    text = "<|channel|>final<|message|>Hi.<|return|>"
    expected = "<|start|>user<|message|>And next?<|end|><|start|>assistant"
    assert continued("gpt-oss", saying("Hi."), [NEXT], text) == expected


def test_glm_ends_a_turn_by_the_next_role():
    assert continued("glm", saying("Hi."), [NEXT], "Hi.<|user|>") == "\nAnd next?<|assistant|>\n"
    for end in ("<|endoftext|>", "", "<|observation|>"):
        extension = continued("glm", saying("Hi."), [NEXT], "Hi." + end)
        assert extension == "<|user|>\nAnd next?<|assistant|>\n"


def test_arguments_may_be_texts_or_objects():
    for name in FAMILIES:
        if not FAMILIES[name].tools:
            continue
        prompts = []
        for arguments in ({"query": "é"}, '{"query": "é"}'):
            history = [USER, saying("", [call(arguments)]), result("a")]
            prompts.append(boundary_of(name).prompt(history, TOOLS))
        assert prompts[0] == prompts[1]
        assert "é" in tokenizer_of(name).decode(prompts[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_has_tools(name):
    assert boundary_of(name).has_tools() == FAMILIES[name].tools


def test_report_is_one_line():
    assert boundary_of("qwen3").report() == (
        "Chat template: a reply ends with '<|im_end|>\\n', a user's message begins with "
        "'<|im_start|>user\\n', the generation prompt is '<|im_start|>assistant\\n'; describes "
        "tools, drops earlier reasoning."
    )
    for name in FAMILIES:
        assert "\n" not in boundary_of(name).report()
    assert "ends with '<|end|>'" in boundary_of("gpt-oss").report()


def test_a_call_renders_once(monkeypatch):
    tokenizer = word_tokenizer(template=FAMILIES["qwen3"].template)
    boundary = ChatBoundary(tokenizer)
    new, reply = [result("a")], saying("", [call({})])
    boundary.extension([USER], reply, new, TOOLS, drawn=[1])

    renders = []
    original = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda *a, **k: renders.append(a) or original(*a, **k)
    )
    boundary.extension([USER] * 500, reply, new, TOOLS * 50, drawn=[1])
    assert len(renders) == 1
    assert len(renders[0][0]) == 3  # history and tools are not rendered


# ---------------------------------------------------------------- templates of a user's own


def own(template, **keywords):
    specials = ("<|im_start|>", "<|im_end|>", "<eot>")
    tokenizer = word_tokenizer(specials, eos="<|im_end|>", template=template)
    return tokenizer, ChatBoundary(tokenizer, **keywords)


def test_text_may_depend_on_the_history():
    tokenizer, boundary = own(
        "{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index }}]{% endif %}"
        "{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}assistant: "
    )
    history = [USER, saying("a"), USER, saying("b"), USER]
    ids = boundary.extension(history, saying("c"), [NEXT], drawn=tokenizer.encode("c<|im_end|>"))
    assert tokenizer.decode(ids) == "\n[Round 7]user: And next?<|im_end|>\nassistant: "


def test_tools_that_a_template_repeats_in_every_question_are_written():
    tokenizer, boundary = own(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if tools and m.role == 'user' %}"
        " Use {{ tools[0].function.name }}.{% endif %}<|im_end|>{% endfor %}assistant: "
    )
    drawn = tokenizer.encode("c<|im_end|>")
    ids = boundary.extension([USER], saying("c"), [NEXT], TOOLS, drawn=drawn)
    assert tokenizer.decode(ids) == "user: And next? Use search.<|im_end|>assistant: "


def test_an_unknown_end_of_a_turn_is_found_or_given():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>\n{% endfor %}assistant: "
    tokenizer, boundary = own(template)
    for end in ("<eot>", "<|im_end|>"):
        ids = boundary.extension([USER], saying("c"), [NEXT], drawn=tokenizer.encode("c" + end))
        assert tokenizer.decode(ids) == "\nuser: And next?<eot>\nassistant: "

    (start,) = tokenizer.encode("<|im_start|>")
    assert boundary.extension([USER], saying("c"), [NEXT], drawn=[start])[0] != ids[0]
    _, given = own(template, stop_ids=[start])
    assert given.extension([USER], saying("c"), [NEXT], drawn=[start]) == ids


def test_the_text_of_a_turn_lacks_its_end_alone():
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eot>\n{% endfor %}assistant: "
    tokenizer, _ = own(template)
    (given,) = tokenizer.encode("<|im_start|>")  # as the closing tag of a call may be
    _, boundary = own(template, stop_ids=[given])
    for end in ("<eot>", tokenizer.eos_token, ""):
        drawn = tokenizer.encode(f"<|im_start|>c d{end}", add_special_tokens=False)
        assert boundary.text_of(drawn) == "<|im_start|>c d"

    drawn = tokenizer.encode("c<|im_start|>", add_special_tokens=False)
    assert boundary.text_of(drawn) == "c<|im_start|>"
    assert boundary.text_of([]) == ""


def test_a_turn_may_end_with_several_tokens():
    tokenizer, boundary = own(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_start|><eot>\n{% endfor %}"
        "assistant: "
    )
    for end, rest in (("", "<|im_start|><eot>"), ("<|im_start|>", "<eot>"), ("<eot>", "")):
        drawn = tokenizer.encode("c" + end)
        ids = boundary.extension([USER], saying("c"), [NEXT], drawn=drawn)
        assert tokenizer.decode(ids) == rest + "\nuser: And next?<|im_start|><eot>\nassistant: "
        reads_alike = end != "<eot>"
        assert boundary.rewrites([USER], saying("c"), [NEXT], drawn=drawn) == (not reads_alike)


def test_a_newline_of_the_reply_is_not_the_templates():
    tokenizer, boundary = own(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n<|im_end|>{% endfor %}assistant: "
    )
    for drawn, rest in (("c\n", "\n<|im_end|>"), ("c\n<|im_end|>", ""), ("c<|im_end|>", "")):
        ids = boundary.extension([USER], saying("c"), [NEXT], drawn=tokenizer.encode(drawn))
        assert tokenizer.decode(ids) == rest + "user: And next?\n<|im_end|>assistant: "


def test_later_results_have_another_format():
    """Continue the block that the first result opens in DeepSeek-R1's template."""
    tokenizer, boundary = own(
        "{% set ns = namespace(first=true) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{{ '<results>' if ns.first else '' }}{{ m.content }}{% set ns.first = false %}"
        "{% else %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}{% endfor %}assistant: "
    )
    called, drawn = saying("", [call({})]), tokenizer.encode("c<|im_end|>")
    for history, expected in (([USER], "<results>b"), ([USER, called, result("a")], "b")):
        ids = boundary.extension(history, called, [result("b")], drawn=drawn)
        assert tokenizer.decode(ids) == expected + "assistant: "


def test_a_boundary_without_special_tokens():
    tokenizer, boundary = own(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}assistant:"
    )
    ids = boundary.extension([USER], saying("c"), [NEXT], drawn=tokenizer.encode("c"))
    assert tokenizer.decode(ids) == "\n\nuser: And next?\n\nassistant:"


@pytest.mark.parametrize(
    ("template", "trait"),
    [
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "leaves it out"),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", "or changes it"),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{{ m.content }}{% endfor %}",
            "repeats it",
        ),
        (
            "{% for m in messages %}{{ m.content }}<|im_end|>{{ m.content | length }}{% endfor %}",
            "same text behind any reply",
        ),
        (
            "{{ messages[-1].content }}{% for m in messages[:-1] %}{{ m.content }}{% endfor %}",
            "moved before it",
        ),
        (
            "{{ raise_exception('one question alone') if messages | length > 1 }}"
            "{{ messages[0].content }}",
            "one question",
        ),
    ],
)
def test_template_without_exact_extension_is_named(template, trait):
    with pytest.raises(BoundaryError, match=trait) as raised:
        own(template)
    assert isinstance(raised.value, VerlError)
    assert isinstance(raised.value, ValueError)


def test_message_moved_by_the_template_is_rejected():
    """Reject a system message that the template would move to the beginning."""
    tokenizer, boundary = own(
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.role != 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    late = {"role": "system", "content": "Late."}
    with pytest.raises(BoundaryError, match=r"message 0 \(system\) is left out or moved"):
        boundary.extension([USER], saying("c"), [late, NEXT], drawn=tokenizer.encode("c"))
    assert boundary.rewrites([USER], saying("c"), [late, NEXT], drawn=tokenizer.encode("c"))


def test_a_refused_prompt_is_an_error_of_the_data():
    with pytest.raises(DataError, match="unknown role tool"):
        boundary_of("gemma").prompt([USER, result("a")])


# ---------------------------------------------------------------- other tokenizers


def test_a_tokenizer_without_template_writes_lines():
    tokenizer = word_tokenizer()
    boundary = ChatBoundary(tokenizer)
    assert not boundary.has_tools()
    assert tokenizer.decode(boundary.prompt([USER])) == "Hello?"

    two = [{"role": "system", "content": "Be short."}, USER]
    for end in ("", "<|im_end|>"):
        drawn = tokenizer.encode(" Hi." + end)
        ids = [*boundary.prompt(two), *drawn]
        ids += boundary.extension(two, saying(" Hi."), [result("a"), NEXT], drawn=drawn)
        assert tokenizer.decode(ids) == (
            f"system: Be short.\nuser: Hello?\nassistant: Hi.{end}\ntool: a\nuser: And next?"
            "\nassistant:"
        )


@needs_shared("models/stories260K")
@pytest.mark.parametrize(
    ("template", "drawn"),
    [(None, ["▁Once", "▁upon"]), (FAMILIES["qwen2.5"].template, ["O", "n", "ce", "▁upon"])],
)
def test_a_tokenizer_that_adds_a_space_in_front_of_texts(template, drawn):
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "stories260K")
    if template:
        with_specials(tokenizer, FAMILIES["qwen2.5"].specials, eos="<|im_end|>", template=template)
    boundary = ChatBoundary(tokenizer)
    history = [{"role": "system", "content": "Be short."}, USER]
    reply = saying("Once upon")

    drawn = tokenizer.convert_tokens_to_ids(drawn)
    ids = [*boundary.prompt(history), *drawn]
    ids += boundary.extension(history, reply, [NEXT], drawn=drawn)
    assert ids == boundary.prompt([*history, reply, NEXT])
    assert not boundary.rewrites(history, reply, [NEXT], drawn=drawn)


@needs_shared("models/minimind-tokenizer")
def test_a_template_of_a_published_model():
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "models" / "minimind-tokenizer")
    boundary = ChatBoundary(tokenizer)
    assert boundary.has_tools()
    reply = saying("", [call({"query": "x"})])
    written = '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
    drawn = tokenizer.encode(written + "<|im_end|>")
    assert not boundary.rewrites([USER], reply, [result("a")], TOOLS, drawn=drawn)

    ids = [*boundary.prompt([USER], TOOLS), *drawn]
    ids += boundary.extension([USER], reply, [result("a")], TOOLS, drawn=drawn)
    assert ids == boundary.prompt([USER, reply, result("a")], TOOLS)
