"""LoRA (Hu et al. 2021, arXiv:2106.09685): W x + (alpha / rank) B A x, with W frozen.

peft's layers replace linear layers within the Hugging Face module itself, which keeps its class and
attributes. This file provides weights under the names of the plain module, for the rollout engine
and for checkpoints.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from verl.checkpoint.hf import state_tensors
from verl.distributed.fsdp import full_tensor, shard_like
from verl.models.lora_targets import (
    ALL_LINEAR,
    Targets,
    as_given,
    chosen_layers,
    outside_of_tower,
)
from verl.models.vision import reads_pictures
from verl.utils.errors import CheckpointError, describe_error
from verl.utils.imports import require
from verl.utils.json_text import parse_json

ADAPTER_FOLDER = "lora_adapter"

_ADAPTER = "default"
_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
_SAVED_PREFIX = "base_model.model."  # peft puts it before every name in its files
_SUFFIX_A = ".lora_A.weight"
_SUFFIX_B = ".lora_B.weight"
# Entries of peft's configuration with which an update is not lora_alpha / r * B A.
_OTHER_UPDATES = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern")


def apply_lora(
    model: PreTrainedModel,
    *,
    rank: int,
    alpha: float,
    target_modules: Targets = ALL_LINEAR,
    exclude_modules: Targets | None = None,
    freezes_tower: bool = False,
    section: str = "actor_rollout_ref.model",
) -> None:
    """Freeze `model` and add adapters to its linear layers, in place.

    Call this before checkpointing, compile and sharding. The adapters are fp32 (float64 in a
    float64 model). B starts at zero, so they do not change the output yet. A is drawn with a seed
    of its own, so that all ranks start equal.

    Args:
        model: a causal LM, or the body of a critic.
        rank: rank of the factors.
        alpha: the update is scaled by alpha / rank.
        target_modules: "all-linear" (all but the head and the vision tower), a list of names or
            ends of names, or a regular expression that matches whole names, as in peft.
        exclude_modules: layers without adapters, in the same forms.
        freezes_tower: whether the layers of the vision tower get none, whatever is chosen.
        section: the configuration section that errors name.

    Raises:
        ModelError: a name that no module has, or one that cannot have an adapter: head, embedding,
            stack of experts, and with `freezes_tower` a layer of the vision tower.
    """
    targets = as_given(target_modules)
    excluded = None if exclude_modules is None else as_given(exclude_modules)
    chosen = chosen_layers(model, targets, excluded, section)
    if freezes_tower:
        chosen = outside_of_tower(model, chosen, targets, section)
    if reads_pictures(model.config) and (targets == ALL_LINEAR or freezes_tower):
        targets = chosen  # peft's own choice would have the vision tower as well

    # Not at the top: peft and accelerate take a second to import, and most runs train all weights.
    peft = require("peft", "LoRA", "pip install peft")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        exclude_modules=excluded,
        fan_in_fan_out=any(isinstance(model.get_submodule(name), Conv1D) for name in chosen),
        base_model_name_or_path=model.name_or_path,
        task_type=None if model.get_output_embeddings() is None else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        peft.inject_adapter_in_model(config, model, adapter_name=_ADAPTER)

    model.requires_grad_(False)
    for name, layer in adapted_layers(model).items():
        assert isinstance(layer.get_base_layer(), (nn.Linear, Conv1D)), name
        for factor in _factors(layer):
            # Trained in fp32: updates of some 1e-6 of a weight vanish in bf16.
            precise = torch.promote_types(factor.weight.dtype, torch.float32)
            factor.to(precise).requires_grad_(True)


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return peft's layers by their names in the plain module; empty without LoRA."""
    found = {name: module for name, module in model.named_modules() if _is_adapted(module)}
    assert len(found) == len({id(module) for module in found.values()})
    return found


