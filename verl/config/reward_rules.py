"""Contradictions between the keys of the reward. See `rules`."""

from pathlib import Path

from verl.config.rule_table import Rows, table
from verl.config.train import TrainConfig
from verl.utils.imports import without_scheme


@table
def reward_has_what_it_needs(config: TrainConfig) -> Rows:
    path = config.custom_reward_function.path
    section = config.reward_model
    is_judged = section.judge.url is not None
    is_missing = (
        path is not None and path.endswith(".py") and not Path(without_scheme(path)).is_file()
    )
    ignores_length = section.reward_manager in ("naive", "batch", "prime")
    buffer = section.overlong_buffer
    longest = config.data.max_response_length
    reads_buffer = section.reward_manager == "dapo" and not (
        {"overlong_buffer_cfg", "max_resp_len"} & section.reward_kwargs.keys()
    )

    return (
        (
            is_missing,
            "custom_reward_function.path must be a Python file, found none at "
            "'{custom_reward_function.path}'.",
        ),
        (
            path is not None and is_judged,
            "custom_reward_function.path='{custom_reward_function.path}' and "
            "{reward_model.judge.url=} both give the score. Set one of them.",
        ),
        (
            section.enable and section.model.path is None,
            "reward_model.enable=True needs reward_model.model.path, the folder or hub name of a "
            "sequence classifier with one label. Set it, or reward_model.enable=False.",
        ),
        (
            section.enable and is_judged,
            "reward_model.enable=True and {reward_model.judge.url=} both give the score. Set one "
            "of them.",
        ),
        (
            is_judged and section.judge.model is None,
            "{reward_model.judge.url=} needs reward_model.judge.model, the model's name there.",
        ),
        (
            buffer.enable and ignores_length,
            "reward_model.overlong_buffer.enable=True is read by reward_manager=dapo, got "
            "'{reward_model.reward_manager}'. Set reward_model.reward_manager=dapo.",
        ),
        (
            buffer.enable and reads_buffer and not 0 < buffer.len <= longest,
            "reward_model.overlong_buffer.len counts the last tokens of a response: at least 1, at "
            "most {data.max_response_length=}, got {reward_model.overlong_buffer.len}. A fifth is "
            f"usual: {max(longest // 5, 1)}.",
        ),
    )


@table
def reward_doubts(config: TrainConfig) -> Rows:
    function = config.custom_reward_function

    return (
        (
            function.path is None and function != type(function)(),
            "custom_reward_function.name and reward_kwargs have no effect without "
            "custom_reward_function.path.",
        ),
        (
            config.reward_model.enable and function.path is not None,
            "{custom_reward_function.path=} scores validation rows with a ground truth and nothing "
            "else: in training the reward model's scores (rm_scores) stand. A reward manager of "
            "your own can combine both (reward_model.reward_manager).",
        ),
    )
