"""`python -m verl.trainer.main_ppo [--dry-run] key=value ...`: train with PPO, GRPO and their kin,
or plan it."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl.utils.entry import exit_code
from verl.utils.garbage import loading_packages
from verl.utils.launcher import end_with_launcher
from verl.utils.lazy import lazy_names
from verl.utils.logging import configure_logging, level_of_rank
from verl.utils.openmp import limit_spinning

if TYPE_CHECKING:
    from verl.config import TrainConfig

DRY_RUN = "--dry-run"


def main(argv: list[str] | None = None, job: Callable[[list[str]], None] | None = None) -> int:
    """Run `job` (by default `train`) and return the exit code; user errors print one line, without
    a traceback."""
    end_with_launcher()
    given = sys.argv[1:] if argv is None else argv
    if job is None and DRY_RUN in given:
        from verl.diagnostics import plan

        return plan.main([argument for argument in given if argument != DRY_RUN])

    configure_logging(level_of_rank())
    limit_spinning()
    return exit_code(lambda: (job or train)(given))


def train(argv: list[str]) -> None:
    """Run the whole job.

    Imports are local: a typo in a key is reported within half a second, before torch loads, and a
    missing package is named.
    """
    from verl.config.load import load_config

    _fit(load_config(argv))


def run_ppo(config: Any) -> None:
    """Run the whole job of a configuration: one that a user's own Hydra program composed, say."""
    from verl.config.keywords import config_from_keywords

    _fit(config_from_keywords(config, {}))


def _fit(config: "TrainConfig") -> None:
    with loading_packages():
        from verl.trainer.variants import trainer_class

    trainer = trainer_class(config)(config)
    trainer.init_workers()
    trainer.fit()


__getattr__ = lazy_names("verl.trainer.main_ppo", {}, old_names=True)

if __name__ == "__main__":
    sys.exit(main())
