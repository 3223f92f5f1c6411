"""Write the weights of a checkpoint, layer by layer, as a Hugging Face folder.

This needs neither a GPU nor packages of training. Memory: two files of at most 5 GB and two decoder
layers in fp32, about 17 GB for 70B parameters, for any number of ranks that saved them. With LoRA
it also holds the base model once, in its own dtype.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from verl.checkpoint.hf import MAX_FILE_BYTES, WEIGHTS_FOLDER, published, save_config, save_weights
from verl.jobs.saved_model import (
    SavedModel,
    open_saved,
    readable,
    reason_of,
    role_folder,
    verify_role,
)
from verl.models.critic import VALUE_HEAD_FILE
from verl.models.lora import ADAPTER_FOLDER
from verl.models.role_folders import WEIGHT_FILES, has_weights
from verl.utils.errors import CheckpointError
from verl.utils.json_text import parse_json
from verl.utils.limits import grown_too_large

_NOT_COPIED = (*WEIGHT_FILES, "adapter_config.json")


def merge(
    local_dir: Path,
    target_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    base_model: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the checkpoint in `local_dir` (`.../global_step_N/actor`) as a folder for transformers.

    Adapters are merged into the weights. `target_dir` is new or empty, or the checkpoint's own
    `huggingface/`, which lacks only the weights. Raises CheckpointError for a folder without a
    checkpoint, for files that do not match its manifest, and for a target that is not empty or
    cannot be written. After an error, nothing stays in the target.
    """
    role = role_folder(local_dir)
    in_place = target_dir.resolve() == (role / WEIGHTS_FOLDER).resolve()
    _check_target(target_dir, in_place=in_place and dtype == torch.float32)
    source = open_saved(role, base_model, dtype)

    with _unfinished(target_dir) as unfinished:
        if not in_place:
            _write_configuration(unfinished, source, dtype)
        save_weights(unfinished, source.model, source.weights, max_file_bytes=max_file_bytes)
        if source.value_head:
            save_file(source.value_head, unfinished / VALUE_HEAD_FILE)


def export_adapters(local_dir: Path, target_dir: Path) -> None:
    """Copy the adapters of a LoRA checkpoint, with their tokenizer, in peft's format."""
    role = role_folder(local_dir)
    if not (role / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"{role} has no adapters: it was saved with lora_rank=0. Drop --no-merge-adapters."
        )
    _check_target(target_dir, in_place=False)
    verify_role(role)
    with _unfinished(target_dir) as unfinished:
        shutil.copytree(role / ADAPTER_FOLDER, unfinished, dirs_exist_ok=True)


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
    source = open_saved(role_folder(local_dir), base_model, dtype)
    files = sorted(hf_dir.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"Expected a Hugging Face folder with model*.safetensors at {hf_dir}, found none."
        )

    opened = []
    for file in files:
        with readable(file):
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
        else:
            found = place[name].get_tensor(name)
            # torch.equal takes numbers of another dtype for equal where they have the same value.
            if found.dtype != tensor.dtype or not torch.equal(found, tensor):
                differ.append(name)

    tied = () if source.model is None else (source.model._tied_weights_keys or ())
    extra = [name for name in place if name not in seen and name not in tied]
    faults = {"differ": differ, "are missing there": missing, "are there only": extra}

    wrong: list[str] = []
    for fault, names in faults.items():
        if names:
            wrong.append(f"{len(names)} {fault}, first '{names[0]}'")
    if wrong:
        raise CheckpointError(
            f"Of the {len(seen)} tensors of {local_dir}, compared with {hf_dir}: "
            f"{'; '.join(wrong)}."
        )

    return len(seen)


def _write_configuration(target: Path, source: SavedModel, dtype: torch.dtype) -> None:
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


@contextmanager
def _unfinished(target: Path) -> Iterator[Path]:
    """Make a new folder to write into; its files become those of `target` at the end of the block.

    After an error, the files are deleted. Raises CheckpointError if they cannot be written;
    safetensors and `shutil` raise errors of their own.
    """
    target = target.resolve()
    # An empty target may be the mount point of a volume. Files move only within a file system.
    is_empty = target.is_dir() and not any(target.iterdir())
    parent = target if is_empty else target.parent
    folder = parent / f".{target.name}-{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True)
        yield folder
        _publish(folder, target)
    except (OSError, SafetensorError) as error:
        way_out = grown_too_large(folder, error)
        if way_out is None:
            way_out = "free some space, or set --target_dir to another folder."
        raise CheckpointError(
            f"{target} was not written ({reason_of(error)}). {way_out[0].upper()}{way_out[1:]}"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, target: Path) -> None:
    """Move complete files to a target that is new, empty, or lacks only the weights."""
    if not target.exists():
        os.replace(folder, target)
        return

    files = sorted(folder.iterdir())
    # The index comes last, because it names the other files.
    files.sort(key=lambda file: file.name.endswith(".index.json"))
    for file in files:
        os.replace(file, target / file.name)


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
