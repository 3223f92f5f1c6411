"""The same program on Ray: one local cluster for all tests, because a start takes seconds."""

import contextlib
import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="the optional backend is not installed")
import psutil
import ray
import torch

from tests.single_controller import workers
from verl.single_controller import calls, links, ray_control, ray_process, ray_ranks
from verl.single_controller.data_future import DataProtoFuture
from verl.single_controller.ray import (
    RUNTIME_ENV,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    connect,
    create_colocated_worker_cls,
    merged_runtime_env,
)
from verl.single_controller.spmd import LocalPool
from verl.utils.devices import ALLOCATOR_SETTINGS
from verl.utils.errors import ConfigError, DeadlineError, WorkerError, WorkerLostError
from verl.utils.scratch import remove_left_behind

# Starting the cluster and its pools takes most of the time.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pools():
    """Start pools of two processes each, including those that tests break, in parallel."""
    # so that the processes of Ray find these workers
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    connect(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )

    os.environ["NCCL_VERL_TEST"] = "heard"  # unknown to Ray itself
    names = ("whole", "lonely")
    pools = {
        name: RayResourcePool(
            [2], use_gpu=False, name_prefix=name, max_colocate_count=3, run_ranks=[2, 3]
        )
        for name in names
    }

    with ThreadPoolExecutor(4) as threads:
        started = threads.map(lambda pool: pool.start("troubled", workers.Troubled), pools.values())
        while not pools["whole"]._groups:  # further sets use the space that the first has reserved
            time.sleep(0.01)
        more = {
            name: threads.submit(RayWorkerGroup, pools["whole"], colocated())
            for name in ("spawned", "stuck")
        }
        list(started)

    groups = {name: group.result() for name, group in more.items()}
    del os.environ["NCCL_VERL_TEST"]
    yield pools | groups
    for pool in pools.values():
        pool.shutdown()
    ray.shutdown()
    del os.environ["PYTHONPATH"]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(calls, "GRACE_S", 0.5)
    monkeypatch.setattr(calls, "ANSWER_S", 1.5)


def colocated():
    entries = {"counter": workers.Counter, "other": workers.Other, "troubled": workers.Troubled}
    return create_colocated_worker_cls(
        {name: RayClassWithInitArgs(cls) for name, cls in entries.items()}
    )


def stored_mib() -> float:
    """Return the size of Ray's object store, at most some seconds old."""
    size = ray.cluster_resources()
    free = ray.available_resources()
    return (size["object_store_memory"] - free["object_store_memory"]) / 2**20


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(pid: int, seconds: float) -> bool:
    """Wait for an actor to end: how long Ray takes depends on the machine."""
    gives_up_at = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < gives_up_at:
        time.sleep(0.05)
    return not is_running(pid)


