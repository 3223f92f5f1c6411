"""Describe the roles of a run as engines that hold memory, and the size of their passes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from verl.config import (
    CriticModelConfig,
    FSDPConfig,
    MicroBatch,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    log_prob_micro_batch,
    reward_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.model_shapes import ModelShapes
from verl.engine.agreement import CPU_PASS_TOKENS
from verl.engine.budget import MOST_TOKENS, largest_that_fits
from verl.engine.compile import compile_backend
from verl.engine.footprint import EngineFootprint, engine_setup, gathers_once
from verl.engine.model_shape import ModelShape
from verl.models.families import LLAMA_FAMILIES
from verl.models.kernels import swiglu
from verl.models.load import torch_dtype

Predict = Callable[[int, int], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Role:
    """One engine on every rank."""

    name: str
    footprint: EngineFootprint
    ranks: int
    sequence_ranks: int  # that share the tokens of the same rows

    @property
    def data_ranks(self) -> int:
        """Ranks with rows of their own."""
        return self.ranks // self.sequence_ranks

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole model, as it is read."""
        return sum(weight.numel() * weight.itemsize for weight in self.footprint.shape.weights)


def roles_of(config: TrainConfig, placement: Placement, shapes: ModelShapes) -> dict[str, Role]:
    """Return the roles of a run in the order of loading.

    Those are the actor and, where the run has them, critic, reference, reward model and teacher. With
    LoRA the actor is the reference.
    """
    roles = config.actor_rollout_ref
    device = placement.device
    actor = roles.actor
    model = roles.model
    found = {
        "actor": _role(
            "actor",
            shapes,
            shapes.policy(model, device),
            placement,
            actor.fsdp_config,
            actor.optim,
            model,
            compiled=actor.use_torch_compile,
            sequence_ranks=actor.ulysses_sequence_parallel_size,
            fused=model.use_fused_kernels and model.lora_rank == 0,
        )
    }

    if config.needs_critic:
        critic = config.critic
        found["critic"] = _role(
            "critic",
            shapes,
            shapes.critic(critic.model, device),
            placement,
            critic.model.fsdp_config,
            critic.optim,
            critic.model,
            compiled=False,
            sequence_ranks=critic.ulysses_sequence_parallel_size,
        )

    if config.needs_reference and model.lora_rank == 0:
        found["reference"] = _role(
            "reference",
            shapes,
            shapes.policy(model, device, is_trained=False),
            placement,
            roles.ref.fsdp_config,
            None,
            None,
            compiled=roles.ref.use_torch_compile,
            sequence_ranks=roles.ref.ulysses_sequence_parallel_size,
            fused=model.use_fused_kernels,
        )

    if config.reward_model.enable:
        scorer = config.reward_model.model
        found["reward_model"] = _role(
            "reward_model",
            shapes,
            shapes.reward_model(scorer, device),
            placement,
            scorer.fsdp_config,
            None,
            None,
            compiled=False,
            sequence_ranks=1,
        )

    if config.distillation.enabled:
        distillation = config.distillation
        found["teacher"] = _role(
            "teacher",
            shapes,
            shapes.teacher(distillation.teacher_models.teacher_model, device),
            placement,
            distillation.fsdp_config,
            None,
            None,
            compiled=distillation.use_torch_compile,
            sequence_ranks=distillation.ulysses_sequence_parallel_size,
            fused=model.use_fused_kernels,
        )

    return found


