"""The hand-over from the trainer's ranks to servers: one rank pushes, all learn the outcome.

Engines in process belong to their ranks: each rank pushes to its own, and all learn of a fault.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from verl.distributed.collectives import ALONE, Axis, gather_objects
from verl.rollout.servers.engine import ServerEngine
from verl.rollout.servers.fleet import Push
from verl.rollout.servers.weights import prove
from verl.rollout.types import Completion
from verl.utils.errors import RolloutError
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.fingerprint import FingerprintLog

# Returns the trainer's log-probs of completions of one prompt. Every rank calls it at once.
TrainerLogProbs = Callable[[tuple[int, ...], Sequence[Completion]], Sequence[Sequence[float]]]


class ServerSender:
    """A `WeightSender` to the servers of an engine. The first rank finds, starts and feeds them.

    In process, each rank starts and feeds its own.

    Args:
        engine: of this rank.
        log_probs: computes the trainer's log-probs for the proof. Every rank calls it at once.
        tensors: gives the trainer's tensors, as `send` gets them, anew.
        adapters: gives the trainer's LoRA factors (`adapter_state`). Every rank calls it at once.
        world: the ranks that hand over together.
    """

    def __init__(
        self,
        engine: ServerEngine,
        log_probs: TrainerLogProbs,
        tensors: Callable[[], NamedTensors],
        adapters: Callable[[], dict[str, torch.Tensor]],
        *,
        world: Axis = ALONE,
    ) -> None:
        self._engine = engine
        self._log_probs = log_probs
        self._adapters = adapters
        self._world = world
        self._acts = world.rank == 0 or engine.config.in_process
        self._pushed: Iterator[Any] | None = None
        engine.draws_alone = world.size == 1 or engine.config.in_process
        if engine.config.in_process:
            engine.sources.tensors_again = self._tensors_once
        elif world.size == 1:
            engine.sources.tensors_again = tensors
        urls = self._act(engine.open)
        if not self._acts:
            engine.join(urls)

    def send(self, named_tensors: NamedTensors, log: FingerprintLog | None = None) -> None:
        """Send as `WeightSender.send` describes.

        The proof: each server draws a few tokens, and its log-probs must be the trainer's.
        """
        tensors: Iterator[Any] = iter(named_tensors)
        adapters = None
        if self._engine.takes_adapters:
            adapters = self._adapters()
            tensors = iter(())  # whole weights are not even gathered
        self._pushed = tensors

        def push() -> tuple[Push, dict[str, Completion] | None]:
            if log is not None:
                # So that the prompt is cached: keys that outlive the push would show.
                self._engine.probe()
            if adapters is None:
                self._engine.update_weights(tensors)
            else:
                self._engine.update_adapters(adapters)
            probes = None if log is None else self._engine.probe()
            return self._engine.fleet.last_push(), probes

        pushed, probes = self._act(push, gathers=tensors)
        self._engine.fleet.adopt(pushed)
        if probes is None:
            return

        own = self._log_probs(self._engine.probe_prompt(), list(probes.values()))
        self._act(lambda: prove(probes, own, self._engine.weight_dtype))

    def _tensors_once(self) -> NamedTensors:
        """Return the tensors of this push. Once is enough: an engine that ends, ends the run."""
        tensors = self._pushed
        self._pushed = None
        assert tensors is not None, "the tensors of a push were read twice"
        return tensors

    def _act(self, act: Callable[[], Any], gathers: Iterable[Any] = ()) -> Any:
        """Act on the first rank, or in process on every rank; raise an error on every rank.

        Args:
            act: called on these ranks.
            gathers: read to the end, since ranks gather its tensors together.

        Returns the first rank's result, or in process this rank's own.
        """
        result = None
        fault: Exception | None = None
        if self._acts:
            try:
                result = act()
            except (RolloutError, ValueError) as error:
                fault = error
        if self._world.size > 1:
            for _ in gathers:
                pass

        if self._engine.config.in_process:
            faults = gather_objects(fault, self._world)
        else:
            [(fault, result), *_] = gather_objects((fault, result), self._world)
            faults = [fault]

        for fault in faults:
            if fault is not None:
                raise fault
        return result
