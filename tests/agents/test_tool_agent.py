"""Turns between model, tools and a simulated user: tokens, masks, counts and limits."""

import json
import sys
import textwrap
from pathlib import Path

import pytest

from tests.agents.scripted import chat_tokenizer, episode, play, rollout_config, text_of
from verl.agents import AgentLoopBase, register
from verl.agents.rendering import ChatTemplate
from verl.agents.runner import AgentRunner
from verl.agents.tools import ToolSet
from verl.utils.errors import ConfigError, DataError, MissingDependencyError, VerlError
from verl.utils.logging import say_once

pytestmark = pytest.mark.usefixtures("one_nursery")

TOOLS = '''
from verl.agents.tools import function_tool


@function_tool(isolation="thread")
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)


@function_tool(isolation="thread")
def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: of the failure.
    """
    raise ValueError(reason)
'''


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text(textwrap.dedent(TOOLS))
    return str(path)


def adds_once(row: int, turn: int, prompt: str) -> str:
    """Call the tool in turn 0, and answer by its result in turn 1."""
    if turn == 0:
        return call("add", f'{{"a": {row}, "b": 2}}')
    result = prompt.split("<tool_response>\n")[-1].split("\n</tool_response>")[0]
    return f"The sum is {result}."


def test_only_drawn_tokens_are_trained(tools: str):
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__function_tool_path=tools)
    episodes = [episode(tokenizer, row) for row in range(3)]
    trajectories, metrics, engine = play(config, tokenizer, adds_once, episodes)

    for row, trajectory in enumerate(trajectories):
        assert [segment.source for segment in trajectory.segments] == ["model", "tool", "model"]
        drawn = text_of(tokenizer, trajectory, "model")
        assert drawn == [
            call("add", f'{{"a": {row}, "b": 2}}') + "<|im_end|>",
            f"The sum is {row + 2}.<|im_end|>",
        ]
        between = text_of(tokenizer, trajectory, "tool")[0]
        assert between.startswith("\n<|im_start|>user")
        assert f"<tool_response>\n{row + 2}\n</tool_response>" in between
        assert between.endswith("<|im_start|>assistant\n")
        assert trajectory.num_turns == 4
        assert [message["role"] for message in trajectory.extra["messages"]] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]

        whole = [*trajectory.prompt_ids, *trajectory.response_ids]
        second = next(prompt for prompt in engine.prompts if tuple(whole[: len(prompt)]) == prompt)
        assert len(second) > 0

    assert metrics["tools/add/ok"] == 3
    assert metrics["agent_loop/ended_by/answer"] == 3


STATEFUL = """
from verl.experimental.agent_loop.tool_agent_loop import AgentData
from verl.tools.base_tool import BaseTool


def seen(data: AgentData):
    data.extra_fields["calls"] = data.extra_fields.get("calls", 0) + 1
    roles = "".join(message["role"][0] for message in data.messages)
    return f"{roles} {data.assistant_turns} {data.tool_rewards} {data.extra_fields['calls']}"


class Declares(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        return seen(agent_data), 0.25, {}


class Reads(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return seen(kwargs["agent_data"]), 0.25, {}
"""
STATEFUL_ENTRY = """
tools:
  - class_name: {path}:{name}
    config: {{isolation: {isolation}}}
    tool_schema:
      type: function
      function:
        name: look
        description: Look at the episode.
        parameters: {{type: object, properties: {{}}, required: []}}
"""


@pytest.mark.parametrize("name", ["Declares", "Reads"])
@pytest.mark.parametrize(("isolation", "calls"), [("thread", 2), ("process", 1)])
def test_a_tool_reads_the_state_of_its_episode(
    tmp_path: Path, name: str, isolation: str, calls: int
):
    """A tool of verl 0.6 and later gets `agent_data`; in a helper process it is a copy."""
    (tmp_path / "stateful.py").write_text(STATEFUL)
    entry = STATEFUL_ENTRY.format(path=tmp_path / "stateful.py", name=name, isolation=isolation)
    (tmp_path / "tools.yaml").write_text(entry)
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__tool_config_path=str(tmp_path / "tools.yaml"))

    def script(row: int, turn: int, prompt: str) -> str:
        return call("look", "{}") if turn < 2 else "Done."

    (trajectory,), _, _ = play(config, tokenizer, script, [episode(tokenizer)])
    answers = [each["content"] for each in trajectory.extra["messages"] if each["role"] == "tool"]
    assert answers == ["ua 1 [] 1", f"uata 2 [0.25] {calls}"]
    assert trajectory.extra["tool_rewards"] == [0.25, 0.25]
    assert trajectory.extra.get("calls") == (2 if isolation == "thread" else None)


