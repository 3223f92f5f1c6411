"""Feed an engine of servers: send the actor's weights, and prove them by its log-probs."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from verl.distributed.collectives import Axis
from verl.protocol import DataProto
from verl.rollout import Completion, ServerEngine, ServerSender, assemble, trajectories_of
from verl.workers.actor import ActorWorker


def server_sender(
    engine: ServerEngine, actor: ActorWorker | None, tokenizer: Any, world: Axis
) -> ServerSender:
    """Find or start the servers of an engine; return the way of the actor's weights to them.

    Without an actor the servers keep their own weights.
    """

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        assert actor is not None
        return actor.named_weights(engine.weight_dtype)

    def adapters() -> dict[str, torch.Tensor]:
        assert actor is not None
        return actor.engine.adapters_for_rollout()

    def log_probs(prompt: tuple[int, ...], drawn: Sequence[Completion]) -> list[list[float]]:
        assert actor is not None
        rollout = actor.config.rollout
        columns = assemble(
            trajectories_of([prompt] * len(drawn), drawn),
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            pad_token_id=tokenizer.pad_token_id,
            vocabulary=engine.vocabulary,
        )
        batch = DataProto.from_dict(tensors=columns)
        own = actor.compute_log_prob(batch).batch["old_log_probs"]

        rows = []
        for row, each in zip(own, drawn):
            rows.append(row[: len(each.token_ids)].tolist())
        return rows

    return ServerSender(engine, log_probs, tensors, adapters, world=world)
