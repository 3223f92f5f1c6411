"""The driver's side of a hand-over: the actor's weights to the rollout, wherever that lives."""

from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from verl.single_controller import GroupFuture, GroupOf, of_all_ranks, start
from verl.utils.errors import VerlError, WorkerLostError
from verl.weight_sync import plan_routes
from verl.workers import ActorWorker, RolloutWorker


class WeightLink(Protocol):
    """Hands the actor's weights to the rollout."""

    def sync(self) -> None:
        """Hand the present weights over."""
        ...

    def provide(self) -> None:
        """Hand the weights over if the rollout has none yet."""
        ...


class ColocatedLink:
    """The rollout lives in the actor's processes and takes the weights itself.

    It also takes them before it generates, if it has none or has given its memory back.
    """

    def __init__(self, rollout: GroupOf[RolloutWorker]) -> None:
        self._rollout = rollout

    def sync(self) -> None:
        """Implement `WeightLink.sync`."""
        self._rollout.take_weights()

    def provide(self) -> None:
        """Implement `WeightLink.provide`."""


class RemoteLink:
    """The rollout has ranks of its own, and every hand-over is a call on both groups at once.

    Args:
        actor, rollout: the worker groups.
        transport: taken instead of the one that fits best; None: chosen.
        folder: for the transport `disk`, one that all ranks see.
    """

    def __init__(
        self,
        actor: GroupOf[ActorWorker],
        rollout: GroupOf[RolloutWorker],
        transport: Any,
        folder: Path,
    ) -> None:
        self._actor = actor
        self._rollout = rollout
        self._has_weights = False

        receivers = of_all_ranks(rollout.weight_endpoint)
        routes = plan_routes(of_all_ranks(actor.weight_endpoint), receivers, transport)
        self._through_files = all(route.transport == "disk" for route in routes)

        dtype = receivers[0].dtype
        assert dtype is not None, "an engine names the dtype of its weights"
        offers = of_all_ranks(actor.offer_weights, routes, dtype, folder)
        accepted = start(actor.accept_receivers)
        joined = start(rollout.join_meetings, list(chain.from_iterable(offers)))
        accepted.result()
        joined.result()

    def sync(self) -> None:
        """Implement `WeightLink.sync`."""
        sent = start(self._actor.send_weights)
        if self._through_files:
            sent.result()  # files are read once they are complete
        received = start(self._rollout.receive_weights)
        try:
            sent.result()
        except VerlError:
            _report_death(received)
            raise
        received.result()
        self._has_weights = True

    def provide(self) -> None:
        """Implement `WeightLink.provide`."""
        if not self._has_weights:
            self.sync()


def _report_death(other_end: GroupFuture[Any]) -> None:
    """Raise WorkerLostError if a rank died during the call: the other end's error follows from it.

    The call ends soon, because each end reports its errors to the other one.
    """
    try:
        other_end.result()
    except WorkerLostError:
        raise
    except VerlError:
        pass  # the error of the first end says why


class ActorRolloutGroups:
    """The groups of actor and rollout as one: a name is looked up in the one, then in the other."""

    def __init__(self, actor: Any, rollout: Any) -> None:
        self._groups = (actor, rollout)

    def __getattr__(self, name: str) -> Any:
        actor, rollout = self._groups
        group = actor if hasattr(actor, name) else rollout
        return getattr(group, name)