def listening_addresses() -> set[str]:
    """Return the addresses that the processes of this test's Ray, and the test itself, listen
    on."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = set()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add(connection.laddr.ip)
    return found


def test_the_runs_own_ray_listens_on_the_loopback_address_alone(pools):
    ranks = pools["whole"].start("troubled", workers.Troubled)._ranks
    assert [place.address for place in ranks.places] == ["127.0.0.1"] * 2
    assert listening_addresses() <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def test_two_actors_give_the_answers_of_one_process(pools):
    assert workers.same_answers(pools["whole"]) == workers.same_answers(LocalPool())


def test_workers_get_variables_that_ray_does_not_know(pools):
    assert (
        pools["spawned"].spawn(["counter"])["counter"].variable("NCCL_VERL_TEST") == ["heard"] * 2
    )


def test_reports_of_a_method_arrive_while_it_runs(pools, tmp_path):
    """Poll for reports: the last one may be missing, but none arrives twice."""
    found = workers.heard(pools["whole"], tmp_path)
    names = [f"row {number}" for number in range(8)]
    assert len(found["reports"]) >= 2
    assert set(found["reports"]) <= set(names)
    assert len(set(found["reports"])) == len(found["reports"])
    assert found["ranks"] == [0, 1]
    assert found["answers"] == list(range(0, 16, 2))
    assert found["raised"][-1] is True


def test_calls_have_the_deadline_that_their_group_was_started_with(pools):
    group = pools["whole"].start("timed", workers.Counter, deadline_s=77.0)
    assert group.deadline_s == 77.0
    assert LocalPool().start("timed", workers.Counter).deadline_s > 77.0


def test_the_answer_of_a_call_is_passed_unread_to_the_next(pools):
    for other in ("whole", "lonely"):
        answers = workers.handed_on(pools["whole"], pools[other])
        assert answers | workers.HANDED_ON == answers
        assert answers["read by the driver"] == 0
        assert "no stamps" in answers["error"]


def test_calls_without_rows_do_not_go_through_ray(pools, monkeypatch):
    group = pools["whole"].start("counter", workers.Counter)
    monkeypatch.setattr(ray_ranks, "Reply", lambda *_: pytest.fail("this one does"))
    assert group.tell("hello") == ["0: hello", "1: hello"]
    assert [len(large) for large in group.give_back(torch.zeros(10**6))] == [10**6] * 2
    for call in (
        lambda: group.double(workers.rows(2)),
        lambda: group.tell("hello", blocking=False),
    ):
        with pytest.raises(pytest.fail.Exception, match="this one does"):
            call()


def test_no_call_overtakes_one_that_is_pending_in_ray(pools):
    group = pools["whole"].start("counter", workers.Counter)
    for pause_s in (0.2, 0.0):  # the second one waits within Ray for the first one to end
        group.double_aloud(workers.rows(2), pause_s=pause_s, blocking=False)
    assert group.seen_so_far() == [[1, 1], [1, 1]]


def test_values_of_the_drivers_own_program_travel_both_ways(pools, monkeypatch):
    """Include a class that a plain pickle would reference by a name unknown to the processes."""

    class Word:
        text = "hello"

    group = pools["whole"].start("counter", workers.Counter)
    assert [word.text for word in group.give_back(Word)] == ["hello"] * 2
    assert [function() for function in group.give_back(lambda: 7)] == [7, 7]
    Word.__module__ = "__main__"
    Word.__qualname__ = "Word"
    monkeypatch.setattr(sys.modules["__main__"], "Word", Word, raising=False)
    assert [type(word) for word in group.give_back(Word())] == [Word] * 2


def test_values_that_cannot_be_sent_are_reported_and_the_group_survives(pools):
    group = pools["whole"].start("troubled", workers.Troubled)
    with pytest.raises(
        WorkerError,
        match=r"cannot_be_pickled raised on rank \d, \d \(.*cannot pickle '_thread.lock'",
    ):
        group.cannot_be_pickled()
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
        group.fine(threading.Lock())
    assert [rank for rank, _ in group.fine()] == [0, 1]


class DoorElsewhere(links.Door):
    """Simulate another machine, with folders that the ranks do not have."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        shutil.rmtree(self.folder)


class ClosedDoor(DoorElsewhere):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.port = 1


def test_processes_outlive_a_connection_which_may_be_by_tcp(pools, monkeypatch):
    """Close the connection of a detached pool, as when its driver ends.

    Any other loss of a connection has no further effect.
    """
    group = pools["whole"].start("troubled", workers.Troubled)
    ranks = group._ranks
    before = group.fine()
    monkeypatch.setattr(ray_process, "Door", DoorElsewhere)
    monkeypatch.setattr(ranks, "links", ray_process.open_links(ranks.actors, {"another node"}))
    assert not any(peer.on_this_machine for peer in ranks.links.peers.values())
    assert group.fine(word="x" * 10**6) == before
    for peer in ranks.links.peers.values():
        peer.link.socket.shutdown(socket.SHUT_RDWR)
    while len(ranks.links.lost) < 2:
        time.sleep(0.01)
    assert group.fine() == before


def test_without_a_connection_calls_go_through_ray_and_a_line_is_logged(pools, monkeypatch, caplog):
    group = pools["whole"].start("troubled", workers.Troubled)
    ranks = group._ranks
    before = group.fine()
    monkeypatch.setattr(ray_process, "Door", ClosedDoor)
    monkeypatch.setattr(ranks, "links", ray_process.open_links(ranks.actors, {"another node"}))
    assert group.fine() == before
    assert "Calls without rows go through Ray as well" in caplog.text
    assert "rank 0 does not reach the driver ([Errno 111] Connection refused)" in caplog.text


