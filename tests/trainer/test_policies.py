"""Training against frozen policies: they stay as they are, and a run repeats to the bit."""

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents.chat_server import serving
from tests.launches import launch
from tests.trainer.runs import (
    command_line,
    run,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.config import load_config
from verl.models.load import load_causal_lm
from verl.trainer import PPOTrainer, RLTrainer
from verl.trainer.main_ppo import main
from verl.trainer.partners import PartnersTrainer
from verl.utils.errors import AlgorithmError, ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
DEBATE = [
    f"{ROLLOUT}.agent.environment.name={Path(__file__).parent.parent}/agents/debate.py:Debate",
    f"{ROLLOUT}.multi_turn.max_tokens_per_turn=8",
    "data.max_response_length=200",
    "data.max_prompt_length=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.test_freq=-1",
]


def against(judge: str) -> str:
    return f"{ROLLOUT}.agent.policies={{player: {{trained: true}}, judge: {{{judge}}}}}"


FROZEN = against("path: toy, max_new_tokens: 8")
COPY = against("path: self, update_freq: 2, max_new_tokens: 8")


def play_against_a_frozen_judge(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train the player. Returns the metrics of the steps, after checks of both policies."""
    trainer = start_trainer(folder, *DEBATE, FROZEN, f"trainer.max_steps={steps}")
    worker = trainer.rollout_wg.worker
    judge = worker.agents.context.policies["judge"]
    begin = {name: value.clone() for name, value in judge.engine.twin.named_weights()}
    actor = {name: value.clone() for name, value in worker.engine.twin.named_weights()}
    trainer.fit()

    held = dict(judge.engine.twin.named_weights())
    assert same_bits(held, begin)
    assert not same_bits(dict(worker.engine.twin.named_weights()), actor)
    lines = step_lines(folder)
    # A cut turn of the player ends its episode before the judge's.
    turns = sum(line.get("agent_loop/policy/judge/turns", 0) for line in lines)
    assert turns > 10 * steps
    for line in lines:
        differences = [line[name] for name in line if name.endswith("rollout_diff_max")]
        assert differences
        assert max(map(abs, differences)) < 1e-4
    return lines


@pytest.mark.slow
def test_the_judge_stays_the_same_to_the_bit(tmp_path: Path):
    play_against_a_frozen_judge(tmp_path, steps=2)


@pytest.mark.slow
def test_the_player_learns(tmp_path: Path):
    lines = play_against_a_frozen_judge(tmp_path, steps=10)
    rewards = [line["critic/score/mean"] for line in lines]
    assert sum(rewards[-4:]) / 4 > rewards[0] + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("policies", [FROZEN, COPY], ids=["frozen", "copy"])
def test_a_resumed_run_meets_the_same_opponent(tmp_path: Path, policies: str):
    own = [*DEBATE, policies, f"{ROLLOUT}.deterministic=True", "trainer.save_freq=2"]
    assert run(tmp_path / "whole", *own, "trainer.max_steps=4") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=2") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=4") == 0
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    others = ("agent_loop/", "rollout/")
    assert without_times(step_lines(parts), *others) == without_times(step_lines(whole), *others)
    assert same_bits(weights(parts, 4), weights(whole, 4))


@pytest.mark.slow
def test_a_copy_of_the_actor_is_renewed_every_so_many_steps(tmp_path: Path):
    own = [*DEBATE, COPY, "trainer.save_freq=2", "trainer.max_steps=4"]
    trainer = start_trainer(tmp_path, *own)
    trainer.fit()
    judge = trainer.rollout_wg.worker.agents.context.policies["judge"]

    copied = {name: value.clone() for name, value in judge.engine.twin.named_weights()}
    of_step = {}
    for step in (2, 4):
        saved = weights(tmp_path, step)
        of_step[step] = {name.rpartition("model/")[2]: value for name, value in saved.items()}
    differing = {2: 0, 4: 0}
    for name, value in copied.items():
        for step, saved in of_step.items():
            (own_name,) = [each for each in saved if each.endswith(name)]
            differing[step] += not torch.equal(saved[own_name], value)
    assert differing[2] == 0  # taken before step 3
    assert differing[4] > 0


def test_a_loop_from_a_users_file_asks_a_frozen_role(tmp_path: Path):
    (tmp_path / "loops.py").write_text(
        textwrap.dedent(
            """
            from verl.agents import AgentLoopBase, AgentLoopOutput

            class Judged(AgentLoopBase):
                roles = ("writer", "judge")

                async def run(self, messages, sampling_params):
                    ids = self.tokenizer.apply_chat_template(
                        messages, add_generation_prompt=True, tokenize=True, return_dict=False
                    )
                    drawn = await self.server_manager.generate(
                        "a", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 8}
                    )
                    said = self.tokenizer.decode(drawn, skip_special_tokens=True)
                    verdict = await self.server_manager.reply(
                        "judge", [{"role": "user", "content": said}]
                    )
                    return AgentLoopOutput(
                        prompt_ids=ids,
                        response_ids=drawn,
                        response_mask=[1] * len(drawn),
                        reward_score=float(len(set(said) & set(verdict))),
                    )
            """
        )
    )
    (tmp_path / "loops.yaml").write_text(
        f"- {{name: judged, _target_: {tmp_path}/loops.py:Judged}}"
    )
    own = [
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=judged",
        f"{ROLLOUT}.agent.gives_reward=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    judge = "{path: toy, max_new_tokens: 8}"
    judged = f"{ROLLOUT}.agent.policies={{writer: {{trained: true}}, judge: {judge}}}"
    assert run(tmp_path / "run", *own, judged) == 0
    lines = step_lines(tmp_path / "run")
    assert all(line["agent_loop/policy/judge/turns"] == 16 for line in lines)
    assert any(line["critic/score/max"] > 0 for line in lines)


def test_a_role_without_a_policy_is_an_error_before_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    assert run(tmp_path, *DEBATE) != 0
    assert "has the roles player, judge" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_server_plays_in_every_schedule(tmp_path: Path, mode: str):
    with serving() as (url, handler):
        judge = against(f"url: '{url}', model: big")
        assert run(tmp_path, *DEBATE, judge, f"trainer.mode={mode}") == 0
    assert len(handler.asked) > 16
    assert len({body["seed"] for body in handler.asked}) > 16
    lines = step_lines(tmp_path)
    assert sum(line.get("agent_loop/policy/judge/turns", 0) for line in lines) > 16


@pytest.mark.slow
@pytest.mark.parametrize("sharing", [1, 2])
def test_two_ranks_meet_the_same_judge_as_one_process(tmp_path: Path, sharing: int):
    shared = f"{ROLLOUT}.tensor_model_parallel_size={sharing}"
    own = [*DEBATE, FROZEN]
    assert run(tmp_path / "one", *own) == 0
    done = launch(2, main, command_line(tmp_path / "two", *own, shared))
    assert done.returncode == 0, done.stderr
    one, two = step_lines(tmp_path / "one"), step_lines(tmp_path / "two")
    names = ("critic/score/mean", "response_length/mean", "agent_loop/policy/judge/turns")
    for name in names:
        # Two slices of the weights add up in another order, so later steps drift apart.
        steps = slice(None) if sharing == 1 else slice(1)
        left = [line[name] for line in one[steps]]
        assert [line[name] for line in two[steps]] == pytest.approx(left), name


# ---- several trained policies --------------------------------------------------------------------

LONGER = f"{ROLLOUT}.multi_turn.max_tokens_per_turn=24"
PARTNER = against("trained: true, path: toy")
STILL = against("trained: true, path: toy, lr: 0")


class Clamped(PPOTrainer):
    """Stand for a user's subclass, which starts one policy."""


@pytest.mark.parametrize("kind", [PPOTrainer, Clamped])
def test_a_trainer_of_one_policy_refuses_a_second_one_before_models_load(tmp_path: Path, kind):
    config = load_config(command_line(tmp_path, *DEBATE, PARTNER))
    with pytest.raises(
        ConfigError, match=rf"\(judge\), .*PartnersTrainer .*, got {kind.__name__}\.$"
    ):
        kind(config)


def test_every_trained_policy_reads_the_sizes_that_a_program_gives(tmp_path: Path):
    trainer = RLTrainer(
        load_config(command_line(tmp_path, *DEBATE, PARTNER, "trainer.max_steps=1"))
    )
    trainer.rollout(["3 + 11 = ?"])  # loads the models
    trainer.train(micro_batch_size=2, gradient_accumulation_steps=4)
    for group in (trainer.ppo.actor_wg, *trainer.ppo.partners.values()):
        assert group.worker.config.actor.ppo_micro_batch_size_per_gpu == 2


class Silent(PartnersTrainer):
    """Forget to return the batch."""

    def estimate_advantages(self, batch):
        super().estimate_advantages(batch)


def test_a_phase_of_several_policies_without_a_return_is_named(tmp_path: Path):
    trainer = start_trainer(tmp_path, *DEBATE, PARTNER, kind=Silent)
    with pytest.raises(AlgorithmError, match="`estimate_advantages` must return its batch"):
        trainer.fit()


def num_differing(saved: dict[str, torch.Tensor]) -> int:
    """Count the weights of a checkpoint that are not those of the packaged model."""
    own = dict(load_causal_lm("toy", dtype=torch.float32).named_parameters())
    differing = 0
    for name, value in saved.items():
        (of_model,) = [each for each in own if name.endswith(each)]
        differing += not torch.equal(own[of_model], value)
    return differing


@pytest.mark.slow
def test_two_policies_learn_each_from_its_role_alone(tmp_path: Path):
    """Compare with a frozen judge: one that is trained without a step is the same opponent."""
    own = [*DEBATE, LONGER, "trainer.max_steps=3", "trainer.save_freq=3"]
    own.append(f"{ROLLOUT}.deterministic=True")
    frozen = against("path: toy, max_new_tokens: 24")
    for name, policies in (("frozen", frozen), ("still", STILL), ("both", PARTNER)):
        assert run(tmp_path / name, *own, policies) == 0

    actor = {name: weights(tmp_path / name, 3) for name in ("frozen", "still", "both")}
    judge = {name: weights(tmp_path / name, 3, "policy_judge") for name in ("still", "both")}
    assert same_bits(actor["still"], actor["frozen"])
    assert num_differing(judge["still"]) == 0
    assert num_differing(judge["both"]) > 0
    assert not same_bits(actor["both"], actor["still"])
    lines = step_lines(tmp_path / "both")
    assert all(line["policy_judge/actor/grad_norm"] > 0 for line in lines)
    for line in lines:
        assert line["policy_judge/rollout/generated_tokens"] > 0
        assert line["policy_judge/perf/rollout_generate_s"] > 0
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def test_a_second_trained_policy_may_have_the_name_of_a_worker(tmp_path: Path):
    (tmp_path / "named.py").write_text(
        textwrap.dedent(
            """
            from tests.agents.debate import Debate

            class Named(Debate):
                roles = ("player", "actor")

                def step(self, action):
                    seen = super().step(action)
                    if seen.role == "judge":
                        seen.role = "actor"
                        seen.rewards = {}
                    return seen
            """
        )
    )
    policies = "{player: {trained: true}, actor: {trained: true, path: toy}}"
    own = [
        *DEBATE[1:],
        f"{ROLLOUT}.agent.environment.name={tmp_path}/named.py:Named",
        f"{ROLLOUT}.agent.policies={policies}",
        "trainer.max_steps=1",
    ]
    assert run(tmp_path / "run", *own) == 0
    (line,) = step_lines(tmp_path / "run")
    assert "policy_actor/actor/grad_norm" in line


@pytest.mark.slow
def test_two_trained_policies_resume_to_the_bit(tmp_path: Path):
    own = [*DEBATE, PARTNER, f"{ROLLOUT}.deterministic=True", "trainer.save_freq=2"]
    assert run(tmp_path / "whole", *own, "trainer.max_steps=4") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=2") == 0
    assert run(tmp_path / "parts", *own, "trainer.max_steps=4") == 0
    for role in ("actor", "policy_judge"):
        whole, parts = weights(tmp_path / "whole", 4, role), weights(tmp_path / "parts", 4, role)
        assert same_bits(parts, whole), role
        assert not same_bits(weights(tmp_path / "whole", 2, role), whole), role


@pytest.mark.slow
def test_two_ranks_train_two_policies_like_one_process(tmp_path: Path):
    own = [*DEBATE, PARTNER, "trainer.save_freq=2"]
    assert run(tmp_path / "one", *own) == 0
    done = launch(2, main, command_line(tmp_path / "two", *own))
    assert done.returncode == 0, done.stderr
    for role in ("actor", "policy_judge"):
        one, two = weights(tmp_path / "one", 2, role), weights(tmp_path / "two", 2, role)
        for name, weight in one.items():
            # Adam divides by gradients: where they are almost 0, so are sums in another order.
            assert (weight - two[name]).abs().max() < 1e-4, (role, name)


def test_old_log_probs_are_those_of_the_policy_that_drew_the_row(tmp_path: Path):
    own = [*DEBATE, against("trained: true, path: toy, lr: 1e-2"), "trainer.max_steps=3"]
    assert run(tmp_path, *own) == 0
    differences = []
    for line in step_lines(tmp_path):
        differences += [line[name] for name in line if name.endswith("rollout_diff_max")]
    assert len(differences) >= 3
    assert max(map(abs, differences)) < 1e-4


TALK = """
from verl.agents import AgentLoopBase, AgentLoopOutput

class Talk(AgentLoopBase):
    roles = ("player", "judge")

    async def run(self, messages, sampling_params):
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        outputs = []
        for role in self.roles:
            drawn = await self.server_manager.generate(
                role, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 8}, role=ROLE
            )
            said = self.tokenizer.decode(drawn, skip_special_tokens=True)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=ids,
                    response_ids=drawn,
                    response_mask=[1] * len(drawn),
                    reward_score=float(len(set(said))),
                    role=role,
                )
            )
        return outputs
"""


def run_talk(folder: Path, role: str) -> int:
    """Train two policies by a loop of a user's; `role` is the code of that given to `generate`."""
    (folder / "loops.py").write_text(TALK.replace("ROLE", role))
    (folder / "loops.yaml").write_text(f"- {{name: talk, _target_: {folder}/loops.py:Talk}}")
    own = [
        f"{ROLLOUT}.agent.agent_loop_config_path={folder}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=talk",
        f"{ROLLOUT}.agent.gives_reward=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.test_freq=-1",
    ]
    policies = "{player: {trained: true}, judge: {trained: true, path: toy, lr: 1e-2}}"
    return run(folder / "run", *own, f"{ROLLOUT}.agent.policies={policies}")


def test_a_loop_from_a_users_file_draws_by_both_trained_policies(tmp_path: Path):
    assert run_talk(tmp_path, "role") == 0
    lines = step_lines(tmp_path / "run")
    assert all(line["policy_judge/rollout/generated_tokens"] > 0 for line in lines)
    assert all(line["policy_judge/actor/grad_norm"] > 0 for line in lines)
    # Tokens of another policy would differ as soon as the judge has learned.
    differences = [v for line in lines for k, v in line.items() if k.endswith("rollout_diff_max")]
    assert len(differences) >= 2
    assert max(map(abs, differences)) < 1e-4


def test_tokens_that_another_policy_drew_are_refused(tmp_path: Path, capfd):
    assert run_talk(tmp_path, "'player'") == 1
    assert "give generate the role of the output" in capfd.readouterr().err
