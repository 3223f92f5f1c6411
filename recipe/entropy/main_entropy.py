"""Train as `python -m verl.trainer.main_ppo`, under the name of verl's recipe.

Run `python -m recipe.entropy.main_entropy key=value ...`; the key
`actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov` or `kl_cov` chooses the loss.
"""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main())
