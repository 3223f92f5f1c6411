"""Draws of servers, and the checks of servers at start. Fakes speak the documented exchanges."""

import sys
import threading
import time

import pytest
import torch

from tests.rollout.servers.rollouts import (
    PARAMS,
    check_abort_of_one_sample,
    draw,
    draw_while,
    rollout_on,
    updated_rollout,
)
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, R
from verl.config import config_from_dict
from verl.config.rollout import RolloutConfig
from verl.rollout import check_engine, check_engine_service
from verl.rollout.servers import engine
from verl.rollout.servers.fleet import Member, Placement
from verl.rollout.types import Continuation, Request, SamplingParams
from verl.utils.errors import ConfigError, RolloutError
from verl.workers import RolloutWorker


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_aborted_samples_keep_their_tokens_and_others_go_on(settings, start, dialect):
    server = start(dialect)
    check_abort_of_one_sample(rollout_on(settings, server), server)


def test_the_abort_of_a_sample_that_has_not_begun_waits_for_no_other(settings, start, monkeypatch):
    monkeypatch.setattr(engine, "_ABORT_S", 5.0)
    server = start()
    rollout = rollout_on(settings, server, max_num_seqs=1)
    rollout.take_weights()
    server.admits.clear()
    requests = [Request(prompt_ids=(5, 6, 7), sample_ids=(0, 1))]
    rollout.engine.submit(requests, PARAMS, seed=0, step=0)

    started = time.monotonic()
    [aborted] = rollout.engine.abort([1])
    assert time.monotonic() - started < 2.5
    assert (aborted.sample_id, aborted.token_ids) == (1, [])

    server.admits.set()
    completions = []
    while rollout.engine.has_work:
        completions += rollout.engine.step()
    assert [each.sample_id for each in completions] == [0]


def test_an_abort_that_comes_before_its_request_ends_the_sample(settings, start, monkeypatch):
    monkeypatch.setattr(engine, "_ABORT_AGAIN_S", 0.2)
    server = start()
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    server.delay_s = 0.5
    server.admits.clear()
    requests = [Request(prompt_ids=(5, 6, 7), sample_ids=(0,))]
    whole = SamplingParams(max_new_tokens=R, ignore_eos=True)
    rollout.engine.submit(requests, whole, seed=0, step=0)

    threading.Timer(0.5, server.admits.set).start()
    [aborted] = rollout.engine.abort()
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) < R


@pytest.mark.parametrize("stops", [(), (5,)])
@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_responses_end_at_stop_tokens_with_and_without_the_models_own(
    settings, start, dialect, stops
):
    server = start(dialect)
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    engine = rollout.engine

    def drawn(**keys):
        params = SamplingParams(max_new_tokens=R, **keys)
        engine.submit([Request(prompt_ids=(5, 6, 7), sample_ids=(0,))], params, seed=0, step=0)
        while engine.has_work:
            completions.extend(engine.step())
        return completions.pop()

    completions = []
    free = drawn(ignore_eos=True)
    assert (len(free.token_ids), free.finish_reason) == (R, "length")
    second = free.token_ids[1]
    for ignore_eos in (True, False):
        ended = drawn(ignore_eos=ignore_eos, stop_token_ids=(*stops, second))
        length = next(n for n, each in enumerate(free.token_ids, 1) if each in (*stops, second))
        assert ended.token_ids == free.token_ids[:length]
        assert len(ended.log_probs) == length
        assert ended.finish_reason == "stop"


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_samples_are_sent_without_seeds_where_that_is_asked_for(
    settings, start, dialect, monkeypatch
):
    server = start(dialect)
    sent = []
    answer = server.answer

    def watched(path, body, *others):
        if "generate" in path:
            asked = body["sampling_params"]
            sent.append({"seed", "sampling_seed"} & asked.keys())
        return answer(path, body, *others)

    monkeypatch.setattr(server, "answer", watched)
    for seed_samples in (True, False):
        rollout = rollout_on(settings, server, seed_samples=seed_samples)
        rollout.take_weights()
        sent.clear()
        draw(rollout)
        assert len(sent) > 4
        assert all(bool(names) == seed_samples for names in sent)


