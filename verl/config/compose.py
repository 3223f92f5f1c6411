"""Compose a command line and the YAML files that it names, by Hydra."""

import re
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra import version as hydra_version
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf import _utils as omegaconf_utils
from omegaconf.errors import OmegaConfBaseException

from verl.config.backends import GROUPS, missing_backend, without_backends
from verl.config.command_line import NO_NUMBER, CommandLine
from verl.utils.errors import ConfigError
from verl.utils.logging import logger
from verl.utils.yaml_text import explain_yaml

HYDRA_VERSION = "1.3"  # the rules by which Hydra reads a command line
_REFUSALS = (HydraException, OmegaConfBaseException, yaml.YAMLError)
# Raised by OmegaConf for `a.b=1` where `a` is a list.
_NAMES_IN_LISTS = (ValueError, TypeError, IndexError)
_NO_FILE_OF_A_GROUP = re.compile(r"Could not find '(\w+)/(\w+)'")
# YAML files that verl's programs name in a folder `config` next to them. Their values are the
# program's own here, so each stands for the schema where the user has no such file.
_FILES_OF_PROGRAMS = {
    "ppo_trainer": (
        *("ppo_trainer", "dapo_trainer", "entropy_trainer"),
        *("one_step_off_ppo_trainer", "fully_async_ppo_trainer"),
    ),
    "sft_trainer": ("sft_trainer", "sft_trainer_engine"),
}
# Texts that YAML 1.1 reads as numbers and a command line does not: 1_5 as 15, 012 as 10, 0x10 as
# 16, 1:30 as 90.
_NUMBER_IN_YAML_ALONE = re.compile(
    rf"(?:{NO_NUMBER}|[+-]?0[\d_]+|[+-]?0[bx][\da-fA-F_]+|[+-]?[\d_]+(?::\d+)+(?:\.[\d_]*)?)$"
)
_NO_GROUP = re.compile(r"Could not override '([^']+)'")
_KEY = re.compile(r"\w+(?:[./@]\w+)*", re.ASCII)
_SETS_A_VALUE = re.compile(r"\+\+\w+(\.\w+)*=")


def compose_files(command: CommandLine, root: str) -> dict[str, Any]:
    """Return the values that the user's YAML and overrides set, with unresolved interpolations.

    The schema stays out of the composition. So the values of the user can be distinguished from
    defaults, and every error message is ours.
    """
    if _names_a_file_of_verl(command, root):
        logger.warning(
            "No folder '%s' here: --config-name=%s stands for the built-in defaults.",
            command.config_path,
            command.config_name,
        )
        command = replace(command, config_path=None, config_name=None)
    if not _asks_for_files(command):
        values = compose_overrides([*without_backends(command.overrides, root)])
        if values is not None:
            return values
    return compose_by_hydra(command, root)


def compose_overrides(overrides: list[str]) -> dict[str, Any] | None:
    """Return the values of overrides that each set a key, or None where Hydra has more to do.

    Such values need no search for files, which takes most of the time of a composition. None also
    stands for a mistake: Hydra words it.
    """
    for override in overrides:
        if not _SETS_A_VALUE.match(override) or "hydra" in override:
            return None

    hydra_version.setbase(HYDRA_VERSION)
    setup_globals()  # for ${now:%H}, which a composition by Hydra knows
    tree = OmegaConf.create({})
    try:
        for override in OverridesParser.create().parse_overrides(overrides):
            if override.is_sweep_override():
                return None
            key = override.key_or_group
            OmegaConf.update(tree, key, override.value(), merge=True, force_add=True)
    except (*_REFUSALS, *_NAMES_IN_LISTS):
        return None

    return plain_values(tree)


