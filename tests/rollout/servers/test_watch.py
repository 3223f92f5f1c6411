"""Servers that hang: they keep their connections, and answer nothing."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import urllib3

from tests.cases import cases
from tests.rollout.servers.rollouts import (
    PARAMS,
    check_redrawn,
    draw,
    draw_while,
    largest_kl,
    move,
    updated_rollout,
)
from tests.rollout.servers.test_owned import install
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, actor_of
from verl.rollout.servers import watch
from verl.rollout.servers.vllm import VLLMServer
from verl.rollout.servers.watch import ServerLostError, Watch
from verl.rollout.types import Request
from verl.workers import RolloutWorker

# The program of a server that the run starts.
OWN_SERVER = """
import sys, threading
from tests.rollout.servers.conftest import untied_copy
from tests.rollout.servers.fake import FakeServer

argument = dict(zip(sys.argv, sys.argv[1:]))
server = FakeServer(untied_copy, port=int(argument["--port"]), name=argument["--model"])
server.delay_s = 0.05
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Look often, so that a server that hangs is noticed after about three seconds."""
    monkeypatch.setattr(watch, "_EVERY_S", 0.2)
    monkeypatch.setattr(watch, "_SIGN_S", 0.8)
    monkeypatch.setattr(watch, "_MISSES_OF_ENGINE", 4)


@pytest.mark.parametrize(
    ("others", "dialect", "part"),
    cases(
        [0, 1],
        ["vllm", "sglang"],
        ["it", "its engine"],
        quick=lambda *case: case == (1, "sglang", "it"),
    ),
)
def test_samples_of_a_server_that_hangs_are_drawn_again(
    settings, start, caplog, dialect, others, part
):
    """Without another server, the same one draws them when it answers again."""
    servers = [start(dialect) for _ in range(others + 1)]
    settings.actor_rollout_ref.rollout.server_timeout_s = 60.0
    rollout = updated_rollout(settings, *servers)
    expected = draw(rollout).batch["responses"]
    hangs = servers[0]
    hangs.delay_s = 0.02
    before = hangs.draws
    thawed = hangs.thawed if part == "it" else hangs.engine_thawed
    questions = 3 if part == "it" else 4

    def freeze():
        while hangs.draws < before + 3:
            time.sleep(0.005)
        thawed.clear()
        while not others and rollout.engine.fleet.living():
            time.sleep(0.01)
        if not others:
            thawed.set()

    batch = draw_while(freeze, rollout)
    check_redrawn(batch, expected)
    assert largest_kl(rollout.actor, batch) < 1e-5
    silence = f"{part} gave no answer within 0.8 s to {questions} questions in a row"
    assert f"at {hangs.url} hangs: {silence}" in caplog.text


@pytest.mark.slow
def test_a_server_that_is_slow_is_not_lost_and_is_asked_once_for_all_draws(settings, start):
    server = start()
    rollout = updated_rollout(settings, server)
    expected = draw(rollout, count=16).batch["responses"]
    # of each token: a draw takes longer than it takes to notice a server that hangs
    server.delay_s = 0.5
    server.asked.clear()

    began = time.monotonic()
    batch = draw(rollout, count=16)
    looks = (time.monotonic() - began) / watch._EVERY_S
    assert looks > 15
    assert torch.equal(batch.batch["responses"], expected)
    assert batch.meta_info["metrics"]["rollout/num_redrawn"] == 0
    assert 3 <= server.asked["/v1/models"] <= looks + 2
    assert server.asked["/inference/v1/generate"] == 32


@pytest.mark.slow
def test_weights_are_not_pushed_to_a_server_that_hangs(settings, start):
    """Weights may take half an hour, so the server is asked before."""
    hangs, other = start(), start()
    rollout = updated_rollout(settings, hangs, other)
    hangs.thawed.clear()
    move(rollout.actor)
    began = time.monotonic()
    rollout.take_weights()
    batch = draw(rollout)
    assert time.monotonic() - began < 15
    assert largest_kl(rollout.actor, batch) < 1e-5

    hangs.thawed.set()
    time.sleep(0.1)
    draw(rollout)
    assert len(rollout.engine.fleet.living()) == 2
    assert hangs.weight_version == other.weight_version


@pytest.mark.slow
def test_a_server_that_is_silent_while_it_takes_weights_is_not_lost(settings, start):
    server = start()
    settings.actor_rollout_ref.rollout.fingerprint_interval = 0
    rollout = updated_rollout(settings, server)
    engine = rollout.engine
    server.delay_s = 0.1
    engine.submit([Request(prompt_ids=(5, 6, 7), sample_ids=(0,))], PARAMS, seed=0, step=0)
    while not server.running:
        time.sleep(0.005)

    take = server._rpc

    def take_in_silence(body):
        server.thawed.clear()
        threading.Timer(5.0, server.thawed.set).start()
        return take(body)

    server._rpc = take_in_silence
    rollout.take_weights()
    while engine.has_work:
        engine.step()
    assert engine.statistics()["num_redrawn"] == 0


def test_other_samples_go_on_while_one_asks_a_server_that_hangs(settings, start, monkeypatch):
    monkeypatch.setattr(watch, "_SIGN_S", 5.0)
    hangs, other = start(), start()
    rollout = updated_rollout(settings, hangs, other)
    hangs.thawed.clear()
    fleet = rollout.engine.fleet
    fleet.note_lost(fleet.members[0], ServerLostError("lost"))
    fleet._looked = 0.0

    first = threading.Thread(target=fleet._look_again)
    first.start()
    while not hangs.asked["/v1/models"]:
        time.sleep(0.005)
    began = time.monotonic()
    fleet._look_again()
    assert time.monotonic() - began < 1
    hangs.thawed.set()
    first.join()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["in a draw", "before a push"])
def test_a_server_of_the_run_that_hangs_is_killed_and_started_again(
    settings, folder, tmp_path, monkeypatch, when
):
    install(tmp_path, "0.32.0", program=OWN_SERVER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path.cwd())]))
    rollout_config = settings.actor_rollout_ref.rollout
    rollout_config.name = "vllm"
    rollout_config.server_python = sys.executable
    rollout_config.server_timeout_s = 60.0
    actor = actor_of(settings)
    rollout = RolloutWorker(
        settings.actor_rollout_ref, device=CPU, tokenizer=tiny_tokenizer(), actor=actor
    )
    move(actor)
    rollout.take_weights()
    expected = draw(rollout).batch["responses"]
    owned = rollout.engine.fleet._restarter
    [keeper] = owned._processes.values()
    [server] = psutil.Process(keeper.pid).children()

    if when == "in a draw":

        def stop():
            while rollout.engine.fleet.is_idle:
                time.sleep(0.005)
            server.send_signal(signal.SIGSTOP)

        batch = draw_while(stop, rollout)
        check_redrawn(batch, expected)
    else:
        server.send_signal(signal.SIGSTOP)
        move(actor)
        rollout.take_weights()
        batch = draw(rollout)

    assert largest_kl(actor, batch) < 1e-5
    assert not server.is_running()
    [again] = owned._processes.values()
    assert again.pid != keeper.pid
    owned.close()


@pytest.mark.slow
def test_a_draw_ends_also_where_the_server_hangs_in_the_middle_of_its_answer():
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_half():
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}")  # without a length
        held.append(connection)

    held = []
    thread = threading.Thread(target=answer_half)
    thread.start()
    server = VLLMServer(f"http://127.0.0.1:{listener.getsockname()[1]}")
    with pytest.raises(
        ServerLostError, match="hangs: it gave no answer within 0.8 s to 3 questions"
    ):
        server.ask_to_draw("/inference/v1/generate", {})
    thread.join()
    held[0].close()
    listener.close()


def lost(cause):
    error = ServerLostError("no answer")
    error.__cause__ = cause
    return error


def refused():
    cause = urllib3.exceptions.NewConnectionError(None, "refused")
    cause.__cause__ = ConnectionRefusedError()
    return cause


def look(look_once, times):
    for _ in range(times):
        with pytest.raises(ServerLostError):
            look_once()


def test_three_silences_in_a_row_are_a_verdict_and_nothing_else_is():
    outcomes = []

    def ask(timeout_s):
        if outcomes and outcomes[0] is not None:
            raise lost(outcomes[0])

    silent = urllib3.exceptions.ReadTimeoutError(None, "/", "timed out")
    server = Watch("a server", ask, ask_engine=lambda timeout_s: None)

    outcomes[:] = [silent]
    look(server.look, 2)
    outcomes[:] = [None]
    server.look()
    outcomes[:] = [silent]
    look(server.look, 2)
    outcomes[:] = [refused()]  # it starts: the machine answers
    look(server.look, 5)
    outcomes[:] = [silent]
    look(server.look, 2)
    with server.excused():
        look(server.look, 5)
    look(server.look, 2)
    assert server.hung_at < 0

    began = time.monotonic()
    look(server.look, 1)
    assert server.hung_at >= began


def test_an_engine_may_be_silent_for_longer_than_its_server():
    def ask(timeout_s):
        if has_ended:
            raise lost(refused())

    def ask_engine(timeout_s):
        raise lost(urllib3.exceptions.ReadTimeoutError(None, "/", "timed out"))

    has_ended = False
    server = Watch("a server", ask, ask_engine)
    look(server.look_at_engine, 3)
    has_ended = True
    look(server.look, 1)
    look(server.look_at_engine, 3)  # of the one that was started in its place
    assert server.hung_at < 0
    look(server.look_at_engine, 1)
    assert server.hung_at > 0
