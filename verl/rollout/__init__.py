"""Rollout engines: requests in, completions out."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import ALONE, Axis
from verl.rollout.assemble import assemble
from verl.rollout.base import GenerateOnly, RolloutEngine, generate, rollout_engines
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.hf import HFEngine
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import ConfigError

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "HFEngine",
    "Request",
    "RolloutEngine",
    "SamplingParams",
    "assemble",
    "create_rollout_engine",
    "generate",
    "rollout_engines",
]

# Engines of other projects that users know by name.
_OTHER_ENGINES = ("vllm", "sglang")


def create_rollout_engine(
    config: RolloutConfig,
    *,
    model: PreTrainedModel,
    tokenizer: Any,
    device: torch.device,
    ranks: Axis = ALONE,
) -> RolloutEngine:
    """The engine that `config.name` says, over the weights of `model`; one engine for all `ranks`,
    each of which makes every call on it alike.

    Raises ConfigError for an unknown name.
    """
    if config.name in _OTHER_ENGINES and config.name not in rollout_engines:
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={config.name}: this version has no adapter for "
            f"'{config.name}', but the engines {', '.join(sorted(rollout_engines))}. Set "
            "actor_rollout_ref.rollout.name=embedded."
        )
    factory = rollout_engines.get(config.name)
    # by the rules only `embedded` can be
    shared: dict[str, Any] = {"ranks": ranks} if ranks.size > 1 else {}
    engine: Any = factory(model=model, tokenizer=tokenizer, config=config, device=device, **shared)
    verbs = {"submit", "step", "abort", "has_work"}
    missing = sorted(verbs - set(dir(engine)))
    if not missing:
        return engine
    if callable(getattr(engine, "generate", None)):
        return cast(RolloutEngine, GenerateOnly(engine))
    raise ConfigError(
        f"The rollout engine '{config.name}' lacks {', '.join(missing)}. It needs submit, step, "
        "abort and has_work, or generate alone (verl.rollout.RolloutEngine)."
    )
