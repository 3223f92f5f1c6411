"""`python -m verl.trainer.main_ppo key=value ...`: train with PPO, GRPO and their kin."""

import os
import sys

from verl.config.load import load_config
from verl.utils.errors import VerlError
from verl.utils.logging import configure_logging
from verl.utils.openmp import limit_spinning


def main(argv: list[str] | None = None) -> int:
    """Load the configuration, train, and return the exit code; what a user can cause is one line, no traceback."""
    configure_logging()
    limit_spinning()
    try:
        config = load_config(sys.argv[1:] if argv is None else argv)
        # Imported once the configuration is checked: a typo is told in half a second, not after torch has loaded.
        from verl.trainer.ppo_trainer import PPOTrainer

        trainer = PPOTrainer(config)
        trainer.init_workers()
        trainer.fit()
    except VerlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        if os.environ.get("VERL_TRACEBACK"):
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
