"""Typed handles of worker groups: an editor goes from a call on a group to the worker's method.

A group offers the registered methods of its worker, with the worker's own parameters. A type
checker therefore takes `GroupOf[ActorWorker]` for an `ActorWorker`. The two differences are
functions here: `start` does not wait, and `of_all_ranks` returns an answer from every rank.
"""

from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from verl.single_controller.calls import GroupFuture
from verl.single_controller.worker import Worker
from verl.single_controller.worker_group import WorkerGroup

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
AnyWorker = TypeVar("AnyWorker", bound=Worker)

GroupOf = Annotated[AnyWorker, WorkerGroup]


def start(
    method: Callable[Parameters, Answer], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> GroupFuture[Answer]:
    """Call a method of a group, such as `group.update_actor`, without waiting for its answer."""
    call: Any = method
    return call(*args, **kwargs, blocking=False)


def num_shares(group: Any) -> int:
    """Return the number of shares that the arguments of `of_each_share` have."""
    return group.num_shares


def of_each_share(method: Callable[..., Answer], *args: Any) -> list[Answer]:
    """Call a method of a group that takes one share of each argument (`Dispatch.DP_COMPUTE`).

    Args:
        args: lists with one entry for each share.
    """
    call: Any = method
    return call(*args)


def of_all_ranks(
    method: Callable[Parameters, Answer], *args: Parameters.args, **kwargs: Parameters.kwargs
) -> list[Answer]:
    """Call a method of a group that answers on every rank (`Dispatch.ONE_TO_ALL`)."""
    call: Any = method
    return call(*args, **kwargs)
