"""Choose the layers that get LoRA adapters, by names as peft reads them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from verl.models.vision import vision_parts, vision_towers
from verl.utils.errors import ModelError
from verl.utils.registry import nearest_names

ALL_LINEAR = "all-linear"
Targets = str | Sequence[str]


def as_given(names: Targets) -> str | list[str]:
    """Return a text, or a list of texts for a sequence of names."""
    return names if isinstance(names, str) else [str(name) for name in names]


def chosen_layers(
    model: PreTrainedModel, targets: str | list[str], excluded: str | list[str] | None, section: str
) -> list[str]:
    """Return the names of the modules that get adapters.

    Raises ModelError for a name without a module, and for a module that is the head or not linear.
    """
    head: Any = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if name}
    linear: list[str] = []
    others: list[str] = []
    for name, part in modules.items():
        is_linear = isinstance(part, (nn.Linear, Conv1D)) and part is not head
        (linear if is_linear else others).append(name)
    ends = _shortest_ends(linear, others)
    way_out = f"Set {section}.target_modules={_shown(ends)}"

    if targets == ALL_LINEAR:
        chosen = _all_linear(model, linear, section, way_out)
    else:
        key = f"{section}.target_modules"
        chosen = _matching(list(modules), targets, key, linear, f"{way_out}.")
    if excluded is not None:
        key = f"{section}.exclude_modules"
        out = set(_matching(list(modules), excluded, key, linear, "Drop the entry."))
        chosen = [name for name in chosen if name not in out]
    if not chosen:
        raise ModelError(
            f"{section}.exclude_modules={excluded} leaves no module for adapters. Exclude fewer, "
            "or set lora_rank=0."
        )

    unfit = next((name for name in chosen if name not in linear), None)
    if unfit is not None:
        raise ModelError(
            f"{section}.target_modules: '{unfit}' of '{model.config.model_type}' is "
            f"{_described(model, unfit)}. Only linear layers can have adapters. {way_out}."
        )
    return chosen


def _all_linear(model: PreTrainedModel, linear: list[str], section: str, way_out: str) -> list[str]:
    """Return the linear layers outside of a vision tower.

    Raises ModelError for a model whose experts are stacks of matrices.
    """
    of_vision: set[nn.Module] = set()
    for tower in vision_parts(model):
        of_vision.update(tower.modules())

    def is_of_text(name: str) -> bool:
        return model.get_submodule(name) not in of_vision

    # Position embeddings of a vision tower may have three dimensions, too.
    stacks = [name for name in _stacks(model) if is_of_text(name)]
    if stacks:
        raise ModelError(
            f"{section}.target_modules=all-linear: the experts of '{model.config.model_type}' are "
            f"stacks of matrices ({stacks[0]}), which cannot have adapters, so most weights would "
            f"not be trained. {way_out} to accept that."
        )
    return [name for name in linear if is_of_text(name)]


def _stacks(model: PreTrainedModel) -> list[str]:
    """Return the modules with a parameter of three dimensions, such as stacks of experts."""
    stacked = [name for name, weight in model.named_parameters() if weight.ndim == 3]
    return sorted({name.rpartition(".")[0] for name in stacked})


def _described(model: PreTrainedModel, name: str) -> str:
    """Describe a module that cannot have an adapter."""
    module = model.get_submodule(name)
    if module is model.get_output_embeddings():
        return "the head, whose log-probs are computed in chunks from its weight alone"
    kind = type(module).__name__
    if name in _stacks(model):
        kind += ", a stack of experts"
    return kind


def outside_of_tower(
    model: PreTrainedModel, chosen: list[str], targets: str | list[str], section: str
) -> list[str]:
    """Return the chosen layers without those of the vision tower.

    Raises ModelError for an entry of `targets` that selects layers of the tower alone.
    """
    of_tower = {id(part) for tower in vision_towers(model) for part in tower.modules()}
    kept = [name for name in chosen if id(model.get_submodule(name)) not in of_tower]

    selected = [(str(targets), chosen)]
    if isinstance(targets, list):
        selected = [(entry, _selected(chosen, entry)) for entry in targets]
    for entry, names in selected:
        if names and not set(names) & set(kept):
            raise ModelError(
                f"{section}.target_modules: '{entry}' selects layers of the vision tower alone "
                f"('{names[0]}'), which freeze_vision_tower=true keeps as they are. Leave it out, "
                "or set freeze_vision_tower=false."
            )
    return kept


def _selected(names: Iterable[str], entry: str) -> list[str]:
    """Return the names that an entry of a list selects in peft: itself, or with it as an end."""
    return [name for name in names if name == entry or name.endswith(f".{entry}")]


def _shortest_ends(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Return the shortest ends of `names` that select none of `others`.

    In Qwen2.5-VL `attn.proj` selects linear layers, but `proj` a convolution, too.
    """
    taken: set[str] = set()
    for name in others:
        taken.update(_ends(name))

    found: set[str] = set()
    for name in names:
        free = (end for end in _ends(name) if end not in taken)
        found.add(next(free, name))
    return sorted(found)


def _ends(name: str) -> list[str]:
    """Return the ends of a module's name at its dots, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]


def _matching(
    names: list[str], wanted: str | list[str], key: str, linear: list[str], fix: str
) -> list[str]:
    """Return the names that a list of (ends of) names or a regular expression selects in peft."""
    leaves = sorted({name.rpartition(".")[2] for name in linear})
    if isinstance(wanted, str):
        try:
            found = [name for name in names if re.fullmatch(wanted, name)]
        except re.error as error:
            raise ModelError(
                f"{key}={wanted} is not a regular expression: {error}. {fix}"
            ) from error
        if not found:
            ends = [name for name in names if name.endswith(f".{wanted}")]
            hint = f"Did you mean the list {_shown([wanted])}? " if ends else ""
            raise ModelError(
                f"{key}={wanted}: a text is a regular expression for whole names such as "
                f"'{linear[0]}', but it matches none. {hint}Nearest: "
                f"{nearest_names(wanted, leaves)}. {fix}"
            )
        return found

    found = []
    for entry in wanted:
        meant = _selected(names, entry)
        if not meant:
            raise ModelError(
                f"{key}: the model has no module named '{entry}'. Nearest: "
                f"{nearest_names(entry, leaves)}. {fix}"
            )
        found += meant
    return list(dict.fromkeys(found))


def _shown(names: list[str]) -> str:
    return "[" + ",".join(names) + "]"
