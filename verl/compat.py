"""Old import paths of verl 0.5, and where their names live here: the one table.

`import verl.trainer.ppo.ray_trainer` finds no such file; the finder in `verl/__init__.py` then asks
this table and gives a module whose names are looked up here on first use, with a DeprecationWarning
that tells the new path. A module that does exist, and has lost a name to another room, asks the
table in its own `__getattr__`.
"""

import importlib
import importlib.util
import warnings
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CORE = "verl.algorithms.compat_signatures"
_REGISTRIES = "verl.algorithms.compat_registries"
_MICRO = "verl.engine.dynamic_batches"

# old module -> {name: new module}, or {name: (new module, new name)}
OLD_PATHS: dict[str, dict[str, str | tuple[str, str]]] = {
    "verl.protocol": {"DataProtoFuture": "verl.single_controller.data_future"},
    "verl.trainer.ppo": {},
    "verl.trainer.ppo.ray_trainer": {"RayPPOTrainer": "verl.trainer.ppo_trainer"},
    "verl.trainer.ppo.core_algos": {
        "agg_loss": "verl.algorithms.masked",
        "compute_entropy_loss": _CORE,
        "compute_gae_advantage_return": _CORE,
        "compute_gpg_outcome_advantage": _CORE,
        "compute_grpo_outcome_advantage": _CORE,
        "compute_grpo_passk_outcome_advantage": _CORE,
        "compute_opo_outcome_advantage": _CORE,
        "compute_policy_loss": _CORE,
        "compute_policy_loss_clip_cov": _CORE,
        "compute_policy_loss_gpg": _CORE,
        "compute_policy_loss_kl_cov": _CORE,
        "compute_reinforce_plus_plus_baseline_outcome_advantage": _CORE,
        "compute_reinforce_plus_plus_outcome_advantage": _CORE,
        "compute_remax_outcome_advantage": _CORE,
        "compute_rloo_outcome_advantage": _CORE,
        "compute_value_loss": _CORE,
        "register_policy_loss": _REGISTRIES,
        "get_policy_loss_fn": _REGISTRIES,
        "register_adv_est": _REGISTRIES,
        "get_adv_estimator_fn": _REGISTRIES,
        "AdvantageEstimator": _REGISTRIES,
        "POLICY_LOSS_REGISTRY": _REGISTRIES,
        "ADV_ESTIMATOR_REGISTRY": _REGISTRIES,
        "kl_penalty": _CORE,
        "AdaptiveKLController": "verl.algorithms.kl",
        "FixedKLController": "verl.algorithms.kl",
        "get_kl_controller": "verl.algorithms.kl",
    },
    "verl.experimental": {},
    "verl.experimental.dataset": {},
    "verl.experimental.dataset.sampler": {
        "AbstractCurriculumSampler": ("verl.data.sampler", "CurriculumSampler"),
        "AbstractSampler": ("verl.data.sampler", "Sampler"),
    },
    "verl.utils.import_utils": {"load_extern_type": "verl.utils.imports"},
    "verl.utils.model": {"create_random_mask": "verl.utils.masks"},
    "verl.utils.dataset": {},
    "verl.utils.dataset.rl_dataset": {
        "RLHFDataset": "verl.data.rlhf_dataset",
        "collate_fn": ("verl.data.collate", "columns_of"),
    },
    "verl.utils.seqlen_balancing": {
        "ceildiv": _MICRO,
        "get_reverse_idx": _MICRO,
        "prepare_dynamic_batch": _MICRO,
        "rearrange_micro_batches": _MICRO,
        "restore_dynamic_batch": _MICRO,
    },
    "verl.utils.reward_score": {"default_compute_score": "verl.rewards.compat_score"},
    "verl.workers.reward_manager": {
        "NaiveRewardManager": "verl.rewards.manager",
        "BatchRewardManager": "verl.rewards.managers",
        "DAPORewardManager": "verl.rewards.managers",
        "PrimeRewardManager": "verl.rewards.managers",
        "REWARD_MANAGER_REGISTRY": "verl.rewards.managers",
        "get_reward_manager_cls": "verl.rewards.managers",
        "register": ("verl.rewards.managers", "register_reward_manager"),
    },
    "verl.single_controller.base": {
        "Worker": "verl.single_controller",
        "WorkerGroup": "verl.single_controller",
    },
    "verl.single_controller.base.decorator": {
        "Dispatch": "verl.single_controller",
        "Execute": "verl.single_controller",
        "get_predefined_dispatch_fn": "verl.single_controller",
        "register": "verl.single_controller",
        "register_dispatch_mode": "verl.single_controller",
        "update_dispatch_mode": "verl.single_controller",
    },
}


def find_old_name(path: str, name: str) -> Any:
    """What the table has for `name` at the old `path`; to be called from a module's
    `__getattr__`."""
    entry = OLD_PATHS[path][name]
    module, new_name = entry if isinstance(entry, tuple) else (entry, name)
    warnings.warn(f"{path}.{name} is now {module}.{new_name}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(module), new_name)


class _OldModule(ModuleType):
    """Looks its names up in the table."""

    def __getattr__(self, name: str) -> Any:
        names = OLD_PATHS[self.__name__]
        if name in names:
            return find_old_name(self.__name__, name)
        known = ", ".join(sorted(names)) or "only submodules"
        raise AttributeError(
            f"'{self.__name__}' is an old path of verl 0.5; of its names this version has: {known}."
        )


class _OldModuleLoader:
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _OldModule(spec.name)
        module.__path__ = []  # submodules are looked up in the table as well
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names are looked up on use."""


def find_old_module(name: str) -> ModuleSpec | None:
    """The spec of a module that is only in the table; None for any other."""
    if name not in OLD_PATHS:
        return None
    return importlib.util.spec_from_loader(name, _OldModuleLoader(), is_package=True)  # pyright: ignore[reportArgumentType]


def page() -> str:
    """The table as Markdown."""
    lines = [
        "# Import paths of verl 0.5",
        "",
        "Generated: `python -m verl.compat > docs/import_paths.md` writes this page anew.",
        "",
        (
            "The old path works, with a `DeprecationWarning` that tells the new one. Paths that "
            "are the same are left out."
        ),
        "",
        "| old | new |",
        "|---|---|",
    ]
    for old, names in OLD_PATHS.items():
        for name, entry in names.items():
            module, new_name = entry if isinstance(entry, tuple) else (entry, name)
            lines.append(f"| `{old}.{name}` | `{module}.{new_name}` |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