@pytest.mark.parametrize(("device", "is_said"), [("cuda", True), ("cpu", False)])
def test_the_price_of_seeds_on_a_gpu_is_said(settings, start, caplog, device, is_said):
    engine = rollout_on(settings, start()).engine
    engine._device = torch.device(device)
    with caplog.at_level("INFO", logger="verl"):
        engine.open()
    assert ("faster with actor_rollout_ref.rollout.seed_samples=False" in caplog.text) == is_said


def test_a_response_that_the_servers_context_cuts_is_refused(settings, start):
    server = start("sglang")
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    server.faults.add("short context")
    with pytest.raises(RolloutError, match=f"at {R - 2} of {R} tokens.*a longer context"):
        draw(rollout)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_a_response_with_an_unknown_finish_reason_is_refused(settings, start, dialect):
    server = start(dialect)
    rollout = rollout_on(settings, server)
    rollout.take_weights()
    server.faults.add("failing draws")
    with pytest.raises(RolloutError, match=r"finish reason 'error'; expected one of stop, length"):
        draw(rollout)


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_no_two_requests_to_a_server_have_one_name(settings, start, dialect, monkeypatch):
    """SGLang refuses a name that is at work, and older versions end: also if a draw is repeated."""
    server = start(dialect)
    names = []
    answer = server.answer

    def watched(path, body, *others):
        if "generate" in path:
            names.append(body.get("request_id") or body.get("rid"))
        return answer(path, body, *others)

    monkeypatch.setattr(server, "answer", watched)
    check_engine_service(rollout_on(settings, server).config.rollout)
    rollout = updated_rollout(settings, server)
    server.delay_s = 0.02
    before = server.draws

    def interrupt():
        while server.draws < before + 3:
            time.sleep(0.005)
        server.end()
        server.start()

    batch = draw_while(interrupt, rollout)
    assert batch.meta_info["metrics"]["rollout/num_redrawn"] >= 1
    assert len(set(names)) == len(names) > 8


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda server: server.end(),
            r"does not answer.*loopback.* runs\): Failed to .*Start one with .*--port PORT ",
        ),
        (lambda server: server.faults.add("empty"), "in a form that is not vLLM's.*Start one"),
        (lambda server: setattr(server, "version", "0.8.4"), "version 0.8.4.*vllm>="),
        (lambda server: setattr(server, "name", "/models/other"), "runs the model '/models/other'"),
        (lambda server: setattr(server, "dialect", "sglang"), "not vLLM's.*rollout.name fits"),
        (lambda server: setattr(server, "is_paused", True), "is paused.*curl -X POST .*/resume"),
    ],
    ids=["unreachable", "empty", "old", "other model", "other protocol", "paused"],
)
def test_a_server_that_cannot_draw_is_one_error_at_start(settings, start, break_it, message):
    server = start()
    name = server.dialect
    break_it(server)
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = name
    rollout.server_urls = [server.url]
    message = message.replace("PORT", server.url.rpartition(":")[-1])
    with pytest.raises((RolloutError, ConfigError), match=f"(?s)vLLM at {server.url}.*{message}"):
        check_engine_service(rollout)
        server.dialect = name
        rollout_on(settings, server)


@pytest.mark.parametrize(
    ("dialect", "version"), [("vllm", "0.33.0"), ("vllm", "1.0.1"), ("sglang", "0.6.0.post1")]
)
def test_a_server_newer_than_the_tests_is_an_error_unless_allowed(
    settings, start, dialect, version
):
    server = start(dialect, version)
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = dialect
    rollout.server_urls = [server.url]
    message = rf"version {version}.*before 0\.\d+.*'{dialect}>=.*allow_untested_servers=True"
    with pytest.raises(ConfigError, match=message):
        check_engine_service(rollout)
    rollout.allow_untested_servers = True
    check_engine_service(rollout)
    rollout_on(settings, server).take_weights()


def test_another_tokenizer_is_an_error(settings, start):
    server = start()
    server.tokenizer = tiny_tokenizer()
    server.tokenizer.encode = lambda *_, **__: [1, 2, 3]
    with pytest.raises(ConfigError, match="has another tokenizer"):
        rollout_on(settings, server)