def _role(
    name: str,
    shapes: ModelShapes,
    shape: ModelShape,
    placement: Placement,
    fsdp: FSDPConfig,
    optim: OptimConfig | None,
    model: ModelConfig | CriticModelConfig | None,
    *,
    compiled: bool | None,
    sequence_ranks: int,
    fused: bool = False,
) -> Role:
    """Describe one role. `model` has the settings of recomputation; None: no recomputation."""
    ranks = len(placement.roles[name])
    copies = ranks // fsdp.fsdp_size if 0 < fsdp.fsdp_size < ranks else 1
    recomputes = model is not None and model.enable_gradient_checkpointing
    is_compiled = compile_backend(compiled, placement.device, shape.family) is not None
    setup = engine_setup(
        fsdp,
        optim,
        on_cuda=placement.on_cuda,
        shard_ranks=ranks // copies if placement.on_cuda or ranks > 1 else None,
        compute_itemsize=torch_dtype(fsdp.compute_dtype).itemsize
        if fsdp.compute_dtype is not None
        else (2 if placement.on_cuda else shape.weights[0].itemsize),
        compiled=is_compiled,
        fused_mlp=fused
        and is_compiled
        and shape.family in LLAMA_FAMILIES
        and swiglu.is_there(placement.device),
        checkpointing_share=model.gradient_checkpointing_share
        if model is not None and recomputes
        else 0.0,
        activation_offload=recomputes and model is not None and model.enable_activation_offload,
    )

    return Role(
        name=name,
        footprint=shapes.footprint(shape, gathers_once(shape, setup, fsdp, placement.device_bytes)),
        ranks=ranks,
        sequence_ranks=sequence_ranks,
    )


class Work(NamedTuple):
    """The rows of a phase, and the keys that set the size of its passes."""

    section: str  # of the configuration
    tokens_key: str  # in it
    rows_key: str
    micro_batch: MicroBatch
    rows: int  # of all ranks together
    longest: int  # tokens of a row
    predictions: int  # of them


def work_of(config: TrainConfig, batch: BatchPlan, phase: str) -> Work:
    """Return the work of a phase; an update has the rows of a mini-batch."""
    roles = config.actor_rollout_ref
    critic = config.critic
    if phase == "scores":
        # Its own tokenizer and chat template may make a little more or less of a row.
        longest = min(batch.longest, config.reward_model.max_length or batch.longest)
        keys = ("reward_model", "forward_max_token_len_per_gpu", "micro_batch_size_per_gpu")
        return Work(*keys, reward_micro_batch(config.reward_model), batch.rows, longest, 1)

    section, use, micro_batch, mini_prompts = {
        "old log-probs": (
            "actor_rollout_ref.rollout",
            "log_prob",
            log_prob_micro_batch(roles.rollout),
            None,
        ),
        "reference log-probs": (
            "actor_rollout_ref.ref",
            "log_prob",
            log_prob_micro_batch(roles.ref),
            None,
        ),
        "teacher log-probs": (
            "distillation",
            "log_prob",
            log_prob_micro_batch(config.distillation),
            None,
        ),
        "values": ("critic", "forward", value_micro_batch(critic), None),
        "actor update": (
            "actor_rollout_ref.actor",
            "ppo",
            update_micro_batch(roles.actor),
            roles.actor.ppo_mini_batch_size,
        ),
        "critic update": ("critic", "ppo", update_micro_batch(critic), critic.ppo_mini_batch_size),
    }[phase]
    keys = (section, f"{use}_max_token_len_per_gpu", f"{use}_micro_batch_size_per_gpu")

    rows = (mini_prompts or batch.prompts) * batch.samples
    return Work(
        *keys, micro_batch, rows, batch.longest, round(batch.longest * (1 - batch.prompt_share))
    )


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The largest pass of a phase on one rank."""

    work: Work
    tokens: int
    predictions: int
    chosen: bool  # by the engine, since the configuration sets no size
    least: int  # tokens of the longest row, or of this rank's part of it

    @classmethod
    def of(cls, work: Work, role: Role, predict: Predict, room: float | None) -> "Passes":
        """Size passes over rows of full length: by the configuration, or by `room` bytes."""
        longest = -(-work.longest // role.sequence_ranks)
        most = -(-work.rows // role.data_ranks) * longest
        if not role.footprint.setup.on_cuda:
            most = min(most, max(CPU_PASS_TOKENS, longest))
        max_tokens, rows = work.micro_batch

        def sized(tokens: int) -> "Passes":
            tokens = min(most, max(longest, tokens))
            predictions = round(tokens * work.predictions / work.longest)
            chosen = max_tokens is None and rows is None
            return cls(
                work=work, tokens=tokens, predictions=predictions, chosen=chosen, least=longest
            )

        if rows is not None:
            return sized(rows * longest)
        if max_tokens is not None:
            return sized(max_tokens)

        def taken(tokens: int) -> int:
            passes = sized(tokens)
            return sum(predict(passes.tokens, passes.predictions).values())

        return sized(MOST_TOKENS if room is None else largest_that_fits(taken, room))
