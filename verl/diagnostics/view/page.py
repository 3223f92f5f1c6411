"""Build the page of `verl view` from its parts: one HTML text, with scripts and styles inside."""

import base64
import hashlib
import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from verl.diagnostics.view.answers import Answers
from verl.utils.errors import DataError
from verl.utils.units import MIB

SCRIPTS = ("core.js", "curves.js", "lanes.js", "samples.js", "trajectory.js", "main.js")
_PARTS = files("verl.diagnostics.view") / "page"


def live_page() -> tuple[str, str]:
    """Return the content security policy and the page that asks a server."""
    return _page("", connects=True)


def exported_page(answers: Answers, *, max_mib: float = 64.0) -> tuple[str, list[str]]:
    """Return one file that opens without a server, and notes on what it lacks.

    Args:
        max_mib: of all answers; samples of the newest steps come first.
    """
    given: dict[str, Any] = {}
    overview = answers.overview()
    for run in overview:
        number = run["id"]
        for question in (f"curves/{number}", f"advice/{number}", f"plan/{number}"):
            given[question] = answers.answer(question)
    given["runs"] = overview

    room = max_mib * MIB
    left_out = 0
    for question in _step_questions(answers, overview):
        answer = _answer_or_error(answers, question)
        room -= len(json.dumps(answer))
        if room < 0:
            left_out += 1
        else:
            given[question] = answer

    notes = []
    if left_out:
        notes.append(
            f"{left_out} tables and samples of older steps did not fit into {max_mib:g} MiB."
        )
    given["notes"] = notes
    # "<" would let a text of a sample end the script element.
    data = json.dumps(given).replace("<", "\\u003c")
    _, page = _page(data, connects=False)
    return page, notes


def _step_questions(answers: Answers, overview: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the questions about single steps, the newest of all runs first."""
    steps = [(step, run["id"]) for run in overview for step in run["kept"]]
    for step, number in sorted(steps, reverse=True):
        yield f"lanes/{number}/{step}"
        yield f"samples/{number}/{step}"
        table = _answer_or_error(answers, f"samples/{number}/{step}")
        for row in range(table.get("rows", 0)):
            yield f"sample/{number}/{step}/{row}"


def _answer_or_error(answers: Answers, question: str) -> Any:
    try:
        return answers.answer(question)
    except DataError as error:
        return {"error": str(error)}


def _page(data: str, *, connects: bool) -> tuple[str, str]:
    style = (_PARTS / "style.css").read_text(encoding="utf-8")
    script = "\n".join((_PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n{script}'
    connect = "'self'" if connects else "'none'"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )

    page = (_PARTS / "page.html").read_text(encoding="utf-8")
    parts = {
        "POLICY": policy,
        "STYLE": style,
        "DATA": data,
        "SCRIPT": script,
    }
    for name, text in parts.items():
        before, after = page.split(f"<!--{name}-->")
        page = before + text + after
    return f"{policy}; frame-ancestors 'none'", page


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