@pytest.mark.parametrize(
    ("mode", "keys", "message"),
    [
        ("raw", {"temperature": 0.7}, "from before the temperature.*processed_logprobs"),
        ("processed", {"top_p": 0.9}, "over the tokens that top_p.*raw_logprobs"),
        ("processed", {"top_k": 5}, "over the tokens that top_p.*raw_logprobs"),
        ("raw", {"top_p": 0.9}, None),
        ("processed", {"temperature": 0.7}, None),
    ],
)
def test_log_probs_of_another_definition_are_refused(settings, start, mode, keys, message):
    server = start()
    server.log_probs_mode = mode
    if message is None:
        rollout_on(settings, server, **keys)
        return
    with pytest.raises(ConfigError, match=message):
        rollout_on(settings, server, **keys)


def test_the_id_of_a_sample_at_work_is_rejected(settings, start):
    engine = rollout_on(settings, start()).engine
    request = Request(prompt_ids=(5, 6), sample_ids=(0,))
    engine.submit([request], PARAMS, seed=0, step=0)
    with pytest.raises(RolloutError, match="Sample id 0 is being generated already"):
        engine.submit([request], PARAMS, seed=0, step=0)
    assert len(engine.abort()) == 1


def test_samples_are_not_continued(settings, start):
    engine = rollout_on(settings, start()).engine
    begun = Continuation(step=0, number=0, token_ids=(5,), log_probs=(-1.0,))
    request = Request(prompt_ids=(5, 6), sample_ids=(0,), continuations=(begun,))
    with pytest.raises(RolloutError, match="cannot continue samples by the same noise"):
        engine.submit([request], PARAMS, seed=0, step=0)


def test_prompts_go_to_the_server_that_knows_their_beginning_unless_it_is_busy():
    knows, other = Member(None), Member(None)
    prompt = tuple(range(320))
    knows.blocks.update(Placement(prompt, 10).blocks)
    longer = Placement((*prompt, 1, 2, 3), 10)
    assert longer.cost(knows) == 3
    assert longer.cost(other) == 323
    assert Placement((9, *prompt), 10).cost(knows) == 321, "another beginning"
    knows.tokens_in_flight = 1000
    assert longer.cost(other) < longer.cost(knows)


def test_servers_share_the_samples(settings, start):
    servers = [start(), start()]
    rollout = rollout_on(settings, *servers)
    rollout.take_weights()
    for server in servers:
        server.delay_s = 0.002
        server.draws = 0
    draw(rollout, count=8)
    assert sum(server.draws for server in servers) == 16
    assert min(server.draws for server in servers) >= 5


def test_servers_need_no_ranks_of_their_own(settings, start):
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = "vllm"
    with pytest.raises(ConfigError, match="need no ranks of their own.*placement.rollout"):
        RolloutWorker(settings.actor_rollout_ref, device=CPU, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "needs vLLM, which is not installed.*server_urls=.*server_python.*name=embedded"),
        ({"server_urls": ["host:8000"]}, "addresses such as http://host:8000, got 'host:8000'"),
        ({"server_urls": ["http://[::1"]}, "addresses such as http://host:8000, got"),
        ({"server_urls": ["http://h"], "server_python": "python"}, "Set one of them"),
        ({"server_python": "/nowhere/python"}, "must be a Python interpreter.*which is no program"),
        ({"server_python": "true"}, "must be a Python interpreter.*'true', which runs no Python"),
        (
            {"server_python": sys.executable},
            "server_python must.*with vLLM, got '.*python.*', which has no package 'vllm'. "
            "Install it there: .*python.* -m pip install vllm",
        ),
        ({"deterministic": True, "server_urls": ["http://h"]}, "name=vllm. Set name=embedded"),
    ],
)
def test_settings_of_servers_are_checked(keys, message):
    with pytest.raises(ConfigError, match=message):
        loaded = config_from_dict(
            {
                "data": {"dataset_name": "toy", "train_batch_size": 4},
                "actor_rollout_ref": {"rollout": {"name": "vllm", **keys}},
            }
        )
        rollout = loaded.actor_rollout_ref.rollout
        check_engine(rollout)
        check_engine_service(rollout)


def test_an_interpreter_with_the_package_is_accepted(tmp_path, monkeypatch):
    rollout = RolloutConfig(name="vllm", server_python=sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "vllm").mkdir()  # a virtual environment of that name is no package
    with pytest.raises(ConfigError, match="no package 'vllm'"):
        check_engine_service(rollout)

    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('imported')")
    check_engine_service(rollout)
