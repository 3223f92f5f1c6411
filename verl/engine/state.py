"""What an engine writes to disk and reads back: weights or adapters, moments by parameter name, schedule position."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from verl.distributed.collectives import Axis, barrier
from verl.distributed.fsdp import full_tensor, shard_like
from verl.engine.optim import restore_moments, saved_moments
from verl.models.critic import VALUE_HEAD_FILE, CriticModel
from verl.models.load import quiet_transformers
from verl.models.lora import (
    ADAPTER_FOLDER,
    adapted_layers,
    adapter_state,
    load_adapters,
    merged_state,
    save_adapters,
)
from verl.utils.errors import CheckpointError

WEIGHTS_FOLDER = "huggingface"
OPTIMIZER_FILE = "optim.pt"


def save_state(
    folder: Path,
    hf_model: Any,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    world: Axis,
    *,
    tokenizer: Any = None,
    merged: bool = False,
) -> None:
    """Write `huggingface/` (loadable by transformers alone) and, with an optimizer, `optim.pt`.

    With LoRA, `lora_adapter/` (loadable by peft alone) instead, and `huggingface/` with the adapters merged into the
    weights only where `merged` asks for it.

    `optim.pt` holds `progress` and, for each trained parameter's name, the whole moments (`exp_avg`, `exp_avg_sq` and
    `step` of AdamW): nothing in them depends on how many ranks there were. Every rank of `world` must call this, to
    gather what is sharded; the first one writes, and all return when it has.
    """
    writes = world.rank == 0
    weights = folder / WEIGHTS_FOLDER
    written = []
    if adapted_layers(hf_model):
        written.append(folder / ADAPTER_FOLDER)
        _save_adapters(folder / ADAPTER_FOLDER, hf_model, writes=writes)
    if merged or not written:
        written.append(weights)
        state = _full_state_dict(hf_model, keep=writes)
        if writes:
            weights.mkdir(parents=True, exist_ok=True)
            with quiet_transformers():
                hf_model.save_pretrained(weights, state_dict=state)
    if tokenizer is not None and writes:
        for place in written:
            tokenizer.save_pretrained(place)
    if optimizer is not None:
        moments = saved_moments(optimizer, hf_model.named_parameters(), keep=writes)
        if writes:
            torch.save({"moments": moments, **progress}, folder / OPTIMIZER_FILE)
    barrier(world)


def load_state(folder: Path, hf_model: Any, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Read what `save_state` wrote into the module and the optimizer, in place; returns its `progress`.

    In place, so that a rollout engine that aliases the weights sees them too.
    """
    if adapted_layers(hf_model):
        _load_adapters(folder / ADAPTER_FOLDER, hf_model)
    elif (folder / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"{folder} was saved by a LoRA run, and this one trains all weights. Set lora_rank as in "
            f"{folder / ADAPTER_FOLDER / 'adapter_config.json'}, or start another run from merged weights."
        )
    else:
        _load_weights(folder / WEIGHTS_FOLDER, hf_model)
    if optimizer is None:
        return {}
    if not (folder / OPTIMIZER_FILE).is_file():
        raise CheckpointError(f"Expected '{OPTIMIZER_FILE}' in {folder}, found none: it was saved without optimizer.")
    saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    restore_moments(optimizer, hf_model.named_parameters(), saved.pop("moments"))
    return saved


def transformer_of(model: PreTrainedModel | CriticModel) -> PreTrainedModel:
    """The transformers module: a policy itself, the body of a critic."""
    return model.body if isinstance(model, CriticModel) else model


def _save_adapters(folder: Path, hf_model: Any, *, writes: bool) -> None:
    state = adapter_state(transformer_of(hf_model))
    if writes:
        save_adapters(folder, transformer_of(hf_model), state)
    if isinstance(hf_model, CriticModel):
        head = {name: full_tensor(tensor).cpu() for name, tensor in hf_model.value_head.state_dict().items()}
        if writes:
            save_file(head, folder / VALUE_HEAD_FILE)


def _load_adapters(folder: Path, hf_model: Any) -> None:
    load_adapters(folder, transformer_of(hf_model))
    if not isinstance(hf_model, CriticModel):
        return
    if not (folder / VALUE_HEAD_FILE).is_file():
        raise CheckpointError(f"{folder} has no {VALUE_HEAD_FILE}: it holds a policy, not a critic.")
    saved = load_file(folder / VALUE_HEAD_FILE)
    with torch.no_grad():
        for name, tensor in hf_model.value_head.state_dict().items():
            tensor.copy_(shard_like(saved[name], tensor))


def _load_weights(folder: Path, hf_model: Any) -> None:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"Expected the weights of a checkpoint in {folder}, found no config.json there.")
    source = _read_weights(folder, hf_model)
    with torch.no_grad():
        for name, tensor in hf_model.state_dict().items():
            if name not in source or source[name].shape != tensor.shape:
                raise CheckpointError(
                    f"{folder} has no '{name}' of shape {tuple(tensor.shape)}, which this model needs."
                )
            tensor.copy_(shard_like(source[name], tensor))


def _read_weights(folder: Path, hf_model: Any) -> dict[str, torch.Tensor]:
    """On the host, under the names of `hf_model.state_dict()`."""
    transformer = transformer_of(hf_model)
    # Through transformers, which knows how the names and stacks of a file map to those of a module.
    loader: Any = type(transformer).from_pretrained
    with quiet_transformers():
        loaded, report = loader(folder, dtype=transformer.dtype, output_loading_info=True)
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise CheckpointError(f"{folder} lacks weights of this model, or has them in another shape: {wrong[:3]}.")
    if not isinstance(hf_model, CriticModel):
        return loaded.state_dict()
    if not (folder / VALUE_HEAD_FILE).is_file():
        raise CheckpointError(f"{folder} has no {VALUE_HEAD_FILE}: it holds a policy, not a critic.")
    body = {f"body.{name}": tensor for name, tensor in loaded.state_dict().items()}
    return body | {f"value_head.{name}": tensor for name, tensor in load_file(folder / VALUE_HEAD_FILE).items()}


def _full_state_dict(hf_model: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, adapters merged in, at least fp32; tied names share one tensor, as `save_pretrained`
    expects. Without `keep` gathered for the ranks that do, and dropped."""
    copies: dict[int, torch.Tensor] = {}

    state: dict[str, torch.Tensor] = {}
    for name, tensor, whole in merged_state(hf_model):
        if not keep:
            continue
        if id(tensor) not in copies:
            half = whole.dtype in (torch.bfloat16, torch.float16)
            copies[id(tensor)] = whole.to("cpu", torch.float32 if half else whole.dtype)
        state[name] = copies[id(tensor)]
    return state
