"""vLLM in process, against a module with the calls of its `AsyncLLM`."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from tests.cases import cases
from tests.rollout.servers.conftest import untied_copy
from tests.rollout.servers.fake import FakeServer
from tests.rollout.servers.fake_vllm import modules
from tests.rollout.servers.rollouts import (
    check_abort_of_one_sample,
    check_redrawn,
    draw,
    draw_while,
    largest_kl,
    move,
)
from tests.rollout.servers.test_adapters import move as move_adapters
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, R, actor_of, prompts
from verl.config import config_from_dict
from verl.rollout import check_engine, check_engine_service
from verl.rollout.servers import in_process, watch
from verl.rollout.servers.in_process import InProcessVLLM
from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError, RolloutError
from verl.workers import RolloutWorker


@pytest.fixture
def vllm(monkeypatch):
    """Install the module; end what it started."""
    installed = modules(lambda: FakeServer(untied_copy))
    for name, module in installed.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield installed["vllm"]
    for engine in installed["vllm"].engines:
        engine.shutdown()


@pytest.fixture
def rollout_of(vllm, settings):
    """Make a rollout with an engine in process; return it, its actor, and the fake engine."""
    made = []

    def make(**keys):
        rollout = settings.actor_rollout_ref.rollout
        rollout.name = "vllm"
        rollout.in_process = True
        for name, value in keys.items():
            setattr(rollout, name, value)
        actor = actor_of(settings)
        worker = RolloutWorker(
            settings.actor_rollout_ref, device=CPU, tokenizer=tiny_tokenizer(), actor=actor
        )
        made.append(worker)
        return worker, actor, vllm.engines[-1]

    yield make
    for worker in made:
        worker.engine.fleet.members[0].server.close()


@pytest.mark.parametrize(
    "transport", cases([None, "disk"], quick=lambda transport: transport is None)
)
def test_log_probs_are_the_trainers_after_every_push(rollout_of, transport):
    worker, actor, _ = rollout_of(temperature=0.7, weight_transport=transport)
    params = SamplingParams(max_new_tokens=R, temperature=0.7)
    for step in range(2):
        worker.take_weights()
        batch = worker.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        again = worker.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        assert torch.equal(batch.batch["responses"], again.batch["responses"])
        assert largest_kl(actor, batch) < 1e-5
        move(actor)


@pytest.mark.parametrize("fault", ["dropped", "half", "stale head", "stale cache", "flush refused"])
def test_a_push_that_did_not_arrive_whole_is_caught(rollout_of, fault):
    worker, actor, engine = rollout_of()
    worker.take_weights()
    draw(worker)
    move(actor)
    engine.server.faults.add(fault)
    message = "did not drop its prefix cache" if fault == "flush refused" else "other weights than"
    with pytest.raises(RolloutError, match=f"vLLM in this process.*{message}|{message}"):
        worker.take_weights()
    assert not engine.server.is_paused


def test_aborted_samples_keep_their_tokens_and_others_go_on(rollout_of):
    worker, _, fake = rollout_of()
    check_abort_of_one_sample(worker, fake.server)


def let_sleep(worker, fake):
    """Have the engine believe that it may sleep, which it does on CUDA alone."""
    worker.engine.can_sleep = True
    worker.engine.fleet.members[0].server._can_sleep = True
    fake.args.enable_sleep_mode = True


def test_a_sleeping_engine_gets_weights_before_its_cache(rollout_of):
    worker, actor, fake = rollout_of()
    let_sleep(worker, fake)
    worker.take_weights()
    for _ in range(2):
        assert largest_kl(actor, draw(worker)) < 1e-5
        assert worker.is_asleep
        assert fake.awake == set()
        move(actor)
        worker.take_weights()
        assert fake.awake == {"weights", "kv_cache"}
    assert fake.slept == [2, 2], "the next weights replace all of the old ones"


def test_a_trainer_that_keeps_the_memory_is_asked_for_it_before_the_start_and_each_wake_up(
    rollout_of, monkeypatch
):
    shares = []
    monkeypatch.setattr(in_process, "leave_free", lambda share, _: shares.append(share))
    worker, _, fake = rollout_of(gpu_memory_utilization=0.4)
    assert shares == [0.4], "for the start"
    shares.clear()
    let_sleep(worker, fake)
    worker.take_weights()
    draw(worker)
    assert not shares
    worker.take_weights()
    assert shares == [0.4, 0.4], "for the weights, and for the cache"

    async def fail(tags):
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")

    draw(worker)
    monkeypatch.setattr(fake, "wake_up", fail)
    with pytest.raises(RolloutError, match="out of memory.*lower .*gpu_memory_utilization"):
        worker.take_weights()


def test_a_sleep_drops_cached_prefixes_and_no_flush_is_asked_for(rollout_of, monkeypatch):
    """If it did not, the next proof would find the keys of the old weights."""
    worker, actor, fake = rollout_of()
    let_sleep(worker, fake)
    worker.take_weights()
    draw(worker)
    move(actor)
    flushes = []
    with monkeypatch.context() as patched:
        patched.setattr(fake, "reset_prefix_cache", lambda **_: flushes.append(1))
        worker.take_weights()
    assert not flushes
    assert worker.engine.statistics()["map_cache_s"] > 0

    kept = dict(fake.server.cached)
    draw(worker)
    move(actor)
    fake.server.cached.update(kept)
    with pytest.raises(RolloutError, match="draws by other weights than"):
        worker.take_weights()


def test_adapters_are_added_to_weights_that_stay(rollout_of, settings):
    settings.actor_rollout_ref.model.lora_rank = 4
    worker, actor, fake = rollout_of()
    base = fake.server.model
    assert fake.args.max_lora_rank == 8
    for push in range(3):
        worker.take_weights()
        assert largest_kl(actor, draw(worker)) < 1e-5
        assert fake.server.model is base
        [name] = fake.server.adapters
        assert name.endswith(f"-{push + 1}")
        move_adapters(actor)

    server = worker.engine.fleet.members[0].server
    server._can_sleep = fake.args.enable_sleep_mode = True
    server.sleep()
    assert fake.slept == [1], "the base weights are kept on the host"


def test_the_engine_ends_with_the_run_and_a_dead_core_is_an_error(rollout_of):
    worker, _, fake = rollout_of()
    assert fake.ends_with is not None
    worker.take_weights()
    fake.is_dead = True
    with pytest.raises(RolloutError, match="engine core has ended.*gpu_memory_utilization"):
        draw(worker)


@pytest.mark.parametrize("goes_on", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_core_that_hangs_is_named(rollout_of, monkeypatch, caplog, goes_on):
    """Its samples are drawn again if it goes on, and the run ends if it does not."""
    monkeypatch.setattr(watch, "_EVERY_S", 0.1)
    monkeypatch.setattr(watch, "_SIGN_S", 0.2)
    monkeypatch.setattr(watch, "_MISSES_OF_ENGINE", 4)
    worker, _, fake = rollout_of(server_timeout_s=10.0 if goes_on else 1.0)
    worker.take_weights()
    expected = draw(worker).batch["responses"]
    fake.server.delay_s = 0.02
    before = fake.server.draws
    silence = "its engine gave no answer within 0.2 s to 4 questions in a row"
    message = f"vLLM in this process hangs: {silence}"

    def freeze():
        while fake.server.draws == before:
            time.sleep(0.005)
        fake.server.engine_thawed.clear()
        while message not in caplog.text:
            time.sleep(0.005)
        if goes_on:
            fake.server.engine_thawed.set()

    if goes_on:
        check_redrawn(draw_while(freeze, worker), expected)
        return
    with pytest.raises(RolloutError, match="No server has answered for 1 s: vLLM in this process"):
        draw_while(freeze, worker)
    fake.server.engine_thawed.set()


@pytest.mark.slow
@pytest.mark.parametrize("is_reaped", [True, False], ids=["reaped", "zombie"])
def test_a_worker_ends_with_the_run_that_is_killed(is_reaped):
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    run = subprocess.Popen(command)
    script = f"""
