"""The roles of a run as engines that hold memory: which there are, how each runs, and how large its passes are."""

from collections.abc import Callable
from dataclasses import dataclass

from verl.config import (
    CriticModelConfig,
    FSDPConfig,
    MicroBatch,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    log_prob_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.model_shapes import ModelShapes
from verl.diagnostics.placement import Placement
from verl.engine.agreement import CPU_PASS_TOKENS
from verl.engine.budget import MOST_TOKENS, largest_that_fits
from verl.engine.compile import compile_backend
from verl.engine.footprint import EngineFootprint, engine_setup, gathers_once
from verl.engine.model_shape import ModelShape

Predict = Callable[[int, int], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One engine on every rank."""

    name: str
    footprint: EngineFootprint
    sequence_ranks: int  # that share the tokens of the same rows

    @property
    def full_bytes(self) -> int:
        """Of the whole model, as each process reads it."""
        return sum(weight.numel() * weight.itemsize for weight in self.footprint.shape.weights)


def roles_of(config: TrainConfig, placement: Placement, shapes: ModelShapes) -> dict[str, Role]:
    """Actor, and critic and reference where the run has them; with LoRA the actor is the reference."""
    roles, device = config.actor_rollout_ref, placement.device
    actor, model = roles.actor, roles.model
    found = {
        "actor": _role(
            "actor", shapes, shapes.policy(model, device), placement, actor.fsdp_config, actor.optim, model,
            compiled=actor.use_torch_compile, sequence_ranks=actor.ulysses_sequence_parallel_size,
        )
    }  # fmt: skip
    if config.needs_reference and model.lora_rank == 0:
        found["reference"] = _role(
            "reference", shapes, shapes.policy(model, device, is_trained=False), placement, roles.ref.fsdp_config, None,
            None, compiled=roles.ref.use_torch_compile, sequence_ranks=roles.ref.ulysses_sequence_parallel_size,
        )  # fmt: skip
    if config.needs_critic:
        critic = config.critic
        found["critic"] = _role(
            "critic", shapes, shapes.critic(critic.model, device), placement, critic.model.fsdp_config, critic.optim,
            critic.model, compiled=False, sequence_ranks=critic.ulysses_sequence_parallel_size,
        )  # fmt: skip
    return found


def _role(
    name: str, shapes: ModelShapes, shape: ModelShape, placement: Placement, fsdp: FSDPConfig,
    optim: OptimConfig | None, model: ModelConfig | CriticModelConfig | None, *, compiled: bool | None,
    sequence_ranks: int,
) -> Role:  # fmt: skip
    """`model` says what recomputes; None: nothing does."""
    ranks = placement.ranks
    copies = ranks // fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else 1
    recomputes = model is not None and model.enable_gradient_checkpointing
    setup = engine_setup(
        fsdp,
        optim,
        on_cuda=placement.on_cuda,
        shard_ranks=ranks // copies if placement.on_cuda or ranks > 1 else None,
        compute_itemsize=2 if placement.on_cuda else shape.weights[0].itemsize,
        compiled=compile_backend(compiled, placement.device, shape.family) is not None,
        checkpointing_share=model.gradient_checkpointing_share if model is not None and recomputes else 0.0,
        activation_offload=recomputes and model is not None and model.enable_activation_offload,
    )
    return Role(
        name=name,
        footprint=shapes.footprint(shape, gathers_once(shape, setup, fsdp, placement.device_bytes)),
        sequence_ranks=sequence_ranks,
    )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The largest pass of a phase on one rank. `chosen`: the engine sizes it, the user gave nothing."""

    tokens: int
    predictions: int
    chosen: bool

    @classmethod
    def of(
        cls, micro_batch: MicroBatch, role: Role, batch: BatchPlan, predict: Predict, room: float | None, rows: int
    ) -> "Passes":
        """Of `rows` rows of full length, in passes as the configuration sizes them; or as `room` bytes allow."""
        longest = -(-batch.longest // role.sequence_ranks)
        most = rows * longest
        if not role.footprint.setup.on_cuda:
            most = min(most, max(CPU_PASS_TOKENS, longest))
        chosen = micro_batch.max_tokens is None and micro_batch.rows is None

        def sized(tokens: int) -> "Passes":
            tokens = min(most, max(longest, tokens))
            return cls(tokens=tokens, predictions=round(tokens * (1 - batch.prompt_share)), chosen=chosen)

        if micro_batch.rows is not None:
            return sized(micro_batch.rows * longest)
        if micro_batch.max_tokens is not None:
            return sized(micro_batch.max_tokens)

        def taken(tokens: int) -> int:
            passes = sized(tokens)
            return sum(predict(passes.tokens, passes.predictions).values())

        return sized(MOST_TOKENS if room is None else largest_that_fits(taken, room))


def micro_batch_of(config: TrainConfig, phase: str) -> MicroBatch:
    roles = config.actor_rollout_ref
    return {
        "old log-probs": lambda: log_prob_micro_batch(roles.rollout),
        "reference log-probs": lambda: log_prob_micro_batch(roles.ref),
        "values": lambda: value_micro_batch(config.critic),
        "actor update": lambda: update_micro_batch(roles.actor),
        "critic update": lambda: update_micro_batch(config.critic),
    }[phase]()
