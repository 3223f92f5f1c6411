"""The sizes of an engine's passes: as asked for, measured, or lowered where memory ran out."""

from collections.abc import Callable
from typing import Any

from verl.distributed.mesh import Mesh
from verl.engine.agreement import plan_of_all_ranks
from verl.engine.budget import AutomaticBudgets, CudaMeter
from verl.engine.memory import PassGuard, Result
from verl.engine.microbatch import Plan, TokenBudget
from verl.engine.options import EngineOptions
from verl.engine.packing import MiniBatch
from verl.utils.arithmetic import ceil_div
from verl.utils.peaks import phase_peaks


class PassSizes:
    """Run the passes over mini-batches in sizes that fit, and remember these sizes.

    Args:
        options: of the engine.
        bytes_to_come: bytes that will lie on the device for good, and do not yet.
    """

    def __init__(
        self, mesh: Mesh, options: EngineOptions, bytes_to_come: Callable[[], int]
    ) -> None:
        meter = CudaMeter(mesh.device, bytes_to_come) if mesh.device.type == "cuda" else None
        self.budgets = AutomaticBudgets(meter, mesh.world)
        self.guard = PassGuard(mesh.device, mesh.world, options)
        self._mesh = mesh

    def run(
        self,
        mini_batch: MiniBatch,
        budget: TokenBudget,
        passes: Callable[[Plan], Result],
        *,
        predict: Callable[[int, int, int], dict[str, int]],
        recover: Callable[[], None],
    ) -> Result:
        """Run `passes` within the budget, again with a smaller one where memory runs out.

        Args:
            predict: bytes of a pass by its tokens, predictions and tokens of pictures.
            recover: called before a restart.
        """
        mesh = self._mesh
        # Each rank along the sequence axis has its part of a row.
        lengths = [ceil_div(length, mesh.sequence.size) for length in mini_batch.lengths]

        def bytes_of(size: int) -> int:
            # Each of these ranks computes all pictures of the row.
            pictures = min(size * mesh.sequence.size, mini_batch.picture_tokens)
            return sum(predict(size, size, pictures).values())

        with phase_peaks.phase(budget.phase, mesh.device):
            asked = self.budgets.begin(budget, lengths, bytes_of)
            result = self.guard.run(
                asked,
                lengths,
                lambda size: plan_of_all_ranks(mini_batch, asked, size, mesh),
                passes,
                recover,
            )
            self.budgets.end(budget)
        return result

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes for a checkpoint."""
        return {
            "lowered_budgets": self.guard.lowered,
            "token_budgets": self.budgets.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`. Sizes that `state` lacks are found anew."""
        self.guard.lowered = dict(state.get("lowered_budgets", {}))
        self.budgets.load_state_dict(state.get("token_budgets", {}))
