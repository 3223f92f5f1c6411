"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the answer is the number after "####"."""

import re
from decimal import Decimal, InvalidOperation
from numbers import Number
from typing import Any, Literal

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import ConfigError, RewardError

Method = Literal["strict", "flexible"]

_SOURCES = ("openai/gsm8k", "gsm8k")
# A sign may come before or after the currency mark, and commas may group the digits. A comma or
# period that ends the sentence is not part of the number.
_NUMBER = r"[-+]?\$?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_ANYWHERE = re.compile(_NUMBER)
_AFTER_MARK = re.compile(rf"\s*({_NUMBER})")


@answer_extractors.register(*_SOURCES)
def extract_answer(text: str, method: Method = "strict") -> str | None:
    """Return the number that answers, without commas and currency marks, or None.

    Args:
        method: "strict" takes the number right after the last "####"; "flexible" takes the last
            number of the text.
    """
    number = None
    if method == "strict":
        _, mark, rest = text.rpartition("####")
        if mark and (found := _AFTER_MARK.match(rest)):
            number = found.group(1)
    elif method == "flexible":
        if numbers := _ANYWHERE.findall(text):
            number = numbers[-1]
    else:
        raise ConfigError(f"The gsm8k rule's method is 'strict' or 'flexible', got {method!r}.")

    if number is None:
        return None
    return number.replace(",", "").replace("$", "")


def _same_number(one: str, other: str) -> bool:
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:  # "+-3" has two signs
        return False


@reward_rules.register(*_SOURCES)
def score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    method: Method = "strict",
    format_score: float = 0.0,
) -> float:
    """Return 1 for a number equal to the ground truth, `format_score` for another, 0 for none.

    `ground_truth` is the bare number, or a whole GSM8K answer with "####". Raises RewardError for
    anything else.
    """
    gold = _gold(ground_truth)
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return 1.0 if _same_number(answer, gold) else format_score


def _gold(ground_truth: Any) -> str:
    """Return the number of a ground truth."""
    gold = None
    if isinstance(ground_truth, (str, Number)):
        truth = str(ground_truth)
        if isinstance(ground_truth, Number) and "e" in truth:
            truth = f"{Decimal(truth):f}"  # 1e-05
        gold = extract_answer(truth, "strict" if "####" in truth else "flexible")
    if gold is None:
        raise RewardError(
            "The gsm8k rule expects a number as reward_model.ground_truth, or an answer that ends "
            f"with '#### number', got {ground_truth!r:.80}. Correct the row, or score it with a "
            "function of your own (custom_reward_function.path)."
        )
    return gold
