"""`python -m recipe.dapo.main_dapo key=value ...`: `python -m verl.trainer.main_ppo` under its old
name. Dynamic sampling, the overlong buffer and the token mean are keys."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main())
