"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): the last boxed answer, compared by math-verify."""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, LifoQueue
from typing import Any

from verl.rewards.registry import RuleRegistry, answer_extractors, reward_rules
from verl.utils.errors import RewardError
from verl.utils.registry import T

# Start: imports of sympy on a busy machine. Answer: above the worker's own limits (two parses, one comparison).
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 15.0
# Where a response boxes nothing, its answer is looked for at the end alone.
TAIL_CHARACTERS = 500


_SOURCES = (
    "math", "MATH", "math500", "lighteval/MATH*", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
    "EleutherAI/hendrycks_math",
)  # fmt: skip


def _register(registry: RuleRegistry[T]) -> Callable[[T], T]:
    """Under all names that MATH goes by."""

    def add(entry: T) -> T:
        for source in _SOURCES:
            registry.register(source)(entry)
        return entry

    return add


@_register(answer_extractors)
def last_boxed(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `\\fbox{...}`, brackets balanced; None without one."""
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
    for old, new in (("\\left", ""), ("\\right", ""), ("\\!", ""), ("dfrac", "frac"), ("tfrac", "frac"), (" ", "")):
        answer = answer.replace(old, new)
    return answer.strip().strip("$").rstrip(".")


@_register(reward_rules)
def score(solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1 when the answer means the same as the ground truth, else 0; what cannot be parsed, or not in time, scores 0.

    `ground_truth` is the bare answer (LaTeX or plain), or a whole solution with a boxed answer.
    """
    truth = str(ground_truth)
    gold = last_boxed(truth) or truth
    answer = last_boxed(solution_str)
    if answer is None and "\\boxed" in solution_str:
        return 0.0  # cut off inside the box
    if answer is not None and _plain(answer) == _plain(gold):
        return 1.0
    text = f"\\boxed{{{answer}}}" if answer is not None else solution_str[-TAIL_CHARACTERS:]
    return float(_pool.equal(f"\\boxed{{{gold}}}", text))


class _Helper:
    """One child process that compares answers."""

    def __init__(self) -> None:
        # The package's own folder goes in front, so that the child finds the same `verl` however we were started.
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.rewards.builtin.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
            encoding="utf-8",
            errors="backslashreplace",
            start_new_session=True,  # Ctrl-C is for the trainer; the child ends when its pipe closes
        )
        self.timed_out = False
        if self._read(START_TIMEOUT_S) != "ready":
            raise RewardError(
                f"The helper process of the MATH rule did not start (exit code {self._process.poll()}); its own words "
                "stand on stderr. Check that `python -c 'import math_verify'` works."
            )

    def ask(self, gold: str, answer: str) -> bool | None:
        """Whether the two are equal; None when there was no answer in time or the process died (then drop it)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([gold, answer]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self._read(ANSWER_TIMEOUT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self, timeout_s: float) -> Any:
        """One answer. Killing the child is what ends the read: no pipe can be waited for with a deadline on Windows."""
        assert self._process.stdout is not None
        alarm = threading.Timer(timeout_s, self._expire)
        alarm.daemon = True
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        return json.loads(line) if line.endswith("\n") else None

    def _expire(self) -> None:
        self.timed_out = True
        self._process.kill()


class _Pool:
    """Helpers that wait for work; as many as there were callers at one time."""

    def __init__(self) -> None:
        self._idle: LifoQueue[_Helper] = LifoQueue()

    def equal(self, gold: str, answer: str) -> bool:
        """Whether the two mean the same; False when that took too long. A helper that died is replaced once."""
        for _ in range(2):
            helper = self._borrow()
            result = helper.ask(gold, answer)
            if result is not None and not helper.timed_out:
                self._idle.put(helper)
            else:
                helper.close()
            if result is not None or helper.timed_out:
                return bool(result)
        raise RewardError(f"The helper process of the MATH rule died twice, comparing {answer!r} with {gold!r}.")

    def close(self) -> None:
        """Idle helpers end here; one at work ends when its pipe closes with our process."""
        while True:
            try:
                self._idle.get_nowait().close()
            except Empty:
                return

    def forget(self) -> None:
        """After a fork: the pipes belong to the parent."""
        self._idle = LifoQueue()

    def _borrow(self) -> _Helper:
        try:
            return self._idle.get_nowait()
        except Empty:
            return _Helper()


_pool = _Pool()
atexit.register(_pool.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.forget)
