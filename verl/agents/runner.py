"""Plays the episodes of a batch: many coroutines in one asyncio loop, next to the engine."""

import asyncio
import atexit
import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any

from verl.agents.boundary import ChatBoundary
from verl.agents.checks import (
    LOOPS_WITH_PICTURES,
    Column,
    check_pictures,
    check_prompts,
    check_rows,
    play_single_rows,
    prompts_too_long,
)
from verl.agents.engine_client import EngineClient
from verl.agents.formats import CallFormat, recognise_format, tool_format, tool_formats
from verl.agents.formats.tool_parser import ParserFormat
from verl.agents.interactions import InteractionSet
from verl.agents.loops import AgentContext, AgentLoop, Episode, Tally, agent_loops, register_loops
from verl.agents.loops.base import EpisodeDropped
from verl.agents.loops.user_loop import UserLoop
from verl.agents.policies import FrozenPolicy, PartnerPolicy
from verl.agents.tools import ToolSet
from verl.agents.tools.threads import gather_all, run_to_end
from verl.agents.user_thread import described_error, file_of
from verl.config.model import ModelConfig
from verl.config.rollout import RolloutConfig
from verl.config.train import TrainConfig
from verl.data.pictures import PictureReader
from verl.rollout.trajectory import DROPPED_BECAUSE, Segment, Trajectory
from verl.utils.errors import ConfigError, RolloutError, VerlError, describe_error
from verl.utils.logging import logger, say_once

_SECTION = "actor_rollout_ref.rollout"
_PICTURES = "prepared_pictures"  # the column, whose pictures the episodes of a row share

# Called with the trajectories of every episode that has ended.
OnEnd = Callable[[Sequence[Trajectory]], None]
Failure = Exception | SystemExit  # how a loop may end an episode


