"""Search questions: exact match with one of several answers, after SQuAD's normalization.

Normalization of Rajpurkar et al. 2016 (arXiv:1606.05250): lower case, no punctuation, no articles,
single blanks.
"""

import re
import string
from collections.abc import Mapping
from typing import Any

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError
from verl.utils.json_text import parse_json

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
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Normalize a text for comparison, as SQuAD does."""
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLE.sub(" ", plain).split())


@answer_extractors.register(*_SOURCES)
def extract_answer(text: str) -> str | None:
    """Return the text between the last `<answer>` tags; None without them."""
    answer = None
    for part in text.split("</answer>")[:-1]:
        _, opening, inside = part.partition("<answer>")
        if opening:
            answer = inside.strip()
    return answer


def _golds(ground_truth: Any) -> list[str]:
    """Return the answers of {"target": ...}, one answer, or a list (Parquet: array) of answers.

    A text in braces or brackets is the JSON of such a mapping or list.
    """
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip().startswith(("{", "[")):
        try:
            truth = parse_json(truth)
        except ValueError as error:
            raise RewardError(
                f"The search rule expects JSON in a ground_truth that begins with a bracket, got "
                f"{truth[:200]!r} ({error}). Write an answer that begins so as {{'target': [...]}}."
            ) from error

    target = truth.get("target") if isinstance(truth, Mapping) else truth
    if isinstance(target, str):
        return [target]

    is_list = hasattr(target, "__iter__") and not isinstance(target, Mapping)
    if target is None or not is_list or len(target) == 0:
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
    """Return 1 if the answer between the last `<answer>` tags is one of the gold answers.

    Args:
        method: "exact", or "substring", which also accepts an answer that contains a gold one.
        format_score: score of any other answer in tags; without tags the score is 0.
    """
    golds = [normalize_answer(gold) for gold in _golds(ground_truth)]
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0

    given = normalize_answer(answer)
    is_right = given in golds
    if method == "substring":
        is_right = is_right or any(gold and gold in given for gold in golds)
    return 1.0 if is_right else format_score
