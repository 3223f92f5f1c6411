"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): math-verify compares the last boxed answer."""

import logging
import os
import re
from typing import Any

from verl.rewards.helper import HelperTimeout
from verl.rewards.processes import ProcessFunction
from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError

STEP_TIMEOUT_S = 3
ANSWER_TIMEOUT_S = 15.0  # more than the sum of its steps: two parses, one comparison
# In a response without a box, the answer is searched for in this last part only.
TAIL_CHARACTERS = 500
# The longest answer that math-verify gets. Its time grows with the square of the length, and a
# response that repeats itself within a box would use up the deadline of every call.
MAX_ANSWER_CHARACTERS = 1000
# A character, or a pair that is not two digits, repeated more than 30 times. No answer has such a
# run; looping responses do, and math-verify can take seconds for it.
_RUN = re.compile(r"(\D|\d\D|\D\d|\D\D)\1{30,}")
# `10\%` and `10` are one answer, as in the normalization of MATH's authors. math-verify reads no
# number in a box with a percent sign.
_PERCENT_SIGN = re.compile(r"\s*\\?%")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character: \left\{ has no end
_SOURCES = (
    "math",
    "MATH",
    "math500",
    "lighteval/MATH*",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "EleutherAI/hendrycks_math",
    "hiyouga/geometry3k",
)
_DAPO_SOURCES = ("math_dapo", "aime*")  # with a field `acc`, as in DAPO's own scripts


@answer_extractors.register(*_SOURCES, *_DAPO_SOURCES)
def last_boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}`, with balanced braces."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None

    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in ("\\boxed", "\\fbox"):
        after_blank = text[start:].partition(" ")[2]  # \boxed 2
        return after_blank.split("$")[0].strip() or None

    depth = 0
    for mark in _BRACE.finditer(text, opening):
        depth += {"{": 1, "}": -1}.get(mark.group(), 0)
        if depth == 0:
            return text[opening + 1 : mark.start()]
    return None


def _plain(answer: str) -> str:
    """Normalize the spelling of an answer, to recognize equal answers without sympy."""
    for old, new in (
        ("\\left", ""),
        ("\\right", ""),
        ("\\!", ""),
        ("dfrac", "frac"),
        ("tfrac", "frac"),
        (" ", ""),
    ):
        answer = answer.replace(old, new)
    return answer.strip().strip("$").rstrip(".")


@reward_rules.register(*_SOURCES)
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Return 1 if the answer has the same meaning as the ground truth, else 0.

    An answer scores 0 if it cannot be parsed within the time limit, or if it is longer than
    MAX_ANSWER_CHARACTERS and not spelled like the ground truth.

    `ground_truth` is the bare answer (LaTeX or plain), or a whole solution with a boxed answer.
    Percent signs do not count.
    """
    truth = str(ground_truth)
    gold = _PERCENT_SIGN.sub("", last_boxed(truth) or truth)
    answer = last_boxed(solution_str)
    if answer is None and "\\boxed" in solution_str:
        return 0.0  # cut off inside the box
    if answer is not None:
        answer = _PERCENT_SIGN.sub("", answer)
    if answer is not None and _plain(answer) == _plain(gold):
        return 1.0
    if answer is not None and len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0

    text = f"\\boxed{{{answer}}}" if answer is not None else solution_str[-TAIL_CHARACTERS:]
    return float(_equal(f"\\boxed{{{gold}}}", _RUN.sub(r"\1", text)))


@reward_rules.register(*_DAPO_SOURCES)
def score_and_accuracy(
    solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """Return `score` and the same number as `acc`, see `score`."""
    value = score(solution_str, ground_truth, extra_info)
    return {"score": value, "acc": value}


def equal(gold: str, answer: str) -> bool:
    """Return whether two LaTeX or plain expressions have the same meaning.

    An expression that cannot be parsed equals no other. This runs in a process of its own:
    math-verify limits its time by signal.alarm, which works only in a main thread, and another
    thread cannot stop a symbolic computation inside a long C call. The parent kills the process.
    """
    from math_verify import parse, verify  # imported only here: sympy takes a second

    # Its own log alone: a caller's log must go on.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # math-verify returns an empty list and False for text that it cannot parse in time. On Windows
    # its limits would start a process for each expression, so only the parent's deadline applies.
    limit_s = STEP_TIMEOUT_S if os.name == "posix" else 0
    parsed_gold = parse(gold, parsing_timeout=limit_s)
    parsed_answer = parse(answer, parsing_timeout=limit_s)
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=limit_s))


_compare = ProcessFunction(
    equal,
    timeout_s=ANSWER_TIMEOUT_S,
    name="the MATH rule",
    warm_up={"gold": "\\boxed{1}", "answer": "\\boxed{1}"},  # pays for the imports and the grammar
    CUDA_VISIBLE_DEVICES="",
)


def _equal(gold: str, answer: str) -> bool:
    """Compare two expressions in a process; False if that takes too long.

    A helper process that dies is replaced once. Raises RewardError if the second one dies too.
    """
    reason: RewardError | None = None
    for _ in range(2):
        try:
            return _compare(gold=gold, answer=answer)
        except HelperTimeout:
            return False
        except RewardError as error:
            reason = error
    raise RewardError(
        f"The MATH rule failed twice, comparing {answer!r} with {gold!r}: {reason}."
    ) from reason
