"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): the last boxed answer, compared by
math-verify."""

import logging
import os
import re
from typing import Any

from verl.rewards.helper import HelperTimeout
from verl.rewards.processes import ProcessFunction
from verl.rewards.registry import answer_extractors, reward_rules
from verl.utils.errors import RewardError

STEP_TIMEOUT_S = 3
ANSWER_TIMEOUT_S = 15.0  # above that of its steps: two parses, one comparison
# Where a response boxes nothing, its answer is looked for at the end alone.
TAIL_CHARACTERS = 500
# The longest answer that math-verify reads. Its time grows with the square of the length, and a
# response that repeats itself within a box would cost the deadline of every call.
MAX_ANSWER_CHARACTERS = 1000
# A character or pair, not of digits alone, that stands there more than 30 times in a row: no answer
# has such a run, responses that loop do, and math-verify takes up to seconds for it.
_RUN = re.compile(r"(\D|\d\D|\D\d|\D\D)\1{30,}")
_SOURCES = (
    "math",
    "MATH",
    "math500",
    "lighteval/MATH*",
    "DigitalLearningGmbH/MATH-lighteval",
    "HuggingFaceH4/MATH-500",
    "EleutherAI/hendrycks_math",
    "math_dapo",
    "aime*",
)


@answer_extractors.register(*_SOURCES)
def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `\\fbox{...}`, brackets balanced; None without
    one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    opening = text.find("{", start)
    if opening < 0 or text[start:opening].strip() not in ("\\boxed", "\\fbox"):
        return text[start:].partition(" ")[2].split("$")[0].strip() or None  # \boxed 2
    depth = 0
    for position in range(opening, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[opening + 1 : position]
    return None


def _plain(answer: str) -> str:
    """Spelling without what never carries meaning, to recognise equal answers without sympy."""
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
    """Return 1 when the answer means the same as the ground truth, else 0.

    An answer scores 0 if it cannot be parsed, or not in time, or if it has more than
    MAX_ANSWER_CHARACTERS and is not spelled like the ground truth.

    `ground_truth` is the bare answer (LaTeX or plain), or a whole solution with a boxed answer.
    """
    truth = str(ground_truth)
    gold = last_boxed(truth) or truth
    answer = last_boxed(solution_str)
    if answer is None and "\\boxed" in solution_str:
        return 0.0  # cut off inside the box
    if answer is not None and _plain(answer) == _plain(gold):
        return 1.0
    if answer is not None and len(answer) > MAX_ANSWER_CHARACTERS:
        return 0.0

    text = f"\\boxed{{{answer}}}" if answer is not None else solution_str[-TAIL_CHARACTERS:]
    return float(_equal(f"\\boxed{{{gold}}}", _RUN.sub(r"\1", text)))


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX or plain expressions mean the same. What cannot be parsed equals nothing.

    For a process of its own: math-verify limits its time by signal.alarm, which works in a main
    thread alone, and a symbolic computation inside one long C call cannot be stopped from another
    thread. The parent kills it.
    """
    from math_verify import parse, verify  # where it runs alone: sympy takes a second to import

    # Its own log alone: a caller's log must go on.
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # math-verify returns an empty list and False for whatever it cannot read, or not in time. On
    # Windows its limits would start a process for each expression: the parent's deadline must do
    # there.
    limit_s = STEP_TIMEOUT_S if os.name == "posix" else 0
    parsed_gold, parsed_answer = (parse(text, parsing_timeout=limit_s) for text in (gold, answer))
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=limit_s))


_compare = ProcessFunction(
    equal,
    timeout_s=ANSWER_TIMEOUT_S,
    name="the MATH rule",
    warm_up={"gold": "\\boxed{1}", "answer": "\\boxed{1}"},  # pays for the imports and the grammar
    CUDA_VISIBLE_DEVICES="",
)


def _equal(gold: str, answer: str) -> bool:
    """Whether the two mean the same; False when that took too long. A helper that died is replaced
    once."""
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
