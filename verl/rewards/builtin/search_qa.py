"""Questions whose answer is looked up: exact match with one of several answers, spelt as SQuAD
compares them.

Normalisation of Rajpurkar et al. 2016 (arXiv:1606.05250): lower case, no punctuation, no articles,
single blanks.
"""

import re
import string
from collections.abc import Mapping
from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError

_SOURCES = (
    "searchR1_*",
    "search_qa*",
    "nq",
    "triviaqa",
    "popqa",
    "hotpotqa",
    "2wikimultihopqa",
    "musique",
    "bamboogle",
)
_OPENING = "<answer>"
_CLOSING = "</answer>"
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """SQuAD's spelling for comparison."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


@answer_extractors.register(*_SOURCES)
def extract_answer(text: str) -> str | None:
    """Return the text between the last `<answer>` tags; None without them."""
    answer = None
    start = text.find(_OPENING)

    while start >= 0:
        start += len(_OPENING)
        end = text.find(_CLOSING, start)
        if end < 0:
            break  # as for every later opening tag
        answer = text[start:end]
        start = text.find(_OPENING, end)

    return None if answer is None else answer.strip()


def _golds(ground_truth: Any) -> list[str]:
    """Of {"target": ...}, one answer, or a list (after Parquet: an array) of answers."""
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if isinstance(target, str):
        return [target]
    if (
        target is None
        or isinstance(target, Mapping)
        or not hasattr(target, "__iter__")
        or len(target) == 0
    ):
        raise RewardError(
            f"The search rule expects ground_truth = {{'target': ['answer', ...]}}, a list or one "
            f"answer, got {ground_truth!r}."
        )
    return [str(answer) for answer in target]


@reward_rules.register(*_SOURCES)
def score(
    solution_str: str,
    ground_truth: Any,
    extra_info: Any = None,
    *,
    method: str = "exact",
    format_score: float = 0.0,
) -> float:
    """1 when the answer between the last `<answer>` tags is one of the gold answers, else 0.

    Args:
        method: "exact", or "substring" where it is enough that the answer contains a gold one.
        format_score: what another answer in tags gets.
    """
    golds = [normalize_answer(gold) for gold in _golds(ground_truth)]
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    given = normalize_answer(answer)
    right = given in golds or (
        method == "substring" and any(gold and gold in given for gold in golds)
    )
    return 1.0 if right else format_score
