"""Rules of batches, sequences and ranks that must divide or hold one another."""

from collections.abc import Iterable, Iterator

from verl.config.keys import value_at
from verl.config.micro_batch import (
    MicroBatch,
    log_prob_micro_batch,
    update_micro_batch,
    value_micro_batch,
)
from verl.config.placement import SHARDED, inactive_sections, ranks_of_roles, trained_sections
from verl.config.rule_table import Messages
from verl.config.train import TrainConfig
from verl.utils.arithmetic import ceil_div


def batch_divides_into_mini_batches(config: TrainConfig) -> Messages:
    batch = config.data.train_batch_size
    reported = set()  # one message for the actor and a critic that follows it
    for section in trained_sections(config):
        key = f"{section}.ppo_mini_batch_size"
        mini = value_at(config, key)
        if mini is None or mini in reported:
            continue
        reported.add(mini)
        if mini > batch:
            yield (
                f"{key} must not exceed data.train_batch_size (both count prompts), got {mini} and "
                f"{batch}. Set {key}={batch}, or leave it unset for the whole batch."
            )
        elif batch % mini:
            yield (
                f"data.train_batch_size must be divisible by {key}, got {batch} and {mini}. "
                f"Nearest that fit: train_batch_size {batch // mini * mini} or "
                f"{(batch // mini + 1) * mini}, ppo_mini_batch_size "
                f"{_nearest_divisor(batch, mini)}."
            )


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number in order, itself as the last."""
    return [part for part in range(1, number + 1) if number % part == 0]


def _nearest_divisor(number: int, near: int) -> int:
    return _nearest(_divisors(number), near)


def _nearest(numbers: Iterable[int], to: int) -> int:
    return min(numbers, key=lambda number: abs(number - to))


def mini_batches_divide_over_ranks(config: TrainConfig) -> Messages:
    """Check that every rank has as many rows of a mini-batch as the others.

    Under agents this depends on the loops that the data names, see `trainer.setup.check_agents`.
    """
    if not config.actor_rollout_ref.rollout.uses_agents:
        yield from uneven_mini_batches(config)


def uneven_mini_batches(config: TrainConfig) -> Messages:
    """Yield sizes of mini-batches that the ranks do not divide, where each sample is one row.

    The whole batch is padded, and so needs no check.
    """
    batch = config.data.train_batch_size
    samples = config.actor_rollout_ref.rollout.n
    counts = {role: len(ranks) for role, ranks in ranks_of_roles(config).items()}
    for section in trained_sections(config):
        update = value_at(config, section)
        mini = update.ppo_mini_batch_size
        ranks = counts[section.removeprefix("actor_rollout_ref.")]
        shares = ranks // update.ulysses_sequence_parallel_size
        if mini is None or mini >= batch or shares < 1 or mini * samples % shares == 0:
            continue
        key = f"{section}.ppo_mini_batch_size"
        fitting = [part for part in _divisors(batch)[:-1] if part * samples % shares == 0]
        way_out = "Leave it unset for the whole batch."
        if fitting:
            near = _nearest(fitting, mini)
            way_out = f"Set {key}={near}, or leave it unset for the whole batch."
        yield (
            f"{key} * actor_rollout_ref.rollout.n, the responses of a mini-batch, must be "
            f"divisible by the {shares} ranks that share them, got {mini} * {samples} = "
            f"{mini * samples}. {way_out}"
        )


def sequences_fit(config: TrainConfig) -> Messages:
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length
    longest = prompt + response
    limit = config.actor_rollout_ref.rollout.max_model_len

    if limit is not None and limit < longest:
        yield (
            "actor_rollout_ref.rollout.max_model_len must hold a prompt and its response "
            f"(data.max_prompt_length + data.max_response_length = {prompt} + {response}), got "
            f"{limit}. Set it to at least {longest}, or leave it unset."
        )

    reported = set()  # one message for a budget and those that follow it
    for key, micro_batch, ranks in _micro_batches(config):
        budget = micro_batch.max_tokens
        if (
            budget is None
            or budget * ranks >= longest
            or budget in reported
            or key.startswith(inactive_sections(config))
        ):
            continue
        reported.add(budget)
        yield (
            f"{key} must hold one whole sequence (data.max_prompt_length + "
            f"data.max_response_length = {prompt} + {response}), got {budget}. Set it to at least "
            f"{ceil_div(longest, ranks)}."
        )


def _micro_batches(config: TrainConfig) -> Iterator[tuple[str, MicroBatch, int]]:
    """Yield (key that limits the tokens of a pass, its size, ranks that share a micro-batch)."""
    roles = config.actor_rollout_ref

    for section, use, micro_batch, sharing in (
        ("actor_rollout_ref.actor", "ppo", update_micro_batch(roles.actor), roles.actor),
        ("actor_rollout_ref.ref", "log_prob", log_prob_micro_batch(roles.ref), roles.ref),
        ("actor_rollout_ref.rollout", "log_prob", log_prob_micro_batch(roles.rollout), roles.actor),
        ("critic", "ppo", update_micro_batch(config.critic), config.critic),
        ("critic", "forward", value_micro_batch(config.critic), config.critic),
        (
            "distillation",
            "log_prob",
            log_prob_micro_batch(config.distillation),
            config.distillation,
        ),
    ):
        key = f"{section}.{use}_max_token_len_per_gpu"
        yield key, micro_batch, sharing.ulysses_sequence_parallel_size


def ranks_can_be_divided(config: TrainConfig) -> Messages:
    """Check that the size of each group of ranks divides the number of ranks of its role."""
    roles = config.actor_rollout_ref
    counts = {role: len(ranks) for role, ranks in ranks_of_roles(config).items()}
    actor_ranks = counts["actor"]

    for role, section in SHARDED.items():
        if f"{section}.".startswith(inactive_sections(config)):
            continue

        ranks = counts.get(role, actor_ranks)
        if role != "reward_model":  # which scores whole sequences
            key = f"{section.removesuffix('.model')}.ulysses_sequence_parallel_size"
            ulysses = value_at(config, key)
            as_actor = (roles.actor.ulysses_sequence_parallel_size, actor_ranks)
            inherits = role in ("reference", "teacher") and (ulysses, ranks) == as_actor
            if ranks % ulysses and not inherits:
                yield (
                    f"{key} must divide the number of ranks, got {ulysses} and {ranks}. Set it to "
                    f"{_nearest_divisor(ranks, ulysses)}."
                )

        key = f"{section}.fsdp_config.fsdp_size"
        size = value_at(config, key)
        if 0 < size < ranks and ranks % size:
            yield (
                f"{key} must divide the number of ranks, got {size} and {ranks}. Set it to "
                f"{_nearest_divisor(ranks, size)}, or to -1 for all."
            )

    shared_by = roles.rollout.tensor_model_parallel_size
    rollout_ranks = counts["rollout"]
    if rollout_ranks % shared_by:
        yield (
            "actor_rollout_ref.rollout.tensor_model_parallel_size must divide the number of ranks, "
            f"got {shared_by} and {rollout_ranks}. Set it to "
            f"{_nearest_divisor(rollout_ranks, shared_by)}."
        )