def test_the_model_sees_exactly_the_tokens_that_are_trained_on(tools: str):
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__function_tool_path=tools)
    (trajectory,), _, engine = play(config, tokenizer, adds_once, [episode(tokenizer)])
    first = len(trajectory.prompt_ids)
    before_answer = len(trajectory.segments[0].token_ids) + len(trajectory.segments[1].token_ids)
    whole = [*trajectory.prompt_ids, *trajectory.response_ids]
    assert engine.prompts == [tuple(whole[:first]), tuple(whole[: first + before_answer])]
    assert trajectory.segments[2].log_probs == [
        -1.0 - place for place in range(len(trajectory.segments[2].token_ids))
    ]


def test_invalid_calls_are_answered_and_counted(tools: str):
    tokenizer = chat_tokenizer()
    wrong = [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1,\n</tool_call>',
        call("subtract", "{}"),
        call("fail", '{"reason": "no way"}'),
        "I give up.",
    ]
    config = rollout_config(multi_turn__function_tool_path=tools)
    (trajectory,), metrics, _ = play(
        config, tokenizer, lambda row, turn, prompt: wrong[turn], [episode(tokenizer)]
    )
    answers = text_of(tokenizer, trajectory, "tool")

    assert len(answers) == 3
    assert "add" in answers[1], "an unknown tool is answered with the known ones"
    assert "no way" in answers[2]
    assert metrics["tools/fail/error"] == 1
    assert sum(value for name, value in metrics.items() if name.endswith("/unknown")) == 1
    assert sum(value for name, value in metrics.items() if name.endswith("/malformed")) == 1


@pytest.mark.parametrize(
    ("settings", "turns", "ended_by"),
    [
        ({"multi_turn__max_assistant_turns": 2}, 2, "turns"),
        ({"multi_turn__max_user_turns": 3}, 4, "turns"),
        ({"response_length": 200}, None, "length"),
        ({"multi_turn__max_tokens_per_turn": 5}, 1, "length"),
    ],
)
def test_an_episode_ends_at_its_limits(
    tools: str, settings: dict, turns: int | None, ended_by: str
):
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__function_tool_path=tools, **settings)
    (trajectory,), metrics, _ = play(
        config,
        tokenizer,
        lambda row, turn, prompt: call("add", '{"a": 1, "b": 2}'),
        [episode(tokenizer)],
    )
    assert metrics[f"agent_loop/ended_by/{ended_by}"] == 1
    assert trajectory.segments[-1].is_model, "nothing stands after the last turn of the model"
    assert len(trajectory.response_ids) <= config.response_length
    drawn = sum(segment.is_model for segment in trajectory.segments)
    if turns is not None:
        assert drawn == turns
    # the prompt, the turns, and the answers that the model read
    assert trajectory.num_turns == 1 + drawn + (drawn - 1)


TALK = '''
from verl.agents.tools import function_tool


@function_tool(isolation="thread")
def talk() -> str:
    """Talk without an end."""
    return "7 " * 100_000
'''


def test_a_long_answer_ends_an_episode_without_being_tokenized_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    encoded = []
    encode = ChatTemplate.encode_part

    def count(template: ChatTemplate, text: str) -> list[int]:
        encoded.append(len(text))
        return encode(template, text)

    monkeypatch.setattr(ChatTemplate, "encode_part", count)
    tokenizer = chat_tokenizer()
    path = tmp_path / "talk.py"
    path.write_text(textwrap.dedent(TALK))
    config = rollout_config(
        multi_turn__function_tool_path=str(path),
        multi_turn__max_tool_response_length=10**6,
        response_length=1000,
    )
    (trajectory,), metrics, _ = play(
        config, tokenizer, lambda row, turn, prompt: call("talk", "{}"), [episode(tokenizer)]
    )

    assert metrics["agent_loop/ended_by/length"] == 1
    assert [segment.source for segment in trajectory.segments] == ["model"]
    assert len(trajectory.extra["messages"][-1]["content"]) == 200_000, "noted whole"
    longest_token = max(map(len, tokenizer.get_vocab()))
    assert 1000 < max(encoded) < 1100 * longest_token


