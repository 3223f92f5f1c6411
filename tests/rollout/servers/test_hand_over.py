"""Hand-overs to a server that the run has started: which calls they make, and what they prove."""

import threading
import time

import pytest
import torch

from tests.cases import cases
from tests.rollout.servers.rollouts import (
    FAULTS,
    PARAMS,
    assert_a_restart_is_noticed,
    draw,
    largest_kl,
    move,
)
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, actor_of
from verl.rollout.types import Request
from verl.utils.errors import RolloutError
from verl.workers import RolloutWorker

SIGN = "/v1/models"  # asked for a sign of life
COPY = "/collective_rpc"
FLUSH = "/reset_prefix_cache"
VERSIONS = ["0.32.0", "0.24.0"]  # the older one records no version itself


@pytest.fixture
def own(settings, start, monkeypatch):
    """Make a rollout on a server of the run; return it, its actor, the server, and paths called."""

    def make(version="0.32.0", **keys):
        server = start("vllm", version)

        class Started:
            urls = (server.url,)

            def __init__(self, *arguments, **keywords):
                pass

            def restart(self, url, *, hung_at):
                pass

        monkeypatch.setattr("verl.rollout.servers.engine.OwnedServers", Started)
        rollout = settings.actor_rollout_ref.rollout
        rollout.name = "vllm"
        for name, value in keys.items():
            setattr(rollout, name, value)
        return on(server)

    def on(server):
        actor = actor_of(settings)
        worker = RolloutWorker(
            settings.actor_rollout_ref, device=CPU, tokenizer=tiny_tokenizer(), actor=actor
        )
        paths = []
        answer = server.answer

        def watched(path, *others):
            paths.append(path)
            return answer(path, *others)

        monkeypatch.setattr(server, "answer", watched)
        return worker, actor, server, paths

    make.on = on
    return make


@pytest.mark.parametrize(
    ("version", "calls"),
    [
        ("0.32.0", [COPY, FLUSH, "/update_weight_version", "/weight_info"]),
        pytest.param("0.24.0", [COPY, FLUSH], marks=pytest.mark.slow),
    ],
)
def test_an_idle_server_of_the_run_is_neither_paused_nor_asked_to_draw(own, version, calls):
    worker, actor, _, paths = own(version, fingerprint_interval=0)
    worker.take_weights()
    for _ in range(2):
        assert largest_kl(actor, draw(worker)) < 1e-5
        move(actor)
        paths.clear()
        worker.take_weights()
        assert paths == [SIGN, *calls]
    assert largest_kl(actor, draw(worker)) < 1e-5


@pytest.mark.parametrize("transport", ["host", "disk"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_that_others_may_use_is_paused(own, settings, start, version, transport):
    server = start("vllm", version)
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = "vllm"
    rollout.server_urls = [server.url]
    rollout.weight_transport = transport
    rollout.fingerprint_interval = 0
    worker, _, _, paths = own.on(server)
    worker.take_weights()
    paths.clear()
    worker.take_weights()
    signature = "/weight_info" if version == "0.32.0" else "/inference/v1/generate"
    assert paths[:3] == [SIGN, "/pause", COPY]
    assert paths[-2:] == ["/resume", signature] or paths[-1] == signature


@pytest.mark.parametrize("version", VERSIONS)
def test_requests_of_the_run_wait_while_weights_change(own, version):
    worker, _, server, paths = own(version, fingerprint_interval=0)
    worker.take_weights()
    server.delay_s = 0.05
    engine = worker.engine
    engine.submit([Request(prompt_ids=(5, 6, 7), sample_ids=(0,))], PARAMS, seed=0, step=0)
    while not server.running:
        time.sleep(0.005)
    paths.clear()
    worker.take_weights()
    assert paths.index("/pause") < paths.index(COPY) < paths.index(FLUSH) < paths.index("/resume")
    engine.abort()


def test_requests_of_other_ranks_wait_while_weights_change(own):
    worker, _, _, paths = own(fingerprint_interval=0)
    worker.take_weights()
    worker.engine.draws_alone = False
    paths.clear()
    worker.take_weights()
    assert paths[:2] == [SIGN, "/pause"]


@pytest.mark.parametrize(
    ("version", "fault"),
    cases(
        VERSIONS, FAULTS, quick=lambda version, fault: version == VERSIONS[0] or fault == "dropped"
    ),
)
def test_a_push_that_did_not_arrive_whole_is_caught(own, version, fault):
    worker, actor, server, _ = own(version)
    worker.take_weights()
    draw(worker)
    move(actor)
    server.faults.add(fault)
    message = "did not drop its prefix cache" if fault == "flush refused" else "other weights than"
    with pytest.raises(RolloutError, match=message):
        worker.take_weights()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_restarted_server_gets_the_weights_before_it_draws(own, version):
    worker, actor, server, paths = own(version, fingerprint_interval=0)
    worker.take_weights()
    move(actor)
    worker.take_weights()
    expected = draw(worker).batch["responses"]
    server.end()
    server.start()
    paths.clear()
    assert torch.equal(draw(worker).batch["responses"], expected)
    assert paths.index(COPY) < paths.index("/inference/v1/generate")


def test_a_restart_between_two_draws_is_noticed_by_the_version_that_the_worker_lost(own):
    worker, actor, server, _ = own("0.24.0")
    worker.take_weights()
    move(actor)
    worker.take_weights()
    assert_a_restart_is_noticed(worker.engine, server)


def test_a_hand_over_that_ends_half_way_leaves_no_version(own, monkeypatch):
    worker, _, server, _ = own("0.24.0")
    worker.take_weights()
    recorded = server.worker.verl_weight_version()
    assert recorded.endswith("-1")

    def fail(weights_iterator):
        next(iter(weights_iterator))
        raise ValueError("no such weight")

    monkeypatch.setattr(server.worker, "reload_weights", fail)
    ended = threading.Event()
    rpc = server._rpc

    def answer(body):
        try:
            return rpc(body)
        except ValueError as error:
            ended.set()
            return 500, {"error": str(error)}

    monkeypatch.setattr(server, "_rpc", answer)
    with pytest.raises(RolloutError, match="no such weight"):
        worker.take_weights()
    assert ended.is_set()
    assert server.worker.verl_weight_version() is None
