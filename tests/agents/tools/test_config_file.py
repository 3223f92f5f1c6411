import json
from pathlib import Path

import pytest

from tests.agents.tools.user_tools import OldCounter
from verl.agents.tools import ToolSet, ToolType, get_tool_class, initialize_tools_from_config
from verl.agents.tools.config_file import build_entry, read_tool_config
from verl.utils.errors import ConfigError

USER_TOOLS = "tests.agents.tools.user_tools"
COUNTER = f"{USER_TOOLS}.OldCounter"


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "tools.yaml"
        path.write_text(text)
        return path

    return write


def test_tools_are_made_in_order_with_config_and_schema(write, monkeypatch):
    monkeypatch.setenv("START", "7")
    path = write(
        f"""
tools:
  - class_name: "{COUNTER}"
    config: {{type: native, start: "${{oc.env:START}}"}}
    tool_schema:
      type: "function"
      function:
        name: "mine"
        description: "Counts."
        parameters:
          type: "object"
          properties:
            n: {{type: "array", items: {{type: "integer"}}}}
          required: ["n"]
  - class_name: {COUNTER}
    config: {{}}
"""
    )
    mine, other = initialize_tools_from_config(path)
    assert isinstance(mine, OldCounter)
    assert (mine.name, other.name) == ("mine", "old_counter")
    assert mine.config["start"] == "7"

    parameters = mine.tool_schema.for_prompt()["function"]["parameters"]
    assert parameters["properties"]["n"]["items"] == {"type": "integer"}


def test_classes_of_this_package_run_in_this_process(write):
    path = write(
        f"""
tools:
  - class_name: {COUNTER}
  - class_name: {COUNTER}
    config: {{isolation: thread}}
  - class_name: verl.agents.tools.builtin.answer_check.Gsm8kTool
  - class_name: verl.agents.tools.builtin.answer_check.Geo3kTool
    config: {{isolation: process}}
"""
    )
    isolations = [entry.isolation for entry in read_tool_config(path)]
    assert isolations == ["process", "thread", "thread", "process"]