@pytest.mark.parametrize(("policy", "masks"), [("text", [True, True]), ("mask", [False, True])])
def test_call_of_a_failing_tool(tools: str, policy: str, masks: list[bool]):
    tokenizer = chat_tokenizer()
    replies = [call("fail", '{"reason": "no"}'), "Done."]
    config = rollout_config(multi_turn__function_tool_path=tools, agent__tool_error=policy)
    (trajectory,), _, _ = play(
        config, tokenizer, lambda row, turn, prompt: replies[turn], [episode(tokenizer)]
    )
    learned = [segment.is_trained for segment in trajectory.segments if segment.is_model]
    assert learned == masks
    assert not trajectory.is_dropped


def test_an_episode_with_a_failing_tool_can_be_dropped(tools: str):
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__function_tool_path=tools, agent__tool_error="drop")
    (trajectory,), metrics, _ = play(
        config,
        tokenizer,
        lambda row, turn, prompt: call("fail", '{"reason": "no"}'),
        [episode(tokenizer)],
    )
    assert trajectory.is_dropped
    assert metrics["agent_loop/dropped"] == 1


INTERACTION = """
from verl.agents.interactions import BaseInteraction

LOG = {log!r}


class Quiz(BaseInteraction):
    async def start_interaction(self, instance_id=None, answer="", **kwargs):
        self.answers = getattr(self, "answers", {{}})
        self.answers[instance_id] = answer
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        is_right = self.answers[instance_id] in messages[-1]["content"]
        return is_right, "Right!" if is_right else "Try again.", float(is_right), {{}}

    async def finalize_interaction(self, instance_id=None, **kwargs):
        with open(LOG, "a") as file:
            file.write(instance_id + "\\n")
"""


@pytest.fixture
def quiz(tmp_path: Path) -> str:
    log = str(tmp_path / "finalized")
    (tmp_path / "quiz.py").write_text(textwrap.dedent(INTERACTION.format(log=log)))
    path = tmp_path / "interactions.yaml"
    path.write_text(
        f"interaction:\n  - name: quiz\n    class_name: {tmp_path}/quiz.py:Quiz\n    config: {{}}\n"
    )
    return str(path)


def test_simulated_user_answers_until_satisfied(quiz: str, tmp_path: Path):
    tokenizer = chat_tokenizer()
    config = rollout_config(multi_turn__interaction_config_path=quiz)
    kwargs = {"interaction_kwargs": {"name": "quiz", "answer": "4"}}
    (trajectory,), metrics, _ = play(
        config,
        tokenizer,
        lambda row, turn, prompt: f"Is it {turn + 3}?",
        [episode(tokenizer, extra_info=kwargs)],
    )

    assert [segment.source for segment in trajectory.segments] == ["model", "user", "model"]
    assert "Try again." in text_of(tokenizer, trajectory, "user")[0]
    assert trajectory.extra["turn_scores"] == [0.0, 1.0]
    assert trajectory.turn_rewards == {0: 0.0, 1: 1.0}
    assert metrics["agent_loop/ended_by/user"] == 1
    assert (tmp_path / "finalized").read_text().split() == ["0-0"]


def test_a_recorded_run_is_repeated_without_its_tools(tools: str, tmp_path: Path):
    tokenizer = chat_tokenizer()
    record = str(tmp_path / "calls.jsonl")
    episodes = [episode(tokenizer, row) for row in range(3)]
    recorded = rollout_config(multi_turn__function_tool_path=tools, agent__record_path=record)
    first, _, _ = play(recorded, tokenizer, adds_once, episodes)

    Path(tools).unlink()
    replayed = rollout_config(agent__replay_path=record)
    assert replayed.agent_loop == "tool_agent"
    again, _, _ = play(replayed, tokenizer, adds_once, episodes)
    assert again == first

    def calls_another(row: int, turn: int, prompt: str) -> str:
        return call("add", f'{{"a": {row}, "b": 3}}')

    with pytest.raises(VerlError, match="add"):
        play(replayed, tokenizer, calls_another, episodes)


