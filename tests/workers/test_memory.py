"""Roles that run out of memory: the phase and its keys, and an update that restarts."""

import pytest
import torch

from tests.workers.batches import (
    R,
    actor_of,
    config,
    critic_of,
    prompts,
    reference_of,
    rollout_of,
    trajectories,
)
from verl.rollout.types import SamplingParams
from verl.utils.errors import OutOfMemoryError

SHORTAGE = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
)


def make_narrow(role, room: int) -> list[int]:
    """Make passes of `role` over more than `room` tokens fail. Returns the tokens of all passes."""
    original = role.engine.module.forward
    sizes = []

    def forward(packed, **arguments):
        sizes.append(len(packed.input_ids))
        if len(packed.input_ids) > room:
            raise SHORTAGE
        return original(packed, **arguments)

    role.engine.module.forward = forward
    return sizes


def test_a_restarted_update_reports_the_same(tmp_path):
    settings = config(tmp_path, ppo_micro_batch_size_per_gpu=4)
    plain = actor_of(settings)
    narrow = actor_of(settings)
    undisturbed = make_narrow(plain, room=1000)
    batch = trajectories(plain)
    batch = batch.union(reference_of(settings).compute_ref_log_prob(batch))
    # a mean that counted these rows twice would differ
    batch.batch["rollout_log_probs"][:4] += 0.1
    expected = plain.update_actor(batch)

    first, second = undisturbed
    assert first < second
    sizes = make_narrow(narrow, room=second - 1)
    metrics = narrow.update_actor(batch)
    assert sizes[:2] == [first, second], "one pass goes well, the next runs out"
    assert len(sizes) == 2 + 4
    assert "training/rollout_kl" in metrics, "what the objective remembers of its passes"
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("make", "call", "phase", "key"),
    [
        (actor_of, "compute_log_prob", "old log-probs", "rollout.log_prob_max_token_len_per_gpu"),
        (
            reference_of,
            "compute_ref_log_prob",
            "reference log-probs",
            "ref.log_prob_max_token_len_per_gpu",
        ),
        (critic_of, "compute_values", "values", "critic.forward_max_token_len_per_gpu"),
    ],
)
def test_evaluations_name_their_phase_and_key(tmp_path, caplog, make, call, phase, key):
    settings = config(tmp_path)
    batch = trajectories(actor_of(settings))
    role = make(settings)
    expected = getattr(make(settings), call)(batch)
    make_narrow(role, room=60)
    with caplog.at_level("WARNING", logger="verl"):
        answer = getattr(role, call)(batch)
    assert f"the pass for {phase}: 2.00 GiB asked" in caplog.text
    assert f"{key}=" in caplog.text
    for name, column in expected.batch.items():
        torch.testing.assert_close(answer.batch[name], column, rtol=1e-4, atol=1e-4)
    make_narrow(role, room=5)
    with pytest.raises(OutOfMemoryError, match=f"the pass for {phase}.*A single row of"):
        getattr(role, call)(batch)


@pytest.mark.parametrize(
    ("shortage", "engine", "expected", "absent"),
    [
        (
            SHORTAGE,
            "embedded",
            "Out of GPU memory in generation: 2.00 GiB.*gpu_memory_utilization.*param_offload=True",
            "off-load less",
        ),
        (
            MemoryError(),
            "embedded",
            "Out of host memory in generation.*gpu_memory_utilization.*off-load less",
            "param_offload",
        ),
        # It has no pages, and splits no prompts.
        (
            MemoryError(),
            "hf",
            "Lower actor_rollout_ref.rollout.max_num_seqs, or off-load less",
            "gpu_memory_utilization",
        ),
    ],
)
def test_generation_names_the_keys_that_help(
    tmp_path, monkeypatch, shortage, engine, expected, absent
):
    settings = config(tmp_path)
    settings.actor_rollout_ref.rollout.name = engine
    rollout = rollout_of(actor_of(settings))

    def step():
        raise shortage

    monkeypatch.setattr(rollout.engine, "step", step)
    with pytest.raises(OutOfMemoryError, match=expected) as caught:
        rollout.generate_sequences(
            prompts(), n=1, params=SamplingParams(max_new_tokens=R), seed=0, step=1
        )
    assert absent not in str(caught.value)
