"""Rollout engines: requests in, completions out."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import ALONE, Axis
from verl.rollout.assemble import assemble, trajectories_of
from verl.rollout.base import (
    Capabilities,
    EngineClass,
    GenerateOnly,
    OptionalVerbs,
    RolloutEngine,
    capabilities_of,
    check_engine,
    check_engine_model,
    check_engine_service,
    generate,
    rollout_engines,
)
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.hf import HFEngine
from verl.rollout.servers import ServerEngine, ServerSender
from verl.rollout.trajectory import Segment, Trajectory
from verl.rollout.types import Completion, Continuation, Request, Room, SamplingParams
from verl.utils.errors import ConfigError

__all__ = [
    "Capabilities",
    "Completion",
    "Continuation",
    "EmbeddedEngine",
    "EngineClass",
    "HFEngine",
    "Request",
    "RolloutEngine",
    "Room",
    "SamplingParams",
    "Segment",
    "ServerEngine",
    "ServerSender",
    "Trajectory",
    "assemble",
    "capabilities_of",
    "check_engine",
    "check_engine_model",
    "check_engine_service",
    "create_rollout_engine",
    "generate",
    "rollout_engines",
    "trajectories_of",
]

_VERBS = {"submit", "step", "abort", "has_work"}
# For memory, metrics and weights: every engine has them, next to the verbs or to `generate`.
_PARTS = (
    "sleep",
    "wake",
    "statistics",
    "weight_dtype",
    "update_weights",
    "weight_place",
    "weight_fingerprints",
)


def create_rollout_engine(
    config: RolloutConfig,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    device: torch.device,
    ranks: Axis = ALONE,
) -> RolloutEngine:
    """Make the engine that `config.name` names, over the weights of `model`.

    `ranks` share one engine, and each of them makes every call on it alike. Raises ConfigError for
    an unknown name, and for a setting or a model that the engine does not support.
    """
    check_engine(config)
    check_engine_model(config, model.config, on_cuda=device.type == "cuda")

    factory = rollout_engines.get(config.name)
    # Only an engine with the capability takes the argument.
    shared: dict[str, Any] = {"ranks": ranks} if ranks.size > 1 else {}
    engine: Any = factory(model=model, tokenizer=tokenizer, config=config, device=device, **shared)

    missing = sorted(_VERBS - set(dir(engine)))
    if missing and not callable(getattr(engine, "generate", None)):
        raise ConfigError(
            f"The rollout engine '{config.name}' lacks {', '.join(missing)}. It needs submit, "
            "step, abort and has_work, or generate alone (verl.rollout.RolloutEngine)."
        )
    _require_parts(engine, config.name)

    if missing:
        return cast(RolloutEngine, GenerateOnly(engine))
    has_all = hasattr(engine, "reserve") and hasattr(engine, "forget_prefixes")
    return engine if has_all else cast(RolloutEngine, OptionalVerbs(engine))


def _require_parts(engine: Any, name: str) -> None:
    """Raise ConfigError for an engine without one of `_PARTS`."""
    missing = [part for part in _PARTS if not hasattr(engine, part)]
    if missing:
        raise ConfigError(
            f"The rollout engine '{name}' lacks {', '.join(missing)}. Add them as "
            "verl.rollout.RolloutEngine describes, or derive the class from "
            "verl.rollout.local.LocalEngine, which has them."
        )
