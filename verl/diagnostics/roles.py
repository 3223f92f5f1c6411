"""Describe the roles of a run as engines that hold memory, and the size of their passes."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from verl.config import (
    ActorRolloutRefConfig,
    MicroBatch,
    TrainConfig,
    log_prob_micro_batch,
    reward_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.config.partners import partner_section
from verl.config.policies import partner_role
from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.hosts import Placement
from verl.diagnostics.model_shapes import ModelShapes
from verl.engine.agreement import CPU_PASS_TOKENS
from verl.engine.budget import MOST_TOKENS, largest_that_fits
from verl.engine.engine_setup import EngineSetup, fuses_mlp, gathers_once
from verl.engine.footprint import EngineFootprint
from verl.engine.model_shape import ModelShape
from verl.engine.options import EngineOptions
from verl.utils.arithmetic import ceil_div

Parts = dict[str, int]  # bytes by purpose
Predict = Callable[[int, int, int], Parts]


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
        return self.footprint.shape.num_bytes


def roles_of(config: TrainConfig, placement: Placement, shapes: ModelShapes) -> dict[str, Role]:
    """Return the roles of a run in the order of loading.

    Those are the actor and, where the run has them, critic, reference, reward model, teacher and
    policies that are trained next to the actor. With LoRA the actor is the reference.
    """
    device = placement.device
    policy = config.actor_rollout_ref
    critic = config.critic
    scorer = config.reward_model
    distillation = config.distillation

    found: dict[str, Role] = {}

    def add(name: str, options: EngineOptions, shape: ModelShape) -> None:
        ranks = len(placement.roles[name])
        setup = EngineSetup.of(options, shape, ranks, fused_mlp=fuses_mlp(options, shape))
        setup = gathers_once(shape, setup, options.fsdp_config, placement.device_bytes)
        found[name] = Role(
            name=name,
            footprint=shapes.footprint(shape, setup),
            ranks=ranks,
            sequence_ranks=options.ulysses_sequence_parallel_size,
        )

    def add_policy(name: str, trained: ActorRolloutRefConfig) -> None:
        tower = trained.actor.freeze_vision_tower
        shape = shapes.policy(trained.model, device, freezes_tower=tower)
        add(name, EngineOptions.of(trained.actor, device, policy=trained), shape)

    add_policy("actor", policy)
    if config.needs_critic:
        add("critic", EngineOptions.of(critic, device), shapes.critic(critic.model, device))
    if config.needs_reference and policy.model.lora_rank == 0:
        plain = shapes.policy(policy.model, device, is_trained=False)
        add("reference", EngineOptions.of(policy.ref, device, policy=policy), plain)
    if scorer.enable:
        options = EngineOptions.of(scorer, device)
        add("reward_model", options, shapes.reward_model(scorer.model, device))
    if distillation.enabled:
        options = EngineOptions.of(distillation, device, policy=policy)
        teacher = distillation.teacher_models.teacher_model
        add("teacher", options, shapes.teacher(teacher, device))
    for role, partner in policy.rollout.agent.partners.items():
        add_policy(partner_role(role), partner_section(policy, partner))
    return found


class Work(NamedTuple):
    """The rows of a phase, and the keys that set the size of its passes."""

    tokens_key: str
    rows_key: str
    micro_batch: MicroBatch
    rows: int  # of all ranks together
    longest: int  # tokens of a row
    predictions: int  # of them
    prompts: int  # that these rows answer
    longest_prompt: int  # tokens of one, all of which may be of pictures


# Of each phase: its section, the first word of its keys there, the reader of its size of passes.
_SIZED_BY: dict[str, tuple[str, str, Callable[[Any], MicroBatch]]] = {
    "old log-probs": ("actor_rollout_ref.rollout", "log_prob", log_prob_micro_batch),
    "reference log-probs": ("actor_rollout_ref.ref", "log_prob", log_prob_micro_batch),
    "teacher log-probs": ("distillation", "log_prob", log_prob_micro_batch),
    "values": ("critic", "forward", value_micro_batch),
    "actor update": ("actor_rollout_ref.actor", "ppo", update_micro_batch),
    "critic update": ("critic", "ppo", update_micro_batch),
}


def work_of(config: TrainConfig, batch: BatchPlan, phase: str) -> Work:
    """Return the work of a phase; an update has the rows of a mini-batch."""
    if phase == "scores":
        # Its own tokenizer and chat template may make a little more or less of a row.
        longest = min(batch.longest, config.reward_model.max_length or batch.longest)
        return Work(
            tokens_key="reward_model.forward_max_token_len_per_gpu",
            rows_key="reward_model.micro_batch_size_per_gpu",
            micro_batch=reward_micro_batch(config.reward_model),
            rows=batch.rows,
            longest=longest,
            predictions=1,
            prompts=batch.prompts,
            longest_prompt=min(longest, batch.longest_prompt),
        )

    section, use, micro_batch_of = _SIZED_BY[phase]
    settings = attrgetter(section)(config)
    prompts = batch.prompts
    if phase.endswith("update"):
        prompts = settings.ppo_mini_batch_size or batch.prompts

    return Work(
        tokens_key=f"{section}.{use}_max_token_len_per_gpu",
        rows_key=f"{section}.{use}_micro_batch_size_per_gpu",
        micro_batch=micro_batch_of(settings),
        rows=prompts * batch.samples,
        longest=batch.longest,
        predictions=batch.longest - batch.longest_prompt,
        prompts=prompts,
        longest_prompt=batch.longest_prompt,
    )


def prompts_of_rank(prompts: int, rows: int, data_ranks: int) -> int:
    """Return of how many prompts a rank has rows, and so pictures.

    Rows of a prompt stay together where each rank gets two prompts (`dealing.balanced`).
    """
    if prompts >= 2 * data_ranks:
        return ceil_div(prompts, data_ranks)
    return min(prompts, ceil_div(rows, data_ranks))


@dataclass(frozen=True, kw_only=True)
class Passes:
    """The largest pass of a phase on one rank."""

    work: Work
    tokens: int
    predictions: int
    picture_tokens: int  # at most, of different pictures
    chosen: bool  # by the engine, since the configuration sets no size
    least: int  # tokens of the longest row, or of this rank's part of it

    @classmethod
    def of(cls, work: Work, role: Role, predict: Predict, room: float | None) -> "Passes":
        """Size passes over rows of full length: by the configuration, or by `room` bytes."""
        longest = ceil_div(work.longest, role.sequence_ranks)
        most = ceil_div(work.rows, role.data_ranks) * longest
        if not role.footprint.setup.on_cuda:
            most = min(most, max(CPU_PASS_TOKENS, longest))
        max_tokens, rows = work.micro_batch

        prompts = prompts_of_rank(work.prompts, work.rows, role.data_ranks)

        def sized(tokens: int) -> "Passes":
            tokens = min(most, max(longest, tokens))
            predictions = round(tokens * work.predictions / work.longest)
            # Ranks that share a row's tokens compute all of its pictures each.
            of_prompts = ceil_div(tokens * role.sequence_ranks * work.longest_prompt, work.longest)
            pictures = 0
            if role.footprint.tower is not None:
                pictures = min(of_prompts, prompts * work.longest_prompt)
            chosen = max_tokens is None and rows is None
            return cls(
                work=work,
                tokens=tokens,
                predictions=predictions,
                picture_tokens=pictures,
                chosen=chosen,
                least=longest,
            )

        if rows is not None:
            return sized(rows * longest)
        if max_tokens is not None:
            return sized(max_tokens)

        def taken(tokens: int) -> int:
            passes = sized(tokens)
            return sum(passes.taken(predict).values())

        return sized(MOST_TOKENS if room is None else largest_that_fits(taken, room))

    def taken(self, predict: Predict) -> Parts:
        """Return the bytes of such a pass, by purpose."""
        return predict(self.tokens, self.predictions, self.picture_tokens)
