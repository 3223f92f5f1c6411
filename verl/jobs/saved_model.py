"""The saved weights of one role, under the names that transformers has for them.

This needs neither a GPU nor packages of training.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, PreTrainedModel

from verl.checkpoint.hf import WEIGHTS_FOLDER, layer_of, state_tensors
from verl.checkpoint.manifest import MANIFEST, SHARD_METADATA, verify_files
from verl.checkpoint.sharded import MODEL, SHARDED_FOLDER, SavedTensors
from verl.models.critic import VALUE_HEAD_FILE
from verl.models.load import causal_lm_class
from verl.models.lora import ADAPTER_FOLDER, merged_shape, merged_weight, read_adapters
from verl.models.role_folders import has_weights, is_role, nearest_role
from verl.utils.errors import CheckpointError
from verl.utils.json_text import parse_json

# The parts of a critic.
_BODY = f"{MODEL}body."
_HEAD = f"{MODEL}value_head."
# Errors of the readers of JSON, of configurations and of safetensors for damaged files.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    StrictDataclassError,
    SafetensorError,
)


@dataclass(frozen=True)
class SavedModel:
    """The saved files of one role.

    `model` (on meta, or the base model of adapters) determines the published names of weights.
    """

    model: PreTrainedModel | None
    weights: Iterator[tuple[str, torch.Tensor]]
    value_head: dict[str, torch.Tensor]
    files: Path  # folder of the tokenizer and, without adapters, of the configuration


def role_folder(folder: Path) -> Path:
    """Return `folder` if a role saved it, else raise CheckpointError with the nearest one."""
    if is_role(folder):
        return folder
    expected = (
        "Expected --local_dir to be a role's folder of a checkpoint (.../global_step_N/actor)"
    )
    if not folder.is_dir():
        raise CheckpointError(f"{expected}, but there is no folder {folder}.")

    near = nearest_role(folder)
    if near is not None:
        raise CheckpointError(f"{expected}, got {folder}. Set --local_dir {near}.")

    if has_weights(folder):
        raise CheckpointError(
            f"{expected}, got {folder}, which already has complete weights: load it as it is."
        )

    inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise CheckpointError(
        f"{expected}, got {folder} with {inside} in it, neither {SHARDED_FOLDER}/{SHARD_METADATA} "
        f"nor {ADAPTER_FOLDER}/. Checkpoints of other frameworks cannot be read."
    )


def open_saved(role: Path, base_model: str | None, dtype: torch.dtype) -> SavedModel:
    """Open the files in the folder of a role. Weights are read one layer after the other.

    Args:
        base_model: frozen weights of adapters; None: those that the adapters name.
        dtype: of the weights, adapters included.

    Raises:
        CheckpointError: a file is missing or damaged, or the base model fits no adapter.
    """
    verify_role(role)
    if (role / ADAPTER_FOLDER).is_dir():
        return _with_adapters(role / ADAPTER_FOLDER, base_model, dtype)

    saved = SavedTensors(role / SHARDED_FOLDER)
    names = sorted((name for name in saved.tensors if name.startswith(MODEL)), key=_natural)
    heads = [name for name in names if name.startswith(_HEAD)]
    prefix = _BODY if heads else MODEL
    layers: dict[str, list[str]] = {}
    for name in names:
        if name not in heads:
            layers.setdefault(layer_of(name), []).append(name)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for layer in layers.values():
            for name, tensor in saved.read_whole(layer).items():
                yield name.removeprefix(prefix), _cast(tensor, dtype)

    head = {name.removeprefix(_HEAD): tensor for name, tensor in saved.read_whole(heads).items()}
    folder = role / WEIGHTS_FOLDER
    return SavedModel(_on_meta(folder), weights(), head, folder)


def _with_adapters(folder: Path, base_model: str | None, dtype: torch.dtype) -> SavedModel:
    """Open a folder of adapters, which are merged into the weights of their base model."""
    config, factors = read_adapters(folder)
    scaling = config["lora_alpha"] / config["r"]
    is_critic = (folder / VALUE_HEAD_FILE).is_file()
    base = base_model or config["base_model_name_or_path"]
    try:
        auto_class: Any = AutoModel
        if not is_critic:
            auto_class = causal_lm_class(AutoConfig.from_pretrained(base))
        model = auto_class.from_pretrained(base, dtype="auto")
    except (OSError, ValueError, ImportError, RuntimeError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"The adapters in {folder} are merged into the model that they were trained on, but "
            f"'{base}' cannot be loaded ({reason_of(error)}). Set --base_model to its present path."
        ) from error

    state = model.state_dict()
    missing = [name for name in factors if f"{name}.weight" not in state]
    if missing:
        raise CheckpointError(
            f"'{base}' has no layer '{missing[0]}', which {folder} adapts. Set --base_model to "
            "another."
        )
    for name, (a, b) in factors.items():
        expected = merged_shape(model.get_submodule(name), a, b)
        found = tuple(state[f"{name}.weight"].shape)
        if found != expected:
            raise CheckpointError(
                f"Expected '{name}.weight' of shape {expected}, which {folder} adapts, but that of "
                f"'{base}' has shape {found}. Set --base_model to the model that the adapters were "
                "trained on."
            )

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in state_tensors(model).items():
            owner = name.removesuffix(".weight")
            whole = tensor.detach()
            if owner in factors and name != owner:
                whole = merged_weight(model.get_submodule(owner), whole, *factors[owner], scaling)
            yield name, _cast(whole, dtype)

    with readable(folder / VALUE_HEAD_FILE):
        head = load_file(folder / VALUE_HEAD_FILE) if is_critic else {}
    return SavedModel(model, weights(), head, folder)


def _on_meta(folder: Path) -> PreTrainedModel | None:
    """Build the family's model without memory; None for custom code, which keeps its names."""
    file = folder / "config.json"
    with readable(file):
        config = parse_json(file.read_text(encoding="utf-8"))
        if "auto_map" in config:
            return None
        name = config["architectures"][0]
        family = getattr(transformers, name, None)
        # Without this check, any object of transformers could be called.
        if not (isinstance(family, type) and issubclass(family, PreTrainedModel)):
            raise ValueError(f"transformers has no model named {name!r:.100}")
        with torch.device("meta"):
            return family(AutoConfig.from_pretrained(folder))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    key: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        key.append((int(part), "") if part.isdigit() else (-1, part))
    return key


def verify_role(role: Path) -> None:
    """Raise CheckpointError unless the files of `role` match the checksums of the manifest.

    A role's folder that was copied alone has no manifest, so it is not verified.
    """
    role = role.resolve()  # `--local_dir .` has no name
    if (role.parent / MANIFEST).is_file():
        verify_files(role.parent, f"{role.name}/")


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise CheckpointError for a `file` that is missing or damaged."""
    try:
        yield
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{file} cannot be read ({reason_of(error)}). If it is damaged or incomplete, copy it "
            "again, or use another checkpoint."
        ) from error


def reason_of(error: Exception) -> str:
    """Return the class and the first line of an error."""
    # shutil.Error has a list of all files that could not be copied, each with the cause.
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
