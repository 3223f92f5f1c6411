"""Simulated users: their YAML file, selection by rows, and sessions that always end."""

import asyncio
import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from verl.agents.interactions import (
    BaseInteraction,
    Gsm8kInteraction,
    InteractionSession,
    InteractionSet,
    initialize_interactions_from_config,
)
from verl.agents.interactions.gsm8k import RIGHT, WRONG
from verl.agents.interactions.registry import choose_interaction
from verl.agents.interactions.session import as_reply
from verl.utils.errors import ConfigError, DataError, RolloutError
from verl.utils.logging import say_once


class Misspelled(BaseInteraction):
    async def generate_reponse(self, instance_id, messages, **kwargs):
        return True, "", 0.0, {}


class TakesLess(BaseInteraction):
    async def generate_response(self, messages):  # pyright: ignore[reportIncompatibleMethodOverride]
        return True, "", 0.0, {}


class Patient(BaseInteraction):
    """Counts the turns of a conversation where all conversations share it."""

    turns = 0

    async def start_interaction(self, instance_id=None, **kwargs):
        self.turns = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.turns += 1
        return self.turns == 2, "Go on.", 0.0, {}


class Remembering(BaseInteraction):
    """Counts them by conversation."""

    def __init__(self, config):
        super().__init__(config)
        self.turns = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        self.turns[instance_id] = 0
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        self.turns[instance_id] += 1
        return self.turns[instance_id] == 2, "Go on.", 0.0, {}


def test_a_misspelled_setting_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "users.py").write_text(USERS_FILE)
    file = tmp_path / "interactions.yaml"
    entry = "{name: a, class_name: users.py:PoliteInteraction, config: {timout_s: 3, greeting: b}}"
    file.write_text(f"interaction: [{entry}]")
    with caplog.at_level("WARNING", logger="verl"):
        initialize_interactions_from_config(file)
    assert "config.timout_s is no setting of interactions" in caplog.text
    assert "Nearest known: timeout_s." in caplog.text
    assert "greeting" not in caplog.text


