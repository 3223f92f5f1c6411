"""Contradictions between the keys of the reward. See `rules`."""

from collections.abc import Iterator
from pathlib import Path

from verl.config.train import TrainConfig


def reward_has_what_it_needs(config: TrainConfig) -> Iterator[str]:
    path = config.custom_reward_function.path
    section = config.reward_model
    if path is not None and path.endswith(".py") and not Path(path).is_file():
        yield f"custom_reward_function.path must be a Python file, found none at '{path}'."

    if path is not None and section.judge.url is not None:
        yield (
            f"custom_reward_function.path='{path}' and reward_model.judge.url={section.judge.url} "
            "both give the score. Set one of them."
        )

    if section.enable and section.model.path is None:
        yield (
            "reward_model.enable=True needs reward_model.model.path, the folder or hub name of a "
            "sequence classifier with one label. Set it, or reward_model.enable=False."
        )

    if section.enable and section.judge.url is not None:
        yield (
            f"reward_model.enable=True and reward_model.judge.url={section.judge.url} both give "
            "the score. Set one of them."
        )

    if section.judge.url is not None and section.judge.model is None:
        yield (
            f"reward_model.judge.url={section.judge.url} needs reward_model.judge.model, the "
            "model's name there."
        )

    if section.overlong_buffer.enable and section.reward_manager in ("naive", "batch", "prime"):
        yield (
            "reward_model.overlong_buffer.enable=True is read by reward_manager=dapo, got "
            f"'{section.reward_manager}'. Set reward_model.reward_manager=dapo."
        )


def reward_doubts(config: TrainConfig) -> Iterator[str]:
    section = config.reward_model
    if section.model.path is not None and not section.enable:
        yield (
            f"reward_model.model.path={section.model.path} has no effect without "
            "reward_model.enable=True."
        )

    function = config.custom_reward_function
    if function.path is None and function != type(function)():
        yield (
            "custom_reward_function.name and reward_kwargs have no effect without "
            "custom_reward_function.path."
        )

    if section.enable and config.custom_reward_function.path is not None:
        yield (
            f"custom_reward_function.path={config.custom_reward_function.path} scores validation "
            "rows with a ground truth and nothing else: in training the reward model's scores "
            "(rm_scores) stand. A reward manager of your own can combine both "
            "(reward_model.reward_manager)."
        )
