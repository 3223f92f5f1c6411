"""Write an engine's state and read it back: weights or adapters, moments, schedule position."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from verl.checkpoint.hf import WEIGHTS_FOLDER, save_config, save_weights, state_tensors
from verl.checkpoint.sharded import MODEL, OPTIMIZER, SHARDED_FOLDER, SavedTensors, ShardedWriter
from verl.distributed.collectives import barrier
from verl.distributed.fsdp import full_tensor, shard_like
from verl.engine.optim import restore_moments
from verl.models.critic import VALUE_HEAD_FILE, CriticModel, other_head
from verl.models.lora import (
    ADAPTER_FOLDER,
    adapted_layers,
    adapter_state,
    load_adapters,
    merged_state,
    save_adapters,
)
from verl.models.processor import copy_processor
from verl.utils.errors import CheckpointError
from verl.utils.json_text import parse_object

PROGRESS_FILE = "progress.json"


def save_state(
    folder: Path,
    hf_model: Any,
    optimizer: torch.optim.Optimizer | None,
    progress: dict[str, Any],
    writer: ShardedWriter,
    *,
    tokenizer: Any = None,
    merged: bool = False,
    in_background: bool = False,
) -> None:
    """Write a checkpoint of one module. Every rank must call this.

    The files do not depend on the number of ranks.

    `sharded/` has the weights and, for each trained parameter's name, the whole moments (`exp_avg`,
    `exp_avg_sq` and `step` of AdamW): every rank writes the shards it has. `huggingface/` has
    configuration and tokenizer, and the weights too where `merged` asks for them. With LoRA
    `lora_adapter/` (loadable by peft alone) instead of weights, and `huggingface/` with the
    adapters merged in where `merged` asks for it. `progress.json` has `progress`.

    All of it is written when this returns. With `in_background`, `sharded/` is written when
    `writer.is_done()`.
    """
    writes = writer.world.rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        state = {"has_optimizer": optimizer is not None, **progress}
        (folder / PROGRESS_FILE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")

    adapted = bool(adapted_layers(hf_model))
    places = []
    if adapted:
        places.append(folder / ADAPTER_FOLDER)
        _save_adapters(folder / ADAPTER_FOLDER, hf_model, writes=writes)
    if merged or not adapted:
        places.append(folder / WEIGHTS_FOLDER)
        if writes:
            save_config(folder / WEIGHTS_FOLDER, transformer_of(hf_model))
    if merged:
        _save_merged(folder / WEIGHTS_FOLDER, hf_model, writes=writes)
    if tokenizer is not None and writes:
        for place in places:
            tokenizer.save_pretrained(place)
            copy_processor(transformer_of(hf_model), place)

    barrier(writer.world)  # the folder exists now
    tensors = {} if adapted else _weights(hf_model)
    writer.write(
        folder / SHARDED_FOLDER,
        tensors | _moments(optimizer, hf_model),
        in_background=in_background,
    )


def load_state(
    folder: Path, hf_model: Any, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Read a checkpoint of `save_state` into the module and the optimizer; return its `progress`.

    In place, so that a rollout engine that aliases the weights sees them too.
    """
    file = folder / PROGRESS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"Expected a role's part of a checkpoint in {folder}, found no {PROGRESS_FILE} there. "
            "A run of other roles has saved it, as GRPO has no critic: name another folder with "
            "trainer.default_local_dir, or start from the beginning with "
            "trainer.resume_mode=disable."
        )

    progress = _read_progress(file)
    has_optimizer = progress.pop("has_optimizer")
    if adapted_layers(hf_model):
        _load_adapters(folder / ADAPTER_FOLDER, hf_model)
    elif (folder / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"{folder} was saved by a LoRA run, and this one trains all weights. Set lora_rank as "
            f"in {folder / ADAPTER_FOLDER / 'adapter_config.json'}, or start another run from "
            "merged weights."
        )
    else:
        _load_weights(folder / SHARDED_FOLDER, hf_model)

    if optimizer is not None:
        if not has_optimizer:
            raise CheckpointError(
                f"{folder} was saved without optimizer. Leave 'optimizer' out of "
                "checkpoint.load_contents, and the run starts with new moments."
            )
        _load_moments(folder / SHARDED_FOLDER, hf_model, optimizer)
    return progress


# Types of the entries of PROGRESS_FILE. All but the first may be missing.
_PROGRESS_TYPES = {
    "has_optimizer": bool,
    "schedule_position": int,
    "lowered_budgets": dict,
    "token_budgets": dict,
}


def _read_progress(file: Path) -> dict[str, Any]:
    """Read the entries that `save_state` wrote. Raises CheckpointError for anything else."""
    try:
        progress = parse_object(file.read_bytes())
        for name, expected in _PROGRESS_TYPES.items():
            if name not in progress and name != "has_optimizer":
                continue

            value = progress.get(name)
            sizes = value.values() if isinstance(value, dict) else ()
            if type(value) is not expected or not all(type(size) is int for size in sizes):
                raise ValueError(f"{name} is {value!r:.50}")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}). If it is damaged or was not copied whole, copy it "
            "again, or use another checkpoint."
        ) from error
    return progress


def transformer_of(model: PreTrainedModel | CriticModel) -> PreTrainedModel:
    """Return the transformers module: a policy itself, the body of a critic."""
    return model.body if isinstance(model, CriticModel) else model


# ---------------------------------------------------------------- weights