def test_roles_of_a_pool_share_its_processes(pools):
    found = workers.two_roles(pools["whole"])
    assert found["words"] == ["0: hello", "1: hello"]
    assert found["share"] == [1, 102]
    assert found["counted"] == [3, 3, 3]
    assert [local_rank for _, local_rank in found["processes"]] == ["0", "1"]
    assert found["again"] == found["processes"]


def test_groups_in_verls_form(pools):
    """Start a second set of processes in a pool, with roles spawned from colocated classes."""
    spawned = pools["spawned"].spawn({"counter", "other"})
    assert spawned["counter"].tell("hello") == ["0: hello", "1: hello"]
    theirs = {pid for pid, _ in spawned["other"].process()}
    assert theirs.isdisjoint(
        pid for pid, _ in pools["whole"].start("other", workers.Other).process()
    )
    with pytest.raises(ConfigError, match=r"No roles \['critic'\]"):
        pools["spawned"].spawn({"critic"})


def test_a_future_of_verls_form_waits_for_object_references(pools):
    future = DataProtoFuture.concat([ray.put(workers.rows(3)), ray.put(workers.rows(1, start=3))])
    parts = future.chunk(2)
    assert [part.get().batch["x"].tolist() for part in parts] == [[0, 1], [2, 3]]
    group = pools["whole"].start("counter", workers.Counter)
    assert group.double(parts[1]).batch["y"].tolist() == [4, 6]


def test_one_rank_raises_and_the_group_survives(pools):
    (one, other), ranks = workers.one_raises_and_all_go_on(pools["whole"])
    for rank, (kind, text, cause) in enumerate((other, one)):
        assert kind == "WorkerError"
        assert text.startswith(f"troubled.only_rank_raises raised on rank {rank} (")
        assert "in only_rank_raises" in text
        assert cause == f"ConfigError('rank {rank} has no such key')"
    assert ranks == [0, 1]


def test_neither_memory_nor_stored_objects_grow_over_hundreds_of_calls(pools):
    before = stored_mib()
    workers.assert_nothing_grew(workers.many_calls(pools["whole"]))
    assert stored_mib() < before + 16


def test_a_killed_rank_is_named_at_once(pools):
    troubled = pools["spawned"].spawn({"troubled"})["troubled"]
    with pytest.raises(
        WorkerLostError,
        match=r"^troubled.one_gets: rank 1 \(rank 3 of the run, .*died: The actor died",
    ) as found:
        troubled.one_gets(1, signal.SIGKILL, deadline_s=20)
    text = str(found.value)
    assert "Rank 1 does not answer; last breadcrumb: " in text
    assert "on the way to the signal" in text
    assert "Rank 0 answers" in text
    assert "in one_gets" in text
    with pytest.raises(
        WorkerLostError, match="cannot be called any more: troubled.one_gets: rank 1"
    ):
        troubled.fine()


def test_loss_of_the_control_service_ends_the_wait_for_a_call(pools, monkeypatch):
    """Simulate the loss by a port that refuses: all tests of this module need the service."""
    monkeypatch.setattr(ray_control, "_OWN_GRACE_S", 0.5)
    ranks = pools["lonely"].start("troubled", workers.Troubled)._ranks
    group = pools["lonely"].start("again", workers.Troubled)
    processes = [pid for _, pid in group.fine()]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    ranks.control.close()
    ranks.control = ray_control.ControlWatch()
    ranks.control.address = address
    with pytest.raises(
        WorkerLostError, match=r"control service \(GCS, .*is gone: .*refused"
    ) as loss:
        group.one_gets(1, 0, deadline_s=60)
    (log,) = [word for word in str(loss.value).split() if "gcs_server" in word]
    assert Path(log.rstrip(",")).is_file()
    assert [ends_within(pid, 30.0) for pid in processes] == [True, True]


