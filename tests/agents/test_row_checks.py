"""Checks of rows, tools, loops and the chat template before models load."""

import sys

import pytest

from tests.agents.scripted import chat_tokenizer, rollout_config
from verl.agents import AgentLoopBase, register
from verl.agents.runner import AgentRunner
from verl.agents.tools import ToolSet
from verl.utils.errors import ConfigError, DataError, MissingDependencyError
from verl.utils.logging import say_once

pytestmark = pytest.mark.usefixtures("one_nursery")


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