def _weights(hf_model: Any) -> dict[str, Tensor]:
    """Return the `state_tensors`, under their names in a checkpoint."""
    tensors = state_tensors(hf_model)
    return {MODEL + name: tensor.detach() for name, tensor in tensors.items()}


def _load_weights(folder: Path, hf_model: Any) -> None:
    saved = SavedTensors(folder)
    is_critic = any(name.startswith(f"{MODEL}value_head.") for name in saved.tensors)
    if isinstance(hf_model, CriticModel) and not is_critic:
        raise CheckpointError(f"{folder} has no value head: it holds a policy, not a critic.")
    weights = _weights(hf_model)
    unread = sorted(name for name in saved.tensors.keys() - weights if name.startswith(MODEL))
    if unread:
        raise CheckpointError(
            f"{folder} has weights that this run's model lacks: {len(unread)}, the first is "
            f"'{unread[0]}'. Another model saved it: set the model's path, override_config and "
            "custom_cls as they were then, or start a run in another folder "
            "(trainer.default_local_dir)."
        )
    saved.read(weights)


def _save_merged(folder: Path, hf_model: Any, *, writes: bool) -> None:
    """Write whole weights, adapters merged in, at least fp32.

    Every rank gathers them one by one, and the first writes.
    """
    body = "body." if isinstance(hf_model, CriticModel) else ""
    head: dict[str, Tensor] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, whole in merged_state(hf_model):
            precise = whole
            if whole.dtype in (torch.bfloat16, torch.float16):
                precise = whole.to(torch.float32)
            if name.startswith(body):
                yield name.removeprefix(body), precise
            else:
                head[name.removeprefix("value_head.")] = precise.cpu().contiguous()

    if not writes:
        for _ in tensors():
            pass
        return
    save_weights(folder, transformer_of(hf_model), tensors())
    if head:
        save_file(head, folder / VALUE_HEAD_FILE)


def _save_adapters(folder: Path, hf_model: Any, *, writes: bool) -> None:
    state = adapter_state(transformer_of(hf_model))
    if writes:
        save_adapters(folder, transformer_of(hf_model), state)
    if isinstance(hf_model, CriticModel):
        head = {}
        for name, tensor in hf_model.value_head.state_dict().items():
            head[name] = full_tensor(tensor).cpu()
        if writes:
            save_file(head, folder / VALUE_HEAD_FILE)


def _load_adapters(folder: Path, hf_model: Any) -> None:
    load_adapters(folder, transformer_of(hf_model))
    if not isinstance(hf_model, CriticModel):
        return
    if not (folder / VALUE_HEAD_FILE).is_file():
        raise CheckpointError(
            f"{folder} has no {VALUE_HEAD_FILE}: it holds a policy, not a critic."
        )

    saved = load_file(folder / VALUE_HEAD_FILE)
    own = hf_model.value_head.state_dict()
    fault = other_head(folder / VALUE_HEAD_FILE, saved, own)
    if fault is not None:
        raise CheckpointError(
            f"{fault} set critic.model.path and critic.model.custom_cls as they were then, or "
            "start a run in another folder (trainer.default_local_dir)."
        )

    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(shard_like(saved[name], tensor))


# ---------------------------------------------------------------- moments
# They are named optimizer.<moment>.<parameter>, or optimizer.<moment>/<part>.<parameter> where a
# moment has parts.


def _moments(optimizer: torch.optim.Optimizer | None, hf_model: Any) -> dict[str, Tensor]:
    """Return the moments, live, as they are sharded."""
    moments: dict[str, Tensor] = {}
    if optimizer is None:
        return moments

    to_saved = getattr(optimizer, "moment_to_saved", None)
    for name, parameter in hf_model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            saved = value if to_saved is None else to_saved(full_tensor(value))
            if not isinstance(saved, dict):
                moments[f"{OPTIMIZER}{kind}.{name}"] = saved.detach()
                continue
            for part, tensor in saved.items():
                moments[f"{OPTIMIZER}{kind}/{part}.{name}"] = tensor.detach()
    return moments


def _load_moments(folder: Path, hf_model: Any, optimizer: torch.optim.Optimizer) -> None:
    parameters = dict(hf_model.named_parameters())
    sharded = not hasattr(optimizer, "moment_from_saved")
    found: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Any]] = {}
    saved = SavedTensors(folder)
    for key, (shape, dtype) in saved.tensors.items():
        if not key.startswith(OPTIMIZER):
            continue
        kind, _, name = key.removeprefix(OPTIMIZER).partition(".")
        kind, _, part = kind.partition("/")
        parameter = parameters.get(name)
        if sharded and parameter is not None and parameter.shape == shape:
            found[key] = torch.empty_like(parameter.detach(), dtype=dtype)
        else:
            found[key] = torch.empty(shape, dtype=dtype)

        of_name = moments.setdefault(name, {})
        if part:
            of_name.setdefault(kind, {})[part] = found[key]
        else:
            of_name[kind] = found[key]

    saved.read(found)
    restore_moments(optimizer, parameters.items(), _in_order_of_steps(moments, parameters))


def _in_order_of_steps(
    moments: Mapping[str, dict[str, Any]], parameters: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Sort moments as steps make them. In a folder, they depend on the ranks that wrote it."""
    order = {name: number for number, name in enumerate(parameters)}
    ordered = {}
    for name in sorted(moments, key=lambda name: order.get(name, -1)):
        kinds = sorted(moments[name], key=lambda kind: (kind != "step", kind))
        ordered[name] = {kind: moments[name][kind] for kind in kinds}
    return ordered
