"""The log is shown from Python as commands show it, unless the program says otherwise."""

import logging

import pytest

from verl.utils.logging import logger, show_log


def test_a_program_without_a_log_of_its_own_sees_ours(capsys):
    show_log()
    show_log()
    logger.info("a line")
    assert capsys.readouterr().out == "I a line\n"


def test_a_level_that_was_set_stays(capsys):
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


def test_a_program_that_shows_the_log_already_is_left_alone(caplog):
    with caplog.at_level(logging.INFO):
        show_log()
        assert logger.handlers == []
