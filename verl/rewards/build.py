"""Build the reward function of a configuration, and the manager that calls it."""

import inspect
from collections.abc import Callable
from typing import Any

from verl.config.reward import RewardModelConfig, SandboxConfig
from verl.config.train import TrainConfig
from verl.rewards.custom import load_custom_reward
from verl.rewards.managers import reward_managers
from verl.rewards.outcome import RewardFunction
from verl.rewards.remote import Judge, SandboxService
from verl.rewards.rules import with_options
from verl.rewards.sandbox.runner import CodeRunner, LocalRunner
from verl.utils.errors import ConfigError, RewardError
from verl.utils.signatures import keywords_of, takes_any_keyword
from verl.utils.user_parts import NamedPart

# Arguments of a manager that `reward_kwargs` cannot set.
_NOT_KEYWORDS = {"self", "tokenizer", "num_examine", "compute_score", "reward_fn_key"}


def build_reward(config: TrainConfig, tokenizer: Any, *, num_examine: int) -> Any:
    """Build the configured reward manager around the user's function, the judge or the rules.

    Raises ConfigError for an entry of `reward_kwargs`, a reward function or a judge that the
    manager does not accept, and RewardError for a manager that raises when it is made.
    """
    section = config.reward_model
    manager = reward_managers.get(section.reward_manager)
    ours = {
        "num_examine": num_examine,
        "reward_fn_key": config.data.reward_fn_key,
        "timeout_s": section.timeout_s,
        "on_error": section.on_error,
        "max_retries": section.max_retries,
        "max_resp_len": config.data.max_response_length,
        "overlong_buffer_cfg": section.overlong_buffer,
        "images": section.images,
    }

    accepted = _accepted(manager)
    for name in section.reward_kwargs:
        if accepted is not None and name not in accepted - _NOT_KEYWORDS:
            raise ConfigError(
                f"reward_model.reward_kwargs.{name}: the manager '{section.reward_manager}' takes "
                f"{', '.join(sorted(accepted - _NOT_KEYWORDS))}."
            )

    if section.images and accepted is not None and "images" not in accepted:
        raise ConfigError(
            f"reward_model.images=True: the manager '{section.reward_manager}' takes no argument "
            "images. Let its class take **settings and pass them on to RewardManager, or leave the "
            "key out."
        )

    takes_function = accepted is None or "compute_score" in accepted
    for key, value in (
        ("custom_reward_function.path", config.custom_reward_function.path),
        ("reward_model.judge.url", section.judge.url),
    ):
        if value is not None and not takes_function:
            raise ConfigError(
                f"{key}={value}: the manager '{section.reward_manager}' takes no argument "
                "compute_score, so it would not call that. Let its class take one, or leave the "
                "key out."
            )
    if takes_function:
        ours["compute_score"] = build_reward_function(config)

    # A user's manager gets those of our settings that its signature names.
    taken = {name: value for name, value in ours.items() if accepted is None or name in accepted}
    part = NamedPart("reward manager", section.reward_manager, manager, RewardError)
    with part.naming_errors():
        return manager(tokenizer, **{**taken, **section.reward_kwargs})


def _accepted(manager: Callable[..., Any]) -> set[str] | None:
    """Return the names of the keyword arguments that a manager accepts; None means any.

    If a class takes `**settings`, which it passes on, the arguments of its base class count too.
    """
    if inspect.isclass(manager):
        constructors = [vars(kind).get("__init__") for kind in inspect.getmro(manager)]
    else:
        constructors = [manager]

    names: set[str] = set()
    for constructor in constructors:
        if constructor is None:
            continue
        names.update(keywords_of(constructor))
        if not takes_any_keyword(constructor):
            return names
    return None


def build_reward_function(config: TrainConfig) -> RewardFunction:
    """Return the user's function, else the judge, else the rules with their options and runner.

    Raises ConfigError if a service that it needs cannot be reached.
    """
    section = config.reward_model
    own = config.custom_reward_function
    for_batches = section.reward_manager == "batch"
    custom = load_custom_reward(own.path, own.name, own.reward_kwargs, for_batches=for_batches)
    if custom is not None:
        return custom
    if section.judge.url is not None:
        judge = Judge(section.judge, section.requests)
        judge.client.check_reachable()
        return judge
    return with_options(section.rule_kwargs, build_code_runner(section))


def build_code_runner(section: RewardModelConfig) -> CodeRunner | None:
    """Build the runner for rules that execute code; None means this machine's default sandbox."""
    if section.sandbox_fusion.url is None:
        if section.sandbox == SandboxConfig():
            return None
        return LocalRunner(section.sandbox)

    runner = SandboxService(section.sandbox_fusion, section.sandbox.timeout_s, section.requests)
    runner.client.check_reachable()
    return runner
