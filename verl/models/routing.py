"""Record the experts that tokens are routed to, and route other passes to the same ones.

Rounding differs between a rollout and a training pass, so a router of nearly equal logits may
choose other experts, and a log-prob is far off (routing replay: Zheng et al. 2025,
arXiv:2507.18071; Ma et al. 2025, arXiv:2510.11370). In a replay the choice is given. Scores are
still those of the pass's own logits, so gradients reach the router.

Choices of a token are one row of numbers, layer by layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.attention import PackingSlot
from verl.models.experts import Mixture, Routing, mixtures
from verl.utils.errors import ModelError

Answer = tuple[Tensor, Tensor, Tensor]  # logits (N, E), scores (N, k), ids (N, k)


def watch_routers(model: PreTrainedModel, slot: PackingSlot) -> int:
    """Let the passes of `model` record or replay choices, as its slot asks.

    Returns the number C of choices of a token: layers with experts times k. Raises ModelError for a
    model without experts, or with a router that is not known here.
    """
    found = mixtures(model)
    if not found:
        family = model.config.get_text_config().model_type
        raise ModelError(
            "actor_rollout_ref.actor.router_replay.mode needs a family of experts whose router is "
            f"known (Qwen2-MoE, Qwen3-MoE, Mixtral, OLMoE, gpt-oss), got '{family}'. Set it to "
            "disabled."
        )

    if slot.routes_layers:
        return slot.routes_layers * found[0].routing.top_k

    slot.routes_layers = len(found)
    for number, mixture in enumerate(found):
        router = mixture.router
        router.forward = partial(_route, slot, number, mixture, router.forward)
    return len(found) * found[0].routing.top_k


def route_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the narrowest dtype for the ids of a model's experts; its largest number is `none`."""
    experts = mixtures(model)[0].router.weight.shape[0]
    return torch.uint8 if experts <= none(torch.uint8) else torch.int16


def none(dtype: torch.dtype) -> int:
    """Return the id that stands for no choice: the pass that reads it routes the token itself."""
    return torch.iinfo(dtype).max


def joined(recorded: dict[int, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the recorded ids (N, k) of all layers as (N, C)."""
    layers = [recorded[number] for number in range(len(recorded))]
    return torch.cat(layers, dim=1).to(dtype)


def spread(chosen: Tensor, places: Tensor, rows: int) -> Tensor:
    """Return the choices (rows, C) of a pass: those `chosen` (M, C) at `places` (M,), else none."""
    routes = chosen.new_full((rows, chosen.shape[1]), none(chosen.dtype))
    return routes.index_copy_(0, places, chosen)


def scores_of(logits: Tensor, ids: Tensor, routing: Routing) -> Tensor:
    """Return the scores (N, k) that a router gives to `ids` (N, k)."""
    if routing.of_chosen:
        return logits.gather(1, ids).softmax(-1)
    scores = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    scores = scores.gather(1, ids)
    if routing.normalized:
        scores = scores / scores.sum(-1, keepdim=True)
    return scores.to(logits.dtype) if routing.rounded else scores


def _route(
    slot: PackingSlot,
    number: int,
    mixture: Mixture,
    original: Callable[[Tensor], Answer],
    states: Tensor,
) -> Answer:
    """Run a router, and record or replay its choice."""
    return _exchange_outside(slot, number, mixture.routing, original(states))


def _exchange(slot: PackingSlot, number: int, routing: Routing, answer: Answer) -> Answer:
    logits, scores, ids = answer
    layout = slot.layout
    routes = None if layout is None else layout.routes
    if routes is not None:
        own = slice(number * routing.top_k, (number + 1) * routing.top_k)
        given: Any = routes[:, own]
        known = given != none(routes.dtype)
        ids = torch.where(known, given.to(ids.dtype), ids)
        scores = scores_of(logits, ids, routing)
    if slot.recorded is not None:
        slot.recorded[number] = ids
    return logits, scores, ids


# Outside of compiled graphs: a number of the layer within one would compile each layer anew.
_exchange_outside: Any = torch.compiler.disable(_exchange)