@pytest.mark.parametrize("follow", [False, True])
def test_template_that_drops_reasoning_begins_a_new_sample(quiz: str, follow: bool):
    """Begin a new sample if the run follows the template; otherwise keep the drawn reasoning."""
    tokenizer = chat_tokenizer("qwen3")
    config = rollout_config(
        multi_turn__interaction_config_path=quiz, multi_turn__use_inference_chat_template=follow
    )
    kwargs = {"interaction_kwargs": {"name": "quiz", "answer": "4"}}
    trajectories, _, engine = play(
        config,
        tokenizer,
        lambda row, turn, prompt: f"<think>\nhm {turn}\n</think>\n\nIs it {turn + 3}?",
        [episode(tokenizer, extra_info=kwargs)],
    )
    assert len(trajectories) == 1 + follow
    for prompt, trajectory in zip(engine.prompts[-len(trajectories) :], trajectories):
        before_last_turn = trajectory.response_ids[: -len(trajectory.segments[-1].token_ids)]
        assert [*trajectory.prompt_ids, *before_last_turn] == list(prompt)
        assert trajectory.segments[-1].is_model

    last_prompt = tokenizer.decode(list(engine.prompts[-1]))
    assert ("hm 0" in last_prompt) != follow
    assert "Try again." in last_prompt


class Table:
    """Columns of a data set, as the check reads them."""

    def __init__(self, **columns: list) -> None:
        self.columns = columns
        self.size = len(next(iter(columns.values())))

    def __call__(self, name: str):
        messages = [{"role": "user", "content": "Question?"}]
        plain = [messages if name == "prompt" else None] * self.size
        for number, value in enumerate(self.columns.get(name, plain)):
            yield f"rows.parquet, row {number}", value


def checked(tokenizer, table: Table, **settings) -> None:
    runner = AgentRunner(rollout_config(**settings), tokenizer)
    try:
        runner.check_rows(table, "prompt")
    finally:
        runner.close()


def test_unreachable_tools_are_an_error(tools: str):
    table = Table(agent_name=["single_turn_agent"] * 2)
    with pytest.raises(ConfigError, match="which never calls them"):
        checked(chat_tokenizer(), table, multi_turn__function_tool_path=tools)


def test_a_missing_library_of_an_environment_is_named_at_the_start(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)  # Python raises ModuleNotFoundError for it
    settings = {"agent__environment__name": "gym", "agent__environment__kwargs": {"env": "Maze-v1"}}
    with pytest.raises(MissingDependencyError, match="'Maze-v1' needs .* pip install gymnasium"):
        checked(chat_tokenizer(), Table(agent_name=[None]), **settings)


def test_a_row_that_names_an_unknown_tool_or_loop_is_named(tools: str):
    tokenizer = chat_tokenizer()
    named = {"tools_kwargs": {"add": {}, "addd": {}, "other": None}}
    with pytest.raises(DataError, match=r"row 1: tools_kwargs names the tool 'addd'.*: add"):
        checked(tokenizer, Table(extra_info=[{}, named]), multi_turn__function_tool_path=tools)
    with pytest.raises(DataError, match=r"row 0: agent_name is 'tool_agnt'.*tool_agent"):
        checked(tokenizer, Table(agent_name=["tool_agnt"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tools_kwargs": [{"add": {}}]},
            "tools_kwargs must be {tool: {create_kwargs: .* got list",
        ),
        (
            {"tools_kwargs": {"add": "7"}},
            "of the tool 'add' must be {create_kwargs: .* got str: '7'",
        ),
        (
            {"tools_kwargs": {"add": {"create_kwargs": ["7"]}}},
            "of the tool 'add', create_kwargs must be {keyword: value}, got list",
        ),
        (
            {"tools_kwargs": {"add": {"create_kwarg": {"x": 1}}}},
            "of the tool 'add' has 'create_kwarg'. Did you mean create_kwargs",
        ),
        ({"tool_selection": "add"}, r"tool_selection must be a list of tools, such as \['add'\]"),
        ({"interaction_kwargs": "quiz"}, "interaction_kwargs must be {name: .*, got str: 'quiz'"),
    ],
)
def test_an_option_of_the_wrong_shape_is_named(tools: str, options: dict, message: str):
    table = Table(extra_info=[{}, options])
    with pytest.raises(DataError, match=f"row 1: .*{message}"):
        checked(chat_tokenizer(), table, multi_turn__function_tool_path=tools)


