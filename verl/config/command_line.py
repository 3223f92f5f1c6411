"""Options and overrides of the command line, before Hydra looks at them."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from verl.utils.errors import ConfigError

USAGE = """\
usage: verl {command} [options] [config.yaml] [key=value ...]

  a.b.c=value             set a key; also +a.b.c=value, ++a.b.c=value and --a.b.c=value
  config.yaml             a YAML file of keys; start it with `defaults: [{root}, _self_]`
  --config-path FOLDER    folder of your YAML file (relative to the current one)
  --config-name NAME      its name; these two stand for config.yaml
  --config-dir FOLDER     a further folder to look for YAML files in
  --cfg job               print the configuration and stop
  --help                  print this and stop

Every key with its default: --cfg job. {shortest}
"""


@dataclass(kw_only=True)
class CommandLine:
    """Options and overrides of a command line, not interpreted yet."""

    overrides: list[str] = field(default_factory=list)
    config_path: str | None = None
    config_name: str | None = None
    config_dir: str | None = None
    is_one_file: bool = False  # folder and name come from `config.yaml`
    show: bool = False
    help: bool = False


# Digits with underscores, other than thousands such as 1_000_000. Hydra leaves the underscores out:
# bounds of 0.5_2 would be 0.52, and an experiment 2024_05 would be 202405.
NO_NUMBER = r"(?![+-]?\d{1,3}(?:_\d{3})+(?:\.\d*)?(?![\d_.]))[+-]?[\d.]*\d_[\d_.]*"
_ENTRY = re.compile(rf"(?<=[\[,:])(\s*)({NO_NUMBER})(?=\s*[,\]}}])")

_VALUE_OPTIONS = {
    "--config-path": "config_path",
    "-cp": "config_path",
    "--config-name": "config_name",
    "-cn": "config_name",
    "--config-dir": "config_dir",
    "-cd": "config_dir",
    "--cfg": "cfg",
    "-c": "cfg",
}


def parse_command_line(argv: list[str]) -> CommandLine:
    """Separate options from overrides. A YAML file that is named alone sets its folder and name.

    Overrides lose leading dashes; nothing is interpreted yet.
    """
    command = CommandLine()
    files: list[Path] = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in _VALUE_OPTIONS:
            if not equals:
                value = next(arguments, "")
            if not value:
                raise ConfigError(f"{name} needs a value: {name} <value>.")
            _set_option(command, _VALUE_OPTIONS[name], value)
        elif argument in ("--help", "-h"):
            command.help = True
        elif argument == "--resolve":
            continue  # printed values are always resolved
        elif argument in ("--multirun", "-m"):
            raise ConfigError(f"{argument} is not available: start one run per configuration.")
        elif names_a_file(argument):
            files.append(Path(argument))
        else:
            command.overrides.append(_normalised_override(argument))

    if files:
        _set_file(command, files)
    return command


def names_a_file(argument: str) -> bool:
    """Return whether an argument is a YAML file, without an option before it."""
    is_yaml = argument.endswith((".yaml", ".yml"))
    return is_yaml and "=" not in argument and not argument.startswith(("-", "+"))


def _set_file(command: CommandLine, files: list[Path]) -> None:
    named = [str(file) for file in files]
    if command.config_name is not None:
        named.insert(0, f"--config-name={command.config_name}")
    if command.config_path is not None:
        named.insert(0, f"--config-path={command.config_path}")
    if len(named) > 1:
        raise ConfigError(
            f"A run has one YAML file, got {' and '.join(named)}. Name the second one in the "
            "`defaults:` of the first."
        )

    command.config_path = str(files[0].parent)
    command.config_name = files[0].stem
    command.is_one_file = True


def _set_option(command: CommandLine, option: str, value: str) -> None:
    if option == "cfg":
        if value != "job":
            raise ConfigError(
                f"--cfg prints the run's configuration only: expected 'job', got '{value}'."
            )
        command.show = True
    elif option == "config_name":
        command.config_name = value.removesuffix(".yaml").removesuffix(".yml")
    else:
        setattr(command, option, value)


def _normalised_override(argument: str) -> str:
    """Turn `--a.b=v`, `+a.b=v` and `a.b=v` into `++a.b=v`, which sets a value.

    Deletions and config groups stay as they are.
    """
    override = argument.lstrip("-") if argument.startswith("-") else argument
    if override.startswith("~"):
        return override
    key, equals, value = override.partition("=")
    if not equals or not key.lstrip("+"):
        raise ConfigError(f"Expected key=value, got '{argument}'. See --help for the options.")
    if "/" in key or "@" in key:
        return override
    # no shell expands it after a dotted key, and Hydra's grammar has no such word
    if value.startswith("~/"):
        value = str(Path(value).expanduser())
    # a text in quotes; keys of numbers refuse it
    if re.fullmatch(NO_NUMBER, value):
        value = f"'{value}'"
    elif value.startswith(("[", "{")) and "'" not in value and '"' not in value:
        value = _ENTRY.sub(r"\1'\2'", value)
    return f"++{key.lstrip('+')}={value}"
