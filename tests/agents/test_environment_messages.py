"""Messages of a user's environment that the model would read otherwise than they are meant."""

import logging
import textwrap
from pathlib import Path

import pytest

from tests.agents.scripted import chat_tokenizer, episode, play, rollout_config
from verl.rollout.trajectory import DROPPED_BECAUSE
from verl.utils.errors import RolloutError
from verl.utils.logging import say_once

WORLD = """
from verl.agents.environments import Observation


class World:
    def __init__(self, opening="user", answer="user", is_done=False):
        self.opening = opening
        self.answer = answer
        self.is_done = is_done

    def reset(self):
        return Observation([{"role": self.opening, "content": "Go."}])

    def step(self, action):
        return Observation([{"role": self.answer, "content": "On."}], done=self.is_done)


class Writes(World):
    def reset(self):
        self.count = 0
        self.messages = [{"role": "user", "content": "0"}]
        return Observation(self.messages)

    def step(self, action):
        self.count += 1
        self.messages[0]["content"] = str(self.count)
        return Observation(self.messages)


class Keeps(World):
    def reset(self, **row):
        return Observation([{"role": "user", "content": row["method"] + row["timeout_s"]}])


class Gives(World):
    def reset(self):
        return Observation([{"role": "user", "content": "Go."}], reward=1.0)


class Repeats(World):
    def reset(self):
        self.messages = [{"role": "user", "content": "Go."}]
        return Observation(self.messages)

    def step(self, action):
        self.messages.append({"role": "user", "content": "On."})
        return Observation(self.messages)


class Draws(World):
    def step(self, action):
        parts = [{"type": "text", "text": "Look."}, {"type": "image", "image": "a.png"}]
        return Observation([{"role": "user", "content": parts}])


class Asks(World):
    def reset(self, task, level=1):
        return Observation([{"role": "user", "content": task}])
"""


def played(folder: Path, kind: str = "World", fields: dict | None = None, **settings):
    (folder / "world.py").write_text(textwrap.dedent(WORLD))
    config = rollout_config(
        agent__environment__name=f"{folder}/world.py:{kind}",
        multi_turn__max_assistant_turns=2,
        **settings,
    )
    tokenizer = chat_tokenizer("llama3")  # its template writes any role
    rows = [episode(tokenizer, **(fields or {}))]
    trajectories, _, _ = play(config, tokenizer, lambda row, turn, prompt: "Left.", rows)
    return trajectories


@pytest.mark.parametrize(
    ("world", "warning"),
    [
        ({}, ""),
        ({"opening": "assistant"}, ""),
        ({"answer": "tool"}, ""),
        ({"answer": "referee"}, ""),
        ({"answer": "assistant"}, "World' answers with a message of the role 'assistant'"),
        ({"answer": "User"}, "a message with the role 'User'; did you mean 'user'"),
        ({"opening": "human"}, "a message with the role 'human'; did you mean 'user'"),
        ({"answer": "assistant", "is_done": True}, ""),  # the model reads no more
    ],
)
def test_doubtful_roles_of_an_environment_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, world: dict, warning: str
):
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="verl"):
        played(tmp_path, agent__environment__kwargs=world)

    warnings = [record.getMessage() for record in caplog.records]
    roles = [text for text in warnings if "role" in text]
    assert len(roles) == bool(warning)
    assert warning in "".join(roles)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"Asks.reset asks for 'task', which is no field of the row.*raw_prompt, seed\. Add"),
        (
            {"extra_info": {"task": "Go left."}},
            r"extra_info holds it: let reset take extra_info, and read extra_info\['task'\]\. Fix",
        ),
    ],
)
def test_a_field_that_reset_asks_for_is_named_where_the_row_lacks_it(
    tmp_path: Path, fields: dict, message: str
):
    with pytest.raises(RolloutError, match=message):
        played(tmp_path, "Asks", fields)

    (trajectory,) = played(tmp_path, "Asks", fields, agent__on_error="drop")
    assert "asks for 'task'" in trajectory.extra[DROPPED_BECAUSE]
    (trajectory,) = played(tmp_path, "Asks", {**fields, "task": "Go left."})
    assert not trajectory.is_dropped


def test_a_message_that_the_environment_changes_later_stays_as_the_model_read_it(tmp_path: Path):
    (trajectory,) = played(tmp_path, "Writes")
    messages = trajectory.extra["messages"]
    assert [message["content"] for message in messages[1:]] == ["0", "Left.", "1", "Left."]


@pytest.mark.parametrize("name", ["method", "effect", "timeout_s", "function"])
def test_fields_of_a_row_may_have_any_name(tmp_path: Path, name: str):
    (trajectory,) = played(tmp_path, "Keeps", {"method": "1", "timeout_s": "2", name: "2"})
    question = trajectory.extra["messages"][1]["content"]
    assert question == ("22" if name == "method" else "12")


def test_images_of_an_environment_are_refused_by_its_name(tmp_path: Path):
    with pytest.raises(
        RolloutError, match=r"Draws.step must return messages of text alone.*a\.png"
    ):
        played(tmp_path, "Draws")


def test_a_reward_of_reset_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for kind in ("World", "Gives"):
        played(tmp_path, kind)
    warned = [line for line in caplog.messages if "gives a reward in reset" in line]
    assert len(warned) == 1
    assert "world.py:Gives" in warned[0]


def test_earlier_messages_in_an_answer_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    for kind in ("World", "Writes", "Repeats"):
        played(tmp_path, kind)
    warned = [line for line in caplog.messages if "its earlier messages and new ones" in line]
    assert len(warned) == 1
    assert "world.py:Repeats" in warned[0]
