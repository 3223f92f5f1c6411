"""Training with vLLM in process. Runs by the interpreter of an environment that has vLLM as well as
this package; `make test-vllm` does so."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.rollout_servers import toy
from tests.rollout_servers.test_vllm import move
from tests.rollout_servers.toy import check_ends, check_learning
from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, actor_of, config, prompts
from verl.rollout.servers.weights import MemorySource
from verl.rollout.types import Request, SamplingParams
from verl.utils.errors import RolloutError
from verl.workers import RolloutWorker

pytest.importorskip("vllm", reason="this environment has no vLLM")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

KEYS = {"in_process": True, "enforce_eager": True}


@pytest.fixture(scope="module")
def tied(tied_folder):
    """Return an actor whose head is its embedding, and its rollout."""
    settings = config(tied_folder)
    section = settings.actor_rollout_ref
    keys = {"name": "vllm", "fingerprint_interval": 1, **KEYS}
    section.rollout = replace(section.rollout, **keys)
    actor = actor_of(settings)
    worker = RolloutWorker(actor.config, device=CPU, tokenizer=tiny_tokenizer(), actor=actor)
    yield actor, worker
    worker.engine.fleet.members[0].server.close()


@pytest.fixture(scope="module")
def toy_engines():
    """Return the embedded engine of the toy, and one in process."""
    ours, theirs = toy.engines(**KEYS)
    yield ours, theirs
    theirs.fleet.members[0].server.close()


@pytest.mark.parametrize("lora_rank", [0, 8])
def test_the_toy_learns_and_every_update_arrives(tmp_path, lora_rank):
    """Whole weights, and adapters on top of weights that stay."""
    keys = {f"actor_rollout_ref.rollout.{name}": value for name, value in KEYS.items()}
    keys["actor_rollout_ref.model.lora_rank"] = lora_rank
    if lora_rank:
        keys["actor_rollout_ref.actor.optim.lr"] = 1e-2
    check_learning(toy.train(tmp_path, **keys))


@pytest.mark.parametrize("transport", ["disk", None])
def test_a_tied_head_arrives_with_every_push(tied, transport):
    actor, rollout = tied
    rollout.config.rollout.weight_transport = transport
    params = SamplingParams(max_new_tokens=10)
    for step in range(3):
        rollout.take_weights()
        batch = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        again = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        assert (batch.batch["responses"] == again.batch["responses"]).all()
        metrics = actor.compute_log_prob(batch).meta_info["metrics"]
        assert abs(metrics["training/rollout_kl"]) < 1e-6
        move(actor)


def test_a_push_that_is_dropped_is_caught(tied, monkeypatch):
    actor, rollout = tied
    rollout.take_weights()
    move(actor)
    with monkeypatch.context() as patched:
        patched.setattr(MemorySource, "fill", lambda *_: None)
        with pytest.raises(RolloutError, match="this process draws by other weights than the"):
            rollout.take_weights()
    rollout.take_weights()


def test_draws_after_sleep_are_by_the_next_weights(tied, monkeypatch):
    """On a CPU vLLM keeps its memory, but stops and goes on as on a GPU."""
    actor, rollout = tied
    [member] = rollout.engine.fleet.members
    monkeypatch.setattr(rollout.engine, "can_sleep", True)
    monkeypatch.setattr(member.server, "_can_sleep", True)
    params = SamplingParams(max_new_tokens=10)
    rollout.take_weights()
    for step in range(2):
        batch = rollout.generate_sequences(prompts(4), n=2, params=params, seed=0, step=step)
        assert rollout.is_asleep
        assert not member.server.can_draw
        metrics = actor.compute_log_prob(batch).meta_info["metrics"]
        assert abs(metrics["training/rollout_kl"]) < 1e-6
        move(actor)
        rollout.take_weights()
        assert member.server.can_draw


def test_responses_end_as_those_of_the_embedded_engine(toy_engines):
    check_ends(*toy_engines)


def test_an_aborted_sample_keeps_its_tokens_and_others_go_on(toy_engines):
    _, engine = toy_engines
    params = SamplingParams(max_new_tokens=400, ignore_eos=True)
    requests = [Request(prompt_ids=(5, 6, 7), sample_ids=(0, 1), limits=(400, 20))]
    engine.submit(requests, params, seed=0, step=0)
    completions = []
    while not completions:
        completions += engine.step()
    [aborted] = engine.abort([0])
    assert (completions[0].sample_id, len(completions[0].token_ids)) == (1, 20)
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) == len(aborted.log_probs) < 400
    assert not engine.has_work


def test_the_engine_ends_with_a_run_that_is_killed(tmp_path):
    """Without a guard of `__main__`, too: its processes do not run the script again."""
    script = tmp_path / "train.py"
    script.write_text(f"""
from tests.rollout_servers import toy
toy.engines(**{KEYS})
print("ready", flush=True)
input()
""")
    command = [sys.executable, str(script)]
    root = str(Path(__file__).parents[2])
    run = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    while "ready" not in (line := run.stdout.readline()):
        assert line, "the run has ended"
    started = psutil.Process(run.pid).children(recursive=True)
    assert any("VLLM" in " ".join(each.cmdline()) for each in started)
    run.kill()  # and do not ask for its status: it stays as a zombie meanwhile
    _, alive = psutil.wait_procs(started, timeout=60)
    run.communicate()
    assert not alive


def test_a_model_that_reads_pictures_draws_by_its_newest_tower(tmp_path):
    """Every step trains the tower, so features that vLLM kept would be old ones."""
    pytest.importorskip("torchvision", reason="vLLM's models that read pictures need torchvision")
    keys = {f"actor_rollout_ref.rollout.{name}": value for name, value in KEYS.items()}
    shapes = {
        "data.dataset_name": "shapes",
        "data.train_max_samples": 4,  # the pictures of every step
        "actor_rollout_ref.model.path": str(toy.save_shapes(tmp_path / "model")),
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "trainer.max_steps": 3,
    }
    steps = toy.train(tmp_path / "run", **keys, **shapes)
    assert len(steps) == 3
    assert max(abs(step["training/rollout_kl"]) for step in steps) < 1e-5
