"""Write the weights of a checkpoint, layer by layer, as a Hugging Face folder.

This needs neither a GPU nor packages of training. Memory: two files of at most 5 GB and two decoder
layers in fp32, about 17 GB for 70B parameters, for any number of ranks that saved them. With LoRA
it also holds the base model once, in its own dtype.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, PreTrainedModel

from verl.checkpoint.hf import (
    MAX_FILE_BYTES,
    WEIGHTS_FOLDER,
    layer_of,
    published,
    save_config,
    save_weights,
)
from verl.checkpoint.manifest import MANIFEST, SHARD_METADATA, verify_files
from verl.checkpoint.sharded import MODEL, SHARDED_FOLDER, SavedTensors
from verl.models.critic import VALUE_HEAD_FILE
from verl.models.load import causal_lm_class
from verl.models.lora import ADAPTER_FOLDER, merged_shape, merged_weight, read_adapters
from verl.models.role_folders import WEIGHT_FILES, has_weights, is_role, nearest_role
from verl.utils.errors import CheckpointError
from verl.utils.json_text import parse_json
from verl.utils.limits import grown_too_large

# The parts of a critic.
_BODY = f"{MODEL}body."
_HEAD = f"{MODEL}value_head."
_NOT_COPIED = (*WEIGHT_FILES, "adapter_config.json")
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
class _Source:
    """The saved files of one role.

    `model` (on meta, or the base model of adapters) determines the published names of weights.
    """

    model: PreTrainedModel | None
    weights: Iterator[tuple[str, torch.Tensor]]
    value_head: dict[str, torch.Tensor]
    files: Path  # folder of the tokenizer and, without adapters, of the configuration


def merge(
    local_dir: Path,
    target_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    base_model: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the checkpoint in `local_dir` (`.../global_step_N/actor`) as a folder for transformers.

    Adapters are merged into the weights. `target_dir` is new, or the checkpoint's own
    `huggingface/`, which lacks only the weights. Raises CheckpointError for a folder without a
    checkpoint, for files that do not match its manifest, and for a target that is not empty or
    cannot be written. An incomplete target is deleted.
    """
    role = _role_folder(local_dir)
    in_place = target_dir.resolve() == (role / WEIGHTS_FOLDER).resolve()
    _check_target(target_dir, in_place=in_place and dtype == torch.float32)
    source = _open(role, base_model, dtype)

    with _unfinished(target_dir) as unfinished:
        if not in_place:
            _write_configuration(unfinished, source, dtype)
        save_weights(unfinished, source.model, source.weights, max_file_bytes=max_file_bytes)
        if source.value_head:
            save_file(source.value_head, unfinished / VALUE_HEAD_FILE)
        if in_place:
            # The index comes last, because it names the other files.
            for file in sorted(unfinished.iterdir(), reverse=True):
                os.replace(file, target_dir / file.name)
        else:
            os.replace(unfinished, target_dir)


def export_adapters(local_dir: Path, target_dir: Path) -> None:
    """Copy the adapters of a LoRA checkpoint, with their tokenizer, in peft's format."""
    role = _role_folder(local_dir)
    if not (role / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"{role} has no adapters: it was saved with lora_rank=0. Drop --no-merge-adapters."
        )
    _check_target(target_dir, in_place=False)
    _verify(role)
    with _unfinished(target_dir) as unfinished:
        shutil.copytree(role / ADAPTER_FOLDER, unfinished, dirs_exist_ok=True)
        os.replace(unfinished, target_dir)


def upload(folder: Path, repository: str, *, private: bool = False) -> str:
    """Upload a written folder to a repository of the hub, and return its address.

    Raises:
        CheckpointError: the hub did not take it; the folder stays.
    """
    hub = HfApi()
    try:
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repository, folder_path=folder)
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        raise CheckpointError(
            f"The folder {folder} is written, but could not be uploaded to '{repository}': "
            f"{reason}. Log in with `hf auth login`, then run: hf upload {repository} {folder}"
        ) from error
    return str(address)