def compose_by_hydra(command: CommandLine, root: str) -> dict[str, Any]:
    """Return the values of a command line and of the files that it names.

    The name of the schema stands for an empty tree meanwhile.
    """
    name = command.config_name or root
    if "megatron" in name:
        raise ConfigError(
            f"Config '{name}': there is no Megatron backend; use '{root}', which shards with FSDP2."
        )

    folder = _config_folder(command)
    overrides = list(command.overrides)
    groups = _subfolders(folder) if _asks_for_files(command) else set()
    if command.config_path and command.config_dir:
        further = _folder(command.config_dir, "--config-dir")
        groups |= _subfolders(further)
        overrides.append(f"hydra.searchpath=[file://{further}]")

    overrides = [
        _as_group(override, groups) for override in overrides if not _is_hydra_setting(override)
    ]
    # A user's folder of YAML files may have the name of a backend's key.
    overrides = [*without_backends(overrides, root, groups)]
    # A value for a whole section is none for a config group.
    sections = {override.lstrip("+").partition("=")[0] for override in overrides}
    try:
        with (
            _stand_in(root, sections),
            _numbers_as_on_a_line(),
            warnings.catch_warnings(),
            initialize_config_dir(str(folder), version_base=HYDRA_VERSION),
        ):
            # ppo_trainer is built in, so file://verl/trainer/config and pkg://verl.trainer.config
            # may point nowhere; and a user's file may have the name of a schema.
            for pattern in (
                r".*verl[/.]trainer[/.]config is not\s+available",
                r"\s*'.*' is validated against ConfigStore schema",
            ):
                warnings.filterwarnings("ignore", message=pattern, category=UserWarning)
            composed = compose(name, overrides)
    except (*_REFUSALS, *_NAMES_IN_LISTS) as error:
        raise ConfigError(_hydra_message(error, command, folder, root)) from error

    return plain_values(composed)


@contextmanager
def _stand_in(root: str, sections: Set[str]) -> Iterator[None]:
    """Replace `root` in Hydra's ConfigStore by an empty tree within the context.

    Outside, it is the schema, for users' own Hydra programs. Files of verl's that hold defaults are
    empty, too, but for groups that are `sections`; a user's own file of such a name comes first.
    """
    store = ConfigStore.instance()
    # Put back as it was: to store the schema again would copy the whole tree. The rest stays: Hydra
    # itself registers its plugins at its first composition.
    schema = store.repo[f"{root}.yaml"]
    store.store(name=root, node={})
    added = []
    groups = GROUPS.get(root, {})
    for group in groups.keys() - sections:
        for file in groups[group]:
            if f"{file}.yaml" not in store.repo.get(group, {}):  # a user's program may have it
                store.store(group=group, name=file, node={}, package="_global_")
                added.append((group, f"{file}.yaml"))
    try:
        yield
    finally:
        store.repo[f"{root}.yaml"] = schema
        for group, file in added:
            del store.repo[group][file]
            if not store.repo[group]:
                del store.repo[group]


@contextmanager
def _numbers_as_on_a_line() -> Iterator[None]:
    """Read numbers in YAML files as on a command line within the context.

    OmegaConf has no public way to its loader. Outside, users' own programs read YAML as before.
    """
    make_loader = omegaconf_utils.get_yaml_loader

    def make_strict_loader() -> Any:
        loader = make_loader()
        resolvers = loader.yaml_implicit_resolvers  # by first character; the first match counts
        for first in "+-.0123456789":
            as_text = ("tag:yaml.org,2002:str", _NUMBER_IN_YAML_ALONE)
            resolvers[first] = [as_text, *resolvers[first]]
        return loader

    omegaconf_utils.get_yaml_loader = make_strict_loader
    try:
        yield
    finally:
        omegaconf_utils.get_yaml_loader = make_loader


def _names_a_file_of_verl(command: CommandLine, root: str) -> bool:
    """Return whether the options name a file that verl ships, by a folder that the user lacks.

    Hydra looks for a relative folder next to the program, where verl keeps `config`.
    """
    folder = command.config_path
    if folder is None or command.is_one_file:
        return False
    if command.config_name not in _FILES_OF_PROGRAMS.get(root, ()):
        return False
    is_next_to_program = Path(folder).name == "config" and not Path(folder).is_absolute()
    return is_next_to_program and not Path(folder).is_dir()


def _asks_for_files(command: CommandLine) -> bool:
    return (
        command.config_path is not None
        or command.config_dir is not None
        or command.config_name is not None
    )


def _config_folder(command: CommandLine) -> Path:
    if command.config_path is not None:
        return _folder(command.config_path, "--config-path")
    if command.config_dir is not None:
        return _folder(command.config_dir, "--config-dir")
    return Path.cwd() if command.config_name is not None else Path(__file__).parent