def test_options_that_no_tool_gets_are_a_warning(tools: str, caplog: pytest.LogCaptureFixture):
    say_once.cache_clear()
    flat = {"tools_kwargs": {"add": {"ground_truth": "7"}}}
    needing = {"need_tools_kwargs": True, "tools_kwargs": {"add": None}}
    table = Table(extra_info=[flat, flat, needing, needing])
    with caplog.at_level("WARNING", logger="verl"):
        checked(chat_tokenizer(), table, multi_turn__function_tool_path=tools)
    assert caplog.text.count("of the tool 'add' has 'ground_truth', which no method") == 1
    assert (
        caplog.text.count("row 2: need_tools_kwargs is set, but the row has no tools_kwargs") == 1
    )
    assert "row 3" not in caplog.text


def test_a_row_whose_loop_needs_what_is_not_configured_is_named():
    tokenizer = chat_tokenizer()
    with pytest.raises(DataError, match=r"row 1: .* needs .*agent.environment.name"):
        checked(tokenizer, Table(agent_name=[None, "environment_agent"]))
    with pytest.raises(DataError, match=r"row 0: .* needs .*agent.gateway.path or "):
        checked(tokenizer, Table(agent_name=["gateway_agent"]))


def test_an_agent_of_the_gateway_that_no_row_reaches_is_an_error(tools: str):
    settings = {"multi_turn__function_tool_path": tools, "agent__gateway__path": "agent.py"}
    with pytest.raises(ConfigError, match=r"played by \['gateway_agent'\], which never calls"):
        checked(chat_tokenizer(), Table(agent_name=[None]), **settings)
    with pytest.raises(ConfigError, match=r"agent.gateway.path=agent.py is configured, but no row"):
        checked(chat_tokenizer(), Table(agent_name=["tool_agent"]), **settings)


def test_a_missing_file_of_the_gateways_agent_is_an_error_before_the_models_load():
    settings = {"agent__gateway__path": "agnt.py"}
    with pytest.raises(ConfigError, match=r"gateway\.path: expected a Python file at 'agnt\.py'"):
        checked(chat_tokenizer(), Table(agent_name=["gateway_agent"]), **settings)


def test_an_environment_that_no_row_reaches_names_the_loops_of_the_rows():
    settings = {"agent__environment__name": "number_guessing"}
    with pytest.raises(
        ConfigError, match=r"all are played by single_turn_agent\. Leave the column"
    ):
        checked(chat_tokenizer(), Table(agent_name=["single_turn_agent"]), **settings)