class AgentRunner:
    """Agent loops, tools and interactions of a run, ready to play batches of episodes.

    Args:
        config: the section `rollout`.
        tokenizer: the model's.
        stop_ids: tokens that end a turn, in addition to the tokenizer's own.
        model: the section `model`, for loops that read it.
        run: the configuration of the whole run, likewise; None: there is none.
        pictures: reads images; None: the model reads text alone.
        policies: frozen ones, by the role that they play.
        partners: policies that are trained next to the actor, by their roles.

    Raises ConfigError at once for a file, name or template that cannot work.
    """

    def __init__(
        self,
        config: RolloutConfig,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int] = (),
        model: ModelConfig | None = None,
        run: TrainConfig | None = None,
        pictures: PictureReader | None = None,
        policies: Mapping[str, FrozenPolicy] | None = None,
        partners: Mapping[str, PartnerPolicy] | None = None,
    ) -> None:
        if pictures is not None and config.multi_turn.use_inference_chat_template:
            raise ConfigError(
                f"{_SECTION}.multi_turn.use_inference_chat_template=true encodes the model's own "
                "turns again, which models that read pictures do not support. Set it to false."
            )
        self.config = config
        self.tokenizer = tokenizer
        if config.agent.agent_loop_config_path is not None:
            register_loops(config.agent.agent_loop_config_path)
        agent_loops.get(config.agent_loop)

        tools = _tools_of(config)
        with ExitStack() as opened:
            if tools is not None:
                opened.callback(tools.close)
            boundary = ChatBoundary(tokenizer, stop_ids=[*stop_ids, *config.stop_token_ids])
            self.context = AgentContext(
                config=config,
                tokenizer=tokenizer,
                model=model,
                run=run,
                boundary=boundary,
                format=_format_of(config, tokenizer, boundary) if tools is not None else None,
                tools=tools,
                interactions=_interactions_of(config),
                pictures=pictures,
                policies=policies or {},
                partners=partners or {},
            )
            opened.pop_all()  # they stay open

        say_once(f"agents: {boundary.report()}")
        self._loops: dict[str, AgentLoop] = {}
        self._is_closed = False
        atexit.register(self.close)  # a run that fails ends without closing its tools

    def apart(self) -> "AgentRunner":
        """Return a runner for episodes in another event loop, which shares the tools with this one.

        Loops, client and tally are its own.
        """
        if self._is_closed:
            self._open_again()
        other = copy.copy(self)
        other.context = replace(self.context, tally=Tally())
        other._loops = {}
        return other

    def play(
        self, episodes: Sequence[Episode], client: EngineClient, on_end: OnEnd | None = None
    ) -> list[Trajectory]:
        """Play all episodes. Return their trajectories in the order of the episodes.

        Args:
            client: of an idle engine.
            on_end: called whenever an episode has ended.
        """
        if self._is_closed:
            self._open_again()
        self.context.tally = Tally()
        self.prepare(episodes, client)

        work = self._play_all(episodes, on_end)
        for policy in self.context.policies.values():
            work = policy.serve(work, steps=client.steps, num_episodes=len(episodes))
        for partner in self.context.partners.values():
            work = partner.serve(
                work,
                steps=client.steps,
                num_episodes=len(episodes),
                max_model_len=client.max_model_len,
            )
        return run_to_end(client.serve(work))

    def prepare(self, episodes: Sequence[Episode], client: EngineClient) -> None:
        """Make the loops of `episodes`, which draw their turns from `client`.

        Raises RolloutError for pictures that a loop cannot read.
        """
        self.context.client = client
        for episode in episodes:
            name = self.loop_name(episode)
            self._loop(name)
            if episode.pictures and name not in LOOPS_WITH_PICTURES:
                raise RolloutError(
                    f"The agent loop '{name}' cannot play prompts with pictures, as that of sample "
                    f"{episode.row}. Leave the images out, or use one of the loops "
                    f"{', '.join(LOOPS_WITH_PICTURES)}."
                )

    @property
    def most_at_once(self) -> int:
        """Most episodes that are played at once."""
        return self.config.agent.max_episodes or self.config.max_num_seqs

    def metrics(self) -> dict[str, float]:
        """Return counts and seconds of the last `play`, under verl's names.

        `<name>/count` of a mean says how many episodes it counts, for the mean of several engines.
        """
        metrics: dict[str, float] = {}
        tally = self.context.tally
        for name, seconds in tally.seconds.items():
            metrics[f"agent_loop/{name}/min"] = min(seconds)
            metrics[f"agent_loop/{name}/max"] = max(seconds)
            metrics[f"agent_loop/{name}/mean"] = sum(seconds) / len(seconds)
            metrics[f"agent_loop/{name}/count"] = float(len(seconds))
        for name, count in sorted(tally.counts.items()):
            metrics[f"agent_loop/{name}"] = float(count)
        if self.context.tools is not None:
            metrics |= self.context.tools.counts(reset=True)
        return metrics

    def partner_counters(self) -> dict[str, dict[str, float]]:
        """Return the counters of the partners' engines in the last `play`, by role."""
        counters = {}
        for role, partner in self.context.partners.items():
            assert partner.client is not None, "play comes first"
            counters[role] = partner.client.counters
        return counters

    def loop_name(self, episode: Episode) -> str:
        """Return the name of the loop that plays an episode."""
        return str(episode.fields.get("agent_name") or self.config.agent_loop)

    def check_rows(self, column: Column, prompt_key: str) -> None:
        """Check the data against what is configured; see `verl.agents.checks`."""
        check_rows(self.config, self.context.tools, self.context.interactions, column)
        check_prompts(self.context, column, prompt_key)

    def play_single_rows(self, column: Column) -> bool:
        """Return whether all episodes are one row each; see `verl.agents.checks`."""
        return play_single_rows(self.config, column)

    def check_pictures(self, column: Column, have_pictures: Iterable[bool]) -> None:
        """Check who plays prompts with pictures; see `verl.agents.checks`."""
        check_pictures(self.config, column, have_pictures)

    def prompts_too_long(self, column: Column, prompt_key: str) -> list[str]:
        """Return the rows with prompts that do not fit with their tools."""
        return [place for place, _ in prompts_too_long(self.context, column, prompt_key)]

    def close(self) -> None:
        """End the processes, threads and connections of tools, interactions and agents.

        `play` makes them anew.
        """
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        if self.context.tools is not None:
            self.context.tools.close()
        if self.context.interactions is not None:
            self.context.interactions.close()
        for close in self.context.closers:
            close()

    # ---------------------------------------------------------------- inner parts

    def _open_again(self) -> None:
        self.context.tools = _tools_of(self.config)
        self.context.interactions = _interactions_of(self.config)
        self._is_closed = False
        atexit.register(self.close)

    def _loop(self, name: str) -> AgentLoop:
        if name not in self._loops:
            self._loops[name] = agent_loops.get(name)(self.context)
        return self._loops[name]

    async def _play_all(
        self, episodes: Sequence[Episode], on_end: OnEnd | None
    ) -> list[Trajectory]:
        at_once = asyncio.Semaphore(self.most_at_once)

        async def play_one(episode: Episode) -> list[Trajectory]:
            async with at_once:
                trajectories = await self.play_one(episode)
            if on_end is not None:
                on_end(trajectories)
            return trajectories

        answers = await gather_all(play_one(episode) for episode in episodes)
        return list(chain.from_iterable(answers))

    async def play_one(self, episode: Episode) -> list[Trajectory]:
        """Play one episode. Where it fails, the configuration says what becomes of it."""
        agent = self.config.agent
        loop = self._loop(self.loop_name(episode))
        try:
            answer = await asyncio.wait_for(_played(loop, episode), agent.episode_timeout_s)
        except asyncio.TimeoutError:
            return self._drop(episode, f"it took more than {agent.episode_timeout_s:g} s")
        if isinstance(answer, EpisodeDropped):
            return self._drop(episode, str(answer))
        if isinstance(answer, Failure):
            return self._drop_failed(episode, answer)

        if not answer:
            return self._drop(episode, "it gave no trajectory")
        if answer[0].is_dropped:
            self._note_dropped(episode, answer[0].extra.get(DROPPED_BECAUSE, "a call failed"))
        return answer

    def _drop_failed(self, episode: Episode, error: Failure) -> list[Trajectory]:
        """Drop an episode that raised, or raise, as the configuration says."""
        if isinstance(error, RolloutError):
            raise error

        is_ours = isinstance(error, VerlError)
        name = self.loop_name(episode)
        if is_ours:
            described = describe_error(error)
        else:
            described = described_error(error, _file_of(self._loop(name)))

        if self.config.agent.on_error == "drop":
            return self._drop(episode, described)
        if is_ours:
            raise error
        raise RolloutError(
            f"The agent loop '{name}' failed in sample {episode.row}. It raised "
            f"{described}. Fix the loop, or drop such episodes: "
            f"{_SECTION}.agent.on_error=drop."
        ) from error

    def _drop(self, episode: Episode, why: str) -> list[Trajectory]:
        """Return a trajectory in place of an episode: one token that is never learned from."""
        self._note_dropped(episode, why)
        filler = Segment(source="template", token_ids=[self.tokenizer.pad_token_id])
        trajectory = Trajectory(
            row=episode.row,
            prompt_ids=list(episode.prompt_ids)[: self.config.prompt_length],
            segments=[filler],
            is_dropped=True,
            extra={DROPPED_BECAUSE: why},
        )
        return [trajectory]

    def _note_dropped(self, episode: Episode, why: str) -> None:
        counts = self.context.tally.counts
        counts["dropped"] += 1
        if counts["dropped"] == 1:
            logger.warning("agents: sample %d is dropped: %s.", episode.row, why.rstrip("."))