def _folder(path: str, option: str) -> Path:
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"{option} must be an existing folder, got '{path}' (looked at {folder})."
        )
    return folder


def _subfolders(folder: Path) -> set[str]:
    """Return the names of folders in a folder, which Hydra takes for config groups."""
    return {path.name for path in folder.iterdir() if path.is_dir()}


def _is_hydra_setting(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0]
    if not key.startswith(("hydra.", "hydra/")) or key == "hydra.searchpath":
        return False
    logger.warning("%s has no effect: Hydra makes no folder and sets up no logging here.", key)
    return True


def _as_group(override: str, groups: set[str]) -> str:
    """Undo the `++` if the name is a config group (a user's subfolder) or Hydra's search path."""
    key = override.lstrip("+").partition("=")[0]
    if key == "hydra.searchpath":
        return override.lstrip("+")
    return f"+{override.lstrip('+')}" if key in groups else override


def _hydra_message(error: Exception, command: CommandLine, folder: Path, root: str) -> str:
    if isinstance(error, (yaml.YAMLError, UnicodeDecodeError)):
        return explain_yaml(error)

    text = str(error.__cause__ if not str(error).strip() and error.__cause__ else error).strip()
    if isinstance(error, OverrideParseException):
        return _unreadable_message(error.override.lstrip("+"), text.splitlines()[0])

    if not isinstance(error, _REFUSALS):
        return (
            f"A key is set within a list, which has numbers and no names ({text}). Set the whole "
            "list: key=[a,b]."
        )

    if "--multirun" in text:
        return (
            f"{text.splitlines()[0].replace('++', '')}. Write a list as key=[a,b] and text as "
            "\"key='a,b'\"."
        )

    if text.startswith("Error merging override"):
        override = text.rpartition(" ")[2].lstrip("+")
        reason = str(error.__context__).partition("\n")[0]
        return f"{override} does not fit the values that were set before it: {reason}."

    group = _NO_GROUP.match(text)
    if group is not None:
        name = group.group(1)
        return (
            f"There is no group of files '{name}'. The names of a key have dots between them: "
            f"{name.replace('/', '.')}=value."
        )

    if "Could not delete" in text:
        return f"{text} A deletion undoes a setting of a YAML file; for no value write key=null."
    if "Cannot find primary config" in text:
        found = sorted(path.stem for path in folder.glob("[!.]*.y*ml"))
        return (
            f"No '{command.config_name}.yaml' in {folder}. Found there: "
            f"{', '.join(found) or 'no YAML file'}."
        )

    absent = _NO_FILE_OF_A_GROUP.search(text)
    if absent is not None:
        message = missing_backend(absent.group(1), absent.group(2), root)
        if message is not None:
            return message

    if "must be a DictConfig" in text:
        return (
            f"'{command.config_name}.yaml' must hold keys and their values (key: value), got a "
            "list."
        )

    return text


def _unreadable_message(override: str, reason: str) -> str:
    """Return the message about an override that Hydra cannot read, for this reason."""
    key, _, value = override.partition("=")
    if not _KEY.fullmatch(key.removeprefix("~")):
        return (
            f"Cannot read '{override}': a key is names with one dot between them, a.b.c. Names "
            "have letters, digits and _ alone."
        )

    for first, last in ("[]", "{}"):
        if value.startswith(first) and not value.endswith(last):
            return (
                f"Cannot read '{override}': '{last}' is missing at its end. Write it without "
                "spaces, or quote the whole argument, since a shell cuts it at spaces."
            )

    if "LexerNoViableAltException" in reason:
        reason = "a character needs quotes"
    quoted = "key='value'" if "'" in value else f"{key}='{value}'"
    return (
        f"Cannot read '{override}' ({reason}). Quote the value within the argument: \"{quoted}\"."
    )


def plain_values(tree: DictConfig) -> dict[str, Any]:
    """Return nested values with interpolations as they are written."""
    values = OmegaConf.to_container(tree, resolve=False)
    assert isinstance(values, dict)
    return {str(name): value for name, value in values.items()}
