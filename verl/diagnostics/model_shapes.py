"""Read the shapes of a run's models from config.json: modules on the meta device, no weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from verl.config import (
    CriticModelConfig,
    ModelConfig,
    RewardModelModelConfig,
    RolloutConfig,
    TeacherModelConfig,
)
from verl.config.policies import PolicyConfig
from verl.engine.engine_setup import EngineSetup
from verl.engine.footprint import EngineFootprint
from verl.engine.model_shape import ModelShape
from verl.models.critic import CriticModel
from verl.models.load import causal_lm_class, load_model_config, torch_dtype
from verl.models.reward_model import load_reward_config
from verl.rollout import check_engine_model
from verl.utils.imports import import_user_code
from verl.workers.trained import (
    add_adapters,
    choose_trained,
    frozen_dtype,
    model_source,
    parameter_dtype,
)

Key = tuple[Any, ...]  # the settings that a shape depends on


class ModelShapes:
    """Makes each module and each footprint once, for any number of plans."""

    def __init__(self) -> None:
        self._known: dict[Key, ModelShape] = {}
        self._configs: dict[Key, Any] = {}  # of policies
        self._footprints: dict[tuple[int, EngineSetup], EngineFootprint] = {}

    def footprint(self, shape: ModelShape, setup: EngineSetup) -> EngineFootprint:
        """Return the footprint of a shape that was made here."""
        return self._footprints.setdefault((id(shape), setup), EngineFootprint(shape, setup))

    def policy(
        self,
        model: ModelConfig,
        device: torch.device,
        *,
        is_trained: bool = True,
        freezes_tower: bool = False,
    ) -> ModelShape:
        """Make the shape of the actor, or with `is_trained` False of the reference.

        Raises ModelError for a missing model.
        """
        dtype = parameter_dtype(model, device, is_trained=is_trained)

        def make() -> PreTrainedModel:
            config = _config(model)
            module = causal_lm_class(config).from_config(config, dtype=torch_dtype(dtype))
            if is_trained:
                choose_trained(
                    module, model, "actor_rollout_ref.model", freezes_tower=freezes_tower
                )
            return module if is_trained else module.requires_grad_(False)

        key = ("policy", is_trained, freezes_tower, *_key(model, device))
        return self._shape(key, make)

    def critic(self, model: CriticModelConfig, device: torch.device) -> ModelShape:
        def make() -> CriticModel:
            body = AutoModel.from_config(
                _config(model), dtype=torch_dtype(parameter_dtype(model, device))
            )
            module = CriticModel(body)
            add_adapters(body, model, "critic.model")
            if model.lora_rank > 0 and device.type == "cuda":
                module.value_head.float()
            return module

        return self._shape(("critic", *_key(model, device)), make)

    def reward_model(self, model: RewardModelModelConfig, device: torch.device) -> ModelShape:
        """Make the shape. Raises ModelError for anything but a classifier with one label."""

        def make() -> PreTrainedModel:
            assert model.path is not None, "the configuration was checked"
            import_user_code(model.external_lib)
            config = load_reward_config(model.path, trust_remote_code=model.trust_remote_code)
            module = AutoModelForSequenceClassification.from_config(
                config, dtype=frozen_dtype(device)
            )
            return module.requires_grad_(False)

        return self._shape(("reward model", device.type, model.path), make)

    def teacher(self, model: TeacherModelConfig, device: torch.device) -> ModelShape:
        """Make the shape of the teacher of distillation."""
        dtype = frozen_dtype(device) if model.dtype is None else torch_dtype(model.dtype)

        def make() -> PreTrainedModel:
            assert model.model_path is not None, "the configuration was checked"
            config = load_model_config(
                model.model_path,
                trust_remote_code=model.trust_remote_code,
                override_config=model.override_config,
            )
            kind = causal_lm_class(config)
            return kind.from_config(config, dtype=dtype).requires_grad_(False)

        key = (device.type, model.model_path, model.dtype, repr(model.override_config))
        return self._shape(("teacher", *key), make)

    def frozen_policy(self, policy: PolicyConfig) -> ModelShape:
        """Make the shape of a model that plays a role of agents, with a `path` of its own."""

        def make() -> PreTrainedModel:
            assert policy.path is not None, "the configuration was checked"
            config = load_model_config(policy.path, trust_remote_code=policy.trust_remote_code)
            return causal_lm_class(config).from_config(config).requires_grad_(False)

        return self._shape(("frozen policy", policy.path), make)

    def check_rollout(
        self, model: ModelConfig, rollout: RolloutConfig, device: torch.device
    ) -> None:
        """Raise ConfigError where the rollout engine does not support the model."""
        key = _key(model, device)
        if key not in self._configs:
            self._configs[key] = _config(model)
        check_engine_model(rollout, self._configs[key], on_cuda=device.type == "cuda")

    def _shape(self, name: Key, make: Callable[[], nn.Module]) -> ModelShape:
        if name not in self._known:
            with torch.device("meta"):
                module = make()
            self._known[name] = ModelShape.from_module(module)
        return self._known[name]


def _key(model: ModelConfig | CriticModelConfig, device: torch.device) -> Key:
    """Return the settings that a shape depends on."""
    adapters = (model.lora_rank, repr(model.target_modules), repr(model.exclude_modules))
    return device.type, model.path, model.dtype, repr(model.override_config), *adapters


def _config(model: ModelConfig | CriticModelConfig) -> Any:
    import_user_code(model.external_lib)
    return load_model_config(**model_source(model))