def test_files_may_be_in_the_working_folder_or_next_to_the_yaml(write, tmp_path, monkeypatch):
    path = write(
        """
tools:
  - class_name: counters.py:Mine
    config: {isolation: thread}
  - class_name: verl.agents.tools.mcp.MCPSearchTool
    config: {type: mcp}
    mcp: {mcp_servers_config_path: servers.json}
"""
    )
    (tmp_path / "counters.py").write_text(
        f"from {USER_TOOLS} import OldCounter\nclass Mine(OldCounter):\n    pass\n"
    )
    (tmp_path / "servers.json").write_text("{}")

    counter, search = read_tool_config(path)
    (made,) = build_entry(counter)
    assert type(made).__name__ == "Mine"
    assert search.mcp == {"mcp_servers_config_path": str(tmp_path / "servers.json")}
    assert "counters.py:Mine)" in counter.place, "errors name the class as the file does"

    (tmp_path / "start").mkdir()
    monkeypatch.chdir(tmp_path / "start")
    for name in ("counters.py", "servers.json"):
        (tmp_path / "start" / name).touch()
    counter, search = read_tool_config(path)
    assert counter.class_name == "counters.py:Mine", "the working folder goes first"
    assert search.mcp == {"mcp_servers_config_path": "servers.json"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: 3", "list of tools under the key 'tools'"),
        ("[1", "line 1, column 3, is not YAML"),
        ("tools: [3]", "tools entry 1: expected keys"),
        (f"tools: [{{class_name: {COUNTER}, configs: {{}}}}]", "entry 1: unknown key 'configs'"),
        ("tools: [{config: {}}]", "entry 1, class_name: expected a class"),
        (f"tools: [{{class_name: {COUNTER}, config: 3}}]", "entry 1, config: expected a mapping"),
        ("tools: [{class_name: nowhere.Tool}]", "entry 1 .*class_name: Cannot import 'nowhere'"),
        ("tools: [{class_name: json.Tool}]", "class_name: 'json' has no 'Tool'"),
        ("tools: [{class_name: json.dumps}]", "must be a class"),
        ("tools: [{class_name: json.JSONDecoder}]", "raised TypeError"),
        ("tools: [{class_name: Tool}]", "package.module.Class"),
        (
            f"tools: [{{class_name: {COUNTER}}}, {{class_name: {COUNTER}}}]",
            "entry 2 .*'old_counter' is taken by .*entry 1",
        ),
        (f"tools: [{{class_name: {COUNTER}, config: {{type: remote}}}}]", "config.type"),
        (f"tools: [{{class_name: {COUNTER}, config: {{isolation: vm}}}}]", "config.isolation"),
        (f"tools: [{{class_name: {COUNTER}, config: {{parallel: 'no'}}}}]", "config.parallel"),
        (f"tools: [{{class_name: {COUNTER}, config: {{timeout_s: 0}}}}]", "config.timeout_s"),
        (f"tools: [{{class_name: {COUNTER}, config: {{retries: -1}}}}]", "config.retries"),
        (f"tools: [{{class_name: {COUNTER}, config: {{type: mcp}}}}]", "mcp_servers_config_path"),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{}}}}}}]",
            "entry 1 .*function.name",
        ),
        (
            "tools: [{class_name: verl.tools.search_tool.SearchTool}]",
            r"entry 1 \([\w.]*SearchTool\): The tool 'search' needs config.retrieval_service_url",
        ),
        (
            "tools: [{class_name: tests.agents.tools.user_tools.BadStart}]",
            "entry 1 .*BadStart.*raised RuntimeError: no licence",
        ),
        (
            f"tools: [{{class_name: {USER_TOOLS}.Duck, config: {{a: 1}}}}]",
            "entry 1 .*Duck must be a subclass of verl.tools.base_tool.BaseTool",
        ),
        (
            f"tools: [{{class_name: {USER_TOOLS}.Nameless}}]",
            r"entry 1 .*Nameless has no name. Call super\(\).__init__",
        ),
        ("tools: []", r"list of tools under the key 'tools', got list: \{'tools': \[\]\}"),
        ("tool: [{class_name: a.B}]", "got dict: {'tool': "),
        (
            f"tools: [{{class_name: {COUNTER}, mcp: {{mcp_servers_config_path: a.json}}}}]",
            "entry 1 .*the key 'mcp' is for the tools of MCP servers. Set config.type=mcp",
        ),
        (
            f"tools: [{{class_name: {USER_TOOLS}.Misspelled}}]",
            r"entry 1 .*Misspelled must override execute\(instance_id, parameters",
        ),
        (
            f"tools: [{{class_name: {USER_TOOLS}.TakesLess}}]",
            r"entry 1 .*TakesLess.execute is called with \(instance_id, parameters\); its signature "
            r"is \(parameters: .*too many",
        ),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: a, descripton: b}}}}}}]",
            "entry 1 .*tool_schema.function: unknown key 'descripton'. Nearest: description",
        ),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: a, parameters: "
            "{properties: {x: {type: string}}, required: [y]}}}}]",
            "entry 1 .*parameters.required names 'y', which is none of the properties: x",
        ),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: ' '}}}}}}]",
            r"entry 1 .*tool_schema.function.name is empty. Name the tool",
        ),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: a, parameters: "
            "{type: string}}}}]",
            "entry 1 .*parameters.type must be object, got 'string'",
        ),
        (
            f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: a, parameters: "
            "{properties: {x: {type: strng}}}}}}]",
            "entry 1 .*properties.x.type: unknown 'strng'. Nearest: string",
        ),
    ],
)
def test_errors_name_file_entry_and_key(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message) as caught:
        initialize_tools_from_config(path)
    assert "tools.yaml" in str(caught.value)


@pytest.mark.parametrize("name", ["ByKeyword", "ByPosition"])
def test_a_class_is_called_by_keywords_or_by_position(write, name):
    path = write(f"tools: [{{class_name: {USER_TOOLS}.{name}, config: {{unit: m}}}}]")
    (tool,) = initialize_tools_from_config(path)
    assert tool.config["unit"] == "m"


def test_tools_before_a_wrong_entry_are_shut_down(write, monkeypatch):
    closed = []
    monkeypatch.setattr(OldCounter, "shut_down", lambda tool: closed.append(tool.name))
    path = write(f"tools: [{{class_name: {COUNTER}}}, {{class_name: nowhere.Tool}}]")
    with pytest.raises(ConfigError, match="entry 2"):
        initialize_tools_from_config(path)
    assert closed == ["old_counter"]


def test_a_missing_file_is_an_error():
    with pytest.raises(ConfigError, match=r"tool_config_path.*nowhere.yaml"):
        read_tool_config("nowhere.yaml")


def test_a_mistake_of_yaml_is_one_sentence_with_its_place(write):
    path = write("tools:\n\t- class_name: a\n")
    with pytest.raises(ConfigError) as caught:
        read_tool_config(path)
    assert str(caught.value) == (
        f"multi_turn.tool_config_path: '{path}', line 2, column 1, is not YAML: found character "
        "'\\t' that cannot start any token (while scanning for the next token). Indent with "
        "spaces, and quote texts with special characters."
    )


def test_a_class_may_come_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    pass\n")
    assert get_tool_class(f"{path}:Mine").__name__ == "Mine"


def test_kinds_of_entries():
    assert [kind.value for kind in ToolType] == ["native", "mcp"]


