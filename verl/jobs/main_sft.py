"""`python -m verl.trainer.main_sft key=value ...`: supervised fine-tuning on prompts with answers,
or on dialogues."""

import sys

from verl.trainer.main_ppo import main as run_job
from verl.utils.errors import retold
from verl.utils.garbage import loading_packages


def main(argv: list[str] | None = None) -> int:
    """Train and return the exit code; what a user can cause is one line, no traceback."""
    return run_job(argv, job)


def job(argv: list[str]) -> None:
    """The whole job. Imports stand where they are needed: a typo in a key is told before torch has
    loaded."""
    from verl.config.load import load_config
    from verl.config.sft import SHARED

    config = load_config(argv, root="sft_trainer")
    with loading_packages():
        from verl.jobs.sft_trainer import SFTTrainer

    with retold(SHARED.names_here):
        trainer = SFTTrainer(config)
        trainer.init_workers()
        trainer.fit()


if __name__ == "__main__":
    sys.exit(main())