def test_a_loop_that_no_row_reaches_is_an_error():
    @register("unreached")
    class Unreached(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            raise NotImplementedError

    own = {"mode": "async", "agent__default_agent_loop": "unreached"}
    table = Table(agent_name=["single_turn_agent"])
    message = r"default_agent_loop=unreached is for rows without agent_name.*one: single_turn_agent"
    with pytest.raises(ConfigError, match=message):
        checked(chat_tokenizer(), table, **own)

    built_in = {**own, "agent__default_agent_loop": "tool_agent"}
    checked(chat_tokenizer(), table, **built_in)


FORGETFUL = """
from verl.agents.tools import BaseTool


class Forgetful(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "noted"

    async def calc_reward(self, instance_id, **kwargs):
        raise KeyError(instance_id)
"""


@pytest.mark.parametrize("policy", ["text", "drop"])
def test_a_tool_that_fails_at_its_reward_follows_the_policy(tmp_path: Path, policy: str):
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    function = {"name": "note", "description": "Note.", "parameters": {"type": "object"}}
    entry = {
        "class_name": f"{tmp_path}/forgetful.py:Forgetful",
        "config": {"isolation": "thread"},
        "tool_schema": {"type": "function", "function": function},
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    config = rollout_config(
        multi_turn__tool_config_path=str(tmp_path / "tools.yaml"), agent__tool_error=policy
    )

    tokenizer = chat_tokenizer()
    replies = [call("note", "{}"), "Done."]
    (trajectory,), metrics, _ = play(
        config, tokenizer, lambda row, turn, prompt: replies[turn], [episode(tokenizer)]
    )
    assert metrics["tools/note/calc_reward_error"] == 1
    assert trajectory.is_dropped == (policy == "drop")


@pytest.mark.parametrize(
    ("asked", "warns"), [("qwen3_coder", True), ("hermes", False), ("qwen25", False), (None, False)]
)
def test_a_format_that_the_template_does_not_show_is_a_warning(
    tools: str, caplog: pytest.LogCaptureFixture, asked: str | None, warns: bool
):
    config = rollout_config(multi_turn__function_tool_path=tools, multi_turn__format=asked)
    say_once.cache_clear()
    with caplog.at_level("WARNING", logger="verl"):
        for _ in range(2):
            AgentRunner(config, chat_tokenizer()).close()
    message = "format=qwen3_coder, but the chat template shows the model calls in the format hermes"
    assert caplog.text.count(message) == warns


def test_tools_and_rows_that_never_meet_are_a_warning(tools: str, caplog: pytest.LogCaptureFixture):
    tokenizer = chat_tokenizer()
    table = Table(extra_info=[{}, {"tools_kwargs": {"add": {}, "fail": None}}])
    settings = {"multi_turn__function_tool_path": tools}
    with caplog.at_level("WARNING", logger="verl"):
        checked(tokenizer, table, **settings)
        assert not caplog.text
        checked(tokenizer, Table(extra_info=[table.columns["extra_info"][1]]), **settings)
        assert "The tools fail are configured, but every row names others" in caplog.text
        checked(tokenizer, table)
        assert "row 1: tools_kwargs names the tool 'add', but no tools are" in caplog.text
        checked(tokenizer, Table(interaction_kwargs=[{"name": "quiz"}]))
        assert "row 0: the row has interaction_kwargs, but no interactions are" in caplog.text


def test_rows_for_tools_or_a_simulated_user_give_no_warning(
    tools: str, quiz: str, caplog: pytest.LogCaptureFixture
):
    """verl's rows of GSM8K have options of both, and a run configures one of them."""
    of_both = {"tools_kwargs": {"add": {}, "fail": {}}, "interaction_kwargs": {"name": "quiz"}}
    table = Table(extra_info=[of_both])
    with caplog.at_level("WARNING", logger="verl"):
        for setting, file in (("function_tool_path", tools), ("interaction_config_path", quiz)):
            checked(chat_tokenizer(), table, **{f"multi_turn__{setting}": file})
    assert not caplog.text


def test_a_prompt_that_its_tools_make_too_long_is_named_before_the_start(tools: str):
    """The row is named, and one that offers fewer tools fits."""
    tokenizer = chat_tokenizer()
    messages = [{"role": "user", "content": "Question?"}]
    runner = AgentRunner(rollout_config(multi_turn__function_tool_path=tools), tokenizer)
    assert runner.context.tools is not None
    one = len(runner.context.boundary.prompt(messages, runner.context.tools.schemas(["add"])))
    runner.close()
    few = {"tools_kwargs": {"add": {}}}
    settings = {"multi_turn__function_tool_path": tools, "prompt_length": one}
    checked(tokenizer, Table(prompt=[messages], extra_info=[few]), **settings)
    table = Table(prompt=[messages] * 2, extra_info=[few, {}])
    with pytest.raises(DataError, match=rf"row 1: the prompt has \d+ tokens .* allows {one}"):
        checked(tokenizer, table, **settings)


def test_unused_interactions_are_an_error(quiz: str):
    with pytest.raises(ConfigError, match="no row has interaction_kwargs"):
        checked(
            chat_tokenizer(), Table(extra_info=[{}, {}]), multi_turn__interaction_config_path=quiz
        )


def test_a_template_without_a_place_for_tools_is_an_error(
    tools: str, monkeypatch: pytest.MonkeyPatch
):
    """The tools end, too: a process that died with the run was logged as one that failed."""
    closed = []
    monkeypatch.setattr(ToolSet, "close", lambda tools: closed.append(tools))
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(ConfigError, match="has no place for tools"):
        AgentRunner(rollout_config(multi_turn__function_tool_path=tools), tokenizer)
    assert len(closed) == 1
