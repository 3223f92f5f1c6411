"""Frozen policies on a GPU: an engine of their own next to the actor's, asleep during updates."""

from pathlib import Path

import pytest
import torch

from tests.trainer.runs import command_line, run, same_bits, step_lines, without_times
from tests.trainer.test_policies import COPY, DEBATE, FROZEN, PARTNER, ROLLOUT
from verl.config import load_config
from verl.models.lora import plain_parameters
from verl.trainer.partners import PartnersTrainer
from verl.trainer.ppo_trainer import PPOTrainer

pytestmark = pytest.mark.gpu
ON_CUDA = [*DEBATE, "trainer.device=cuda", f"{ROLLOUT}.deterministic=True", "trainer.max_steps=4"]


def host_weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    """Copy the judge's weights, as they lie on the host."""
    judge = trainer.rollout_wg.worker.agents.context.policies["judge"]
    return {name: value.detach().clone() for name, value in plain_parameters(judge.model)}


def test_the_judge_stays_the_same_to_the_bit_and_sleeps_during_updates(tmp_path: Path):
    trainer = PPOTrainer(load_config(command_line(tmp_path, *ON_CUDA, FROZEN)))
    trainer.init_workers()
    before = host_weights(trainer)
    trainer.fit()
    assert same_bits(host_weights(trainer), before)
    assert {value.device.type for value in before.values()} == {"cpu"}

    judge = trainer.rollout_wg.worker.agents.context.policies["judge"]
    assert not judge.engine.twin.ready, "the judge's engine keeps its weights on the device"
    norms = [line["actor/grad_norm"] for line in step_lines(tmp_path)]
    assert all(norm > 0 for norm in norms), f"gradients by step: {norms}"


def test_a_copy_has_the_actors_weights_of_its_step(tmp_path: Path):
    trainer = PPOTrainer(load_config(command_line(tmp_path, *ON_CUDA, COPY)))
    trainer.init_workers()
    begin = host_weights(trainer)
    trainer.fit()
    held = host_weights(trainer)
    differing = [name for name, value in held.items() if not torch.equal(value, begin[name])]
    assert differing, "the copy was never renewed"


def test_two_policies_train_and_both_engines_sleep_during_updates(tmp_path: Path):
    trainer = PartnersTrainer(load_config(command_line(tmp_path, *ON_CUDA, PARTNER)))
    trainer.init_workers()
    trainer.fit()
    for line in step_lines(tmp_path):
        norms = {name: line[name] for name in line if name.endswith("grad_norm")}
        assert set(norms) == {"actor/grad_norm", "policy_judge/actor/grad_norm"}, norms
        assert all(norm > 0 for norm in norms.values()), norms

    prompts = next(iter(trainer.train_loader))
    trainer.collect(prompts)
    for rollout in (trainer.rollout_wg, *trainer.partner_rollouts.values()):
        assert rollout.worker.is_asleep, "an engine keeps the device's memory after generation"


@pytest.mark.parametrize("policies", [FROZEN, COPY, PARTNER], ids=["frozen", "copy", "partner"])
def test_a_seed_draws_the_same_first_step_again(tmp_path: Path, policies: str):
    # Gradients on a CUDA device are sums in any order, so later steps may differ.
    lines = []
    for name in ("one", "two"):
        assert run(tmp_path / name, *ON_CUDA, policies) == 0
        first = without_times(
            step_lines(tmp_path / name), "agent_loop/", "rollout/", "policy_judge/rollout/", "perf/"
        )[0]
        kept = {key: first[key] for key in first if "actor/" not in key and "perf/" not in key}
        lines.append(kept)
    assert lines[0] == lines[1]