def compare(
    local_dir: Path,
    hf_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    base_model: str | None = None,
) -> int:
    """Count the tensors in `hf_dir`, all of which must equal the output of `merge` bit for bit.

    Raises CheckpointError that names those that differ, or that only one of the two has.
    """
    source = _open(_role_folder(local_dir), base_model, dtype)
    files = sorted(hf_dir.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"Expected a Hugging Face folder with model*.safetensors at {hf_dir}, found none."
        )

    opened = []
    for file in files:
        with _readable(file):
            opened.append(safe_open(file, framework="pt"))

    place: dict[str, Any] = {}
    for file in opened:
        place.update(dict.fromkeys(file.keys(), file))
    differ = []
    missing = []
    seen = set()
    for name, tensor in published(source.model, source.weights):
        seen.add(name)
        if name not in place:
            missing.append(name)
        elif not torch.equal(place[name].get_tensor(name), tensor):
            differ.append(name)

    tied = () if source.model is None else (source.model._tied_weights_keys or ())
    extra = [name for name in place if name not in seen and name not in tied]
    found = {"differ": differ, "are missing there": missing, "are there only": extra}

    wrong: list[str] = []
    for fault, names in found.items():
        if names:
            wrong.append(f"{len(names)} {fault}, first '{names[0]}'")
    if wrong:
        raise CheckpointError(
            f"Of the {len(seen)} tensors of {local_dir}, compared with {hf_dir}: "
            f"{'; '.join(wrong)}."
        )

    return len(seen)


# ---------------------------------------------------------------- saved weights


def _open(role: Path, base_model: str | None, dtype: torch.dtype) -> _Source:
    _verify(role)
    if (role / ADAPTER_FOLDER).is_dir():
        return _open_adapters(role / ADAPTER_FOLDER, base_model, dtype)

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
    return _Source(_on_meta(folder), weights(), head, folder)


def _open_adapters(folder: Path, base_model: str | None, dtype: torch.dtype) -> _Source:
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
            f"'{base}' cannot be loaded ({_reason(error)}). Set --base_model to its present path."
        ) from error

    state = model.state_dict(keep_vars=True)
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
        seen: set[int] = set()
        for name, tensor in state.items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            owner = name.removesuffix(".weight")
            whole = tensor.detach()
            if owner in factors and name != owner:
                whole = merged_weight(model.get_submodule(owner), whole, *factors[owner], scaling)
            yield name, _cast(whole, dtype)

    with _readable(folder / VALUE_HEAD_FILE):
        head = load_file(folder / VALUE_HEAD_FILE) if is_critic else {}
    return _Source(model, weights(), head, folder)


def _on_meta(folder: Path) -> PreTrainedModel | None:
    """Build the family's model without memory; None for custom code, which keeps its names."""
    file = folder / "config.json"
    with _readable(file):
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


def _write_configuration(target: Path, source: _Source, dtype: torch.dtype) -> None:
    copied = shutil.ignore_patterns(*_NOT_COPIED)
    shutil.copytree(source.files, target, ignore=copied, dirs_exist_ok=True)
    file = target / "config.json"
    if not file.is_file():  # a folder of adapters has none
        assert source.model is not None
        save_config(target, source.model, dtype)
        return

    config = parse_json(file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 10 after layer 9."""
    key: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        key.append((int(part), "") if part.isdigit() else (-1, part))
    return key


# ---------------------------------------------------------------- damage


def _verify(role: Path) -> None:
    """Raise CheckpointError unless the files of `role` match the checksums of the manifest.

    A role's folder that was copied alone has no manifest, so it is not verified.
    """
    role = role.resolve()  # `--local_dir .` has no name
    if (role.parent / MANIFEST).is_file():
        verify_files(role.parent, f"{role.name}/")


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise CheckpointError for a `file` that is missing or damaged."""
    try:
        yield
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{file} cannot be read ({_reason(error)}). If it is damaged or incomplete, copy it "
            "again, or use another checkpoint."
        ) from error


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Make a new folder next to `target`, renamed when it is complete and deleted on failure.

    Raises CheckpointError if it cannot be written; safetensors and `shutil` raise errors of their
    own.
    """
    target = target.resolve()
    folder = target.with_name(f".{target.name}-{os.getpid()}.tmp")
    try:
        folder.mkdir(parents=True)
        yield folder
    except (OSError, SafetensorError) as error:
        way_out = grown_too_large(folder, error)
        if way_out is None:
            way_out = "free some space, or set --target_dir to another folder."
        raise CheckpointError(
            f"{target} was not written ({_reason(error)}). {way_out[0].upper()}{way_out[1:]}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _reason(error: Exception) -> str:
    # shutil.Error has a list of all files that could not be copied, each with the cause.
    if isinstance(error, shutil.Error):
        return str(error.args[0][0][-1])
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---------------------------------------------------------------- folders


def _role_folder(folder: Path) -> Path:
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


def _check_target(target: Path, *, in_place: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(
            f"Expected --target_dir to be a new folder, but {target} is a file. Set another one."
        )
    if not any(target.iterdir()):
        return
    if in_place and not has_weights(target):
        return
    raise CheckpointError(
        f"Expected --target_dir to be a new folder, but {target} is not empty. Set another one, or "
        "remove it."
    )
