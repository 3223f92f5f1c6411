"""`verl capsule RUN --step N`: put one step of a recorded run into a file."""

import argparse
import sys
from pathlib import Path

from verl.utils.commands import verl_command
from verl.utils.entry import exit_code


def main(argv: list[str] | None = None) -> int:
    """Write the capsule; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="verl capsule",
        description="Put one step into a file: configuration, versions, prompts, samples, and the "
        "checkpoint before it or a pointer to that. `verl replay` executes it again.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run (trainer.default_local_dir)")
    parser.add_argument("--step", type=int, required=True, help="the step to execute again")
    parser.add_argument("--output", metavar="FILE", help="default: RUN-step-N.zip, here")
    parser.add_argument(
        "--weights", action="store_true", help="put the checkpoint in, for another machine"
    )
    arguments = parser.parse_args(argv)
    return exit_code(lambda: capsule(arguments))


def capsule(arguments: argparse.Namespace) -> None:
    """Write the capsule. Imports are local: --help needs no torch."""
    from verl.trainer.capsule import write_capsule
    from verl.utils.errors import ConfigError

    name = f"{Path(arguments.run).absolute().name}-step-{arguments.step}.zip"
    path = Path(arguments.output or name)
    if path.is_dir():
        raise ConfigError(f"--output must name a file, got the folder '{path}'. Name a file in it.")
    write_capsule(arguments.run, arguments.step, path, weights=arguments.weights)
    print(f"Wrote {path} ({path.stat().st_size / 2**20:.1f} MiB).")
    print(f"Execute the step again: {verl_command('replay', path)}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
