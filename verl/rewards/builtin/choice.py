"""Multiple choice: the response names one of the options by its letter."""

import re
from typing import Any, Literal

from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import ConfigError, RewardError

Method = Literal["strict", "flexible"]

# Each optional part of a pattern takes the blanks that follow it, so that a run of blanks can be
# divided in one way alone: the time of a search grows with the length of the text.
_LETTER = r"(?:[\(\[]\s*)?([A-Z])"
_BOXED = re.compile(rf"\\boxed\{{\s*(?:\\text\{{\s*)?{_LETTER}")
_TAGGED = re.compile(rf"<answer>\s*{_LETTER}(?![A-Za-z])[^<]*</answer>")
_NAMED = re.compile(
    r"\b(?:[Aa]nswer|ANSWER|[Cc]hoice|[Oo]ption)\b(?:\s+(?:is|would be))?"
    rf"\s*(?::\s*)?(?:\*+\s*)?{_LETTER}(?![A-Za-z'])"
)
# Where answers are marked, from the clearest mark to the weakest; the last of its kind counts.
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
    """The letter that a response answers, or None.

    Args:
        method: "strict" takes a marked letter (`\\boxed{B}`, `<answer>B</answer>`, "the answer is
            (B)") or a response that is nothing but a letter; "flexible" else takes the last letter
            that stands alone, "A" and "I" aside where they are words.
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
        alone = [
            match
            for match in _ALONE.finditer(text)
            if len(match.group()) > 1 or match.group() not in "AI"
        ]
        return alone[-1].group(1) if alone else None

    return None


def gold_letter(ground_truth: Any) -> str:
    """The letter of a ground truth: a letter, or the number of the option counted from 0."""
    truth = str(ground_truth).strip()
    if truth.isdigit() and int(truth) < 26:
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
    """1 when the response names the right option, else 0."""
    return float(extract_choice(solution_str, method) == gold_letter(ground_truth))
