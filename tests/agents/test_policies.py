"""Roles of an episode: the policy of each, and its tokens, rewards and noise."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.agents.chat_server import Chat, serving
from tests.agents.scripted import PARAMS, ScriptedEngine, chat_tokenizer, episode, rollout_config
from tests.agents.scripted import text_of as segment_texts
from verl.agents import AgentRunner, Copies, EngineClient, EngineSteps, make_policies
from verl.agents.environments import Observation, environments
from verl.agents.policies import EnginePolicy
from verl.config.policies import PolicyConfig
from verl.rollout import Trajectory
from verl.utils.errors import ConfigError, RolloutError

DEBATE = "tests/agents/debate.py:Debate"
ACTOR = PolicyConfig(trained=True)


class Echo:
    """A frozen policy that repeats the last message, and notes the calls."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    async def reply(self, messages: Any, **noise: int) -> str:
        self.calls.append({"messages": [dict(each) for each in messages], **noise})
        return "echo " + messages[-1]["content"]

    async def serve(self, work: Any, **_: Any) -> Any:
        return await work


def play(
    environment: str, policies: dict[str, PolicyConfig], frozen: dict[str, Any], rows: int = 2
) -> tuple[list[Trajectory], Any]:
    """Play episodes on a scripted engine. Return the trajectories and the tokenizer."""
    tokenizer = chat_tokenizer()
    config = rollout_config(agent__environment__name=environment, agent__policies=policies)
    engine = ScriptedEngine(tokenizer, lambda row, turn, _: f"aaa r{row} t{turn}")
    runner = AgentRunner(config, tokenizer, policies=frozen)
    client = EngineClient(EngineSteps(engine, PARAMS, seed=0, step=7), max_model_len=4000)
    try:
        return runner.play([episode(tokenizer, row) for row in range(rows)], client), tokenizer
    finally:
        runner.close()


def test_a_frozen_judge_answers_in_the_players_trajectory_without_a_share_in_it():
    judge = Echo()
    policies = {"player": ACTOR, "judge": PolicyConfig(path="toy")}
    trajectories, tokenizer = play(DEBATE, policies, {"judge": judge})

    assert [each.role for each in trajectories] == ["player", "player"]
    first = trajectories[0]
    assert segment_texts(tokenizer, first, "model") == [
        "aaa r0 t0<|im_end|>",
        "aaa r0 t1<|im_end|>",
    ]
    assert "echo aaa r0 t0" in segment_texts(tokenizer, first, "user")[0]
    assert first.reward == pytest.approx(2 * 3 / len("aaa r0 t0"))
    assert first.turn_rewards == {turn: pytest.approx(1 / 3) for turn in (0, 1)}
    assert first.num_turns == 4

    calls = sorted(judge.calls, key=lambda call: call["row"])  # episodes run at once
    assert [(call["step"], call["row"], call["turn"]) for call in calls] == [(0, 0, 0), (0, 1, 0)]
    heard = [message["content"] for message in calls[0]["messages"]]
    assert heard == ["Question 0?", "aaa r0 t0"]


def test_roles_that_the_actor_plays_have_trajectories_and_noise_of_their_own():
    trajectories, tokenizer = play(DEBATE, {"player": ACTOR, "judge": ACTOR}, {}, rows=1)

    assert [(each.role, each.part) for each in trajectories] == [("player", 0), ("judge", 1)]
    player, judge = trajectories
    # The turns of the script are those of the whole episode, those of segments the role's own.
    assert segment_texts(tokenizer, player, "model") == [
        "aaa r0 t0<|im_end|>",
        "aaa r0 t2<|im_end|>",
    ]
    assert segment_texts(tokenizer, judge, "model") == ["aaa r0 t1<|im_end|>"]
    assert [segment.turn for segment in player.segments if segment.is_model] == [0, 1]
    # The judge loses the player's last reward; the first came before it had acted.
    assert judge.reward == pytest.approx(-1 / 3)


class Stranger:
    roles = ("player",)

    def reset(self) -> Observation:
        return Observation([{"role": "user", "content": "Hi"}], role="referee")

    def step(self, action: str) -> Observation:
        raise AssertionError("not reached")


