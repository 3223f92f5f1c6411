"""Ranks of one launch: the same answers as one process, and an error with its cause in every
failure."""

import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.single_controller import workers
from tests.single_controller.launch import Run, launch
from verl.single_controller import WorkerGroup, breadcrumbs, links, spmd_rank
from verl.single_controller.breadcrumbs import (
    breadcrumb,
    format_stacks,
    keep_breadcrumbs,
    read_breadcrumbs,
)
from verl.single_controller.calls import GroupFuture, Lost
from verl.single_controller.host import Raised
from verl.single_controller.in_process import InProcess
from verl.single_controller.spmd import LocalPool, join
from verl.single_controller.wire import Kind
from verl.utils.errors import ConfigError, WorkerLostError


@pytest.fixture(scope="module")
def troubles() -> dict[str, Run]:
    """Run all failures at once: most of the time is spent waiting for deadlines."""
    scenarios = {
        "killed": (workers.killed, 1),
        "stopped": (workers.stopped, 1, 1.0),
        "driver raises": (workers.trouble, "one_raises_before_a_collective", 0),
        "rank raises": (workers.trouble, "one_raises_before_a_collective", 1),
        "terminated": (workers.terminated_after_a_death,),
        "exits": (workers.trouble, "one_exits_between_collectives", 1),
        "skipped": (workers.trouble_within, 1.0, "one_skips_a_collective", 1),
    }
    launch(workers.two_roles)  # before the others, which can then fork
    with ThreadPoolExecutor(len(scenarios)) as threads:
        runs = {name: threads.submit(launch, *scenario) for name, scenario in scenarios.items()}
        return {name: run.result() for name, run in runs.items()}


def error_of(run: Run) -> tuple[str, str]:
    assert run.error is not None, run.value
    assert None not in run.exit_codes, "all processes have ended"
    return run.error


def test_two_ranks_give_the_answers_of_one_process():
    assert launch(workers.same_answers).value == workers.same_answers(LocalPool())


def test_reports_of_a_method_arrive_while_it_runs(tmp_path):
    for name in ("alone", "two"):
        (tmp_path / name).mkdir()
    alone = workers.heard(LocalPool(), tmp_path / "alone")
    two = launch(workers.heard, tmp_path / "two").value
    names = [f"row {number}" for number in range(8)]
    for found, ranks in ((alone, [0]), (two, [0, 1])):
        assert found["reports"] == names
        assert found["ranks"] == ranks
        assert found["answers"] == list(range(0, 16, 2))
        assert found["raised"] == ["before"] * len(ranks) + [True]
        assert found["pending"] == 0


def handed_on_between_parts(pool):
    return workers.handed_on(*pool.split([[0, 1], [2, 3]]))


def handed_on_within_a_pool(pool):
    return workers.handed_on(pool, pool)


@pytest.mark.parametrize(
    ("scenario", "size"),
    [(handed_on_within_a_pool, 2), (handed_on_between_parts, 4)],
    ids=["same ranks", "other ranks"],
)
def test_the_answer_of_a_call_is_passed_unread_to_the_next(scenario, size):
    answers = launch(scenario, size=size).value
    assert answers | workers.HANDED_ON == answers
    assert answers["read by the driver"] == 0
    assert "no stamps" in answers["error"]


def test_roles_of_a_pool_share_its_processes():
    run = launch(workers.two_roles)
    assert run.exit_codes == [0, 0]
    found = run.value
    assert found["words"] == ["0: hello", "1: hello"]
    assert found["each"] == ["0: a", "1: b"]
    assert found["share"] == [1, 102]
    assert found["counted"] == [3, 3, 3], "both ranks work on all rows, and answer once"
    assert len({pid for pid, _ in found["processes"]}) == 2
    assert found["again"] == found["processes"]


def test_one_rank_raises_and_the_group_survives():
    run = launch(workers.one_raises_and_all_go_on)
    assert run.error is None, run.error
    (one, other, unsendable), ranks = run.value
    for rank, (kind, text, cause) in enumerate((other, one)):
        assert kind == "WorkerError"
        assert text.startswith(f"troubled.only_rank_raises raised on rank {rank} (")
        assert f"ConfigError: rank {rank} has no such key" in text.splitlines()[0]
        assert "in only_rank_raises" in text
        assert cause == f"ConfigError('rank {rank} has no such key')"
    assert "raised on rank 1" in unsendable[1]
    assert "lambda" in unsendable[1]
    assert ranks == [0, 1]
    assert run.exit_codes == [0, 0]


def test_an_interrupt_does_not_keep_a_call_from_some_of_the_ranks():
    """They would wait in a collective for the others, until they are killed after 20 s."""
    run = launch(workers.interrupted_call)
    assert run.value == [[1], [1]], run.error


