"""Calls through Ray: how one is sent to an actor or a node, and how its answer is read."""

import types
from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.protocol import DataProto
from verl.single_controller.calls import Lost
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.host import OnEmit, Raised
from verl.single_controller.ray_process import Call, HandedOn, RankError
from verl.single_controller.shares import Args, Kwargs

Key = TypeVar("Key", int, str)
ROWS = (DataProto,)
REFERENCES = (HandedOn, DataProtoFuture, ray.ObjectRef)


class Reply:
    """Reply to a call of an actor, which may still be running."""

    def __init__(self, actor: Any, call: Any, on_emit: OnEmit) -> None:
        self.actor = actor
        self.on_emit = on_emit
        self.value: Any = None
        self.reference, self.ended = actor.run.remote(call)
        self._asked: Any = None

    def take(self, answer: Any) -> Raised | Lost | None:
        """Keep the answer of the call; return how the call ended."""
        if isinstance(answer, Raised | Lost):
            return answer
        self.value = answer
        return None

    def hear(self) -> None:
        """Pass the values of `emit` that have arrived to `on_emit`, and ask for more."""
        if self.on_emit is None:
            return

        if self._asked is not None:
            arrived, _ = ray.wait([self._asked], timeout=0)
            if not arrived:
                return
            answer = answer_of(self._asked)
            if isinstance(answer, list):  # otherwise the rank is lost, which `wait` reports
                for value in answer:
                    self.on_emit(value)
        self._asked = self.actor.take_emitted.remote()


def on_node(node: str, function: types.FunctionType, *args: Any) -> Any:
    """Run a function on a node; return the reference of its answer."""
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    # Send the function as code. To look it up by name, the process would first have to import
    # torch, which takes seconds.
    by_value = types.FunctionType(function.__code__, function.__globals__, function.__name__)
    by_value.__module__ = "__main__"
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)  # pyright: ignore
    return task(by_value).remote(*args)


def answers_in_time(asked: Mapping[Key, Any], timeout_s: float) -> dict[Key, Any]:
    """Return the answers that come in time and are no errors."""
    if not asked:
        return {}
    keys = {reference: key for key, reference in asked.items()}
    done, _ = ray.wait(list(keys), num_returns=len(keys), timeout=timeout_s)

    answers = {}
    for reference in done:
        answer = answer_of(reference)
        if not isinstance(answer, Raised | Lost):
            answers[keys[reference]] = answer
    return answers


def answer_of(reference: Any) -> Any:
    """Return the value of a reference that has arrived, or the reason if it has none."""
    try:
        return ray.get(reference)
    except RankError as error:
        return error.raised
    except RayTaskError as error:  # an argument or the answer could not be pickled
        return Raised(str(error.cause), str(error), None)
    except RayError as error:
        # Drop Ray's list of possible causes, which is a page long.
        reason = str(error).split("Some common causes")[0]
        return Lost(" ".join(reason.split()))


def shared_call(call: Call) -> Any:
    """Prepare a call that several ranks get, so that it is pickled once.

    A call with rows goes to Ray's store. Ray would pickle any other call for every rank, an eighth
    of the time of a small call. Only references must be pickled by Ray, which counts them.
    """
    _, _, args, kwargs, _ = call
    if holds(ROWS, args, kwargs):
        return ray.put(call)
    if holds(REFERENCES, args, kwargs):
        return call
    return cloudpickle.dumps(call)


def holds(kinds: tuple[type, ...], args: Args, kwargs: Kwargs) -> bool:
    """Return whether an argument is of one of these kinds."""
    return any(isinstance(value, kinds) for value in (*args, *kwargs.values()))
