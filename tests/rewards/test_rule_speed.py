"""Every built-in rule reads hostile text in linear time: a repetitive response must not stop the
trainer."""

import functools
import itertools
import random
import string
import time

import pytest

from tests.cases import cases
from verl.compat import score as compat_score
from verl.rewards import rules
from verl.rewards.builtin import math as math_rule
from verl.rewards.registry import answer_extractors

LENGTH = 10_000
LIMIT_S = 0.05  # CPU time; measured: 0.1-4 ms
# Digits, blanks and letters outside ASCII: `\d`, `\s` and `str.isdigit` accept some of them.
BEYOND_ASCII = "\u00a0\u2003\u3000\x1c\x85٣²½éß\u0301∞×÷−·"
CHARACTERS = string.printable + BEYOND_ASCII
# Fragments of the patterns of the rules.
PIECES = [
    *"()[]{}<>*:.,$#+-/=\\ \n\t09ABaz'",
    "answer",
    "Option ",
    " is ",
    "would be",
    "<answer>",
    "</answer>",
    "\\boxed{",
    "\\boxed",
    "\\text{",
    "####",
    "the ",
]
SOURCES = {
    "gsm8k": "4",
    "gsm8k flexible": "4",
    "math": "4",
    "countdown": {"target": 24, "numbers": [3, 8, 1]},
    "multiple_choice": "B",
    "multiple_choice flexible": "B",
    "search_qa": {"target": ["an answer"]},
    "toy": "4",
}


def repeated(piece: str) -> str:
    return piece * (LENGTH // len(piece))


def hostile_texts() -> list[str]:
    """Repeat every character, every pair of pieces, and a sample of all pairs of characters."""
    generator = random.Random(0)
    relevant = list(itertools.product(PIECES, repeat=2))
    pairs = ["".join(pair) for pair in generator.sample(relevant, 400)]
    sampled = generator.sample(list(itertools.product(CHARACTERS, repeat=2)), 200)
    pairs += ["".join(pair) for pair in sampled]
    texts = [repeated(piece) for piece in (*CHARACTERS, *pairs)]

    # The repetition starts where a pattern has begun to match, and no later text completes it.
    openings = ("answer", "<answer>", "<answer>A", "\\boxed{", "\\boxed{\\text{", "####", "A", "(")
    for opening in openings:
        texts += [opening + repeated(piece) for piece in (*CHARACTERS, "* ", ": ", " (")]
    return texts


def cpu_seconds(call) -> float:
    """Return the shortest of up to three runs: garbage collection may slow one down."""
    shortest = float("inf")
    for _ in range(3):
        began = time.process_time()
        call()
        shortest = min(shortest, time.process_time() - began)
        if shortest < LIMIT_S / 5:
            break
    return shortest


def slow(score, texts: list[str]) -> list[str]:
    found = []
    for text in texts:
        seconds = cpu_seconds(functools.partial(score, text))
        if seconds > LIMIT_S:
            found.append(f"{text[:30]!r}: {seconds:.2f} s")
    return found


@pytest.fixture
def compared(monkeypatch) -> list[str]:
    """Collect the texts that the MATH rule gives to math-verify, in place of its process."""
    texts: list[str] = []
    monkeypatch.setattr(math_rule, "_equal", lambda gold, text: texts.append(text) or False)
    return texts


@pytest.mark.parametrize("name", cases(SOURCES, quick=lambda name: "flexible" not in name))
def test_a_rule_reads_ten_thousand_hostile_characters_in_time(name, compared):
    source, _, method = name.partition(" ")
    options = {"method": method} if method else {}

    def score(text: str) -> None:
        rules.default_compute_score(source, text, SOURCES[name], **options)
        compat_score.default_compute_score(source, text, SOURCES[name], **options)

    assert slow(score, hostile_texts()) == []


@pytest.mark.parametrize("name", ["multiple_choice", "search_qa", "math"])
def test_an_extractor_reads_ten_thousand_hostile_characters_in_time(name):
    extract = answer_extractors.get(name)
    assert slow(extract, hostile_texts()) == []


def test_math_verify_gets_no_text_that_it_is_slow_on(compared):
    math_rule.equal("\\boxed{1}", "\\boxed{1}")  # imports and grammar
    pieces = [*string.printable, "0%", "$.", "-5", "()", "a+", "^{", "1\n"]
    for piece in pieces:
        math_rule.score(repeated(piece), "4")
        math_rule.score("\\boxed{" + piece * (400 // len(piece)) + "}", "4")
        math_rule.score(f"\\boxed{{{repeated(piece)}}}", "4")

    assert len(compared) >= len(pieces)
    compare = functools.partial(math_rule.equal, "\\boxed{4}")
    assert slow(compare, compared) == []


def test_a_long_answer_spelled_like_the_truth_is_right():
    truth = "x" * (2 * math_rule.MAX_ANSWER_CHARACTERS)
    assert math_rule.score(f"\\boxed{{{truth}}}", truth) == 1.0