def test_keys_that_a_class_of_this_package_does_not_read_are_errors(write):
    path = write(
        """
tools:
  - class_name: verl.tools.search_tool.SearchTool
    config: {type: native, retrieval_service_url: "http://127.0.0.1:1", topkk: 3}
"""
    )
    with pytest.raises(ConfigError, match=r"entry 1 .*config: unknown key 'topkk'. Near.* topk"):
        initialize_tools_from_config(path)


DECLARED = """
from verl.agents.tools import BaseTool
from verl.agents.tools.builtin.search import SearchTool


class Weather(BaseTool):
    config_keys = ("unit", "timeout")

    async def execute(self, instance_id, parameters, **kwargs):
        return str(self.config)


class Snow(Weather):
    config_keys = ("depth",)


class Rain(Weather):
    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema)
        self.drops = config.get("drops")


class Finds(SearchTool):
    config_keys = ("language",)


class Text(Weather):
    config_keys = ("unit")


class Nothing(Weather):
    config_keys = None
"""


def write_declared(write, name, config):
    (write("").parent / "declared.py").write_text(DECLARED)
    schema = {"function": {"name": "forecast", "description": "Forecasts."}}
    entry = {"class_name": f"declared.py:{name}", "config": config, "tool_schema": schema}
    return write(json.dumps({"tools": [entry]}))


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Weather", {"unti": "m"}, "config: unknown key 'unti'. Nearest known: unit"),
        ("Weather", {"retry": 1}, "config: unknown key 'retry'. Nearest known: retries"),
        ("Snow", {"dept": 3}, "config: unknown key 'dept'. Nearest known: depth"),
        ("Finds", {"topkk": 3}, "config: unknown key 'topkk'. Nearest known: topk"),
        ("Text", {"unit": "m"}, r"Text\.config_keys must be a tuple of names .* got 'unit'"),
        ("Nothing", {}, r"Nothing\.config_keys must be a tuple of names .* got None"),
    ],
)
def test_a_class_that_declares_its_keys_refuses_others(write, name, config, message, isolation):
    path = write_declared(write, name, {**config, "isolation": isolation})
    with pytest.raises(ConfigError, match=rf"entry 1 \(declared\.py:{name}\).*{message}"):
        ToolSet.from_config(path, num_processes=1)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Weather", {"type": "native", "timeout": 3, "timeout_s": 5}),
        ("Snow", {"depth": 3, "unit": "m", "timeout": 3}),
        ("Finds", {"language": "en", "retrieval_service_url": "http://127.0.0.1:1", "topk": 2}),
        ("Rain", {"drops": 3}),
    ],
)
def test_declared_keys_and_those_of_base_classes_pass(write, caplog, name, config):
    path = write_declared(write, name, {**config, "isolation": "thread"})
    with caplog.at_level("WARNING", logger="verl"):
        tools = ToolSet.from_config(path)
    tools.close()
    assert tools.names == ["forecast"]
    assert "Nearest known" not in caplog.text


TIMED = """
from verl.agents.tools import BaseTool


class Plain(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return "done"


class Timed(Plain):
    async def execute(self, instance_id, parameters, **kwargs):
        return str(self.config["timeout"])
"""


@pytest.mark.parametrize(("name", "warnings"), [("Plain", 1), ("Timed", 0)])
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_misspelled_setting_of_calls_is_warned_of(
    write, caplog: pytest.LogCaptureFixture, name: str, warnings: int, isolation: str
):
    """A class may read a key of that name itself."""
    path = write(
        f"""
tools:
  - class_name: {write("").parent}/timed.py:{name}
    config: {{timeout: 3, of_the_class: 1, isolation: {isolation}}}
    tool_schema: {{type: function, function: {{name: wait, description: Waits., parameters: {{}}}}}}
"""
    )
    (path.parent / "timed.py").write_text(TIMED)
    with caplog.at_level("WARNING", logger="verl"):
        ToolSet.from_config(path, num_processes=1).close()
    assert caplog.text.count("config.timeout of the tool 'wait'") == warnings
    assert ("Nearest known: timeout_s." in caplog.text) == bool(warnings)
    assert "of_the_class" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "warnings"), [("int", 1), ("[string, dict]", 1), ("[string, 'null']", 0)]
)
def test_a_type_that_json_does_not_have_is_warned_of(
    write, caplog: pytest.LogCaptureFixture, kind: str, warnings: int
):
    path = write(
        f"tools: [{{class_name: {COUNTER}, tool_schema: {{function: {{name: a, parameters: "
        f"{{properties: {{x: {{type: {kind}}}}}}}}}}}}}]"
    )
    with caplog.at_level("WARNING", logger="verl"):
        read_tool_config(path)
    assert caplog.text.count("which is no type of JSON") == warnings
    assert caplog.text.count("properties.x.type is '") == warnings
