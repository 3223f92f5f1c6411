"""Base classes of the workers with an engine: its adapters, and its checkpoint."""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from verl.config import ActorRolloutRefConfig, CheckpointConfig, CriticModelConfig, ModelConfig
from verl.distributed.fsdp import full_tensor
from verl.engine.base import TrainEngine
from verl.models.divergence import FrozenHead
from verl.models.load import check_vocabulary, load_causal_lm
from verl.models.logprobs import head_of
from verl.models.lora import apply_lora
from verl.models.vision import freeze_vision_tower
from verl.single_controller import Dispatch, Worker, register
from verl.utils.imports import import_user_code
from verl.weight_sync.shards import whole_fingerprints


class EngineWorker(Worker):
    """A worker with an `engine`; the engine's mesh decides which share of a batch is its own."""

    engine: TrainEngine

    @property
    def reads_weights(self) -> bool:
        """Return whether this rank reads its model's files; others get the weights from it."""
        return self.rank == 0 or self.world_size == 1

    @property
    def data_rank(self) -> int:
        """Return the engine's place along the data axis; see `Worker.data_rank`."""
        return self.engine.mesh.data.rank

    @property
    def data_size(self) -> int:
        """Return the size of the engine's data axis."""
        return self.engine.mesh.data.size

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def frozen_head(self) -> FrozenHead | None:
        """Copy the output layer of a language model to the host. All ranks but 0 return None."""
        linear: Any = self.engine.hf_model.get_output_embeddings()
        with self.engine.on_device():
            weight = full_tensor(linear.weight)
            bias = None if linear.bias is None else full_tensor(linear.bias)
            head = FrozenHead(weight, bias, head_of(self.engine.hf_model))
            return head.to(torch.device("cpu")) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lower_budgets(self, sizes: dict[str, int]) -> None:
        """Begin with passes of at most these sizes, see `OutOfMemoryError.lowered`."""
        self.engine.sizes.guard.lower(sizes)


class TrainedWorker(EngineWorker):
    """A worker with an engine that learns.

    `tokenizer` is saved with the weights; `checkpoint` lists the other contents.
    """

    config: Any
    tokenizer: Any
    checkpoint: CheckpointConfig

    def load_policy(
        self, config: ActorRolloutRefConfig, device: torch.device, *, max_length: int
    ) -> PreTrainedModel:
        """Load the causal LM to train, with its adapters and for the `tokenizer`."""
        import_user_code(config.model.external_lib)
        model = load_causal_lm(
            **model_source(config.model),
            dtype=parameter_dtype(config.model, device),
            max_length=max_length,
            weights=self.reads_weights,
        )
        check_vocabulary(model, self.tokenizer)
        choose_trained(
            model,
            config.model,
            "actor_rollout_ref.model",
            freezes_tower=config.actor.freeze_vision_tower,
        )
        return model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_config(self, config: Any) -> None:
        """Read the sizes of updates and passes from another section.

        The settings that the model was built by must be the same.
        """
        self.config = config

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weight_digests(self) -> tuple[list[str], list[int]]:
        """Return names and fingerprints of the trained tensors, for the record of the run."""
        return whole_fingerprints(self.engine.trained_parameters())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, *, in_background: bool = False) -> None:
        """Save the contents that `checkpoint.save_contents` names, see `TrainEngine.save`.

        Every rank writes its shards.
        """
        contents = self.checkpoint.save_contents
        self.engine.save(
            folder,
            tokenizer=self.tokenizer,
            merged="hf_model" in contents,
            optimizer="optimizer" in contents,
            extra="extra" in contents,
            in_background=in_background,
        )

    @register(dispatch_mode=Dispatch.RANK_ZERO)  # it learns of the other ranks' failures too
    def checkpoint_is_written(self, *, wait: bool) -> bool:
        """Return whether all ranks have written their part of a checkpoint in the background.

        Raises the error that stopped one.
        """
        return self.engine.is_saved(wait=wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: Path) -> None:
        """Undo `save_checkpoint`, as far as `checkpoint.load_contents` asks for it."""
        contents = self.checkpoint.load_contents
        self.engine.load(folder, optimizer="optimizer" in contents, extra="extra" in contents)


def model_source(model: ModelConfig | CriticModelConfig) -> dict[str, Any]:
    """Give the arguments that functions which load a model take from its section."""
    assert model.path is not None, "the configuration was checked"
    return {
        "path": model.path,
        "trust_remote_code": model.trust_remote_code,
        "override_config": model.override_config,
    }


def parameter_dtype(
    config: ModelConfig | CriticModelConfig, device: torch.device, *, is_trained: bool = True
) -> torch.dtype | str:
    """Return the dtype to load weights in: fp32 if they are trained.

    Frozen weights, also those under LoRA, get `frozen_dtype`.
    """
    if config.dtype is not None:
        return config.dtype
    if is_trained and config.lora_rank <= 0:
        return torch.float32
    return frozen_dtype(device)


def frozen_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of weights that are not trained: the one that CUDA computes in."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def choose_trained(
    model: PreTrainedModel, config: ModelConfig, section: str, *, freezes_tower: bool
) -> None:
    """Freeze the vision tower where asked, and add adapters, before other changes to the model."""
    if freezes_tower:
        freeze_vision_tower(model)
    add_adapters(model, config, section, freezes_tower=freezes_tower)


def add_adapters(
    model: PreTrainedModel,
    config: ModelConfig | CriticModelConfig,
    section: str,
    *,
    freezes_tower: bool = False,
) -> None:
    """Add the adapters that the configuration asks for, before any other change to the model."""
    if config.lora_rank > 0:
        apply_lora(
            model,
            rank=config.lora_rank,
            alpha=config.lora_alpha,
            target_modules=config.target_modules,
            exclude_modules=config.exclude_modules,
            freezes_tower=freezes_tower,
            section=section,
        )
