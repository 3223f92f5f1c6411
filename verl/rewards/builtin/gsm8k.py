"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the answer is a number behind "####"."""

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import ConfigError

Method = Literal["strict", "flexible"]

_SOURCES = ("openai/gsm8k", "gsm8k")
# A sign may stand before or behind the currency mark. Digits come plain or grouped by commas; a
# comma or full stop that ends the sentence is not part of the number.
_NUMBER = r"[-+]?\$?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_ANYWHERE = re.compile(_NUMBER)
_AFTER_MARK = re.compile(rf"\s*({_NUMBER})")


@answer_extractors.register(*_SOURCES)
def extract_answer(text: str, method: Method = "strict") -> str | None:
    """The number a text ends in, without commas and currency marks, or None.

    Args:
        method: "strict" takes the number right behind the last "####"; "flexible" takes the last
            number of the text.
    """
    if method == "strict":
        _, mark, rest = text.rpartition("####")
        found = _AFTER_MARK.match(rest) if mark else None
        number = found.group(1) if found else None
    elif method == "flexible":
        numbers = _ANYWHERE.findall(text)
        number = numbers[-1] if numbers else None
    else:
        raise ConfigError(f"The gsm8k rule's method is 'strict' or 'flexible', got {method!r}.")
    return number.replace(",", "").replace("$", "") if number is not None else None


def _same_number(one: str, other: str) -> bool:
    try:
        return Decimal(one) == Decimal(other)
    except InvalidOperation:  # "+-3": two signs are no number
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
    """1 when the extracted number has the value of the ground truth, `format_score` for another
    number, 0 for none.

    `ground_truth` is the bare number, or a whole GSM8K answer with "####".
    """
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    truth = str(ground_truth)
    gold = extract_answer(truth, "strict" if "####" in truth else "flexible")
    return 1.0 if gold is not None and _same_number(answer, gold) else format_score
