"""The configuration in keywords, for a program or a notebook: short names of keys, and settings
that several share.

A keyword is one of `KEYWORDS`, a section of `SECTIONS` with a mapping, one of `OPTIONS`, the last
part of one key of `UNNAMED`, or a key or a section of the tree itself. A YAML file and a dictionary
may hold them too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from verl.config.absent_keys import absent_key
from verl.config.keys import (
    Values,
    flatten,
    is_inherited,
    keys_of,
    nearest_keys,
    nest,
    owner_of,
    value_at,
)
from verl.config.load import config_from_dict, given_values, merge_values, read_yaml
from verl.config.placement import ranks_of_roles, trained_sections
from verl.config.train import TrainConfig
from verl.utils.errors import ConfigError
from verl.utils.logging import logger

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_CRITIC = "critic"
# Keyword: the keys that it sets.
KEYWORDS = {
    "actor_placement": ("trainer.placement.actor",),
    "rollout_placement": ("trainer.placement.rollout",),
    "critic_placement": ("trainer.placement.critic",),
    "reference_placement": ("trainer.placement.reference",),
    "reward_model_placement": ("trainer.placement.reward_model",),
    "backend": (f"{_ROLLOUT}.name",),
    "sglang_endpoint": (f"{_ROLLOUT}.server_urls",),
    "max_new_tokens": ("data.max_response_length",),
    "gradient_clip_val": (f"{_ACTOR}.grad_clip", f"{_CRITIC}.grad_clip"),
    "lr": (f"{_ACTOR}.optim.lr",),
}
# Keyword: the section that it sets.
SECTIONS = {
    "actor_config": _ACTOR,
    "rollout_config": _ROLLOUT,
    "critic_config": _CRITIC,
    "ray_config": "ray_init",
}
# Sections whose keys need no section before them.
UNNAMED = ("trainer", "data", "algorithm", _ROLLOUT)
# Other names of keys within those of `SECTIONS`.
_SHORT = {"backend": "name", "gradient_clip_val": "grad_clip", "lr": "optim.lr"}
_BATCHES = ("micro_batch_size", "gradient_accumulation_steps")
# Names of other libraries, which are not taken: the keyword or key to give instead.
_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "data.train_batch_size",
    "epochs": "trainer.total_epochs",
    "model": "actor_rollout_ref.model.path",
    "model_path": "actor_rollout_ref.model.path",
    "dataset": "data.dataset_name, data.train_files",
    "train_dataset": "data.train_files",
    "eval_dataset": "data.val_files",
    "reward_funcs": "custom_reward_function.path",
    "reward_function": "custom_reward_function.path, reward_fn",
    "compute_score": "custom_reward_function.path",
    "steps": "max_steps",
    "num_generations": f"{_ROLLOUT}.n",
    "output_dir": "trainer.default_local_dir",
}
# Arguments of `RLTrainer` that are objects, for the message about a misspelt one.
_OBJECTS = ("tokenizer", "reward_fn", "val_reward_fn", "train_dataset", "val_dataset")
# The values that keys stand in for are known only with the whole configuration.
OPTIONS = ("enable_hybrid_engine", "amp", *_BATCHES)


def config_from_keywords(config: Any, keywords: Values) -> TrainConfig:
    """Return a new, checked configuration from keywords.

    It need not name data, which a program may give as objects. Numbers of NumPy, as those of a
    sweep over `np.arange`, count as Python's own.

    Args:
        config: a TrainConfig, a mapping, a DictConfig, the path of a YAML file, or None.
        keywords: replace values of `config`, or stand alone.
    """
    layers = [without_numpy(_given(config)), without_numpy(dict(keywords))]
    options = {name: layer.pop(name) for layer in layers for name in OPTIONS if name in layer}
    values = merge_values(*(_as_keys(layer) for layer in layers))
    return with_options(config_from_dict(values), options)


def without_numpy(value: Any) -> Any:
    """Return values with Python's own numbers and lists in place of NumPy's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if type(value) is dict:
        return {name: without_numpy(inner) for name, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_numpy(inner) for inner in value)
    return value


