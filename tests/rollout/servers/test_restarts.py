"""Servers that end, come back or close connections, and the samples that they had."""

import threading
import time

import pytest
import torch

from tests.cases import cases
from tests.rollout.servers.rollouts import (
    assert_a_restart_is_noticed,
    check_redrawn,
    draw,
    draw_while,
    largest_kl,
    move,
    rollout_on,
    updated_rollout,
)
from tests.workers.batches import actor_of
from verl.rollout.servers.server import ServerLostError
from verl.utils.errors import RolloutError

# Dialect and version: vLLM 0.24 records no version of the weights.
KINDS = [("vllm", "0.32.0"), ("vllm", "0.24.0"), ("sglang", "0.5.23"), ("sglang", "0.5.3")]


@pytest.mark.parametrize(
    ("dialect", "version"),
    [*KINDS[::2], *(pytest.param(*kind, marks=pytest.mark.slow) for kind in KINDS[1::2])],
)
def test_a_restarted_server_gets_the_weights_before_it_draws(settings, start, dialect, version):
    server = start(dialect, version)
    rollout = updated_rollout(settings, server)
    expected = draw(rollout).batch["responses"]
    server.end()
    server.start()
    assert torch.equal(draw(rollout).batch["responses"], expected)


def test_a_restart_between_two_draws_is_noticed_by_a_server_that_names_no_weights(settings, start):
    server = start("vllm", "0.24.0")
    engine = updated_rollout(settings, server).engine
    engine.forget_prefixes()
    assert_a_restart_is_noticed(engine, server)


@pytest.mark.parametrize(
    ("dialect", "others"),
    cases(["vllm", "sglang"], [0, 1], quick=lambda *case: case in {("vllm", 1), ("sglang", 0)}),
)
def test_samples_of_a_server_that_ends_are_drawn_again(settings, start, dialect, others):
    """End it in the middle of its draws; without another server, it comes back with old weights."""
    servers = [start(dialect) for _ in range(others + 1)]
    rollout = updated_rollout(settings, *servers)
    expected = draw(rollout).batch["responses"]

    for server in servers:
        server.delay_s = 0.02
    before = servers[0].draws

    def interrupt():
        while servers[0].draws < before + 3:
            time.sleep(0.005)
        servers[0].end()
        if not others:
            servers[0].start()

    batch = draw_while(interrupt, rollout)
    check_redrawn(batch, expected)
    assert largest_kl(rollout.actor, batch) < 1e-5


@pytest.mark.parametrize("probe", [1, 2], ids=["before the push", "after it"])
def test_a_hand_over_outlives_a_server_that_ends_in_its_proof(settings, start, probe):
    server = start()
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor)
    rollout.take_weights()
    move(actor)
    server.delay_s = 0.02
    last = server.draws + probe

    def interrupt():
        while server.draws < last:
            time.sleep(0.005)
        server.end()
        server.start()

    thread = threading.Thread(target=interrupt)
    thread.start()
    rollout.take_weights()
    thread.join()
    assert largest_kl(actor, draw(rollout)) < 1e-5


@pytest.mark.parametrize(("dialect", "version"), KINDS)
def test_a_server_that_restarts_before_the_proof_gets_the_weights(
    settings, start, dialect, version, monkeypatch
):
    server = start(dialect, version)
    actor = actor_of(settings)
    rollout = rollout_on(settings, server, actor=actor)
    rollout.take_weights()
    move(actor)
    push = rollout.engine.fleet.push

    def push_and_restart(*arguments, **keywords):
        push(*arguments, **keywords)
        server.end()
        server.start()

    monkeypatch.setattr(rollout.engine.fleet, "push", push_and_restart)
    if server.version == "0.24.0":  # names no weights
        with pytest.raises(RolloutError, match="other weights than"):
            rollout.take_weights()
        return
    rollout.take_weights()
    assert largest_kl(actor, draw(rollout)) < 1e-5


def test_a_run_ends_with_the_reason_if_no_server_comes_back(settings, start):
    server = start()
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    rollout.engine.fleet._patience_s = 0.3
    server.end()
    with pytest.raises(RolloutError, match=f"No server has answered.*vLLM at {server.url}"):
        draw(rollout)


def test_samples_that_another_run_aborts_are_drawn_again(settings, start):
    server = start("sglang")
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    expected = draw(rollout).batch["responses"]
    server.delay_s = 0.02
    before = server.draws

    def push():
        while server.draws < before + 3:
            time.sleep(0.005)
        server.answer("/pause_generation", {"mode": "abort"}, threading.Event())
        server.answer("/continue_generation", {}, threading.Event())

    check_redrawn(draw_while(push, rollout), expected)


def test_a_server_that_closes_idle_connections_is_not_lost(settings, start):
    """It closes them when the next call is on its way, so that the call has no answer."""
    server = start()
    server.faults.add("closes after an answer")
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    batch = draw(rollout)
    assert batch.meta_info["metrics"]["rollout/num_redrawn"] == 0


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_server_that_was_lost_during_a_push_does_not_stay_paused(settings, start, dialect):
    server = start(dialect)
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    fleet = rollout.engine.fleet
    server.is_paused = True
    fleet.note_lost(fleet.members[0], ServerLostError("lost"))
    draw(rollout)
    assert not server.is_paused


def test_a_closed_engine_ends_its_threads_and_no_server_of_the_user(settings, start):
    def threads():
        return {thread for thread in threading.enumerate() if thread.name == "verl-server"}

    server = start("vllm", "0.32.0")
    before = threads()
    rollout = updated_rollout(settings, server)
    draw(rollout)
    mine = threads() - before
    assert mine

    rollout.close()
    for thread in mine:
        thread.join(timeout=5.0)
    assert not threads() & mine
    assert len(draw(updated_rollout(settings, server))) == 8
