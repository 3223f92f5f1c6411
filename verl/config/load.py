"""From a command line or a dictionary to a checked configuration.

Only this file, `build` and `compose` know Hydra and OmegaConf.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from verl.config import evaluation, generation, serve, sft
from verl.config.async_defaults import (
    with_async_defaults,
    with_batch_of_a_step,
    with_correction_forms,
)
from verl.config.build import SchemaNode, build_config, typed_tree
from verl.config.command_line import USAGE, CommandLine, parse_command_line
from verl.config.compose import compose_files, plain_values
from verl.config.keys import Key, Values, flatten, keys_of, nest, rename_aliases
from verl.config.rules import RULES, RULES_OF_FILES, Rule, doubtful
from verl.config.sft_engine import with_conversations
from verl.config.toy_defaults import with_toy_defaults
from verl.config.train import TrainConfig
from verl.config.validate import validate
from verl.config.value_types import allows_null, takes_text
from verl.utils.errors import ConfigError, restated
from verl.utils.logging import silenced
from verl.utils.secrets import MASK, masked_values, remember_environment


@dataclass(frozen=True)
class Root:
    """The configuration of one entry point."""

    schema: type
    command: str  # of `verl`
    module: str  # which `python -m` runs
    shortest: str  # the line of --help about a first run
    rules: tuple[Rule, ...] = RULES
    rules_of_files: tuple[Rule, ...] = ()  # more of them, for those who cannot give data as objects
    doubts: Callable[[Any], Iterable[str]] = doubtful
    with_defaults: Callable[[Values], Values] = dict


def _with_training_defaults(given: Values) -> Values:
    """Return `given` with the defaults that depend on other keys."""
    given = with_correction_forms(with_toy_defaults(given))
    return with_async_defaults(with_batch_of_a_step(given))


ROOTS = {
    "ppo_trainer": Root(
        TrainConfig,
        "train",
        "verl.trainer.main_ppo",
        (
            "The shortest run: data.dataset_name=toy. With --dry-run: its memory and batches "
            "alone, nothing is trained."
        ),
        rules_of_files=RULES_OF_FILES,
        with_defaults=_with_training_defaults,
    ),
    "generation": Root(
        generation.GenerationConfig,
        "generate",
        "verl.jobs.main_generation",
        "The shortest run: data.path=toy model.path=toy data.output_path=out.parquet",
        generation.RULES,
        doubts=generation.doubtful,
    ),
    "evaluation": Root(
        evaluation.EvaluationConfig,
        "eval",
        "verl.jobs.main_eval",
        "The shortest run: data.path=out.parquet",
        evaluation.RULES,
        doubts=lambda _: (),
    ),
    "serve": Root(
        serve.ServeConfig,
        "serve",
        "verl.jobs.main_serve",
        "The model may also stand first, without its key. The shortest run: verl serve toy",
        serve.RULES,
        doubts=serve.doubtful,
    ),
    "sft_trainer": Root(
        sft.SFTConfig,
        "sft",
        "verl.jobs.main_sft",
        (
            "The shortest run: data.train_files=rows.parquet model.path=toy. With --dry-run: its "
            "memory alone, nothing is trained."
        ),
        sft.RULES,
        sft.RULES_OF_FILES,
        sft.doubtful,
        with_conversations,
    ),
}

# A word that Hydra reads as a number.
_NUMBER = re.compile(r"[+-]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|nan)", re.IGNORECASE)


def load_config(argv: list[str], *, root: str = "ppo_trainer", only_to_plan: bool = False) -> Any:
    """Return the checked configuration that `argv` asks for.

    `--cfg job` and `--help` print and exit with status 0.

    Args:
        argv: arguments without the program's name.
        root: a name of `ROOTS`; the result is an object of its schema, by default a TrainConfig.
        only_to_plan: log a feature that this version lacks as a warning. Such a configuration must
            not be trained.

    Raises:
        ConfigError: for every mistake that a user can make.
    """
    about = ROOTS[root]
    command = parse_command_line(argv)
    if command.help:
        usage = USAGE.format(
            command=about.command, module=about.module, root=root, shortest=about.shortest
        )
        print(usage, end="")
        sys.exit(0)

    on_line = {override.partition("=")[0].lstrip("+") for override in command.overrides}
    with silenced() if command.show else nullcontext():  # that output is a YAML file to be kept
        config, written_as = _build(_compose(command, root), root, on_line)
    if command.show:
        _show(config)
        sys.exit(0)

    rules = (*about.rules, *about.rules_of_files)
    with restated(partial(_as_written, written_as)):
        validate(config, rules, about.doubts, only_to_plan=only_to_plan)
    return config


def _compose(command: CommandLine, root: str) -> dict[str, Any]:
    """Return the values that a command line and its files set.

    A text that looks like a number is quoted: Hydra would make 1.1 of an experiment 1.10.
    """
    keys = keys_of(ROOTS[root].schema)
    overrides = []
    for override in command.overrides:
        name, _, value = override.partition("=")
        key = keys.get(name.lstrip("+"))
        if key is not None and takes_text(key) and _NUMBER.fullmatch(value):
            override = f"{name}='{value}'"
        overrides.append(override)
    return compose_files(dataclasses.replace(command, overrides=overrides), root)


def _show(config: Any) -> None:
    """Print the configuration as YAML, without second names, which a change would contradict."""
    schema = type(config)
    shown = flatten(config_to_show(config), schema)
    for path, key in keys_of(schema).items():
        if key.main is not None:
            shown.pop(path, None)

    text = OmegaConf.to_yaml(OmegaConf.create(nest(shown)))
    print(text, end="")
    if MASK in text:
        print(
            f"Secrets are shown as {MASK}. Before you use this as a configuration, put them in, "
            "best as ${oc.env:NAME}.",
            file=sys.stderr,
        )


def config_from_dict(values: Values | DictConfig, *, root: str = "ppo_trainer") -> Any:
    """Return a checked configuration from nested values or a composed DictConfig.

    Any value may be left out. Data need not be named; a program may give it as objects.
    """
    config, written_as = _build(given_values(values, root=root), root)
    with restated(partial(_as_written, written_as)):
        validate(config, ROOTS[root].rules, ROOTS[root].doubts)
    return config


def merge_values(*layers: Values, root: str = "ppo_trainer") -> dict[str, Any]:
    """Merge layers {key: value} into nested values; later layers win, by any name of a key."""
    schema = ROOTS[root].schema
    merged = dict[str, Any]()
    for layer in layers:
        merged |= rename_aliases(flatten(nest(layer), schema), keys_of(schema))[0]
    return nest(merged)


def read_overrides(words: list[str]) -> dict[str, Any]:
    """Read words `key=value` as a command line does, as unchecked nested values.

    Raises ConfigError for options and YAML files, and for a word that is not readable.
    """
    command = parse_command_line(words)
    if command != CommandLine(overrides=command.overrides):
        raise ConfigError(f"Expected words key=value alone, got '{' '.join(words)}'.")
    return _compose(command, "ppo_trainer")


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file and the files that its `defaults:` name, as unchecked nested values."""
    file = Path(path)
    if file.suffix != ".yaml":
        raise ConfigError(
            f"The name of a configuration file must end in .yaml, got '{path}'. Rename it."
        )
    command = CommandLine(config_path=str(file.parent), config_name=file.stem)
    return compose_files(command, "ppo_trainer")