def with_options(config: TrainConfig, options: Values) -> TrainConfig:
    """Return a configuration with the `OPTIONS` that are not None.

    Returns `config` itself if all are None.
    """
    given = {}
    for name, value in options.items():
        if value is not None:
            given[name] = without_numpy(value)

    for name in ("enable_hybrid_engine", "amp"):
        if given.get(name, True) not in (True, False):
            raise ConfigError(f"{name} must be True or False, got {given[name]!r}.")
    for name in _BATCHES:
        value = given.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a whole number above 0, got {value!r}.")

    if "enable_hybrid_engine" in given:
        _check_hybrid_engine(config, given["enable_hybrid_engine"])
    values: dict[str, Any] = dict(_update_sizes(config, *map(given.get, _BATCHES)))
    if "amp" in given:
        values |= _compute_dtypes(config, given["amp"])
    if not values:
        return config

    changed = merge_values(_as_keys(_given(config)), values)
    return config_from_dict(changed)


def assign(config: TrainConfig, other: TrainConfig) -> None:
    """Copy every value of `other` into `config`, which keeps its identity and its sections."""
    for path in keys_of(TrainConfig):
        owner, name = owner_of(config, path)
        setattr(owner, name, value_at(other, path))


# ---- from keywords to keys -----------------------------------------------------------------------


def _given(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, TrainConfig):
        # Keys that follow another one are left out, so that they continue to follow it.
        given: dict[str, Any] = {}
        for path, key in keys_of(TrainConfig).items():
            value = value_at(config, path)
            if not is_inherited(config, key, value):
                given[path] = value
        return given

    if isinstance(config, Mapping):
        return given_values(config)
    if isinstance(config, str) and Path(config).suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"A configuration in a text is the path of a YAML file, got '{config}'. Give settings "
            "as keys and keywords: RLTrainer({'actor_rollout_ref.model.path': ..., "
            "'data.train_files': ...}, lr=1e-6)."
        )
    if isinstance(config, str | Path):
        return read_yaml(config)
    raise ConfigError(
        "A configuration is a TrainConfig, a mapping or the path of a YAML file, got "
        f"{type(config).__name__}. Give settings as keywords: RLTrainer(lr=1e-6, ...)."
    )


def _as_keys(values: Values) -> dict[str, Any]:
    """Return {key of the tree: value}.

    Raises ConfigError for unknown keys and for two values of one key.
    """
    flat: dict[str, Any] = {}
    for name, path, value in _paths(values):
        if name.endswith("backend") and value == "local":
            value = "embedded"
        for key, leaf in flatten(nest({path: value}), TrainConfig).items():
            if key in flat and flat[key] != leaf:
                raise ConfigError(
                    f"'{name}' sets {key}={leaf!r}, which is {flat[key]!r} already. Set it once."
                )
            flat[key] = leaf
    return flat


def _paths(values: Values) -> Iterator[tuple[str, str, Any]]:
    """Yield (keyword, path of a key or a section, value)."""
    known = keys_of(TrainConfig)
    tops = [section.name for section in fields(TrainConfig)]

    for name, value in values.items():
        if name in KEYWORDS:
            for path in KEYWORDS[name]:
                yield name, path, value

        elif name in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} must be a mapping of keys of {SECTIONS[name]} to values, got "
                    f"{value!r}."
                )
            for inner, setting in value.items():
                path = f"{SECTIONS[name]}.{_SHORT.get(inner, inner)}"
                if path not in known:
                    path = f"{SECTIONS[name]}.{inner}"
                yield f"{name}: {inner}", path, setting

        elif name.partition(".")[0] in tops or "." in name:
            yield name, name, value
        elif named := [f"{section}.{name}" for section in UNNAMED if f"{section}.{name}" in known]:
            if len(named) > 1:
                raise ConfigError(
                    f"Keyword '{name}' may be {' or '.join(named)}. Give one of them: "
                    f'RLTrainer(**{{"{named[0]}": {value!r}}}).'
                )
            yield name, named[0], value
        elif (way := absent_key(name)) is not None:
            raise ConfigError(f"Unknown keyword '{name}': {way}")
        else:
            near = _ELSEWHERE.get(name)
            names = [*KEYWORDS, *SECTIONS, *OPTIONS, *_OBJECTS, *tops, *known]
            near = near or nearest_keys(name, names)
            raise ConfigError(f"Unknown keyword '{name}'. Nearest known: {near}.")


# ---- options -------------------------------------------------------------------------------------


