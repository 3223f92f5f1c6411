"""Choices of a backend on the command line of later versions of verl, such as `engine=fsdp`.

They name config groups there. This package has one backend, so its own name is read over.
"""

from collections.abc import Container, Iterator

from verl.utils.errors import ConfigError

_OTHERS = ("megatron", "veomni", "torchtitan", "automodel", "mindspeed")
# {root: {key: names of what this package has}}
_OWN = {
    "sft_trainer": {"engine": ("fsdp",), "optim": ("fsdp",), "model": ("hf_model",)},
    "ppo_trainer": {"model_engine": ("dp", "fsdp")},
}


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
            raise ConfigError(
                f"{key}={value} is not available: there is one backend, which shards with FSDP2. "
                f"Write {key}={own[key][0]}, or leave it out."
            )
        yield override
