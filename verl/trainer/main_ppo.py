"""`python -m verl.trainer.main_ppo [--dry-run] key=value ...`: train with PPO, GRPO and their kin, or plan it."""

import logging
import os
import sys
from collections.abc import Callable

from verl.utils.errors import MissingDependencyError, VerlError
from verl.utils.imports import missing_package
from verl.utils.logging import configure_logging
from verl.utils.openmp import limit_spinning

DRY_RUN = "--dry-run"


def main(argv: list[str] | None = None, job: Callable[[list[str]], None] | None = None) -> int:
    """Do `job` (by default `train`) and return the exit code; what a user can cause is one line, no traceback."""
    # What all ranks would say is said once.
    configure_logging(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    limit_spinning()
    argv = sys.argv[1:] if argv is None else argv
    try:
        if job is None and DRY_RUN in argv:
            return _plan([argument for argument in argv if argument != DRY_RUN])
        (job or train)(argv)
    except VerlError as error:
        # What a rank raised comes with its place and traceback; where it is a user's to mend, the one line will do.
        return _told(error.__cause__ if isinstance(error.__cause__, VerlError) else error)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        return _told(MissingDependencyError(missing))
    return 0


def train(argv: list[str]) -> None:
    """The whole job. Imports stand where they are needed: a typo in a key is told in half a second, not after torch has
    loaded, and a package that is not installed by name."""
    from verl.config.load import load_config

    config = load_config(argv)
    from verl.trainer.variants import trainer_class

    trainer = trainer_class(config)(config)
    trainer.init_workers()
    trainer.fit()


def _plan(argv: list[str]) -> int:
    from verl.diagnostics.plan import main

    return main(argv)


def _told(error: VerlError) -> int:
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if os.environ.get("VERL_TRACEBACK"):
        raise error
    return 1


if __name__ == "__main__":
    sys.exit(main())
