"""The actor's exact divergences from frozen models: which a run needs, and their heads."""

from verl.config import TrainConfig
from verl.models.divergence import Divergence, FrozenHead
from verl.single_controller import GroupOf, of_all_ranks
from verl.workers import ActorWorker, EngineWorker
from verl.workers.policy_terms import DistillationTerm


def distillation_term(config: TrainConfig) -> DistillationTerm | None:
    """Return the term that distillation adds to the actor's loss, if it adds one."""
    if not config.distillation.enabled or config.distillation.is_reward:
        return None
    asked = config.distillation.distillation_loss
    return DistillationTerm(
        kind=asked.loss_mode,
        coef=asked.distillation_loss_coef,
        is_whole_loss=config.distillation.is_whole_loss,
    )


def connect_frozen_models(
    config: TrainConfig,
    actor: GroupOf[ActorWorker],
    reference: GroupOf[EngineWorker] | None,
    teacher: GroupOf[EngineWorker] | None,
) -> None:
    """Give the actor the term of distillation, and the head of every frozen model that its loss
    compares whole distributions with. The states come with each batch."""
    term = distillation_term(config)
    if term is not None:
        actor.distill(term)
    if config.actor_rollout_ref.actor.needs_exact_kl:
        assert reference is not None, "the configuration asks for a reference"
        head = head_of_group(reference)
        actor.add_divergence(
            Divergence(name="ref_kl", states="ref_states", head=head, kind="reverse_kl")
        )

    if term is not None and term.is_exact:
        assert teacher is not None, "distillation has a teacher"
        actor.add_divergence(
            Divergence(
                name="teacher_divergence",
                states="teacher_states",
                head=head_of_group(teacher),
                kind=term.kind,
                beta=config.distillation.distillation_loss.jsd_beta,
            )
        )


def head_of_group(group: GroupOf[EngineWorker]) -> FrozenHead:
    """Return the output layer of a group's model, which its first rank has whole."""
    answers = of_all_ranks(group.frozen_head)
    heads = [answer for answer in answers if answer is not None]
    assert len(heads) == 1, "rank 0 alone answers"
    return heads[0]