def _file_of(loop: AgentLoop) -> str | None:
    """Return the file of the class that plays an episode."""
    if isinstance(loop, UserLoop):
        return file_of(loop.loop_class.run)
    return file_of(loop.play)


async def _played(loop: AgentLoop, episode: Episode) -> list[Trajectory] | Failure:
    """Return what a loop gives or raises: its own TimeoutError is none of the episode's limit.

    A `sys.exit` of a user's code is a failure, too: it would end the run without a message.
    """
    try:
        return await loop.play(episode)
    except (Exception, SystemExit) as error:  # noqa: BLE001  (the caller raises it, or drops)
        return error


def _tools_of(config: RolloutConfig) -> ToolSet | None:
    """Make the tools that the configuration names; None without any."""
    turns = config.multi_turn
    agent = config.agent
    sources = (turns.tool_config_path, turns.function_tool_path, agent.replay_path)
    if not any(sources):
        return None

    return ToolSet.from_config(
        tool_config_path=turns.tool_config_path,
        function_tool_path=turns.function_tool_path,
        max_parallel_calls=turns.max_parallel_calls,
        max_tool_response_length=turns.max_tool_response_length,
        tool_response_truncate_side=turns.tool_response_truncate_side,
        timeout_s=agent.tool_timeout_s,
        policy=agent.tool_error,
        record_path=agent.record_path,
        replay_path=agent.replay_path,
    )


def _interactions_of(config: RolloutConfig) -> InteractionSet | None:
    """Make the interactions that the configuration names; None without any."""
    path = config.multi_turn.interaction_config_path
    if path is None:
        return None
    return InteractionSet.from_config(path)


def _format_of(config: RolloutConfig, tokenizer: Any, boundary: ChatBoundary) -> CallFormat:
    """Return the tool-call format that the configuration names or the chat template shows."""
    asked = config.multi_turn.format
    if not boundary.has_tools():
        raise ConfigError(
            "The tokenizer's chat template has no place for tools, so the model would never hear "
            "of them. Set actor_rollout_ref.model.custom_chat_template to one that writes `tools`, "
            f"or leave out {_SECTION}.multi_turn.tool_config_path and function_tool_path."
        )

    shown = recognise_format(tokenizer.chat_template)
    name = asked or shown
    if name is None:
        raise ConfigError(
            "The chat template does not show how the model writes tool calls. Set "
            f"{_SECTION}.multi_turn.format to one of: {', '.join(sorted(tool_formats))}."
        )

    chosen = tool_format(name, tokenizer)
    if shown is not None and type(chosen) not in (ParserFormat, tool_formats.get(shown)):
        say_once(
            f"agents: {_SECTION}.multi_turn.format={name}, but the chat template shows the model "
            f"calls in the format {shown}. Calls in that one are not read. Leave the key out to "
            "read them.",
            logging.WARNING,
        )
    return chosen


def episodes_of(
    columns: Mapping[str, Any], n: int, *, step: int, record_step: int
) -> list[Episode]:
    """Return n episodes for each row of object columns, with `raw_prompt` and `prompt_row`."""
    episodes = []
    for place, prompt_row in enumerate(columns["prompt_row"]):
        for sample in range(n):
            # A loop or an environment that changes its fields must not change its siblings'.
            fields = {
                name: copy.deepcopy(values[place])
                for name, values in columns.items()
                if name != _PICTURES
            }

            pictures = columns[_PICTURES][place] if _PICTURES in columns else None
            episode = Episode(
                row=int(prompt_row) * n + sample,
                messages=list(fields["raw_prompt"]),
                prompt_ids=[int(token) for token in fields["raw_prompt_ids"]],
                fields=fields,
                record_step=record_step,
                step=step,
                pictures=tuple(pictures or ()),
            )
            episodes.append(episode)
    return episodes
