"""`python -m recipe.r1.main_eval key=value ...`: `python -m verl.trainer.main_eval` under its old
name."""

import sys

from verl.jobs.main_eval import main

if __name__ == "__main__":
    sys.exit(main())
