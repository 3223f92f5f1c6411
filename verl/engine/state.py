"""What an engine writes to disk and reads back: Hugging Face weights, moments by parameter name, schedule position."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from verl.distributed.fsdp import full_tensor, shard_like
from verl.models.critic import VALUE_HEAD_FILE, CriticModel
from verl.models.load import quiet_transformers
from verl.utils.errors import CheckpointError

WEIGHTS_FOLDER = "huggingface"
OPTIMIZER_FILE = "optim.pt"


def save_state(
    folder: Path,
    hf_model: Any,
    optimizer: torch.optim.Optimizer | None,
    schedule_position: int,
    *,
    tokenizer: Any = None,
) -> None:
    """Write `huggingface/` (loadable by transformers alone) and, with an optimizer, `optim.pt`.

    `optim.pt` maps each trained parameter's name to its whole `exp_avg`, `exp_avg_sq` and `step`: nothing in it depends
    on how many ranks there were.
    """
    weights = folder / WEIGHTS_FOLDER
    weights.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        hf_model.save_pretrained(weights, state_dict=_full_state_dict(hf_model))
    if tokenizer is not None:
        tokenizer.save_pretrained(weights)
    if optimizer is None:
        return
    moments = {
        name: {key: full_tensor(value).cpu() for key, value in optimizer.state[parameter].items()}
        for name, parameter in hf_model.named_parameters()
        if parameter in optimizer.state
    }
    torch.save({"moments": moments, "schedule_position": schedule_position}, folder / OPTIMIZER_FILE)


def load_state(folder: Path, hf_model: Any, optimizer: torch.optim.Optimizer | None, device: torch.device) -> int:
    """Read what `save_state` wrote into the module and the optimizer, in place; returns the schedule's position.

    In place, so that a rollout engine that aliases the weights sees them too.
    """
    _load_weights(folder / WEIGHTS_FOLDER, hf_model)
    if optimizer is None:
        return 0
    if not (folder / OPTIMIZER_FILE).is_file():
        raise CheckpointError(f"Expected '{OPTIMIZER_FILE}' in {folder}, found none: it was saved without optimizer.")
    saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    parameters = dict(hf_model.named_parameters())
    unknown = sorted(set(saved["moments"]) - set(parameters))
    if unknown:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE} has moments of {unknown[:3]}, which this model has not.")
    optimizer.state.clear()
    for name, moments in saved["moments"].items():
        parameter = parameters[name]
        optimizer.state[parameter] = {
            # The fused step counts on the device; the counter is a scalar and never sharded.
            key: value.to(device) if key == "step" else shard_like(value, parameter.detach())
            for key, value in moments.items()
        }
    return saved["schedule_position"]


def transformer_of(model: PreTrainedModel | CriticModel) -> PreTrainedModel:
    """The transformers module: a policy itself, the body of a critic."""
    return model.body if isinstance(model, CriticModel) else model


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


def _full_state_dict(hf_model: Any) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, at least fp32; tied names share one tensor, as `save_pretrained` expects."""
    copies: dict[int, torch.Tensor] = {}

    def on_host(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            half = tensor.dtype in (torch.bfloat16, torch.float16)
            copies[id(tensor)] = full_tensor(tensor).to("cpu", torch.float32 if half else tensor.dtype)
        return copies[id(tensor)]

    state = hf_model.state_dict(keep_vars=True)  # keep_vars: tied names stay one object
    return {name: on_host(tensor) for name, tensor in state.items()}