def test_a_killed_rank_is_named_at_once(troubles):
    kind, text = error_of(troubles["killed"])
    assert kind == "WorkerLostError"
    assert text.startswith("troubled.one_gets: rank 1 (")
    assert "Rank 1 does not answer; last breadcrumb: " in text
    assert "on the way to the signal" in text
    assert "Rank 0 answers" in text
    assert "in one_gets" in text, "where the other one is"
    assert "_bootstrap" not in text, "of its stack, what is in the method"


def test_a_terminated_driver_reports_which_rank_died_before(troubles):
    kind, text = error_of(troubles["terminated"])
    assert kind == "WorkerLostError"
    assert text.startswith("rank 1 (")
    assert "Last breadcrumb of rank 1: " in text
    assert "troubled.fine is done" in text


def test_a_death_within_a_collective_is_named_before_the_errors_that_follow(troubles):
    kind, text = error_of(troubles["exits"])
    assert kind == "WorkerLostError"
    first, *_, ended, last = text.splitlines()
    assert first.startswith("troubled.one_exits_between_collectives: rank 1 (")
    assert "dmesg | grep" in text
    assert ended == "All processes of the group have been ended."
    assert last == first


class EndedRanks(InProcess):
    """Ranks that fail in this order: the first raised, the second died."""

    size = 2
    raised = Raised("RuntimeError: connection closed", "", None)

    def __init__(self) -> None:
        self.noticed = iter([{0: self.raised}, {0: self.raised, 1: Lost("signal 9")}])

    def wait(self, replies, timeout_s):
        return next(self.noticed)

    def abort(self, reason):
        """End no process."""


def test_a_death_is_listed_before_an_error_that_was_noticed_first():
    future = GroupFuture(EndedRanks(), "actor.update", {0: None, 1: None}, [0, 1], list, 20.0)
    with pytest.raises(WorkerLostError) as found:
        future.result()
    text = str(found.value)
    assert text.startswith("actor.update: rank 1 (this process) died: signal 9\nAlso: ")
    assert "raised on rank 0 (this process): RuntimeError: connection closed" in text


@pytest.mark.slow
def test_a_stopped_driver_is_ended_by_the_other_ranks():
    run = launch(workers.driver_stops, silence_s=4.0)
    assert run.error == ("no answer", "")
    assert run.exit_codes == [-9, 1]


def test_ranks_of_one_machine_listen_on_the_loopback_address_alone():
    addresses = launch(workers.listening).value
    assert {address for of_rank in addresses for address in of_rank} == {"127.0.0.1"}


def test_a_rank_reads_no_token_that_another_user_could_have_written(tmp_path, monkeypatch):
    door = links.Door(2, other_machines=False)
    assert door.port == 0
    folder = Path(door.folder)
    assert links.read_token(folder) == door.token
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(WorkerLostError, match="must belong to user"):
        links.read_token(folder)
    with pytest.raises(WorkerLostError, match="same user and the same TMPDIR"):
        links.read_token(tmp_path)
    door.close()
    shutil.rmtree(folder)


def test_a_stopped_rank_is_named_at_the_deadline(troubles):
    kind, text = error_of(troubles["stopped"])
    assert kind == "DeadlineError"
    assert text.startswith("troubled.one_gets not done within 1 s: rank 1 (")
    assert "; rank 0 (" in text.splitlines()[0]
    assert "Rank 1 does not answer; last breadcrumb: " in text
    assert "Rank 0 answers" in text
    assert troubles["stopped"].exit_codes[1] == -9, "a stopped process is killed"


@pytest.mark.parametrize(("name", "rank"), [("driver raises", 0), ("rank raises", 1)])
def test_a_rank_that_raises_does_not_leave_the_others_in_a_collective(troubles, name, rank):
    kind, text = error_of(troubles[name])
    assert kind == "WorkerError"
    assert text.startswith(f"troubled.one_raises_before_a_collective raised on rank {rank} (")
    assert "KeyError: 'skipped the collective'" in text.splitlines()[0]
    assert f"Rank {1 - rank} answers; last breadcrumb: " in text
    assert "in _collective" in text


def test_a_skipped_collective_is_reported_at_the_deadline(troubles):
    kind, text = error_of(troubles["skipped"])
    assert kind == "DeadlineError"
    assert text.startswith("troubled.one_skips_a_collective not done within 1 s: rank 0 (")
    assert "rank 1 (" not in text.splitlines()[0], "it is done"
    assert "in _collective" in text
    assert "one_skips_a_collective is done" in text


def test_neither_memory_nor_descriptors_grow_over_hundreds_of_calls():
    run = launch(workers.many_calls, timeout_s=100)
    assert run.error is None, run.error
    workers.assert_nothing_grew(run.value)