def test_an_unknown_role_of_an_observation_is_an_error():
    if "stranger" not in environments:
        environments.register("stranger")(Stranger)
    with pytest.raises(RolloutError, match=r"one of its roles.*: player; got 'referee'"):
        play("stranger", {"player": ACTOR}, {})


@pytest.mark.parametrize(
    ("environment", "policies", "message"),
    [
        (DEBATE, {}, r"has the roles player, judge, but .*policies names none. Missing: player"),
        (DEBATE, {"player": ACTOR}, r"Missing: judge. Set .*judge.trained=true"),
        (
            DEBATE,
            {"player": ACTOR, "judge": ACTOR, "jury": ACTOR},
            r"policies.jury plays no role. Roles .*: judge, player",
        ),
        ("number_guessing", {"player": ACTOR}, r"policies.player plays no role.*: none"),
    ],
)
def test_roles_and_policies_that_do_not_fit_are_an_error_at_start(
    environment: str, policies: dict[str, PolicyConfig], message: str
):
    tokenizer = chat_tokenizer()
    config = rollout_config(agent__environment__name=environment, agent__policies=policies)
    runner = AgentRunner(config, tokenizer)

    def column(name: str) -> Iterator[tuple[str, Any]]:
        yield "row 0", None

    with pytest.raises(ConfigError, match=message):
        runner.check_rows(column, "prompt")


def test_the_loop_of_environments_needs_one():
    tokenizer = chat_tokenizer()
    config = rollout_config(agent__default_agent_loop="environment_agent")
    client = EngineClient(
        EngineSteps(ScriptedEngine(tokenizer, lambda *_: "a"), PARAMS, seed=0, step=1),
        max_model_len=4000,
    )
    with pytest.raises(ConfigError, match="environment_agent needs an environment. Set"):
        AgentRunner(config, tokenizer).play([episode(tokenizer)], client)


# ---- engines of their own ------------------------------------------------------------------------


def replies(policy: EnginePolicy, asked: list[tuple[int, int]], step: int = 3) -> list[str]:
    """Ask for turns of (row, turn) in this order. Return them in the order of `asked`."""

    async def main() -> list[str]:
        hello = [{"role": "user", "content": "hello"}]
        calls = [policy.reply(hello, step=step, row=row, turn=turn) for row, turn in asked]
        return list(await asyncio.gather(*calls))

    steps = EngineSteps(policy.engine, policy.params, seed=0, step=step)
    return asyncio.run(policy.serve(main(), steps=steps, num_episodes=4))


def toy_policies(*roles: str, **settings: Any) -> dict[str, Any]:
    policies = {role: PolicyConfig(path="toy", **settings) for role in roles}
    config = rollout_config(agent__policies={"player": ACTOR, **policies})
    config.prompt_length = config.response_length = 64
    return make_policies(
        config,
        own_model=lambda: pytest.fail("not a copy of the actor"),
        own_tokenizer=None,
        device=torch.device("cpu"),
        sleeps=True,
    )


def test_seed_step_row_and_turn_fix_the_turns_of_a_frozen_model():
    made = toy_policies("one", "other", max_new_tokens=12, temperature=5.0)
    one, other = made["one"], made["other"]
    places = [(0, 0), (1, 0), (1, 1)]
    drawn = replies(one, places)

    assert len(set(drawn)) == 3
    assert replies(one, places[::-1]) == drawn[::-1]
    assert replies(one, places, step=4) != drawn
    assert replies(other, places) != drawn  # the same model in another role


def test_sampling_settings_are_the_policys_own():
    greedy = toy_policies("judge", temperature=0.0, max_new_tokens=3)["judge"]
    drawn = replies(greedy, [(0, 0), (1, 0), (2, 5)])
    assert len(set(drawn)) == 1
    assert len(greedy.tokenizer.encode(drawn[0], add_special_tokens=False)) <= 3


