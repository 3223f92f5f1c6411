"""The rollout role: owns a rollout engine, next to the actor or on ranks of its own."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from verl import agents
from verl.config import ActorRolloutRefConfig
from verl.config.policies import partner_role
from verl.data.build import build_picture_reader
from verl.distributed.collectives import gather_objects
from verl.distributed.mesh import init_mesh, init_rollout_mesh
from verl.engine.memory import reports_out_of_memory
from verl.models.load import check_vocabulary, load_causal_lm, load_model_config
from verl.models.pictures import Pictures
from verl.protocol import DataProto
from verl.rollout import (
    ServerEngine,
    assemble,
    capabilities_of,
    check_engine_model,
    create_rollout_engine,
    generate,
    trajectories_of,
)
from verl.rollout.goal import Goal
from verl.rollout.stopping import end_of_sequence_ids
from verl.rollout.trajectory import Trajectory
from verl.rollout.types import Completion, Request, Room, SamplingParams
from verl.single_controller import Dispatch, Worker, note_progress, register, tell
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.imports import import_user_code
from verl.weight_sync import (
    DirectSender,
    Endpoint,
    Meeting,
    WeightReceiver,
    WeightSender,
    join,
    receive_into,
)
from verl.workers.actor import ActorWorker, model_source
from verl.workers.counters import combine_counters, combine_metrics
from verl.workers.playing import (
    episode_columns,
    follow_to_the_end,
    frozen_policies,
    lead,
    pictures_of,
    refuse_pictures,
)
from verl.workers.served import server_sender
from verl.workers.stream import EpisodeOrders, EpisodeStream, Orders, Progressed, advance, freeze
from verl.workers.texts import text_columns

if TYPE_CHECKING:
    from verl.rollout.embedded.engine import EmbeddedEngine

_WAY_OUT = (
    "Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or "
    "max_num_batched_tokens (without the section's name for verl generate), or split the model "
    "over more GPUs: rollout.tensor_model_parallel_size."
)
_WAY_OUT_NEXT_TO_THE_ACTOR = (
    "Lower actor_rollout_ref.rollout.gpu_memory_utilization, max_num_seqs or "
    "max_num_batched_tokens, or keep the trainer's weights and moments on the host meanwhile: "
    "actor_rollout_ref.actor.fsdp_config.param_offload=True, optimizer_offload=True."
)


class RolloutWorker(Worker):
    """Generate responses with an engine of its own.

    Args:
        config: the `actor_rollout_ref` section; `model` and `rollout` are read.
        device: where the engine computes; with an actor in this process, its device counts.
        tokenizer: for stop strings, the padding token and texts.
        actor: the actor of this process. Its weights become the engine's without a copy wherever
            layout and dtype agree. None: the rollout has ranks of its own.
        partners: rollouts in this process that draw the turns of a role, whose policies are trained
            next to the actor, by `partner_role`.
        loads_weights: whether an engine without an actor reads the weights from the model's files;
            if not, they come from the actor's ranks before the first generation.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: torch.device,
        tokenizer: Any,
        actor: ActorWorker | None = None,
        loads_weights: bool = False,
        **partners: "RolloutWorker",
    ) -> None:
        self.config = config
        self.partners = {
            role: partners[partner_role(role)] for role in config.rollout.agent.partners
        }
        self.tokenizer = tokenizer
        self.actor = actor
        self.is_asleep = False
        self.has_weights = loads_weights
        self._receiver: WeightReceiver | None = None
        import_user_code(config.model.external_lib)

        if actor is None:
            self.mesh = init_mesh(device, shard=False)
        else:
            self.mesh = actor.engine.mesh
        self.device = self.mesh.device
        self.is_external = capabilities_of(config.rollout.name).external
        if self.is_external and actor is None and not loads_weights:
            raise ConfigError(
                f"actor_rollout_ref.rollout.name={config.rollout.name} is fed by the actor's "
                "ranks: its servers need no ranks of their own. Leave trainer.placement.rollout "
                "unset."
            )
        # Ranks that share an engine. Servers split their model over devices of their own.
        size = 1 if self.is_external else config.rollout.tensor_model_parallel_size
        self.rollout_mesh = init_rollout_mesh(self.mesh, size)
        model_config = load_model_config(**model_source(config.model))
        check_engine_model(config.rollout, model_config, on_cuda=self.device.type == "cuda")

        with self._names_out_of_memory("loading"):
            if actor is None:
                model = self._load(loads_weights and not self.is_external)
            else:
                model = actor.engine.hf_model
            self.engine = create_rollout_engine(
                config.rollout,
                model=model,
                tokenizer=tokenizer,
                device=self.device,
                ranks=self.rollout_mesh.tensor,
            )
        self._direct = self._sender()
        self._weights_version = 0
        self.agents: agents.AgentRunner | None = None
        self.episodes: EpisodeStream | None = None  # that go on over several calls
        if config.rollout.uses_agents:
            stop_ids = end_of_sequence_ids(model, tokenizer)
            pictures = build_picture_reader(config.model, tokenizer, keeps_images=self.is_external)
            sharing = self.rollout_mesh.tensor
            with self._names_out_of_memory("loading"):
                policies = frozen_policies(
                    config, tokenizer, self.device, is_alone=actor is None, sharing=sharing
                )
            self._copies = agents.Copies(config.rollout, policies)
            self.agents = agents.AgentRunner(
                config.rollout,
                tokenizer,
                stop_ids=stop_ids,
                pictures=pictures,
                policies=policies,
                partners={
                    role: agents.PartnerPolicy(role, partner.engine)
                    for role, partner in self.partners.items()
                },
            )

    @property
    def data_rank(self) -> int:
        """Return `Worker.data_rank`: ranks that share an engine (tensor parallel) have the same."""
        return self.rollout_mesh.data.rank

    @property
    def data_size(self) -> int:
        """Return `Worker.data_size`."""
        return self.rollout_mesh.data.size

    # ---------------------------------------------------------------- generation

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
        prompt_ids = [tuple(map(int, ids)) for ids in prompts.non_tensor_batch["raw_prompt_ids"]]
        rows = list(map(int, prompts.non_tensor_batch["prompt_row"]))
        if not self.has_weights:
            self.take_weights()

        completions = []
        total = len(rows) * n
        speaks = self.rollout_mesh.tensor.rank == 0  # for the ranks that share an engine
        pictures = pictures_of(prompts)
        for completion in self._generate(prompt_ids, rows, n, params, seed, step, pictures):
            completions.append(completion)
            if speaks:
                note_progress(len(completions), total, "responses")
                tell((completion.sample_id, completion.token_ids))
        self._make_room()

        local_id = {}  # sample id in the whole batch -> row of this rank's share
        prompt_of_row = []
        for place, row in enumerate(rows):
            prompt_of_row += [prompt_ids[place]] * n
            for sample in range(n):
                local_id[row * n + sample] = place * n + sample
        local = [replace(each, sample_id=local_id[each.sample_id]) for each in completions]
        columns = self._columns(trajectories_of(prompt_of_row, local))
        return DataProto.from_dict(
            tensors=columns, meta_info={"metrics": self._metrics(self.engine.statistics())}
        )

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
        if not self.has_weights:
            self.take_weights()
        columns = prompts.non_tensor_batch
        episodes = agents.episodes_of(columns, n, step=step, record_step=record_step)
        for partner in self.partners.values():
            if not partner.has_weights:
                partner.take_weights()
        self._copies.renew(self.engine, step if record_step >= 0 else None)
        self.engine.forget_prefixes()
        longest = self._longest_episode
        self.engine.reserve(Room(sequences=len(episodes), tokens=longest))

        steps = agents.EngineSteps(self.engine, params, seed, step)
        sharing = self.rollout_mesh.tensor
        with self._names_out_of_memory("generation"):
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
        return DataProto.from_dict(
            tensors=self._columns(trajectories, with_turns=True),
            non_tensors=episode_columns(trajectories, self.agents.context.pictures is not None),
            meta_info={"metrics": metrics},
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def start_samples(self, orders: Orders) -> None:
        """Submit samples to the engine, also while others run. `advance_samples` draws tokens."""
        if not self.has_weights:
            self.take_weights()
        if not self.engine.has_work:
            self.engine.forget_prefixes()
        with self._names_out_of_memory("generation"):
            self.engine.submit(orders.requests, orders.params, seed=orders.seed, step=0)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def advance_samples(self, goal: Goal, most_steps: int | None) -> Progressed:
        """Draw tokens until `goal` is reached, or for `most_steps` steps of the engine."""
        started = time.perf_counter()
        with self._names_out_of_memory("generation"):
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
        for group in orders.groups:
            refuse_pictures(group.prompt)
        if not self.has_weights:
            self.take_weights()
        if self.episodes is None:
            sharing = self.rollout_mesh.tensor
            self.episodes = EpisodeStream(self.agents, self.engine, sharing, self._longest_episode)
        self.episodes.start(orders)

    @register(dispatch_mode=Dispatch.DP_COMPUTE)
    def advance_episodes(self, goal: Goal, most_steps: int | None) -> Progressed:
        """Play until `goal` is reached, or for `most_steps` steps of the engine."""
        assert self.episodes is not None, "start_episodes comes first"
        started = time.perf_counter()
        with self._names_out_of_memory("generation"):
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

    @property
    def _longest_episode(self) -> int:
        """Most tokens of a prompt and its response together."""
        rollout = self.config.rollout
        return rollout.max_model_len or rollout.prompt_length + rollout.response_length

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
        )

    def _agent_metrics(self, own: dict[str, float]) -> dict[str, float]:
        """Combine the counts of the agent loops of all engines."""
        return combine_metrics(gather_objects(own, self.rollout_mesh.data))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_texts(
        self, prompts: DataProto, *, n: int, params: SamplingParams, seed: int
    ) -> DataProto:
        """Sample n texts for each of B prompts: the columns of `text_columns`.

        Reads `raw_prompt_ids` and `prompt_row` as `generate_sequences` does.
        """
        prompt_ids = list(map(tuple, prompts.non_tensor_batch["raw_prompt_ids"]))
        rows = list(map(int, prompts.non_tensor_batch["prompt_row"]))

        pictures = pictures_of(prompts)
        completions = list(self._generate(prompt_ids, rows, n, params, seed, 0, pictures))
        columns = text_columns(completions, rows, n, self.tokenizer)
        return DataProto.from_dict(non_tensors=columns)

    def _generate(
        self,
        prompt_ids: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        n: int,
        params: SamplingParams,
        seed: int,
        step: int,
        pictures: Sequence[Pictures],
    ) -> Iterator[Completion]:
        """Sample n responses to each prompt, with the sample ids of the whole batch."""
        if not self.has_weights:
            raise RolloutError(
                "The rollout has no weights yet. Hand the actor's over before it generates "
                "(`sync_weights`)."
            )
        requests = []
        for row, ids, own in zip(rows, prompt_ids, pictures):
            sample_ids = tuple(range(row * n, (row + 1) * n))
            requests.append(Request(prompt_ids=ids, sample_ids=sample_ids, pictures=own))

        # A resumed run starts without the prefixes of earlier prompts.
        self.engine.forget_prefixes()
        with self._names_out_of_memory("generation"):
            yield from generate(self.engine, requests, params, seed=seed, step=step)

    def _make_room(self) -> None:
        """Give the device to the actor of this process, if the configuration says so."""
        if self.is_external and not cast(ServerEngine, self.engine).can_sleep:
            return  # servers have memory of their own
        if self.actor is not None and self.config.rollout.free_cache_engine:
            self.engine.sleep()
            self.is_asleep = True
            self.has_weights = False

    def _metrics(self, counters: dict[str, float]) -> dict[str, float]:
        """Combine the counters of a generation over all engines."""
        return combine_counters(gather_objects(counters, self.rollout_mesh.data))

    # ---------------------------------------------------------------- weights

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self) -> None:
        """Take the weights of the actor in this process. Every rank must call it."""
        if self.actor is None:
            raise RolloutError("Only a rollout in the actor's process can take its weights.")
        with self._names_out_of_memory("the hand-over of weights to the rollout"):
            if self.is_asleep:
                self.engine.wake()
                self.is_asleep = False
            log = self.actor.proofs.next()
            named_tensors = self.actor.named_weights(
                self.engine.weight_dtype, log, place=self.engine.weight_place
            )
            self._direct.send(named_tensors, log)
            self._weights_version += 1
            self.has_weights = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_endpoint(self) -> Endpoint:
        """Return the place of the engine's weights."""
        return Endpoint.here(self.device, self.engine.weight_dtype)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join_meetings(self, meetings: Sequence[Meeting]) -> None:
        """Connect to the sender that serves this rank."""
        rank = self.mesh.world.rank
        mine = [meeting for meeting in meetings if rank in meeting.route.receivers]
        assert len(mine) == 1, f"{len(mine)} senders for rank {rank}"
        self._receiver = join(mine[0], rank, self.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def receive_weights(self) -> None:
        """Take the weights that the actor's ranks send; see `ActorWorker.send_weights`."""
        assert self._receiver is not None, "join_meetings comes first"
        with self._names_out_of_memory("the hand-over of weights to the rollout"):
            self.has_weights = False
            receive_into(self.engine, self._receiver, sharing=self.rollout_mesh.tensor)
            self._weights_version += 1
            self.has_weights = True

    # ---------------------------------------------------------------- inner parts

    def _sender(self) -> WeightSender:
        """Return the way of the actor's weights in this process."""
        if self.is_external:
            engine = cast(ServerEngine, self.engine)
            return server_sender(engine, self.actor, self.tokenizer, self.mesh.world)
        return DirectSender(self.engine, world=self.mesh.world, sharing=self.rollout_mesh.tensor)

    def _load(self, weights: bool) -> Any:
        rollout = self.config.rollout
        dtype = rollout.dtype or self.config.model.dtype
        if dtype is None:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        model = load_causal_lm(
            **model_source(self.config.model),
            dtype=dtype,
            max_length=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            weights=weights,
        )
        check_vocabulary(model, self.tokenizer)
        return model

    def _names_out_of_memory(self, phase: str) -> AbstractContextManager[None]:
        way_out = _WAY_OUT if self.actor is None else _WAY_OUT_NEXT_TO_THE_ACTOR
        rank = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size}"
        return reports_out_of_memory(phase, self.device, way_out, rank=rank)