@pytest.mark.slow
def test_torchrun_does_not_end_the_driver_before_it_reports_the_cause():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m"]
    found = subprocess.run(
        [*command, "tests.single_controller.torchrun_program"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    answers = next(line for line in found.stdout.splitlines() if line.startswith("ANSWER "))
    assert json.loads(answers.removeprefix("ANSWER ")) == workers.same_answers(LocalPool())
    assert found.returncode != 0
    assert "WorkerLostError: troubled.one_gets: rank 1 (" in found.stderr
    assert "Rank 1 does not answer; last breadcrumb: " in found.stderr


def test_a_process_alone_has_a_pool_of_itself(monkeypatch):
    pool = join()
    group = pool.start("counter", workers.Counter, 3)
    assert isinstance(group, WorkerGroup)
    assert group.tell("hello") == ["3: hello"]
    pool.shutdown()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK.*not set. Launch with torchrun"):
        join()


def test_ranks_of_other_machines_connect_by_tcp_and_strangers_are_rejected(monkeypatch):
    store = HashStore()
    monkeypatch.setattr(spmd_rank, "_store", lambda world_size, timeout_s: store)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(spmd_rank.connect_all, 2, 20.0)
        port = int(store.get("port"))
        token = store.get("token").decode()
        entrance = links.Entrance("a folder of another machine", "localhost", port, token)
        stranger = links.connect(entrance._replace(token="x" * len(token)), 1, 20.0)
        with pytest.raises((EOFError, OSError)):
            stranger.receive()
        link = links.connect(entrance, 1, 20.0)
        peers, folder = waiting.result()

    here = f"{socket.gethostname()}, pid {os.getpid()}"
    assert (peers[1].place, peers[1].on_this_machine, link.same_machine) == (here, False, False)
    peers[1].link.send(Kind.CALL, 3, torch.ones(100_000))
    assert link.receive().value().sum() == 100_000
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.seed=1", "data.seed=2"], None),
        (["data.seed=2", "trainer.seed=1"], None),
        (["trainer.seed=1", "data.seed=3"], "only here: data.seed; given to rank 0 alone: 1."),
        (["trainer.seed=1"], "only here: none; given to rank 0 alone: 1."),
    ],
)
def test_a_machine_with_other_arguments_than_rank_0_says_so(monkeypatch, caplog, arguments, said):
    store = HashStore()
    monkeypatch.setattr(spmd_rank, "_store", lambda world_size, timeout_s: store)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr("sys.argv", ["main_ppo.py", "trainer.seed=1", "data.seed=2"])

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(spmd_rank.connect_all, 2, 20.0)
        store.get("folder")
        monkeypatch.setattr("sys.argv", ["main_ppo.py", *arguments])
        entrance = spmd_rank._find_entrance(2, 20.0)
        links.connect(entrance, 1, 20.0)
        _, folder = waiting.result()

    shutil.rmtree(folder)
    warnings = [line for line in caplog.messages if "other arguments than rank 0" in line]
    assert len(warnings) == (said is not None)
    assert all(said in line for line in warnings)


def test_missing_ranks_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spmd_rank, "_store", lambda world_size, timeout_s: HashStore())
    with pytest.raises(WorkerLostError, match=r"Ranks \[1, 2\] of 3 did not connect within 0.1 s"):
        spmd_rank.connect_all(3, 0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_connect_at_the_last_moment(monkeypatch, tmp_path):
    def admit(door):
        time.sleep(0.1)
        return {1: "peer"}

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(spmd_rank, "_store", lambda world_size, timeout_s: HashStore())
    monkeypatch.setattr(links.Door, "admit", admit)
    peers, folder = spmd_rank.connect_all(2, 0.05)
    shutil.rmtree(folder)
    assert peers == {1: "peer"}


def test_breadcrumbs_survive_the_objects_that_they_describe(tmp_path, monkeypatch):
    # This process must stop writing to the file: its progress goes elsewhere.
    monkeypatch.setattr(breadcrumbs._Notes, "file", None)
    breadcrumb("lost: there is no file yet")
    keep_breadcrumbs(tmp_path, 3)
    breadcrumb("before the long one")
    breadcrumb("é" * 1000)
    assert read_breadcrumbs(tmp_path)[3].endswith("éé")
    breadcrumb("short")
    assert read_breadcrumbs(tmp_path)[3].split(" ", 1)[1] == "short"


def test_stacks_name_threads_and_lines(monkeypatch):
    list_frames = sys._current_frames

    def not_collecting():
        assert not gc.isenabled(), "Python 3.11 may wait forever"
        return list_frames()

    monkeypatch.setattr(sys, "_current_frames", not_collecting)
    begun = threading.Event()
    done = threading.Event()

    def wait_here() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=wait_here, name="the waiting one")
    thread.start()
    begun.wait()
    text = format_stacks()
    done.set()
    thread.join()
    assert "thread the waiting one:" in text
    assert "in wait_here" in text
