"""The shapes of a run's models, from their config.json alone: modules on the meta device, no weight is read."""

from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM

from verl.config import CriticModelConfig, ModelConfig
from verl.engine.footprint import EngineFootprint, EngineSetup
from verl.engine.model_shape import ModelShape
from verl.models.critic import CriticModel
from verl.models.load import _torch_dtype, load_model_config
from verl.workers.trained import add_adapters, parameter_dtype


class ModelShapes:
    """Makes each module once, and each footprint, however often a plan is made anew."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], ModelShape] = {}
        self._footprints: dict[tuple[int, EngineSetup], EngineFootprint] = {}

    def footprint(self, shape: ModelShape, setup: EngineSetup) -> EngineFootprint:
        """Of a shape that was made here."""
        return self._footprints.setdefault((id(shape), setup), EngineFootprint(shape, setup))

    def policy(self, model: ModelConfig, device: torch.device, *, is_trained: bool = True) -> ModelShape:
        """Of the actor, or with `is_trained` False of the reference. Raises ModelError for a model that is missing."""
        return self._shape(model, device, "actor_rollout_ref.model", is_trained)

    def critic(self, model: CriticModelConfig, device: torch.device) -> ModelShape:
        return self._shape(model, device, "critic.model", True)

    def config(self, model: ModelConfig | CriticModelConfig) -> Any:
        """The model's configuration of text."""
        assert model.path is not None, "the configuration was checked"
        return load_model_config(
            model.path, trust_remote_code=model.trust_remote_code, override_config=model.override_config
        )

    def _shape(
        self, model: ModelConfig | CriticModelConfig, device: torch.device, section: str, is_trained: bool
    ) -> ModelShape:
        dtype = _torch_dtype(parameter_dtype(model, device, is_trained=is_trained))
        name = (
            section, is_trained, device.type, dtype, model.path, repr(model.override_config), model.lora_rank,
            repr(model.target_modules), repr(model.exclude_modules),
        )  # fmt: skip
        if name not in self._known:
            is_critic = isinstance(model, CriticModelConfig)
            maker: Any = AutoModel if is_critic else AutoModelForCausalLM
            with torch.device("meta"):
                body = maker.from_config(self.config(model), dtype=dtype)
            module = CriticModel(body) if is_critic else body
            if is_trained:
                add_adapters(body, model, section)
                if is_critic and model.lora_rank > 0 and device.type == "cuda":
                    module.value_head.float()
            else:
                module.requires_grad_(False)
            self._known[name] = ModelShape.from_module(module)
        return self._known[name]
