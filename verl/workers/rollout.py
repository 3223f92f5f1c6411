"""The rollout role: the calls by which a rollout engine generates, plays episodes and goes on."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from verl import agents
from verl.config import ActorRolloutRefConfig, TrainConfig
from verl.config.policies import partner_role
from verl.distributed.collectives import gather_objects
from verl.models.pictures import pictures_of
from verl.protocol import DataProto
from verl.rollout import assemble, generate, trajectories_of
from verl.rollout.goal import Goal
from verl.rollout.trajectory import Trajectory
from verl.rollout.types import Completion, Request, Room, SamplingParams
from verl.single_controller import Dispatch, emit, note_progress, register
from verl.utils.errors import RolloutError
from verl.workers.actor import ActorWorker
from verl.workers.counters import combine_metrics
from verl.workers.playing import (
    episode_columns,
    follow_to_the_end,
    lead,
    make_agents,
)
from verl.workers.rollout_engine import RolloutEngineWorker
from verl.workers.stream import EpisodeOrders, EpisodeStream, Orders, Progressed, advance, freeze
from verl.workers.texts import text_columns

if TYPE_CHECKING:
    from verl.rollout.embedded.engine import EmbeddedEngine

# `verl.workers.rollout.replica`, a path of verl 0.6 and later, is then looked up in the table of
# old paths.
__path__: list[str] = []


class RolloutWorker(RolloutEngineWorker):
    """Generate responses with an engine of its own.

    Args:
        config, device, tokenizer, actor, loads_weights: see `RolloutEngineWorker`.
        run: the configuration of the whole run, for agent loops that read it.
        partners: rollouts in this process that draw the turns of a role, whose policies are trained
            next to the actor, by `partner_role`.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: torch.device,
        tokenizer: Any,
        actor: ActorWorker | None = None,
        loads_weights: bool = False,
        run: TrainConfig | None = None,
        **partners: "RolloutWorker",
    ) -> None:
        super().__init__(
            config, device=device, tokenizer=tokenizer, actor=actor, loads_weights=loads_weights
        )
        self.partners = {
            role: partners[partner_role(role)] for role in config.rollout.agent.partners
        }
        self.agents: agents.AgentRunner | None = None
        self.episodes: EpisodeStream | None = None  # that go on over several calls
        if config.rollout.uses_agents:
            with self._names_errors("loading"):
                self.agents, self._copies = make_agents(
                    config,
                    tokenizer,
                    self.device,
                    stop_ids=self.stop_ids,
                    partners={role: partner.engine for role, partner in self.partners.items()},
                    is_alone=actor is None,
                    for_servers=self.is_external,
                    sharing=self.rollout_mesh.tensor,
                    run=run,
                )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(
        self, prompts: DataProto, *, n: int, params: SamplingParams, seed: int, step: int
    ) -> DataProto:
        """Sample n responses to each of B prompts: B * n rows, the samples of a prompt together.

        Reads the object columns `raw_prompt_ids` and `prompt_row`, the number of the prompt in the
        whole batch: sample ids, and with them the noise, do not depend on how the batch is dealt to
        the ranks. Returns the columns of phase "generate".

        Reports (sample id, token ids) of every response when it is finished.
        """
        requests = requests_of(prompts, n)
        self.provide_weights()

        completions = []
        total = len(requests) * n
        speaks = self.rollout_mesh.tensor.rank == 0  # for the ranks that share an engine
        for completion in self._generate(requests, params, seed=seed, step=step):
            completions.append(completion)
            if speaks:
                note_progress(len(completions), total, "responses")
                emit((completion.sample_id, completion.token_ids))
        self._make_room()

        local_id = {}  # sample id in the whole batch -> row of this rank's share
        prompt_of_row = []
        for request in requests:
            for sample_id in request.sample_ids:
                local_id[sample_id] = len(prompt_of_row)
                prompt_of_row.append(request.prompt_ids)
        local = [replace(each, sample_id=local_id[each.sample_id]) for each in completions]
        columns = self._columns(trajectories_of(prompt_of_row, local))
        return DataProto.from_dict(
            tensors=columns, meta_info={"metrics": self._metrics(self.engine.statistics())}
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_texts(
        self, prompts: DataProto, *, n: int, params: SamplingParams, seed: int
    ) -> DataProto:
        """Sample n texts for each of B prompts: the columns of `text_columns`.

        Reads `raw_prompt_ids` and `prompt_row` as `generate_sequences` does.
        """
        requests = requests_of(prompts, n)
        completions = self._generate(requests, params, seed=seed, step=0)
        columns = text_columns(completions, requests, self.tokenizer, self.vocabulary)
        return DataProto.from_dict(non_tensors=columns)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_ANY_ROWS)
    def play_episodes(
        self,
        prompts: DataProto,
        *,
        n: int,
        params: SamplingParams,
        seed: int,
        step: int,
        record_step: int,
    ) -> DataProto:
        """Play n episodes of each of B prompts by agent loops: at least B * n rows.

        Reads all object columns, among them `raw_prompt`, `raw_prompt_ids` and `prompt_row`.

        Returns the columns of phase "generate", in no order over the ranks, with `turn_of_token`
        (rows, R) and the object columns `episode` (its number in the whole batch), `episode_part`,
        `agent_role`, `num_turns`, `agent_info` (for the reward function), `agent_reward` (None
        where the reward function gives the score) and `turn_rewards` ({turn: reward}). A model that
        reads pictures adds `prepared_pictures`: those of the prompt, then those of tools.

        Reports (sample id, None) of every episode when it has ended.

        Args:
            record_step: number of the batch within the run, below 0 for validation.
        """
        assert self.agents is not None, "the configuration names no agent loop"
        self.provide_weights()
        columns = prompts.non_tensor_batch
        episodes = agents.episodes_of(columns, n, step=step, record_step=record_step)
        for partner in self.partners.values():
            partner.provide_weights()
        self._copies.renew(self.engine, step if record_step >= 0 else None)
        self.engine.forget_prefixes()
        longest = self.config.rollout.longest_sequence
        self.engine.reserve(Room(sequences=len(episodes), tokens=longest))

        steps = agents.EngineSteps(self.engine, params, seed, step, self.vocabulary)
        sharing = self.rollout_mesh.tensor
        with self._names_errors("generation"):
            if sharing.rank == 0:
                version = self._weights_version
                trajectories, counters = lead(
                    self.agents, episodes, steps, sharing, max_model_len=longest, version=version
                )
            else:
                trajectories, counters = follow_to_the_end(steps, sharing)
        for rollout in (self, *self.partners.values()):
            rollout._make_room()

        metrics = {**self._metrics(counters), **self._agent_metrics(self.agents.metrics())}
        for role, drawn in self.agents.partner_counters().items():
            for name, value in self._metrics(drawn).items():
                metrics[f"{partner_role(role)}/{name}"] = value
        return DataProto.from_dict(
            tensors=self._columns(trajectories, with_turns=True),
            non_tensors=episode_columns(trajectories, self.agents.context.pictures is not None),
            meta_info={"metrics": metrics},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def start_samples(self, orders: Orders) -> None:
        """Submit samples to the engine, also while others run. `advance_samples` draws tokens."""
        self.provide_weights()
        if not self.engine.has_work:
            self.engine.forget_prefixes()
        with self._names_errors("generation"):
            self.engine.submit(orders.requests, orders.params, seed=orders.seed, step=0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def advance_samples(self, goal: Goal, most_steps: int | None) -> Progressed:
        """Draw tokens until `goal` is reached, or for `most_steps` steps of the engine."""
        started = time.perf_counter()
        with self._names_errors("generation"):
            finished = advance(self.engine, goal, most_steps)
        return Progressed(finished=finished, seconds=time.perf_counter() - started)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def freeze_samples(self, keep: bool) -> Progressed:
        """Take all samples out of the engine, which has no work afterwards.

        Every rank must call it. `keep` holds their keys and values until they go on.
        """
        news = freeze(self.engine, keep=keep)
        news.metrics = self._metrics(self.engine.statistics())
        self._make_room()
        return news

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def start_episodes(self, orders: EpisodeOrders) -> None:
        """Begin episodes next to those at work. `advance_episodes` plays them."""
        assert self.agents is not None, "the configuration names no agent loop"
        self.provide_weights()
        if self.episodes is None:
            longest = self.config.rollout.longest_sequence
            self.episodes = EpisodeStream(
                self.agents, self.engine, self.rollout_mesh.tensor, longest, self.vocabulary
            )
        self.episodes.start(orders)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def advance_episodes(self, goal: Goal, most_steps: int | None) -> Progressed:
        """Play until `goal` is reached, or for `most_steps` steps of the engine."""
        assert self.episodes is not None, "start_episodes comes first"
        started = time.perf_counter()
        with self._names_errors("generation"):
            ended = self.episodes.advance(goal, most_steps)
        return Progressed(episodes=ended, seconds=time.perf_counter() - started)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def freeze_episodes(self, keep: bool) -> Progressed:
        """Take all turns out of the engine, which has no work afterwards. Tools go on.

        Every rank must call it. `keep` holds their keys and values until they go on.
        """
        if self.episodes is None:  # the checkpoint of a resumed run may hold a whole batch
            self._make_room()
            return Progressed()
        ended = self.episodes.freeze(keep=keep)
        counters, of_agents = self.episodes.take_metrics()
        metrics = {**self._metrics(counters), **self._agent_metrics(of_agents)}
        self._make_room()
        return Progressed(episodes=ended, metrics=metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget_kept(self) -> None:
        """Drop the keys and values of frozen samples, as a resumed run begins without them."""
        cast("EmbeddedEngine", self.engine).forget_kept()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close_agents(self) -> None:
        """End the processes of tools. Later episodes start them again."""
        if self.episodes is not None:
            self.episodes.close()
            self.episodes = None
        if self.agents is not None:
            self.agents.close()

    def close(self) -> None:
        """End the processes and threads of agents and of the engine; see `Worker.close`."""
        self.close_agents()
        self.engine.close()

    def _generate(
        self, requests: Sequence[Request], params: SamplingParams, *, seed: int, step: int
    ) -> Iterator[Completion]:
        """Give the completions of all requests as they are finished."""
        if not self.has_weights:
            raise RolloutError(
                "The rollout has no weights yet. Hand the actor's over before it generates "
                "(`sync_weights`)."
            )
        # A resumed run starts without the prefixes of earlier prompts.
        self.engine.forget_prefixes()
        with self._names_errors("generation"):
            yield from generate(self.engine, requests, params, seed=seed, step=step)

    def _columns(
        self, trajectories: Sequence[Trajectory], *, with_turns: bool = False
    ) -> dict[str, torch.Tensor]:
        rollout = self.config.rollout
        return assemble(
            trajectories,
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=self.tokenizer.pad_token_id,
            with_turns=with_turns,
            vocabulary=self.vocabulary,
        )

    def _agent_metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Combine the counts of the agent loops of all engines."""
        return combine_metrics(gather_objects(own, self.rollout_mesh.data))


def requests_of(prompts: DataProto, n: int) -> list[Request]:
    """Return a request of n samples for each prompt, with the sample ids of the whole batch."""
    columns = prompts.non_tensor_batch
    requests = []
    for ids, row, pictures in zip(
        columns["raw_prompt_ids"], columns["prompt_row"], pictures_of(prompts)
    ):
        first = int(row) * n
        request = Request(
            prompt_ids=tuple(map(int, ids)),
            sample_ids=tuple(range(first, first + n)),
            pictures=pictures,
        )
        requests.append(request)
    return requests
