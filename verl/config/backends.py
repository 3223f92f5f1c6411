"""Choices of a backend in later versions of verl, such as `engine=fsdp`, which name config groups.

This package has one backend, so its own name is read over: on the command line, and in the list
`defaults:` of a YAML file.
"""

from collections.abc import Container, Iterator

from verl.utils.errors import ConfigError

_OTHERS = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")
# {root: {key: names of what this package has}}
_OWN = {
    "sft_trainer": {"engine": ("fsdp",), "optim": ("fsdp",), "model": ("hf_model",)},
    "ppo_trainer": {"model_engine": ("dp", "fsdp")},
}

# {root: {group: files of verl's that hold the values that this package has by default}}
GROUPS = {
    "sft_trainer": _OWN["sft_trainer"],
    "ppo_trainer": {
        **_OWN["ppo_trainer"],
        "actor": ("actor", "dp_actor"),
        "critic": ("critic", "dp_critic"),
        "data": ("legacy_data",),
        "engine": ("fsdp",),
        "model": ("hf_model",),
        "optim": ("fsdp",),
        "ref": ("ref", "dp_ref"),
        "reward_model": ("reward_model", "dp_reward_model"),
        "rollout": ("rollout",),
    },
}


def missing_backend(group: str, value: str, root: str) -> str | None:
    """Return the message for a choice of a backend that is missing; None for any other choice."""
    own = GROUPS.get(root, {}).get(group)
    if own is None or not value.startswith(_OTHERS):
        return None
    return (
        f"{group}={value} is not available: there is one backend, which shards with FSDP2. "
        f"Write {group}={own[0]}, or leave it out."
    )


def without_backends(overrides: list[str], root: str, groups: Container[str] = ()) -> Iterator[str]:
    """Yield the overrides that choose no backend. Raises ConfigError for one that is missing.

    Args:
        groups: config groups of the user, which are no choices of a backend.
    """
    own = {key: names for key, names in _OWN.get(root, {}).items() if key not in groups}
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        value = value.strip("'\"")
        if value in own.get(key, ()):
            continue
        if key in own and value in _OTHERS:
            raise ConfigError(missing_backend(key, value, root))
        yield override