def test_taken_weights_change_the_draws_and_the_source_stays():
    policy = toy_policies("judge", temperature=0.0, max_new_tokens=8)["judge"]
    before = replies(policy, [(0, 0)])
    other = {name: value.clone() for name, value in policy.engine.twin.named_weights()}
    for value in other.values():
        value.mul_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    policy.take(other.items())
    assert replies(policy, [(0, 0)]) != before

    held = dict(policy.engine.twin.named_weights())
    assert all(torch.equal(held[name], value) for name, value in other.items())
    assert all(held[name].data_ptr() != value.data_ptr() for name, value in other.items())


def test_copies_are_renewed_by_the_step_and_never_by_a_validation():
    own = rollout_config(agent__policies={"old": PolicyConfig(path="self", update_freq=3)})
    policy = toy_policies("old")["old"]
    copies = Copies(own, {"old": policy})

    due = []
    for step in (None, 1, 1, None, 2, 3, None, 4, 5, 7):
        if copies.renew(policy.engine, step):
            due.append(step)
    assert due == [None, 1, 4, 7]


@pytest.mark.parametrize(
    ("steps", "is_newer"), [([4], False), ([None, 4], False), ([5, 6], True), ([None, 6], True)]
)
def test_a_run_that_resumes_between_two_copies_says_so_once(
    caplog: pytest.LogCaptureFixture, steps: list[int | None], is_newer: bool
):
    own = rollout_config(agent__policies={"old": PolicyConfig(path="self", update_freq=3)})
    policy = toy_policies("old")["old"]
    copies = Copies(own, {"old": policy})
    with caplog.at_level(logging.WARNING, logger="verl"):
        for step in steps:
            copies.renew(policy.engine, step)
    assert caplog.text.count("by the copy after step 3 ") == int(is_newer)


# ---- servers -------------------------------------------------------------------------------------


@pytest.fixture
def chat() -> Iterator[tuple[str, type[Chat]]]:
    with serving() as place:
        yield place


def served(url: str, **settings: Any) -> dict[str, Any]:
    policy = PolicyConfig(url=url, model="big", max_new_tokens=9, temperature=0.5, **settings)
    return make_policies(
        rollout_config(agent__policies={"player": ACTOR, "judge": policy}),
        own_model=lambda: pytest.fail("no model is loaded"),
        own_tokenizer=None,
        device=torch.device("cpu"),
        sleeps=True,
    )


def test_a_server_plays_a_role(chat: tuple[str, type[Chat]], monkeypatch: pytest.MonkeyPatch):
    url, handler = chat
    monkeypatch.setenv("JUDGE_KEY", "secret")
    policies = {"player": ACTOR, "judge": PolicyConfig(url=url, model="big")}
    trajectories, tokenizer = play(DEBATE, policies, served(url, api_key_env="JUDGE_KEY"))

    asked = sorted(handler.asked, key=lambda body: body["messages"][0]["content"])
    assert [body["path"] for body in asked] == ["/v1/chat/completions"] * 2
    assert {body["key"] for body in asked} == {"Bearer secret"}
    assert {(body["max_tokens"], body["temperature"]) for body in asked} == {(9, 0.5)}
    assert asked[0]["seed"] != asked[1]["seed"]
    assert f"big {asked[0]['seed']}" in segment_texts(tokenizer, trajectories[0], "user")[0]

    before = [body["seed"] for body in asked]
    handler.asked.clear()
    play(DEBATE, policies, served(url, api_key_env="JUDGE_KEY"))
    assert sorted(body["seed"] for body in handler.asked) == sorted(before)


def test_a_server_that_answers_otherwise_ends_the_run(chat: tuple[str, type[Chat]]):
    url, handler = chat
    handler.answer = {"error": "no model"}
    policies = {"player": ACTOR, "judge": PolicyConfig(url=url, model="big")}
    with pytest.raises(RolloutError, match=r"judge.url answered without choices.*no model"):
        play(DEBATE, policies, served(url))

    handler.status = 401
    with pytest.raises(RolloutError, match=r"answered 401.* Set actor_.*judge\.api_key_env to"):
        play(DEBATE, policies, served(url))