def _check_hybrid_engine(config: TrainConfig, enabled: bool) -> None:
    """Check that actor and rollout share devices, as a hybrid engine must."""
    ranks = ranks_of_roles(config)
    actor = ranks.pop("actor")
    rollout = ranks.pop("rollout")
    shared_by = config.actor_rollout_ref.rollout.tensor_model_parallel_size

    if enabled and config.trainer.placement.actor is not None and len(actor) > shared_by:
        raise ConfigError(
            f"enable_hybrid_engine=True with actor_placement={actor} would load the model "
            f"{len(actor) // shared_by} times for the rollout: each engine has a whole copy, and "
            f"tensor_model_parallel_size={shared_by} ranks share one. Set "
            f"rollout_config={{'tensor_model_parallel_size': {len(actor)}}} for one copy over "
            "these ranks, or leave enable_hybrid_engine out to have the copies, which share the "
            "prompts."
        )

    if enabled:
        return

    colocated = [role for role, numbers in ranks.items() if numbers == actor]
    is_apart = rollout != actor
    if colocated or not (ranks or is_apart):
        fact = "the actor is alone with its rollout"
        if colocated:
            fact = f"{' and '.join(colocated)} would be on the actor's ranks {actor}"
        raise ConfigError(
            f"enable_hybrid_engine=False asks for models on ranks of their own, but {fact}. Set "
            "rollout_placement, critic_placement, reference_placement or reward_model_placement "
            "to other ranks, or leave enable_hybrid_engine out."
        )

    logger.info(
        "enable_hybrid_engine=False: %s; the actor is on %s, the rollout engine on %s.",
        ranks,
        actor,
        rollout,
    )


def _update_sizes(
    config: TrainConfig, micro_batch_size: int | None, gradient_accumulation_steps: int | None
) -> Iterator[tuple[str, int]]:
    """Yield keys for passes of `micro_batch_size` responses, with their values.

    An update of one rank has as many passes as accumulation steps.
    """
    ranks = ranks_of_roles(config)
    for section in trained_sections(config):
        role = value_at(config, section)
        if micro_batch_size is not None:
            if role.use_dynamic_bsz:
                raise ConfigError(
                    f"micro_batch_size={micro_batch_size} counts responses, but "
                    f"{section}.use_dynamic_bsz=True fills passes by tokens. Set "
                    "use_dynamic_bsz=False, or leave micro_batch_size out."
                )
            yield f"{section}.ppo_micro_batch_size_per_gpu", micro_batch_size

        if gradient_accumulation_steps is None:
            continue
        micro = role.ppo_micro_batch_size_per_gpu if micro_batch_size is None else micro_batch_size
        if micro is None:
            raise ConfigError(
                f"gradient_accumulation_steps={gradient_accumulation_steps} counts passes of "
                "micro_batch_size responses, which is not set. Give micro_batch_size too."
            )

        members = ranks["critic" if section == _CRITIC else "actor"]
        shares = len(members) // role.ulysses_sequence_parallel_size
        rows = micro * gradient_accumulation_steps * shares
        n = config.actor_rollout_ref.rollout.n
        if rows % n:
            steps = next(
                count
                for count in range(gradient_accumulation_steps, n * rows)
                if micro * count * shares % n == 0
            )
            raise ConfigError(
                "An update takes whole prompts: micro_batch_size * gradient_accumulation_steps * "
                f"ranks must be a multiple of actor_rollout_ref.rollout.n={n} responses a prompt, "
                f"got {micro} * {gradient_accumulation_steps} * {shares} = {rows}. Set "
                f"gradient_accumulation_steps={steps}, or another rollout.n."
            )

        yield f"{section}.ppo_mini_batch_size", rows // n


def _compute_dtypes(config: TrainConfig, amp: bool) -> dict[str, Any]:
    """Return keys for the dtype of forward and backward passes.

    It is bfloat16 over float32 parameters, or the parameters' own dtype.
    """
    models = {
        "actor_rollout_ref.model": config.actor_rollout_ref.model,
        "critic.model": config.critic.model,
    }
    for section, model in models.items():
        if amp and model.dtype not in (None, "float32"):
            raise ConfigError(
                "amp=True computes in bfloat16 over parameters in float32, got "
                f"{section}.dtype={model.dtype}. Leave the dtype unset, or amp out."
            )

    own, critics = (model.dtype or "float32" for model in models.values())
    values: dict[str, Any] = {
        f"{_ACTOR}.fsdp_config.compute_dtype": "bfloat16" if amp else own,
        "actor_rollout_ref.ref.fsdp_config.compute_dtype": "bfloat16" if amp else own,
        "critic.model.fsdp_config.compute_dtype": "bfloat16" if amp else critics,
    }
    if amp:
        return values
    # Frozen weights too: they would be bfloat16 on CUDA.
    return {**values, "actor_rollout_ref.model.dtype": own, "critic.model.dtype": critics}
