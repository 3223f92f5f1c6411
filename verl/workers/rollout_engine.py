"""A worker with a rollout engine: how it is made, gets its weights and shares its device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from verl.config import ActorRolloutRefConfig
from verl.distributed.collectives import gather_objects
from verl.distributed.mesh import init_mesh, init_rollout_mesh
from verl.engine.memory import Shortage, reports_out_of_memory
from verl.models.features import use_store
from verl.models.load import check_vocabulary, load_causal_lm, load_model_config
from verl.rollout import (
    ServerEngine,
    capabilities_of,
    check_engine_model,
    create_rollout_engine,
    rollout_engines,
)
from verl.rollout.local import LocalEngine
from verl.rollout.stopping import end_of_sequence_ids
from verl.single_controller import Dispatch, Worker, register
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.imports import import_user_code
from verl.utils.launcher import rank_title
from verl.utils.user_parts import NamedPart
from verl.weight_sync import (
    DirectSender,
    Endpoint,
    Meeting,
    WeightReceiver,
    WeightSender,
    join,
    receive_into,
)
from verl.workers.actor import ActorWorker
from verl.workers.counters import combine_counters
from verl.workers.served import server_sender
from verl.workers.trained import model_source, parameter_dtype


class RolloutEngineWorker(Worker):
    """Own a rollout engine, next to the actor or on ranks of its own.

    Args:
        config: the `actor_rollout_ref` section; `model` and `rollout` are read.
        device: where the engine computes; with an actor in this process, its device counts.
        tokenizer: for stop strings, the padding token, texts and the check of the vocabulary.
        actor: the actor of this process. Its weights become the engine's without a copy wherever
            layout and dtype agree. None: the rollout has ranks of its own.
        loads_weights: whether an engine without an actor reads the weights from the model's files;
            if not, they come from the actor's ranks before the first generation.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        device: torch.device,
        tokenizer: Any,
        actor: ActorWorker | None,
        loads_weights: bool,
    ) -> None:
        self.config = config
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

        with self._names_errors("loading"):
            if actor is None:
                model = self._load(loads_weights and not self.is_external)
            else:
                model = actor.engine.hf_model
            embeddings: Any = model.get_input_embeddings()
            self.vocabulary: int = embeddings.num_embeddings
            self.engine = create_rollout_engine(
                config.rollout,
                model=model,
                tokenizer=tokenizer,
                device=self.device,
                ranks=self.rollout_mesh.tensor,
            )
        self._share_features()
        self._direct = self._sender()
        self._weights_version = 0
        self.stop_ids = end_of_sequence_ids(model, tokenizer)

    @property
    def data_rank(self) -> int:
        """Return the number of the engine; ranks that share it (tensor parallel) have the same."""
        return self.rollout_mesh.data.rank

    @property
    def data_size(self) -> int:
        """Return the number of engines."""
        return self.rollout_mesh.data.size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_weights(self) -> None:
        """Take the weights of the actor in this process. Every rank must call it."""
        if self.actor is None:
            raise RolloutError("Only a rollout in the actor's process can take its weights.")
        with self._names_errors("the hand-over of weights to the rollout"):
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

    def provide_weights(self) -> None:
        """Take the weights of the actor if the engine has none."""
        if not self.has_weights:
            self.take_weights()

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
        with self._names_errors("the hand-over of weights to the rollout"):
            self.has_weights = False
            receive_into(self.engine, self._receiver, sharing=self.rollout_mesh.tensor)
            self._weights_version += 1
            self.has_weights = True

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

    def _sender(self) -> WeightSender:
        """Return the way of the actor's weights in this process."""
        if self.is_external:
            engine = cast(ServerEngine, self.engine)
            return server_sender(engine, self.actor, self.tokenizer, self.mesh.world)
        return DirectSender(self.engine, world=self.mesh.world, sharing=self.rollout_mesh.tensor)

    def _share_features(self) -> None:
        """Let engine and actor compute the features of pictures once for both.

        They do so where both compute in one dtype.
        """
        if self.actor is None or self.actor.features is None:
            return
        if not isinstance(self.engine, LocalEngine):
            return
        trainer = self.actor.engine
        dtype = trainer.options.compute_dtype or next(trainer.hf_model.parameters()).dtype
        if self.engine.twin.dtype == dtype:
            use_store(self.engine.twin.module, self.actor.features)

    def _load(self, weights: bool) -> Any:
        config = self.config.model
        rollout = self.config.rollout
        model = load_causal_lm(
            **model_source(config),
            dtype=rollout.dtype or parameter_dtype(config, self.device, is_trained=False),
            max_length=rollout.longest_sequence,
            weights=weights,
        )
        check_vocabulary(model, self.tokenizer)
        return model

    def _way_out(self, shortage: Shortage) -> str:
        """Return the keys that save memory of this engine, where memory ran out."""
        lower = "max_num_seqs"
        if self.config.rollout.name != "hf":  # which has no pages and splits no prompts
            lower = "gpu_memory_utilization, max_num_seqs or max_num_batched_tokens"
        advice = f"Lower actor_rollout_ref.rollout.{lower}"

        if self.actor is None:
            return (
                f"{advice} (without the section's name for verl generate), or split the model over "
                "more GPUs: rollout.tensor_model_parallel_size."
            )
        if not shortage.on_device:
            return f"{advice}, or off-load less of the trainer, which takes host memory."
        return (
            f"{advice}, or keep the trainer's weights and moments on the host meanwhile: "
            "actor_rollout_ref.actor.fsdp_config.param_offload=True, optimizer_offload=True."
        )

    @contextmanager
    def _names_errors(self, phase: str) -> Iterator[None]:
        """Name the phase in which memory runs out, and the engine in whose file an error arises."""
        rank = rank_title(self.rank, self.world_size)

        name = self.config.rollout.name
        part = NamedPart("rollout engine", name, rollout_engines.get(name), RolloutError)
        naming = part.naming_errors(passes=lambda error: not part.runs_in(error))
        with naming, reports_out_of_memory(phase, self.device, self._way_out, rank=rank):
            yield
