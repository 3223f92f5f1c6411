"""Sections of the configuration as classes of verl 0.5, readable by attribute or by key."""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, get_args, get_type_hints

from omegaconf import DictConfig, OmegaConf

from verl.utils.errors import ConfigError


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A dataclass that is also a mapping, with fields that can be set only once.

    A subclass lists the fields that may change in `_mutable_fields`.
    """

    _mutable_fields: ClassVar[set[str]] = set()
    _target_: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ and name not in self._mutable_fields:
            raise FrozenInstanceError(f"Field '{name}' is set once. Make another object instead.")
        super().__setattr__(name, value)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if there is no such field."""
        return getattr(self, key, default)

    def __getitem__(self, key: str) -> Any:
        """Return an attribute, as verl 0.5 does: AttributeError if there is none of that name."""
        return getattr(self, key)

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__

    def __iter__(self) -> Iterator[str]:
        return iter([entry.name for entry in fields(self)])

    def __len__(self) -> int:
        return len(fields(self))


@dataclass
class KLControlConfig(BaseConfig):
    """`algorithm.kl_ctrl`."""

    type: str = "fixed"
    kl_coef: float = 0.001
    horizon: int = 10000
    target_kl: float = 0.1


@dataclass
class PFPPOConfig(BaseConfig):
    """`algorithm.pf_ppo`."""

    reweight_method: str = "pow"
    weight_pow: float = 2.0


@dataclass
class FilterGroupsConfig(BaseConfig):
    """`algorithm.filter_groups`."""

    enable: bool = False
    metric: str | None = None
    max_num_gen_batches: int = 0


@dataclass
class AlgoConfig(BaseConfig):
    """`algorithm`."""

    gamma: float = 1.0
    lam: float = 1.0
    adv_estimator: str = "gae"
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig | None = None
    filter_groups: FilterGroupsConfig | None = None


def omega_conf_to_dataclass(config: Any, dataclass_type: Any = None) -> Any:
    """Make an object of `dataclass_type`, or of the class that the key `_target_` names.

    It has the values of `config`. A section within becomes an object of the class of its field. A
    dataclass is returned as it is.
    """
    if not config:
        return config if dataclass_type is None else dataclass_type()
    if is_dataclass(config):
        return config

    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)
    values = dict(config)
    target = values.pop("_target_", "")
    if dataclass_type is None:
        if not target:
            raise ConfigError(
                "omega_conf_to_dataclass needs dataclass_type, or a key _target_ with the class."
            )
        module, _, name = str(target).rpartition(".")
        dataclass_type = getattr(importlib.import_module(module), name)

    known = {entry.name for entry in fields(dataclass_type)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ConfigError(f"{dataclass_type.__name__} has no fields {unknown}; it has {known}.")
    made = {str(name): _made(value, dataclass_type, name) for name, value in values.items()}
    return dataclass_type(**made)


def _made(value: Any, owner: Any, name: Any) -> Any:
    """Return a value; a section as an object of its `_target_` or of its field's class, if any."""
    if not isinstance(value, dict):
        return value
    if "_target_" in value:
        return omega_conf_to_dataclass(value)
    kind = get_type_hints(owner)[name]
    for option in (kind, *get_args(kind)):
        if is_dataclass(option):
            return omega_conf_to_dataclass(value, option)
    return value
