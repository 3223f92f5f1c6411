"""Rules and reward managers by verl 0.5's names."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from verl.config.keywords import config_from_keywords
from verl.protocol import DataProto
from verl.rewards.build import build_reward
from verl.rewards.builtin import gsm8k, math, search_qa
from verl.rewards.custom import load_custom_reward

_ANSWER_LINE = re.compile(r"(?i)answer\s*:\s*([^\n]+)")


class AbstractRewardManager(ABC):
    """Base of users' reward managers, which the trainer calls for a whole batch.

    It is made as `Manager(tokenizer=..., num_examine=..., compute_score=..., reward_fn_key=...)`.
    """

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return the scores (B, R), or with `return_dict` a dict with them as `reward_tensor`."""


def gsm8k_answer(solution_str: str, method: str = "strict") -> str | None:
    """Return the number that answers a GSM8K question, see `gsm8k.extract_answer`."""
    return gsm8k.extract_answer(solution_str, method)  # pyright: ignore[reportArgumentType]


def gsm8k_score(
    solution_str: str,
    ground_truth: str,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for the right number, `format_score` for another one, 0 for none."""
    if gsm8k_answer(solution_str, method) is None:
        return 0.0
    is_right = gsm8k.score(solution_str, ground_truth, method=method)  # pyright: ignore[reportArgumentType]
    return score if is_right else format_score


def math_score(solution_str: str, ground_truth: str) -> float:
    """Return 1 if the answer in the last box has the meaning of the ground truth, else 0."""
    return math.score(solution_str, ground_truth)


def math_equal(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Return whether two answers have the same meaning; None equals only None."""
    if str1 is None or str2 is None:
        return str1 is str2
    return math_score(f"\\boxed{{{str1}}}", str2) == 1.0


def last_boxed_only_string(string: str) -> str | None:
    """Return the last \\boxed{...} of a text, including the box; None without one."""
    answer = math.last_boxed(string)
    if answer is None:
        return None
    return f"\\boxed{{{answer}}}"


def remove_boxed(s: str) -> str:
    """Return the content of a \\boxed{...}. Raises ValueError without one."""
    answer = math.last_boxed(s)
    if answer is None:
        raise ValueError(f"Expected a text with \\boxed{{...}}, got {s!r}.")
    return answer


def math_dapo_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    """Return `score` (1 or -1), `acc` (whether the answer is right) and `pred` (the answer).

    The answer is the last box of the text with `strict_box_verify`, or else the rest of the last
    line that says "Answer:". `pred` is None where there is none.
    """
    if strict_box_verify:
        answer = math.last_boxed(solution_str)
    else:
        lines = _ANSWER_LINE.findall(solution_str)
        answer = lines[-1].strip() if lines else None
    is_right = math_equal(answer, str(ground_truth))
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def search_answer(solution_str: str) -> str | None:
    """Return the text between the last `<answer>` tags; None without them."""
    return search_qa.extract_answer(solution_str)


def search_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return `score` for a right answer in tags, `format_score` for another one, 0 for none."""
    return _search_score(solution_str, ground_truth, "exact", format_score, score)


def search_substring_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score as `search_score` does; an answer that contains a right one is right, too."""
    return _search_score(solution_str, ground_truth, "substring", format_score, score)


def _search_score(
    solution_str: str, ground_truth: Any, rule: str, format_score: float, score: float
) -> float:
    if search_answer(solution_str) is None:
        return 0.0
    is_right = search_qa.score(solution_str, ground_truth, method=rule) == 1.0
    return score if is_right else format_score


def load_reward_manager(config: Any, tokenizer: Any, num_examine: int, **reward_kwargs: Any) -> Any:
    """Build the configured reward manager, with the user's function, a judge or the rules.

    `reward_kwargs` override those of `reward_model.reward_kwargs`.
    """
    config = config_from_keywords(config, {})
    config.reward_model.reward_kwargs = {**config.reward_model.reward_kwargs, **reward_kwargs}
    return build_reward(config, tokenizer, num_examine=num_examine)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """Load the function that `custom_reward_function` names; return None without a path."""
    section = config_from_keywords(config, {}).custom_reward_function
    return load_custom_reward(section.path, section.name, section.reward_kwargs)


def compute_reward(data: DataProto, reward_fn: Any) -> tuple[torch.Tensor, dict[str, list[Any]]]:
    """Return the scores (B, R), and further fields of each response."""
    result = reward_fn(data, return_dict=True)
    return result["reward_tensor"], result.get("reward_extra_info", {})
