"""Train as `python -m verl.trainer.main_ppo trainer.mode=fully_async`, under an old name.

Run `python -m recipe.fully_async_policy.fully_async_main key=value ...`.
"""

import sys

from verl.trainer.schedules.main_fully_async import main

if __name__ == "__main__":
    sys.exit(main())
