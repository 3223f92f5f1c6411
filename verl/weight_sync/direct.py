"""Hand over within one process: the engine reads the trainer's tensors themselves."""

from dataclasses import dataclass

from verl.distributed.collectives import ALONE, Axis
from verl.weight_sync.base import NamedTensors, WeightTaker, check
from verl.weight_sync.fingerprint import FingerprintLog


@dataclass(frozen=True)
class DirectSender:
    """A `WeightSender` to an engine of this process. Nothing is copied on the way.

    Args:
        engine: takes the tensors.
        world: the ranks that hand over together, each to its own engine. A difference on one is
            raised on all.
        sharing: those with engines that hold parts of the same weights (tensor parallelism).
    """

    engine: WeightTaker
    world: Axis = ALONE
    sharing: Axis = ALONE

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes."""
        self.engine.update_weights(named_tensors)
        expected = None if log is None else log.read()
        check(expected, self.engine, world=self.world, sharing=self.sharing)
