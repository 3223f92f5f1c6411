"""Programs under the names of verl's recipes.

`python -m recipe.NAME.PROGRAM` of a recipe that is not here says what to run.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_OWN_LOSS = (
    "its loss is not in this version. Register yours by @register_policy_loss('mine') in a file "
    "that actor_rollout_ref.model.external_lib names, and run `python -m verl.trainer.main_ppo` with "
    "actor_rollout_ref.actor.policy_loss.loss_mode=mine"
)
_AGENTS = "run `python -m verl.trainer.main_ppo` with agents and tools: docs/how_to/agents.md"
_ABSENT = {
    "prime": (
        "its implicit reward model is not in this version. Run `python -m verl.trainer.main_ppo` "
        "with algorithm.adv_estimator=rloo and a reward model of your own, reward_model.enable=True "
        "and reward_model.model.path"
    ),
    "spin": _OWN_LOSS,
    "sppo": _OWN_LOSS,
    "gkd": "run `python -m verl.trainer.main_ppo` with distillation.enabled=True",
    "retool": _AGENTS,
    "langgraph_agent": _AGENTS,
    "deepeyes": _AGENTS,
}


class _AbsentRecipes(importlib.abc.MetaPathFinder):
    """Explain, as the last finder that is asked, that a recipe is not here."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__ or name not in _ABSENT:
            return None
        raise ModuleNotFoundError(
            f"verl's recipe '{name}' is not here: {_ABSENT[name]}.", name=fullname
        )


sys.meta_path.append(_AbsentRecipes())
