"""Programs in Python show the log like commands do, unless they configure it."""

import logging

import pytest

from verl.utils.logging import logger, show_log


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
