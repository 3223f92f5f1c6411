"""Score responses as `python -m verl.jobs.main_eval`, under the name of verl's recipe.

Run `python -m recipe.r1.main_eval data.path=out.parquet`. For the recipe's own data sets add
`custom_reward_function.path=recipe/r1/reward_score.py custom_reward_function.name=reward_func`.
"""

import sys

from verl.jobs.main_eval import main

if __name__ == "__main__":
    sys.exit(main())
