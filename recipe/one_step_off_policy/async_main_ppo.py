"""Train as `python -m verl.trainer.main_ppo trainer.mode=one_step_off`, under an old name.

Run `python -m recipe.one_step_off_policy.async_main_ppo key=value ...`.
"""

import sys

from verl.trainer.schedules.main_one_step_off import main

if __name__ == "__main__":
    sys.exit(main())
