"""The console script `verl`. It loads only the modules that a command needs."""

import importlib
import sys

import verl
from verl.cli.commands import COMMANDS, Command
from verl.utils.entry import exit_code
from verl.utils.launcher import end_with_launcher
from verl.utils.registry import nearest_names


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit status; 2 for an unknown command."""
    end_with_launcher()
    given = sys.argv[1:] if argv is None else argv
    return exit_code(lambda: _answer(given))


def _answer(argv: list[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(_help())
        return 0

    if argv[0] in ("--version", "-V"):
        print(f"verl {verl.__version__}")
        return 0

    command, rest = _find(argv)
    if command is None:
        print(_unknown(argv), file=sys.stderr)
        return 2

    if {"--help", "-h"} & set(rest):
        print(f"verl {command.words}: {command.summary}\n\n  {command.example}\n")
    return importlib.import_module(command.module).main([*command.first, *rest])


def _find(argv: list[str]) -> tuple[Command | None, list[str]]:
    """Return the command that the first words name, and the arguments after them."""
    for count in (2, 1):
        words = " ".join(argv[:count])
        if words in COMMANDS:
            return COMMANDS[words], argv[count:]
    return None, argv


def _unknown(argv: list[str]) -> str:
    # Of "reward chek" both words are meant as a name; of "trian data.x=1" the first alone.
    tried = argv[0]
    if len(argv) > 1 and "=" not in argv[1] and not argv[1].startswith("-"):
        tried = " ".join(argv[:2])
    return (
        f"No command '{tried}'. Nearest: {nearest_names(tried, list(COMMANDS))}. All of them: verl "
        "--help"
    )


def _help() -> str:
    lines = [
        f"verl {verl.__version__}: reinforcement-learning post-training for large language models",
        "",
        "usage: verl COMMAND [options] [config.yaml] [key=value ...]",
        "",
    ]
    for command in COMMANDS.values():
        lines += [f"  {command.words:<14}{command.summary}", f"  {'':<14}$ {command.example}", ""]
    lines.append(
        "Options and keys of a command: verl COMMAND --help. Every key with its default: verl "
        "train --cfg job"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
