"""Turns between model, tools and a simulated user: tokens, masks, counts and limits."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.agents.scripted import chat_tokenizer, episode, play, rollout_config, text_of
from tests.agents.tool_files import call
from verl.agents.rendering import ChatTemplate
from verl.agents.tools import ToolSession
from verl.utils.errors import DataError, VerlError

pytestmark = pytest.mark.usefixtures("one_nursery")


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


def test_a_user_is_finalized_also_where_the_tools_cannot_end(
    tools: str, quiz: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def fail(session: ToolSession) -> dict[str, float]:
        raise DataError("the record has no end of the trajectory")

    monkeypatch.setattr(ToolSession, "finish", fail)
    config = rollout_config(
        multi_turn__interaction_config_path=quiz, multi_turn__function_tool_path=tools
    )
    kwargs = {"interaction_kwargs": {"name": "quiz", "answer": "4"}}
    tokenizer = chat_tokenizer()
    with pytest.raises(DataError, match="no end of the trajectory"):
        play(config, tokenizer, lambda *_: "4", [episode(tokenizer, 0, extra_info=kwargs)])
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