def lora_rank(model: nn.Module) -> int:
    """Return the rank of the adapters; 0 without LoRA."""
    largest = 0
    for layer in adapted_layers(model).values():
        a, _ = _factors(layer)
        largest = max(largest, a.out_features)
    return largest


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapters: the model computes with its frozen weights, as before training."""
    layers = adapted_layers(model).values()
    # Do not use peft's enable_adapters(), which also switches requires_grad: FSDP2 records in its
    # first pass which parameters are trained. If that pass were this one, it would add up their
    # gradients in another dtype from then on.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ---------------------------------------------------------------- the plain module


def plain_parameters(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `named_parameters` of the module without its adapters."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        if not _is_adapter_part(name):
            yield _plain(name), parameter


def plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `named_modules` of the module without its adapters."""
    for name, module in model.named_modules():
        if not _is_adapted(module) and not _is_adapter_part(name):
            yield _plain(name), module


def merged_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the plain module, whole tensor W + scale * B A), without merging in place.

    The sum is fp32 (float64 in a float64 model). Tensors without an adapter alias the parameters if
    they are whole on this rank, so do not write to them. Every rank must iterate to the end.
    """
    yield from _whole(model, plain_parameters(model))


def merged_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the plain module, whole merged tensor) of the state dict.

    It includes persistent buffers. A tied weight has its first name alone. See `merged_parameters`.
    """
    plain: list[tuple[str, Tensor]] = []
    for name, tensor in state_tensors(model).items():
        if not _is_adapter_part(name):
            plain.append((_plain(name), tensor))
    yield from _whole(model, plain)


