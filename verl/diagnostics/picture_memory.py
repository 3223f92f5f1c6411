"""Plan the memory that pictures take on the hosts: prepared ones, and features that are kept."""

from dataclasses import dataclass

from verl.diagnostics.batch import BatchPlan
from verl.diagnostics.roles import Role, prompts_of_rank
from verl.engine.tower_shape import TowerShape
from verl.models.features import KEPT_BYTES

# Numbers of a prepared picture are fp32.
_PIXEL_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PictureMemory:
    """Bytes on hosts, if every token of a prompt is of a picture; zero for models of text."""

    prepared: int = 0  # pictures of a batch, in the driver
    prepared_a_rank: int = 0  # of a rank's share, in its own process
    kept: int = 0  # features, in each process of the actor

    @classmethod
    def of(cls, batch: BatchPlan, actor: Role) -> "PictureMemory":
        """Plan the pictures of one step, which the actor's processor prepares."""
        tower = actor.footprint.shape.tower
        if tower is None:
            return cls()

        # A single process shares them with the driver.
        of_rank = 0
        if actor.ranks > 1:
            prompts = prompts_of_rank(batch.prompts, batch.rows, actor.data_ranks)
            of_rank = _prepared(tower, prompts * batch.longest_prompt)

        return cls(
            prepared=_prepared(tower, batch.prompts * batch.longest_prompt),
            prepared_a_rank=of_rank,
            kept=0 if tower.connector_trained else KEPT_BYTES,
        )


def _prepared(tower: TowerShape, tokens: int) -> int:
    return tower.patches(tokens) * tower.patch_numel * _PIXEL_BYTES
