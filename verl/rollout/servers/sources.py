"""The way of new weights to servers: memory of this machine, a folder, or adapters alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.models.lora import adapted_layers, lora_rank
from verl.models.vision import vision_parts
from verl.rollout.servers.owned import takes_memory
from verl.rollout.servers.server import Server, WeightSource
from verl.rollout.servers.weights import MemorySource, WeightFolder
from verl.utils.errors import ConfigError
from verl.weight_sync.base import NamedTensors

_SECTION = "actor_rollout_ref.rollout"


def adapter_rank(config: RolloutConfig, server_class: type[Server], model: PreTrainedModel) -> int:
    """Return the rank of the adapters that servers draw by; 0: they get whole, merged weights.

    Raises ConfigError if the configuration asks for adapters that they do not take.
    """
    rank = lora_rank(model)
    adapts_vision = _adapts_vision(model)
    largest = server_class.largest_lora_rank
    if config.lora_weights == "adapter" and rank > largest:
        raise ConfigError(
            f"{_SECTION}.lora_weights=adapter: {server_class.title} takes adapters of ranks up to "
            f"{largest}, got actor_rollout_ref.model.lora_rank={rank}. Set lora_weights=merged."
        )
    if config.lora_weights == "adapter" and adapts_vision:
        raise ConfigError(
            f"{_SECTION}.lora_weights=adapter: {server_class.title} ignores adapters of a vision "
            "tower, and actor_rollout_ref.model.target_modules names layers of one. Set "
            "lora_weights=merged, or target_modules=all-linear."
        )
    if config.lora_weights is not None:
        return rank if config.lora_weights == "adapter" else 0

    is_owned = not config.server_urls
    is_free = config.weight_transport in (None, "disk")
    is_taken = rank <= largest and not adapts_vision
    return rank if is_owned and is_free and is_taken else 0


def _adapts_vision(model: PreTrainedModel) -> bool:
    """Return whether any layer around the language model has an adapter."""
    of_vision = {id(module) for part in vision_parts(model) for module in part.modules()}
    return any(id(layer) in of_vision for layer in adapted_layers(model).values())


@dataclass(kw_only=True)
class WeightSources:
    """Makes the source of each push.

    Args:
        config: says which way.
        model: describes the tensors; its weights are not read.
        device: of the trainer.
        dtype: of the servers.
        tensors_again: gives the trainer's tensors anew, where this process has all of them.
    """

    config: RolloutConfig
    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    tensors_again: Callable[[], NamedTensors] | None = None

    def of_tensors(self, named_tensors: NamedTensors, version: str) -> WeightSource:
        """Return the source of whole weights: memory of this machine, or a folder."""
        asked = self.config.weight_transport
        again = self.tensors_again
        if asked is not None and asked != "disk" and again is None:
            raise ConfigError(
                f"{_SECTION}.weight_transport={asked} hands weights from one rank to servers, and "
                "here several train. Leave it unset."
            )
        if again is not None and (asked in ("ipc", "host") or takes_memory(self.config)):
            return MemorySource(
                tensors=again,
                model=self.model,
                device=self.device,
                bucket_bytes=self.config.update_weights_bucket_megabytes << 20,
                dtype=self.dtype,
            )
        return self._folder.write(named_tensors, version)

    def of_adapters(self, state: dict[str, Any], version: str) -> WeightSource:
        """Return the source of LoRA adapters (`adapter_state`)."""
        return self._folder.write_adapters(state, version)

    @cached_property
    def _folder(self) -> WeightFolder:
        return WeightFolder(self.config.server_weights_dir, self.model, self.dtype)
