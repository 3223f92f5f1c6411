"""The helper process of the MATH rule: compares answers with math-verify, one JSON line in, one out.

A process of its own because math-verify limits its time with signal.alarm, which works in a main thread alone, and
because a symbolic computation inside one long C call cannot be stopped from another thread. The parent kills it.
"""

import json
import logging
import os
import sys

from math_verify import parse, verify

PARSE_TIMEOUT_S = 3
COMPARE_TIMEOUT_S = 3


def equal(gold: str, answer: str) -> bool:
    """Whether two LaTeX or plain expressions mean the same. What cannot be parsed equals nothing."""
    # math-verify returns an empty list and False for whatever it cannot read, or not in time.
    # On Windows its limits would start a process for each expression: the parent's deadline must do there.
    limited = os.name == "posix"
    parsed_gold, parsed_answer = (
        parse(text, parsing_timeout=PARSE_TIMEOUT_S if limited else 0) for text in (gold, answer)
    )
    return bool(verify(parsed_gold, parsed_answer, timeout_seconds=COMPARE_TIMEOUT_S if limited else 0))


def main() -> None:
    """Answer until the parent closes the pipe, also by being killed."""
    # A print inside sympy must not end up between our answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    equal("\\boxed{1}", "\\boxed{1}")  # pays for the imports and the grammar before the first deadline starts
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        print(json.dumps(equal(gold, answer)), file=answers)


if __name__ == "__main__":
    main()