def test_a_stopped_rank_is_named_and_killed_even_if_its_neighbor_stops_meanwhile(
    pools, monkeypatch, caplog
):
    troubled = pools["stuck"].spawn({"troubled"})["troubled"]
    processes = [pid for _, pid in troubled.fine()]
    ranks = troubled._ranks
    find_stacks = ranks.stacks

    def then_stop_the_neighbour(timeout_s):
        found = find_stacks(timeout_s)
        os.kill(processes[0], signal.SIGSTOP)
        return found

    monkeypatch.setattr(ray_ranks, "_READ_S", 60.0)
    monkeypatch.setattr(ranks, "stacks", then_stop_the_neighbour)
    with pytest.raises(
        DeadlineError, match=r"^troubled.one_gets not done within 1 s: rank 1 \(.*; rank 0 \("
    ) as found:
        troubled.one_gets(1, signal.SIGSTOP, deadline_s=1)
    assert "Rank 1 does not answer; last breadcrumb: " in str(found.value)
    assert "on the way to the signal" in str(found.value)
    assert "Rank 0 answers" in str(found.value)
    assert [ends_within(pid, 20.0) for pid in processes] == [True, True]
    assert "could not be ended" not in caplog.text

    monkeypatch.setattr(ray_ranks, "_READ_S", 0.0)
    ranks.abort("again")
    assert f"Rank 1 ({ranks.describe(1)}) could not be ended" in caplog.text
    assert f"kill -9 {processes[1]} there" in caplog.text


def test_a_skipped_collective_is_reported_at_the_deadline(pools):
    with pytest.raises(
        DeadlineError, match=r"one_skips_a_collective not done within 1 s: rank 0 \("
    ) as found:
        workers.trouble_within(pools["whole"], 1.0, "one_skips_a_collective", 1)
    assert "rank 1 (" not in str(found.value).splitlines()[0], "it is done"
    assert "in _collective" in str(found.value)
    assert "one_skips_a_collective is done" in str(found.value)


def test_a_request_that_the_runs_own_ray_cannot_serve_fails_at_once(pools):
    for use_gpu, kind, way_out in ((False, "CPU", "num_cpus=64"), (True, "GPU", "n_gpus_per_node")):
        with pytest.raises(ConfigError, match=f"64 ranks need 64 {kind}s.*has.*{way_out}"):
            RayResourcePool([64], use_gpu=use_gpu).new_processes(timeout_s=60.0)


def test_a_cluster_without_room_reports_its_resources(pools, monkeypatch, caplog):
    monkeypatch.setattr("verl.single_controller.ray_pools.is_own", lambda: False)
    monkeypatch.setattr("verl.single_controller.ray_pools._SILENT_S", 0.1)
    with pytest.raises(
        ConfigError, match=r"no room for \[64\] processes with \{'CPU': 1.0, 'GPU': 1.0\} each"
    ):
        RayResourcePool([64]).new_processes(timeout_s=0.2)
    [waiting] = caplog.messages
    assert re.search(
        r"found no room yet for \[64\].*its nodes have .* Waiting up to 0.2 s", waiting
    )
    with pytest.raises(ConfigError, match=r"For two nodes of eight GPUs give \[8, 8\]"):
        RayResourcePool()


def test_a_class_without_its_arguments_is_named():
    with pytest.raises(ConfigError, match=r"must be RayClassWithInitArgs\(cls=.* got type\."):
        RayWorkerGroup(RayResourcePool([1]), workers.Counter)  # pyright: ignore


def test_an_existing_ray_is_used_unchanged(pools):
    before = ray.get_runtime_context().get_job_id()
    connect(address="no such cluster")
    assert ray.get_runtime_context().get_job_id() == before


def test_a_fork_does_not_destroy_what_it_inherits(pools):
    class Client:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != driver:
                os._exit(1)

    driver = os.getpid()
    Client()  # garbage for the next collection
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_users_runtime_environment_extends_the_shipped_one(monkeypatch):
    monkeypatch.delenv(ALLOCATOR_SETTINGS, raising=False)  # a trainer in this process has set it
    given = {"excludes": ["data/"], "env_vars": {"A": "1"}, "working_dir": "."}
    merged = merged_runtime_env(given)
    assert {"checkpoints/", "*.safetensors", "data/"} <= set(merged["excludes"])
    assert merged["env_vars"] == {**RUNTIME_ENV["env_vars"], "A": "1"}
    assert merged["working_dir"] == "."
    assert given["excludes"] == ["data/"]
    assert merged_runtime_env(None) == RUNTIME_ENV


