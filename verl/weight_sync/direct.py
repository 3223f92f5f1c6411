"""Hand over within one process: the engine reads the trainer's tensors themselves."""

from verl.distributed.collectives import ALONE, Axis
from verl.weight_sync.base import NamedTensors, WeightTaker, check
from verl.weight_sync.fingerprint import FingerprintLog


class DirectSender:
    """A `WeightSender` to an engine of this process. Nothing is copied on the way.

    Args:
        engine: takes the tensors.
        world: the ranks that hand over together, each to its own engine. A difference on one is
            raised on all.
        sharing: those with engines that hold parts of the same weights (tensor parallelism).
    """

    def __init__(self, engine: WeightTaker, *, world: Axis = ALONE, sharing: Axis = ALONE) -> None:
        self._engine = engine
        self._world = world
        self._sharing = sharing

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes."""
        self._engine.update_weights(named_tensors)
        expected = None if log is None else log.read()
        check(expected, self._engine, world=self._world, sharing=self._sharing)
