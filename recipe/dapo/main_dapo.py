"""Train as `python -m verl.trainer.main_ppo`, under the name of verl's recipe.

Run `python -m recipe.dapo.main_dapo key=value ...`. Dynamic sampling, the overlong buffer and the
token mean are keys: `examples/dapo_trainer` has them.
"""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main())