GSM8K = "verl.agents.interactions.gsm8k.Gsm8kInteraction"
QUESTION = [{"role": "user", "content": "How many?"}]
USERS_FILE = """
from verl.agents.interactions import BaseInteraction

class PoliteInteraction(BaseInteraction):
    def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    def generate_response(self, instance_id, messages, **kwargs):
        return True, f"Thanks, {self.config['greeting']}", 0.5, {"turns": len(messages)}

    def finalize_interaction(self, instance_id):
        pass


class ByKeyword(PoliteInteraction):
    def __init__(self, *, config):
        super().__init__(config)


class ByPosition(PoliteInteraction):
    def __init__(self, settings):
        super().__init__(settings)


class Unmade(PoliteInteraction):
    def __init__(self, config):
        raise OSError("no database")
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "interactions.yaml"
    path.write_text(text)
    return path


def answer(text: str) -> list[dict[str, str]]:
    return [*QUESTION, {"role": "assistant", "content": text}]


# ---- the YAML file -------------------------------------------------------------------------------


def test_interactions_of_a_file_by_dotted_path_and_by_file(tmp_path):
    (tmp_path / "polite.py").write_text(USERS_FILE)
    path = write(
        tmp_path,
        f"interaction:\n"
        f"  - class_name: {GSM8K}\n"
        f"  - {{name: second, class_name: {GSM8K}, config: {{}}}}\n"
        f"  - {{class_name: 'polite.py:PoliteInteraction', config: {{greeting: friend}}}}\n",
    )
    made = initialize_interactions_from_config(path)
    assert list(made) == ["gsm8k", "second", "polite"]
    assert made["gsm8k"].name == "gsm8k"
    assert made["second"].config == {"name": "second"}
    assert isinstance(made["second"], Gsm8kInteraction)

    session = InteractionSession(made["polite"])

    async def main():
        async with session:
            return await session.generate_response(answer("7"))

    assert asyncio.run(main()) == (True, "Thanks, friend", 0.5, {"turns": 2})
    assert session.outcomes == {"ok": 3}


def test_a_class_is_called_by_keyword_or_by_position(tmp_path, monkeypatch):
    monkeypatch.setenv("GREETING", "x")
    (tmp_path / "users.py").write_text(USERS_FILE)
    for name in ("ByKeyword", "ByPosition"):
        text = (
            f"interaction: [{{class_name: '{tmp_path}/users.py:{name}', "
            "config: {greeting: '${oc.env:GREETING}'}}]"
        )
        (made,) = initialize_interactions_from_config(write(tmp_path, text)).values()
        assert made.config["greeting"] == "x"

    path = write(tmp_path, f"interaction: [{{class_name: '{tmp_path}/users.py:Unmade'}}]")
    with pytest.raises(
        ConfigError, match=r"entry 1 .*Unmade\(config\) raised OSError: no database"
    ):
        initialize_interactions_from_config(path)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["list 'interaction:'", "got nothing"]),
        ("interactions: []", ["list 'interaction:'"]),
        ("interaction: [5]", ["entry 1", "must be keys and values"]),
        (f"interaction: [{{clas_name: {GSM8K}}}]", ["entry 1", "'clas_name'", "class_name"]),
        ("interaction: [{name: x}]", ["entry 1", "class_name must be", "got nothing"]),
        (
            "interaction: [{class_name: nowhere.Thing}]",
            ["entry 1", "class_name: Cannot import", "nowhere"],
        ),
        (
            "interaction: [{class_name: verl.agents.interactions.gsm8k.Gsm9kInteraction}]",
            ["entry 1", "class_name:", "Gsm8kInteraction"],
        ),
        ("interaction: [{class_name: pathlib.Path}]", ["entry 1", "it lacks start_interaction"]),
        (f"interaction: [{{class_name: {GSM8K}, config: 5}}]", ["entry 1", "config must be"]),
        (
            f"interaction: [{{class_name: {GSM8K}}}, {{name: gsm8k, class_name: {GSM8K}}}]",
            ["entry 2", "Duplicate interaction name 'gsm8k' found"],
        ),
        ("interaction: ${oc.env:NOT_SET_HERE}", ["cannot be read", "'NOT_SET_HERE' not found"]),
        ("interaction: [", ["line 1, column 15, is not YAML: expected the node content"]),
        (
            f"interaction: [{{class_name: {__name__}.Misspelled}}]",
            ["entry 1", "Misspelled must override generate_response(instance_id, messages"],
        ),
        (
            f"interaction: [{{class_name: {__name__}.TakesLess}}]",
            ["entry 1", "TakesLess.generate_response is called with (instance_id, messages); its"],
        ),
    ],
)
def test_mistakes_name_file_entry_and_key(tmp_path, text, facts):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        initialize_interactions_from_config(path)
    for fact in [path.name, *facts]:
        assert fact in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    message = r"^multi_turn\.interaction_config_path: expected a YAML file at '.*nothing\.yaml', "
    with pytest.raises(ConfigError, match=message):
        initialize_interactions_from_config(tmp_path / "nothing.yaml")


# ---- the choice of a row -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kwargs", "chosen"),
    [
        (["gsm8k", "other"], {"name": "other"}, "other"),
        (["gsm8k", "other"], {"ground_truth": "1"}, "gsm8k"),
        (["gsm8k", "other"], {"name": None}, "gsm8k"),
        (["only"], None, "only"),
    ],
)
def test_rows_choose_by_name(names, kwargs, chosen):
    interactions = {name: BaseInteraction({"name": name}) for name in names}
    assert choose_interaction(interactions, kwargs) == chosen


@pytest.mark.parametrize(
    ("kwargs", "fact"), [({"name": "gsm9k"}, "names 'gsm9k'"), ({}, "has no name")]
)
def test_an_unknown_choice_names_the_known(kwargs, fact):
    interactions = {name: BaseInteraction({"name": name}) for name in ("one", "two")}
    with pytest.raises(DataError, match=f"{fact}.*Known: one, two"):
        choose_interaction(interactions, kwargs)


# ---- sessions ------------------------------------------------------------------------------------


def test_gsm8k_answers_until_the_number_is_right():
    interaction = Gsm8kInteraction({"name": "gsm8k"})
    rows = InteractionSet({"gsm8k": interaction})

    async def main():
        async with rows.session({"name": "gsm8k", "ground_truth": "72"}) as session:
            replies = [
                await session.generate_response(answer("#### 71")),
                await session.generate_response(answer("it is 72")),
                await session.generate_response([*answer("#### 72"), *QUESTION]),
            ]
            assert interaction._conversations
        return replies

    replies = asyncio.run(main())
    rows.close()

    assert [tuple(reply) for reply in replies] == [
        (False, WRONG, 0.0, {}),
        (False, WRONG, 0.0, {}),
        (True, RIGHT, 1.0, {}),
    ]
    assert interaction._conversations == {}


class Recorder(BaseInteraction):
    """Notes its calls. `config` says which method fails, and how."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = []

    def _called(self, method: str) -> None:
        self.calls.append(method)
        if self.config.get("raise_in") == method:
            raise KeyError(method)
        if self.config.get("hang_in") == method:
            time.sleep(60)

    async def start_interaction(self, instance_id=None, **kwargs):
        self._called("start")
        return "own-id"

    async def generate_response(self, instance_id, messages, **kwargs):
        assert instance_id == "own-id"
        messages.clear()
        self._called("answer")
        return False, "go on", 0.25, kwargs

    async def finalize_interaction(self, instance_id=None, **kwargs):
        self._called("finalize")


async def converse(session: InteractionSession, messages=QUESTION):
    async with session:
        return await session.generate_response(messages)


@pytest.mark.parametrize("name", ["method", "effect", "timeout_s", "function"])
def test_keywords_of_a_row_may_have_any_name(name):
    reply = asyncio.run(converse(InteractionSession(Recorder({}), {name: "strict"})))
    assert reply == (False, "go on", 0.25, {name: "strict"})


