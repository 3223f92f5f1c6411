"""Programs in Python show the log like commands do, unless they configure it."""

import io
import logging
import sys

import pytest

from verl.utils.logging import logger, show_log
from verl.utils.streams import show


def test_a_program_without_its_own_log_setup_shows_ours(capsys):
    show_log()
    show_log()
    logger.info("a line")
    assert capsys.readouterr().out == "I a line\n"


def test_an_existing_level_is_kept(capsys):
    logger.setLevel(logging.WARNING)
    show_log()
    logger.info("a line")
    logger.warning("a warning")
    assert capsys.readouterr().out == "W a warning\n"


def test_a_rank_other_than_the_first_shows_warnings(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "1")
    show_log()
    logger.info("a line")
    assert capsys.readouterr().out == ""


def test_a_program_that_already_shows_the_log_is_unchanged(caplog):
    with caplog.at_level(logging.INFO):
        show_log()
        assert logger.handlers == []


def test_characters_that_the_terminal_lacks_are_written_as_escapes(monkeypatch: pytest.MonkeyPatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="latin-1"))
    show_log()
    logger.info("数 %s", "half a character: \ud800")
    show("é 学")
    lines = ["I \\u6570 half a character: \\ud800", "é \\u5b66"]
    assert terminal.getvalue().decode("latin-1").splitlines() == lines
