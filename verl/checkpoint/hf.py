"""Write folders that transformers loads: a configuration, and weights layer by layer."""

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

WEIGHTS_FOLDER = "huggingface"  # within the folder of a role
MAX_FILE_BYTES = 5 * 10**9
_NAME = "model"
_INDEX = "model.safetensors.index.json"


def save_config(folder: Path, model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
    """Write all files of `model.save_pretrained` except for the weights.

    These are the configuration, the generation configuration and custom code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


def state_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, live; a tied weight under its first name alone."""
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


def layer_of(name: str) -> str:
    """Return the decoder layer of a parameter, or the parameter's own name if it has none."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return found.group() if found else name


def save_weights(
    folder: Path,
    model: PreTrainedModel | None,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write `tensors`, see `published`, as `model.safetensors` or as several files with an index.

    At most one file, its copy while it is written, and one layer are in memory.
    """
    names: list[list[str]] = []  # of the tensors of each file
    total_bytes = 0
    for held in _by_file(published(model, tensors), max_file_bytes):
        save_file(held, _part(folder, len(names)), metadata={"format": "pt"})
        names.append(list(held))
        total_bytes += sum(tensor.nbytes for tensor in held.values())

    count = len(names)
    if count == 1:
        _part(folder, 0).rename(folder / f"{_NAME}.safetensors")
        return

    place = {}
    for number, own in enumerate(names):
        file = f"{_NAME}-{number + 1:05d}-of-{count:05d}.safetensors"
        _part(folder, number).rename(folder / file)
        place |= dict.fromkeys(own, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": place}
    (folder / _INDEX).write_text(
        json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def published(
    model: PreTrainedModel | None, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `tensors` with the names and stacks of the family's published files, layer by layer.

    Args:
        model: describes the tensors (its weights are not read); None leaves them as they are.
        tensors: whole tensors, named as in `model`. The tensors of a layer must be consecutive, and
            a tied weight comes once.
    """
    if model is None:
        yield from tensors
        return

    ignored = set(model._keys_to_ignore_on_save or ())
    for _, group in itertools.groupby(tensors, key=lambda item: layer_of(item[0])):
        layer = {name: tensor for name, tensor in group if name not in ignored}
        yield from revert_weight_conversion(model, layer).items()


def _by_file(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of one file after the other: at most `max_bytes`, or a single tensor.

    It is the same dictionary each time, so that no file stays in memory.
    """
    held: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors:
        if held and num_bytes + tensor.nbytes > max_bytes:
            yield held
            held.clear()
            num_bytes = 0

        # Clone a part, because a slice would keep the whole tensor alive.
        is_part = tensor.untyped_storage().nbytes() != tensor.nbytes
        on_host = tensor.detach().cpu()
        held[name] = on_host.clone() if is_part else on_host.contiguous()
        num_bytes += tensor.nbytes
    yield held


def _part(folder: Path, number: int) -> Path:
    """Return the file of this number until the number of all is known."""
    return folder / f".{_NAME}-{number}.part"
