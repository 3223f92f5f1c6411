"""The actor's exact divergences from frozen models: which a run needs, and their heads."""

from typing import Any

from verl.config import TrainConfig
from verl.models.divergence import Divergence, FrozenHead


def connect_frozen_models(config: TrainConfig, actor: Any, reference: Any) -> None:
    """Give the actor the head of every frozen model that its loss compares whole distributions
    with. The states come with each batch."""
    if config.actor_rollout_ref.actor.needs_exact_kl:
        head = head_of_group(reference)
        actor.add_divergence(
            Divergence(name="ref_kl", states="ref_states", head=head, kind="reverse_kl")
        )


def head_of_group(group: Any) -> FrozenHead:
    """Return the output layer of a group's model, which its first rank has whole."""
    answers = group.frozen_head()
    heads = [answer for answer in answers if answer is not None]
    assert len(heads) == 1, "rank 0 alone answers"
    return heads[0]
