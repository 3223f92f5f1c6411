"""Multiple choice: the response names one of the options by its letter."""

import re
from typing import Any, Literal

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import ConfigError, RewardError

Method = Literal["strict", "flexible"]

# Each optional part of a pattern includes the blanks that follow it. A run of blanks can then match
# in one way only, so the time of a search is linear in the length of the text.
_LETTER = r"(?:[\(\[]\s*)?([A-Z])"
_BOXED = re.compile(
    rf"\\boxed\{{\s*(?:\\(?:text|textbf|mathrm|mathbf)\{{\s*)?{_LETTER}(?![A-Za-z'])"
)
_TAGGED = re.compile(rf"<answer>\s*{_LETTER}(?![A-Za-z])[^<]*</answer>")
_NAMED = re.compile(
    r"\b(?:[Aa]nswer|ANSWER|[Cc]hoice|[Oo]ption)\b(?:\s+(?:is|would be))?"
    rf"\s*(?::\s*)?(?:\*+\s*)?\$?{_LETTER}(?![A-Za-z'])"
)
# Marks of an answer, from the clearest to the weakest; the last match of a pattern counts.
_MARKED = (_BOXED, _TAGGED, _NAMED)
_ALONE = re.compile(r"(?<![A-Za-z'])[\(\[]?([A-Z])[\)\].:,]?(?![A-Za-z'])")
_WHOLE = re.compile(rf"\s*{_LETTER}\s*(?:[\)\]]\s*)?(?:[.:]\s*)?")
_SOURCES = (
    "multiple_choice*",
    "cais/mmlu",
    "mmlu*",
    "TIGER-Lab/MMLU-Pro",
    "allenai/ai2_arc",
    "ai2_arc*",
    "Idavidrein/gpqa",
    "gpqa*",
    "Rowan/hellaswag",
    "hellaswag",
)


@answer_extractors.register(*_SOURCES)
def extract_choice(text: str, method: Method = "strict") -> str | None:
    """Return the letter that a response answers, or None.

    Args:
        method: "strict" accepts a marked letter (`\\boxed{B}`, `<answer>B</answer>`, "the answer is
            (B)") or a response that is only a letter; "flexible" also accepts the last letter that
            stands alone, except for "A" and "I" without a mark, which may be words.
    """
    if method not in ("strict", "flexible"):
        raise ConfigError(
            f"The multiple-choice rule's method is 'strict' or 'flexible', got {method!r}."
        )

    for pattern in _MARKED:
        if found := pattern.findall(text):
            return found[-1]

    if whole := _WHOLE.fullmatch(text):
        return whole.group(1)
    if method == "flexible":
        letter = None
        for match in _ALONE.finditer(text):
            may_be_a_word = len(match.group()) == 1 and match.group() in "AI"
            if not may_be_a_word:
                letter = match.group(1)
        return letter

    return None


def gold_letter(ground_truth: Any) -> str:
    """Return the letter of a ground truth, which is a letter or the option's number from 0."""
    truth = str(ground_truth).strip()
    if truth.isdecimal() and int(truth) < 26:
        return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[int(truth)]
    match = _WHOLE.fullmatch(truth.upper())
    if match is None:
        raise RewardError(
            "The multiple-choice rule expects a letter or an option's number, got "
            f"{ground_truth!r}."
        )
    return match.group(1)


@reward_rules.register(*_SOURCES)
def score(
    solution_str: str, ground_truth: Any, extra_info: Any = None, *, method: Method = "strict"
) -> float:
    """Return 1 if the response names the right option, else 0."""
    return float(extract_choice(solution_str, method) == gold_letter(ground_truth))