import time
from verl.weight_sync.vllm_worker import TakesWeights
TakesWeights().verl_end_with({run.pid})
print("ready", flush=True)
time.sleep(300)
"""
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    assert worker.stdout.readline() == "ready\n"
    assert worker.poll() is None
    run.kill()
    if is_reaped:
        run.wait()
    assert worker.wait(timeout=60) == 1
    run.wait()
    worker.stdout.close()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gpu_memory_utilization": 0.99}, "did not start.*Free memory.*whole GPU.*server_python"),
        ({"max_model_len": 8}, "takes 8 tokens"),
    ],
)
def test_an_engine_that_cannot_serve_is_one_error(rollout_of, settings, keys, message):
    if "max_model_len" in keys:
        settings.actor_rollout_ref.rollout.engine_kwargs.vllm = keys
        keys = {}
    with pytest.raises((RolloutError, ConfigError), match=f"(?s)vLLM.*{message}"):
        rollout_of(**keys)


def test_an_unknown_argument_is_an_error(rollout_of, settings):
    settings.actor_rollout_ref.rollout.engine_kwargs.vllm = {"swap_spice": 1}
    with pytest.raises(ConfigError, match="vLLM 0.32.0 has no argument swap_spice"):
        rollout_of()


def rollout_config():
    loaded = config_from_dict(
        {
            "data": {"dataset_name": "toy", "train_batch_size": 4},
            "actor_rollout_ref": {"rollout": {"name": "vllm", "in_process": True}},
        }
    )
    return loaded.actor_rollout_ref.rollout


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"server_urls": ["http://h"]}, "server_urls=.*is for servers. Set one of them"),
        ({"server_python": "python"}, "server_python=python is for servers"),
        ({"num_servers": 2}, "one engine on the device of each rank, got num_servers=2"),
        ({"tensor_model_parallel_size": 2}, "got tensor_model_parallel_size=2.*as a server"),
        ({"name": "sglang"}, "name=sglang. Set name=vllm, or in_process=false"),
        ({"name": "embedded"}, "name=embedded. Set name=vllm, or in_process=false"),
    ],
)
def test_settings_of_servers_do_not_mix(keys, message):
    config = replace(rollout_config(), **keys)
    with pytest.raises(ConfigError, match=message):
        check_engine(config)


def test_a_missing_package_is_one_error_with_the_fix():
    config = rollout_config()
    check_engine(config)
    fix = r"cannot be imported.*pip install 'vllm>=0.24.*server_python names the interpreter"
    with pytest.raises(ConfigError, match=f"(?s){fix}"):
        check_engine_service(config)


@pytest.mark.parametrize("version", ["0.23.1", "0.33.0", "1.0"])
def test_a_version_that_was_not_tested_is_one_error_with_the_fix(vllm, version):
    vllm.__version__ = version
    with pytest.raises(ConfigError, match=f"tested with vLLM 0.24 to before 0.33, got {version}"):
        check_engine_service(rollout_config())


def test_the_trainers_environment_is_back_after_a_start(vllm, settings, monkeypatch, tmp_path):
    """Children see other settings, and not the user's script; this process sees its own."""
    seen = {}
    start = InProcessVLLM._start

    async def watched(self, arguments):
        seen.update(os.environ)
        seen["main"] = vars(sys.modules["__main__"]).get("__file__")
        return await start(self, arguments)

    monkeypatch.setattr(InProcessVLLM, "_start", watched)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    main = sys.modules["__main__"]
    rollout = settings.actor_rollout_ref.rollout
    rollout.name, rollout.in_process = "vllm", True
    actor = actor_of(settings)
    server = InProcessVLLM(rollout, actor.engine.hf_model, torch.float32, CPU)
    assert seen["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert seen["VLLM_CPU_KVCACHE_SPACE"] == "3", "the user's own setting"
    assert seen["main"] is None
    assert sys.modules["__main__"] is main
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    server.close()
