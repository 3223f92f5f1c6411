"""Rollout engines: requests in, completions out."""

import importlib.util
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import ALONE, Axis
from verl.rollout.assemble import assemble
from verl.rollout.base import RolloutEngine, rollout_engines
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.hf import HFEngine
from verl.rollout.types import Completion, Request, SamplingParams
from verl.utils.errors import ConfigError, MissingDependencyError

__all__ = [
    "Completion",
    "EmbeddedEngine",
    "HFEngine",
    "Request",
    "RolloutEngine",
    "SamplingParams",
    "assemble",
    "create_rollout_engine",
    "rollout_engines",
]

# Engines of other projects that users know by name, and how to get them.
_OTHER_ENGINES = {"vllm": "pip install 'verl[vllm]'", "sglang": "pip install 'verl[sglang]'"}


def create_rollout_engine(
    config: RolloutConfig, *, model: PreTrainedModel, tokenizer: Any, device: torch.device, ranks: Axis = ALONE
) -> RolloutEngine:
    """The engine that `config.name` says, over the weights of `model`; one engine for all `ranks`, each of which makes
    every call on it alike.

    Raises ConfigError for an unknown name, MissingDependencyError for an engine whose package is not installed.
    """
    if config.name in _OTHER_ENGINES and config.name not in rollout_engines:
        if importlib.util.find_spec(config.name) is None:
            raise MissingDependencyError(
                f"actor_rollout_ref.rollout.name={config.name} needs the package '{config.name}'. "
                f"Install it: {_OTHER_ENGINES[config.name]}"
            )
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={config.name}: '{config.name}' is installed, but this version ships the "
            f"engines {', '.join(sorted(rollout_engines))} only. Set actor_rollout_ref.rollout.name=embedded."
        )
    factory = rollout_engines.get(config.name)
    shared: dict[str, Any] = {"ranks": ranks} if ranks.size > 1 else {}  # by the rules only `embedded` can be
    return factory(model=model, tokenizer=tokenizer, config=config, device=device, **shared)