def test_interaction_gets_row_keywords_and_copied_messages():
    interaction = Recorder({})
    messages = answer("hi")
    reply = asyncio.run(converse(InteractionSession(interaction, {"topic": "cats"}), messages))
    assert reply == (False, "go on", 0.25, {"topic": "cats"})
    assert len(messages) == 2
    assert interaction.calls == ["start", "answer", "finalize"]


@pytest.mark.parametrize("method", ["start", "answer"])
def test_error_ends_counts_and_finalizes_the_conversation(method, caplog):
    interaction = Recorder({"raise_in": method})
    session = InteractionSession(interaction)
    with caplog.at_level(logging.WARNING, logger="verl"):
        reply = asyncio.run(converse(session))
    assert (reply.should_terminate, reply.content, reply.score) == (True, "", 0.0)
    assert reply.data["outcome"] == "crashed"
    assert f"raised KeyError ({__file__}:" in reply.data["error"]
    assert interaction.calls[-1] == "finalize"
    assert session.outcomes["crashed"] == 1


def test_a_hanging_answer_ends_at_the_deadline():
    interaction = Recorder({"hang_in": "answer", "timeout_s": 0.1})
    session = InteractionSession(interaction)
    begin = time.monotonic()
    reply = asyncio.run(converse(session))
    assert time.monotonic() - begin < 20
    assert reply.data["outcome"] == "timeout"
    assert "Recorder.generate_response did not answer within 0.1 s" in reply.data["error"]
    assert interaction.calls == ["start", "answer", "finalize"]
    assert session.outcomes == {"ok": 2, "timeout": 1}


def test_a_cancelled_episode_still_finalizes():
    interaction = Recorder({})

    async def main():
        entered = asyncio.Event()

        async def episode():
            async with InteractionSession(interaction):
                entered.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(episode())
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert interaction.calls == ["start", "finalize"]


@pytest.mark.parametrize(
    "value", [None, (True, "x"), (True, 5, 0.0, {}), (True, "x", float("nan"), {}), "abcd"]
)
def test_invalid_return_value_is_shown_in_the_error(value):
    class Odd(Recorder):
        async def generate_response(self, instance_id, messages, **kwargs):
            return value

    interaction = Odd({})
    with pytest.raises(RolloutError, match=r"Odd.generate_response must return \(should_terminate"):
        asyncio.run(converse(InteractionSession(interaction)))
    assert interaction.calls == ["start", "finalize"]


def test_a_last_answer_may_be_none():
    assert as_reply((True, None, 1.0, {}), "Silent") == (True, "", 1.0, {})
    with pytest.raises(RolloutError, match="Silent.generate_response must return"):
        as_reply((False, None, 1.0, {}), "Silent")


@pytest.mark.parametrize("flag", [True, np.bool_(True), np.array([True]), torch.tensor(True)])
def test_a_flag_may_come_from_an_array(flag):
    assert as_reply((flag, "", 1.0, {}), "Counting").should_terminate is True


@pytest.mark.parametrize(
    "value",
    [
        None,
        (False, {"a": 1}, 0.0, {}),
        (False, "", 0.0, "text"),
        ("False", "", 0.0, {}),
        (0.7, "", False, {}),  # the score before the flag
        (None, "", 0.0, {}),
    ],
)
def test_a_reply_of_another_shape_names_the_method(value):
    with pytest.raises(RolloutError, match="Odd.generate_response must return"):
        as_reply(value, "Odd")


def test_blocking_users_answer_concurrently():
    class Slow(BaseInteraction):
        def generate_response(self, instance_id, messages, **kwargs):
            time.sleep(0.3)
            return True, "", 0.0, {}

    rows = InteractionSet({"slow": Slow({})})

    async def main():
        sessions = [rows.session(None) for _ in range(20)]
        return await asyncio.gather(*[converse(session) for session in sessions])

    begin = time.monotonic()
    assert len(asyncio.run(main())) == 20
    assert time.monotonic() - begin < 4  # one after the other: 6 s
    rows.close()


def test_a_deadline_must_be_a_number_above_zero():
    with pytest.raises(ConfigError, match=r"config.timeout_s of the interaction Recorder.*'soon'"):
        InteractionSet({"x": Recorder({"timeout_s": "soon"})})


@pytest.mark.parametrize(("user", "warnings"), [(Patient, 1), (Remembering, 0)])
def test_state_that_conversations_share_is_a_warning(user, warnings, caplog):
    say_once.cache_clear()
    interaction = user({})

    async def main():
        for _ in range(2):
            async with InteractionSession(interaction, {}) as session:
                for _ in range(2):
                    reply = await session.generate_response(QUESTION)
            assert reply.should_terminate

    with caplog.at_level(logging.WARNING, logger="verl"):
        asyncio.run(main())
    message = f"The interaction {user.__name__} set self.turns anew in a call."
    assert caplog.text.count(message) == warnings
    assert caplog.text.count("self.turns[instance_id] = ...") == warnings