def test_a_runtime_environment_may_be_a_file(tmp_path):
    file = tmp_path / "runtime_env.yaml"
    file.write_text("excludes: [data/]")
    assert "data/" in merged_runtime_env(str(file))["excludes"]
    file.write_text("- data/")
    with pytest.raises(ConfigError, match=r"must hold a mapping, got \['data/'\] \(list\)"):
        merged_runtime_env(str(file))
    with pytest.raises(ConfigError, match="no/such/file.yaml cannot be read"):
        merged_runtime_env("no/such/file.yaml")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (7, "must hold a mapping, got 7"),
        ({"excludes": 7}, "excludes must be a list of patterns"),
        ({"excludes": "data/"}, "excludes must be a list of patterns"),
        ({"env_vars": 7}, "env_vars must map names to texts"),
        ({"env_vars": {"A": 7}}, "env_vars must map names to texts"),
        ({"workingdir": "."}, "Ray knows no entry 'workingdir'. Nearest known: working_dir"),
        ({"working_dir": "no/such"}, "working_dir must be a folder .* got 'no/such', which does"),
    ],
)
def test_an_invalid_runtime_environment_is_rejected(given, message):
    with pytest.raises(ConfigError, match=f"ray_init.runtime_env.*{message}"):
        merged_runtime_env(given)


def test_a_cluster_that_does_not_answer_is_reported_at_once(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in ("127.0.0.1:9", "ray://127.0.0.1:9"):
        with pytest.raises(
            ConfigError, match=f"No Ray cluster answers at ray_init.address={address}"
        ):
            connect(address=address)


@pytest.mark.parametrize("is_late_again", [False, True])
def test_a_ray_that_is_late_on_a_busy_machine_is_started_again(
    monkeypatch, tmp_path, is_late_again
):
    # Ray leaves such a process behind. Its name is that of the file.
    left = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep") or "", left)
    processes: list[subprocess.Popen[bytes]] = []

    def init(**arguments: Any) -> None:
        if processes and not is_late_again:
            return
        processes.append(subprocess.Popen([str(left), "60"]))
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("verl.single_controller.ray.remove_session_at_exit", lambda: None)
    if is_late_again:
        with pytest.raises(ConfigError, match="started twice.*30 s.*load of.*ray start --head"):
            connect()
    else:
        connect()
    assert len(processes) == 1 + is_late_again
    assert not any(psutil.pid_exists(process.pid) for process in processes)
    ray_control.note_own(False)


_KILLED_DRIVER = """
import psutil, sys, time
from tests.single_controller import workers
from verl.single_controller.ray import RayResourcePool, connect

if __name__ == "__main__":
    connect(num_cpus=2, log_to_driver=False, logging_level="ERROR")
    RayResourcePool([1], use_gpu=False).start("troubled", workers.Troubled).fine()
    found = [process.pid for process in psutil.Process().children(recursive=True)]
    print(*found, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_folder_of_the_runs_own_ray_stays_only_after_a_loss(tmp_path, monkeypatch, is_kept):
    session = tmp_path / "session_1"
    (session / "logs").mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to(session)
    monkeypatch.setattr(ray_control, "_session", session)
    monkeypatch.setattr(ray_control, "_kept", set())
    monkeypatch.setattr(ray, "shutdown", lambda: None)

    if is_kept:
        ray_control.keep_session()
    ray_control._remove_session(session, os.getpid() + 1)
    assert session.is_dir(), "a fork removes nothing"
    ray_control._remove_session(session, os.getpid())
    assert session.is_dir() == is_kept
    assert (tmp_path / "session_latest").is_symlink() == is_kept


def test_nothing_outlives_a_killed_driver(tmp_path):
    (tmp_path / "program.py").write_text(_KILLED_DRIVER)
    scratch = Path("/tmp") / tmp_path.name  # the path of a socket must be short
    scratch.mkdir(exist_ok=True)
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(scratch)}
    driver = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
    )
    assert driver.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    agents = [process for process in processes if process.name().endswith("Agent")]
    assert agents
    assert list(scratch.glob("verl-*"))

    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(processes, timeout=30)  # Ray alone: 60 s
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    # Ray may kill a rank before it removes its folder; then the next start does.
    remove_left_behind(scratch)
    assert list(scratch.glob("verl-*")) == []
    shutil.rmtree(scratch)


def test_workers_get_the_drivers_nccl_variables(monkeypatch):
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    variables = merged_runtime_env({"env_vars": {"NCCL_DEBUG": "INFO"}})["env_vars"]
    assert (variables["NCCL_IB_DISABLE"], variables["NCCL_DEBUG"]) == ("1", "INFO")