def given_values(values: Values | DictConfig, *, root: str = "ppo_trainer") -> dict[str, Any]:
    """Return plain values.

    From a DictConfig that a user's own Hydra program composed, keep only values that differ from
    the schema.
    """
    if not isinstance(values, DictConfig):
        return {str(name): value for name, value in values.items()}
    schema = ROOTS[root].schema
    plain = plain_values(values)
    sections = plain_values(typed_tree(schema))
    # keywords, or mistakes
    others = {name: plain.pop(name) for name in [*plain] if name not in sections}
    defaults = flatten(sections, schema)
    changed = {}
    for path, value in flatten(plain, schema).items():
        if path not in defaults or value != defaults[path]:
            changed[path] = value
    return nest(changed) | others


def config_to_show(config: Any) -> dict[str, Any]:
    """Return nested plain values without secrets, for people, trackers and files."""
    return masked_values(config_to_dict(config))


def config_to_dict(config: Any) -> dict[str, Any]:
    """Return nested plain values, fit for JSON.

    `config_from_dict` gives an equal configuration back.
    """
    return dataclasses.asdict(config)


def _build(values: Values, root: str, on_line: Container[str] = ()) -> tuple[Any, dict[str, str]]:
    """Resolve schema defaults, then those of the toy set, then `values`.

    Returns the configuration, and other names of keys that the user wrote, by key. Contradictions
    are not checked yet. A name of a key that is `on_line` overrules other names of it, which come
    from files.
    """
    schema = ROOTS[root].schema
    keys = keys_of(schema)
    given, written_as = rename_aliases(flatten(values, schema), keys, on_line)
    given = {path: value for path, value in given.items() if not _leaves_unset(keys[path], value)}
    given = ROOTS[root].with_defaults(given)

    for value in given.values():
        remember_environment(value)
    config = build_config(given, schema, written_as)
    return config, {path: name for path, name in written_as.items() if name != path}


def _leaves_unset(key: Key, value: Any) -> bool:
    """Return whether the value is a null of a key that has none.

    Such a null stands for the followed key, or for the default.
    """
    return (
        value is None
        and not allows_null(key)
        and (key.setting.follows is not None or key.setting.null_is_default)
    )


def _as_written(written_as: Mapping[str, str], message: str) -> str:
    """Rewrite a message with the names of keys that the user wrote."""
    for path, name in written_as.items():
        message = re.sub(rf"(?<![\w.]){re.escape(path)}(?!\w|\.\w)", name, message)
    return message


# Users' own Hydra programs find the schema by name in their `defaults:` lists.
for _name, _root in ROOTS.items():
    ConfigStore.instance().repo[f"{_name}.yaml"] = SchemaNode(_name, _root.schema)
