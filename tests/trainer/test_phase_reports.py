"""Long phases report their name and progress; short ones are silent."""

import gc
import io
import logging
import re
import threading
import time
import weakref

import pytest

from tests.single_controller.launch import launch
from tests.single_controller.workers import progress_of_two
from tests.trainer.runs import command_line
from verl.config import load_config
from verl.single_controller import note_progress
from verl.single_controller.breadcrumbs import Progress
from verl.single_controller.spmd import LocalPool
from verl.trainer import PPOTrainer, phase_reports
from verl.trainer.phase_reports import PhaseReports
from verl.utils.errors import ConfigError
from verl.utils.logging import logger


def wait_for_lines(caplog, count: int) -> list[str]:
    gives_up_at = time.monotonic() + 30
    while len(caplog.messages) < count and time.monotonic() < gives_up_at:
        time.sleep(0.01)
    return caplog.messages


def test_a_long_phase_reports_its_name_and_progress(caplog):
    caplog.set_level(logging.INFO)
    of_ranks = [Progress(3, 8, "responses"), Progress(4, 8, "responses"), Progress(0, 0, "")]
    reports = PhaseReports(lambda: of_ranks, every_s=0.05)
    with reports.phase("testing"):
        reports.note(1, 5, "batches")
        with reports.phase("gen"):
            first, second = wait_for_lines(caplog, 2)[:2]
    for line in (first, second):
        assert line.startswith("Phase gen: ")
        found = re.fullmatch(
            r"Phase gen: \d+ s so far, 1 of 5 batches, 7 of 16 responses, "
            r"(\S+) a second, about (\d+) s left",
            line,
        )
        assert found is not None, line
        rate, left_s = map(float, found.groups())
        assert left_s == pytest.approx(9 / rate, abs=0.51)


def test_a_terminal_has_one_line_that_goes_away(monkeypatch):
    """The line is removed before a line of the log, and at the end of the phase."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(phase_reports.sys, "stdout", terminal)
    monkeypatch.setattr(phase_reports, "_REDRAW_S", 0.02)
    reports = PhaseReports(lambda: [Progress(1, 4, "responses")])
    assert reports._status is not None
    with reports.phase("gen"):
        gives_up_at = time.monotonic() + 30
        while "1 of 4 responses" not in terminal.getvalue() and time.monotonic() < gives_up_at:
            time.sleep(0.01)
    logger.removeFilter(reports._status._before_log)
    shown = terminal.getvalue()
    assert "Phase gen: " in shown
    assert "\n" not in shown
    assert shown.endswith(phase_reports._CLEAR)


def test_a_program_may_have_no_standard_output(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    with PhaseReports(lambda: []).phase("gen"):
        pass


def test_nothing_is_reported_with_progress_off(caplog):
    caplog.set_level(logging.INFO)
    reports = PhaseReports(lambda: [], every_s=0.01, is_on=False)
    with reports.phase("gen"):
        assert reports._thread is None


class Clock:
    """Let time pass when a test says so. A sleeper wakes after a moment of real time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept = threading.Semaphore(0)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)
        self.slept.release()


def test_short_phases_are_silent_and_a_longer_one_is_not(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(phase_reports, "time", clock)
    reports = PhaseReports(lambda: [], every_s=0.3)

    def pass_time(seconds: float) -> None:
        with reports.phase("adv"):
            clock.now_s += seconds
            for _ in range(2):  # the first poll may have begun before the time passed
                assert clock.slept.acquire(timeout=60)
            while clock.slept.acquire(blocking=False):
                pass

    for _ in range(40):
        pass_time(0.01)
    assert caplog.messages == []
    pass_time(0.4)
    assert wait_for_lines(caplog, 1) == ["Phase adv: 0 s so far"]


def test_the_driver_reads_the_progress_of_the_ranks_while_they_run(tmp_path):
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    alone = progress_of_two(LocalPool(), tmp_path / "alone")
    two = launch(progress_of_two, tmp_path / "two").value
    assert alone == [[Progress(3, 8, "mini-batches")], [Progress(0, 0, "")]]
    assert two == [[Progress(3, 8, "mini-batches")] * 2, [Progress(0, 0, "")] * 2]


def test_roles_in_one_process_count_their_progress_once(tmp_path):
    use_kl = "actor_rollout_ref.actor.use_kl_loss=True"
    trainer = PPOTrainer(load_config(command_line(tmp_path, use_kl)))
    with pytest.raises(ConfigError, match=r"none is loaded. Call init_workers\(\) before it"):
        trainer.fit()

    trainer.init_workers()
    assert len(trainer.worker_groups()) == 3  # actor, rollout, reference
    note_progress(3, 8, "responses")
    assert trainer.progress() == [Progress(3, 8, "responses")]


def test_a_dropped_trainer_is_freed(tmp_path):
    """Its models would otherwise stay in memory next to those of the next one."""
    trainer = PPOTrainer(load_config(command_line(tmp_path)))
    trainer.init_workers()
    trainer.fit()
    kept = {
        "trainer": weakref.ref(trainer),
        "model": weakref.ref(trainer.actor_wg.worker.engine.hf_model),
        "rollout": weakref.ref(trainer.rollout_wg.worker.engine),
    }
    del trainer
    gc.collect()
    assert [name for name, part in kept.items() if part() is not None] == []
