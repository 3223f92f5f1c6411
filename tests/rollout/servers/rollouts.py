"""Rollouts on servers, and checks that the tests of all servers share."""

import threading
import time

import pytest
import torch

from tests.tiny_models import tiny_tokenizer
from tests.workers.batches import CPU, R, actor_of, prompts
from verl.rollout.types import Request, SamplingParams
from verl.utils.errors import RolloutError
from verl.workers import RolloutWorker

FAULTS = ["dropped", "half", "stale head", "stale cache", "flush refused"]  # of a push
PARAMS = SamplingParams(max_new_tokens=R)


def rollout_on(settings, *servers, actor=None, tokenizer=None, **keys):
    rollout = settings.actor_rollout_ref.rollout
    rollout.name = servers[0].dialect
    rollout.server_urls = [server.url for server in servers]
    for name, value in keys.items():
        setattr(rollout, name, value)
    return RolloutWorker(
        settings.actor_rollout_ref,
        device=CPU,
        tokenizer=tokenizer or tiny_tokenizer(),
        actor=actor or actor_of(settings),
    )


def move(actor):
    """Change every weight, as an update does."""
    with torch.no_grad():
        for parameter in actor.engine.module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def updated_rollout(settings, *servers, update=move):
    """Return a rollout that has taken the weights of an actor after an update."""
    actor = actor_of(settings)
    rollout = rollout_on(settings, *servers, actor=actor)
    update(actor)
    rollout.take_weights()
    return rollout


def draw(rollout, count=4, step=1):
    return rollout.generate_sequences(prompts(count), n=2, params=PARAMS, seed=0, step=step)


def largest_kl(actor, batch):
    return abs(actor.compute_log_prob(batch).meta_info["metrics"]["training/rollout_kl"])


def check_abort_of_one_sample(rollout, server):
    """Abort one of two samples: it keeps its tokens, and the other one goes on."""
    rollout.take_weights()
    server.delay_s = 0.1
    engine = rollout.engine
    requests = [Request(prompt_ids=(5, 6, 7), sample_ids=(0, 1), limits=(R, 3))]
    engine.submit(requests, PARAMS, seed=0, step=0)
    time.sleep(0.25)
    [aborted] = engine.abort([0])
    assert aborted.finish_reason == "abort"
    assert 0 < len(aborted.token_ids) == len(aborted.log_probs) < R
    completions = []
    while engine.has_work:
        completions += engine.step()
    assert [(each.sample_id, len(each.token_ids)) for each in completions] == [(1, 3)]


def assert_a_restart_is_noticed(engine, server):
    """Restart the server between two draws of the engine, and expect an error."""
    engine.submit([Request(prompt_ids=(5, 6), sample_ids=(0,))], PARAMS, seed=0, step=0)
    while engine._ended.empty():
        time.sleep(0.01)
    server.end()
    server.start()
    engine.submit([Request(prompt_ids=(5, 7), sample_ids=(1,))], PARAMS, seed=0, step=0)
    with pytest.raises(RolloutError, match="changed its weights during the generation"):
        while engine.has_work:
            engine.step()


def draw_while(interrupt, rollout):
    """Draw while `interrupt` runs in a thread."""
    thread = threading.Thread(target=interrupt)
    thread.start()
    batch = draw(rollout)
    thread.join()
    return batch


def check_redrawn(batch, expected):
    """Check that samples were drawn again, and that all are those of an undisturbed run."""
    assert torch.equal(batch.batch["responses"], expected), "each sample once, by the same noise"
    assert batch.meta_info["metrics"]["rollout/num_redrawn"] >= 1