def _whole(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    layers = adapted_layers(model)
    for name, tensor in tensors:
        owner, _, kind = name.rpartition(".")
        whole = full_tensor(tensor)
        if kind == "weight" and owner in layers:
            whole = _merged(layers[owner], whole)
        yield name, whole


def _merged(layer: Any, weight: Tensor) -> Tensor:
    factor_a, factor_b = _factors(layer)
    a = full_tensor(factor_a.weight)
    b = full_tensor(factor_b.weight)
    return merged_weight(layer.get_base_layer(), weight, a, b, layer.scaling[_ADAPTER])


def merged_shape(layer: nn.Module, a: Tensor, b: Tensor) -> tuple[int, int]:
    """Return the shape of the weight of `layer` for factors A (rank, in) and B (out, rank)."""
    inputs = a.shape[1]
    outputs = b.shape[0]
    return (inputs, outputs) if isinstance(layer, Conv1D) else (outputs, inputs)


@torch.no_grad()
def merged_weight(layer: nn.Module, weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute W + scaling * B A in at least fp32.

    W is the `weight` of `layer`, A (rank, in), B (out, rank).
    """
    precise = torch.promote_types(weight.dtype, torch.float32)
    transposed = isinstance(layer, Conv1D)  # GPT-2: (in, out)
    if transposed:
        weight = weight.T
    total = weight.to(precise, copy=True, memory_format=torch.contiguous_format)
    total.addmm_(b.to(precise), a.to(precise), alpha=scaling)
    return total.T.contiguous() if transposed else total


# ---------------------------------------------------------------- files


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return every factor, whole and on the host, under peft's names. Every rank must call it."""
    return {name: full_tensor(factor).cpu() for name, factor in _named_factors(model)}


def save_adapters(folder: Path, model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Write `state` (of `adapter_state`) as `peft.PeftModel.from_pretrained` reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{_SAVED_PREFIX}{name}": tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / _WEIGHTS_FILE, metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config[_ADAPTER])  # pyright: ignore
    config.inference_mode = True
    for kind in ("target_modules", "exclude_modules"):
        if isinstance(names := getattr(config, kind), set):
            setattr(config, kind, sorted(names))  # the order of a set differs between processes
    config.save_pretrained(folder)


def read_adapters(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[Tensor, Tensor]]]:
    """Read the files of `save_adapters`.

    Returns:
        peft's configuration, and (A, B) by the layer's name in the plain module.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapters are of another kind.
    """
    with _explained(folder):
        config, saved = _read_files(folder)
        factors = {}
        for name, a in saved.items():
            if name.endswith(_SUFFIX_A):
                layer = name.removesuffix(_SUFFIX_A)
                factors[layer] = (a, saved[f"{layer}{_SUFFIX_B}"])
        return config, factors


def _read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return peft's configuration, and the factors under their names in the model."""
    config = parse_json((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    _check_config(config)
    factors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / _WEIGHTS_FILE).items():
        factors[name.removeprefix(_SAVED_PREFIX)] = tensor
    _check_kind(folder, config, factors)
    return config, factors


def _check_config(config: Any) -> None:
    """Raise ValueError unless the numbers that scale the adapters are present."""
    if not isinstance(config, dict):
        raise ValueError(f"{ADAPTER_CONFIG} holds a {type(config).__name__}")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ValueError(f"{ADAPTER_CONFIG} has {name}={value!r:.50}")


def _check_kind(folder: Path, config: dict[str, Any], names: Iterable[str]) -> None:
    """Raise CheckpointError for adapters of peft that are more than factors of one scale."""
    others = [f"{key}={config[key]!r:.50}" for key in _OTHER_UPDATES if config.get(key)]
    for name in names:
        if not name.endswith((_SUFFIX_A, _SUFFIX_B)):
            others.append(f"the tensor '{name}'")
    if others:
        raise CheckpointError(
            f"Expected adapters in {folder} that add lora_alpha / r * B A to linear layers and are "
            f"nothing else, found {others[0]}. Merge them into their model by peft "
            "(AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()), and use that."
        )


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an error of reading into a CheckpointError."""
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"Expected the adapters of a LoRA run in {folder} ({ADAPTER_CONFIG} and "
            f"{_WEIGHTS_FILE}), but they cannot be read ({describe_error(error)}). If they "
            "are damaged or incomplete, copy them again, or use another checkpoint."
        ) from error


def load_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Read files of `save_adapters`, or of peft itself, into the adapters of `model`, in place."""
    file = folder / _WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"Expected the adapters of a LoRA run in {folder}, found none. The checkpoint was "
            "saved with lora_rank=0: set lora_rank=0, or start another run from its weights "
            "(python -m verl.model_merger merge)."
        )
    with _explained(folder):
        written, saved = _read_files(folder)
        alpha = written["lora_alpha"]

    factors = dict(_named_factors(model))
    wrong: list[str] = []
    for name in {**factors, **saved}:
        is_in_both = name in saved and name in factors
        if not is_in_both or saved[name].shape != factors[name].shape:
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"{file} does not match the adapters of this run, first at '{wrong[0]}'. Set "
            f"lora_rank, target_modules and exclude_modules as in {folder / ADAPTER_CONFIG}."
        )

    config: Any = model.peft_config[_ADAPTER]  # pyright: ignore
    # Adapters of the same shapes with another scale are another policy.
    if alpha != config.lora_alpha:
        raise CheckpointError(
            f"The adapters in {folder} were trained with lora_alpha={alpha}, this run has "
            f"{config.lora_alpha}. Set lora_alpha={alpha}."
        )
    with torch.no_grad():
        for name, parameter in factors.items():
            parameter.copy_(shard_like(saved[name], parameter.detach()))


# ---------------------------------------------------------------- names


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def _factors(layer: Any) -> tuple[nn.Linear, nn.Linear]:
    """Return A (rank, in) and B (out, rank)."""
    return layer.lora_A[_ADAPTER], layer.lora_B[_ADAPTER]


def _is_adapter_part(name: str) -> bool:
    return ".lora_" in name


def _plain(name: str) -> str:
    return re.sub(r"\.base_layer(?=\.|$)", "", name)


def _named_factors(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every factor, under the name that it has in peft's files."""
    for name, parameter in model.named_parameters():
        if _is_adapter_part(name):
            yield name.replace(f".{_ADAPTER}.", "."), parameter
