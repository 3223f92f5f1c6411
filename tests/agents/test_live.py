"""Episodes whose turns are frozen and go on: the same tokens, and tools that do not notice."""

import asyncio
import time

import pytest

from tests.agents.scripted import episode
from tests.rollout.engines import make_engine, talkative_model
from tests.tiny_models import tiny_tokenizer
from verl.agents import AgentRunner, EngineClient, EngineSteps, LiveEpisodes
from verl.agents.loops import AgentContext, Episode, agent_loops
from verl.config.rollout import RolloutConfig
from verl.rollout import SamplingParams
from verl.rollout.goal import Goal, GoalWatch
from verl.rollout.trajectory import Segment, Trajectory
from verl.utils.errors import RolloutError
from verl.workers.stream import freeze as take_out

PARAMS = SamplingParams(max_new_tokens=12, ignore_eos=True)
LONGEST = 128
TURNS = 3
EPISODES = range(6)
NEVER = Goal((), ((1, 1),))
tool_ends: list[float] = []  # times at which tools have ended


class Waiting:
    """Draws turns, and waits for a tool after each."""

    tool_s = 0.0

    def __init__(self, context: AgentContext) -> None:
        self.context = context

    async def play(self, episode: Episode) -> list[Trajectory]:
        ids = list(episode.prompt_ids)
        segments = []
        for turn in range(TURNS):
            drawn = await self.context.client.generate(prompt_ids=ids, row=episode.row, turn=turn)
            segments.append(
                Segment(
                    source="model",
                    token_ids=drawn.token_ids,
                    log_probs=drawn.log_probs,
                    versions=drawn.versions,
                )
            )
            ids += [*drawn.token_ids, 7, 9]
            await asyncio.sleep(self.tool_s)
            tool_ends.append(time.monotonic())
        return [Trajectory(row=episode.row, prompt_ids=episode.prompt_ids, segments=segments)]


class Broken(Waiting):
    """Fails after its first turn."""

    async def play(self, episode: Episode) -> list[Trajectory]:
        await self.context.client.generate(prompt_ids=episode.prompt_ids, row=episode.row)
        raise RolloutError("a loop that fails")


agent_loops.register("waiting_live")(Waiting)
agent_loops.register("broken_live")(Broken)


def begin(engine, loop: str = "waiting_live") -> tuple[AgentRunner, EngineSteps]:
    config = RolloutConfig(prompt_length=64, response_length=64, mode="async")
    config.agent.default_agent_loop = loop
    return AgentRunner(config, tiny_tokenizer()), EngineSteps(engine, PARAMS, seed=3, step=0)


def freeze(live: LiveEpisodes, engine, *, keep: bool = False):
    return live.freeze(lambda: take_out(engine, keep=keep))


def prompts() -> list[Episode]:
    return [episode(tiny_tokenizer(), row) for row in EPISODES]


def drawn(trajectories: list[Trajectory]) -> list[list[tuple[int, float]]]:
    rows = []
    for trajectory in sorted(trajectories, key=lambda each: each.row):
        pairs = []
        for segment in trajectory.segments:
            pairs += zip(segment.token_ids, segment.log_probs or ())
        rows.append(pairs)
    return rows


def test_frozen_turns_draw_the_tokens_of_an_undisturbed_batch():
    engine = make_engine(talkative_model("qwen2"), max_model_len=LONGEST)
    runner, steps = begin(engine)
    undisturbed = runner.play(prompts(), EngineClient(steps, max_model_len=LONGEST))

    live = LiveEpisodes(runner, steps, max_model_len=LONGEST)
    ended = []
    live.start(prompts(), 0)
    for version in range(1, 60):
        ended += live.advance(GoalWatch(NEVER), most_steps=5)
        ended += freeze(live, engine)
        assert not engine.has_work
        live.start([], version)
    live.close()

    assert sorted(row for row, _ in ended) == list(EPISODES)
    trajectories = [trajectories[0] for _, trajectories in ended]
    ours = drawn(trajectories)
    theirs = drawn(undisturbed)
    for one, other in zip(ours, theirs, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        # Keys that are computed again have other bits.
        assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-4)

    spans = []
    for trajectory in trajectories:
        for segment in trajectory.segments:
            assert segment.versions is not None
            assert len(segment.versions) == len(segment.token_ids)
            assert list(segment.versions) == sorted(segment.versions)
            spans.append(len(set(segment.versions)))
    assert max(spans) > 2, "some turn was drawn by three weights"
    engine.check_integrity()


def test_tools_go_on_while_the_engine_stands_still(monkeypatch):
    monkeypatch.setattr(Waiting, "tool_s", 0.1)
    tool_ends.clear()
    engine = make_engine(talkative_model("qwen2"), max_model_len=LONGEST)
    runner, steps = begin(engine)
    live = LiveEpisodes(runner, steps, max_model_len=LONGEST)
    live.start(prompts(), 0)
    while not engine.has_work:
        live.advance(GoalWatch(NEVER), most_steps=1)
    while engine.has_work:
        live.advance(GoalWatch(NEVER), most_steps=1)
    freeze(live, engine)
    frozen_at = time.monotonic()
    time.sleep(0.4)
    thawed_at = time.monotonic()
    live.start([], 1)

    ended = live.advance(GoalWatch(NEVER), most_steps=None)
    live.close()
    assert len(ended) == len(EPISODES)
    meanwhile = [at for at in tool_ends if frozen_at < at < thawed_at]
    assert len(meanwhile) == len(EPISODES)


def test_an_error_of_a_loop_reaches_the_engine_s_thread():
    engine = make_engine(talkative_model("qwen2"), max_model_len=LONGEST)
    runner, steps = begin(engine, "broken_live")
    live = LiveEpisodes(runner, steps, max_model_len=LONGEST)
    live.start(prompts(), 0)
    with pytest.raises(RolloutError, match="a loop that fails"):
        live.advance(GoalWatch(NEVER), most_steps=None)
    live.close()


def test_closing_ends_all_episodes():
    engine = make_engine(talkative_model("qwen2"), max_model_len=LONGEST)
    runner, steps = begin(engine)
    live = LiveEpisodes(runner, steps, max_model_len=LONGEST)
    live.start(prompts(), 0)
    live.advance(GoalWatch(NEVER), most_steps=3)
    freeze(live, engine)
    live.close()
    assert live.num_at_work == 0
    assert not engine.has_work
