"""Responses are scored during generation, and log-probs and values computed concurrently, if this
changes only the time."""

import json
import time

import pytest

from tests.trainer.runs import (
    PPO,
    command_line,
    metric_lines,
    run,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from verl.config import load_config
from verl.rewards.manager import NaiveRewardManager
from verl.trainer import PPOTrainer
from verl.trainer.dapo import DAPOTrainer
from verl.utils.phases import phase
from verl.workers import CriticWorker

KL = [
    *PPO,
    "trainer.test_freq=-1",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.kl_coef=0.1",
]
PASSES = ("compute_log_prob", "compute_ref_log_prob", "compute_values")


def spans(folder, step: int) -> list[dict]:
    """Return the complete events of a timeline."""
    trace = json.loads((folder / "timeline" / f"global_step_{step}.json").read_text())
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def scoring_begins_within_generation(folder, step: int) -> bool:
    """Check whether the timeline has responses scored before the last one was finished."""
    trace = json.loads((folder / "timeline" / f"global_step_{step}.json").read_text())[
        "traceEvents"
    ]
    (gen,) = [event for event in trace if event["name"] == "gen"]
    first = [event["ts"] for event in trace if event["name"] == "reward, from the first response"]
    return [gen["ts"] < start < gen["ts"] + gen["dur"] for start in first] == [True]


def slow_reward(folder) -> list[str]:
    """Return overrides for a reward that takes half a second."""
    file = folder / "slow.py"
    file.write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    time.sleep(0.03)\n"
        "    return {'score': len(set(solution_str)) / 10, 'length': len(solution_str)}\n"
    )
    return [f"custom_reward_function.path={file}"]


@pytest.mark.slow
def test_the_run_is_the_same_with_and_without_overlap(tmp_path):
    options = [*KL, *slow_reward(tmp_path), "trainer.profile_steps=[2]", "trainer.save_freq=2"]
    options += [
        "actor_rollout_ref.rollout.max_num_seqs=4",
        "data.val_batch_size=2",
        "actor_rollout_ref.rollout.val_kwargs.n=1",  # slow rewards of few responses
        "trainer.val_before_train=True",
    ]
    overlapped = tmp_path / "overlapped"
    after = tmp_path / "after"

    assert run(overlapped, *options) == 0
    assert run(after, *options, "reward_model.launch_reward_fn_async=False") == 0
    assert without_times(metric_lines(overlapped)) == without_times(metric_lines(after))
    assert same_bits(weights(overlapped, 2), weights(after, 2))
    assert scoring_begins_within_generation(overlapped, 2)
    assert not scoring_begins_within_generation(after, 2)
    begun = {}

    for folder in (overlapped, after):
        events = {event["name"]: event for event in spans(folder, 2)}
        end_of_reward = events["reward"]["ts"] + events["reward"]["dur"]
        begun[folder] = [events[name]["ts"] < end_of_reward for name in PASSES]

    assert begun == {overlapped: [True] * 3, after: [False] * 3}


class OwnScore(PPOTrainer):
    def score(self, batch):
        batch = super().score(batch)
        batch.batch["response_mask"][0] = 0
        return batch


class OwnPasses(PPOTrainer):
    def evaluate_policies(self, batch):
        return super().evaluate_policies(batch)


class OwnGeneration(PPOTrainer):
    def generate(self, prompts, first_row=0):
        return super().generate(prompts, first_row)


class Filtered(PPOTrainer):
    """Reorder rows after generation, so that the results begun for the whole batch do not apply."""

    def step(self, prompts):
        batch = self.generate(prompts)
        self.begin_passes(batch)
        batch = self.evaluate_policies(self.score(batch).select_idxs([3, 2, 1, 0]))
        batch = self.estimate_advantages(batch)
        values = self.critic_wg.compute_values(batch).batch["values"]
        assert (values == batch.batch["values"]).all()
        return batch


def test_results_begun_for_another_batch_are_discarded(tmp_path):
    own = [*PPO, "trainer.max_steps=1", "trainer.test_freq=-1"]
    trainer = start_trainer(tmp_path, *own, kind=Filtered)
    trainer.fit()


@pytest.mark.parametrize("kind", [OwnScore, OwnPasses, PPOTrainer])
def test_a_replaced_phase_gets_the_plain_sequence(tmp_path, monkeypatch, kind):
    began: list[str] = []
    original = CriticWorker.compute_values

    def noted(self, batch):
        began.append("values")
        return original(self, batch)

    noted.__dict__.update(original.__dict__)
    monkeypatch.setattr(CriticWorker, "compute_values", noted)
    original_call = NaiveRewardManager.__call__

    def patient(self, data, return_dict=False):
        ends_at = time.monotonic() + 0.3
        while kind is PPOTrainer and not began and time.monotonic() < ends_at + 20:
            time.sleep(0.01)
        while time.monotonic() < ends_at:
            time.sleep(0.01)
        began.append("reward is done")
        return original_call(self, data, return_dict)

    patient.__dict__.update(original_call.__dict__)
    monkeypatch.setattr(NaiveRewardManager, "__call__", patient)
    own = [*PPO, "trainer.max_steps=1", "trainer.test_freq=-1"]
    trainer = start_trainer(tmp_path, *own, kind=kind)
    trainer.fit()
    plain = ["reward is done", "values"]
    assert began == (plain if kind is not PPOTrainer else plain[::-1])


class OwnName(NaiveRewardManager):
    """Replace no method, so that every declaration holds."""


class OwnManager(NaiveRewardManager):
    """Declare nothing, so that it may change the batch in any way."""

    def __call__(self, data, return_dict=False):
        return super().__call__(data, return_dict)


class DeclaredManager(NaiveRewardManager):
    @phase(reads="responses attention_mask")
    def __call__(self, data, return_dict=False):
        return super().__call__(data, return_dict)


class WritingManager(NaiveRewardManager):
    @phase(reads="responses attention_mask", writes="response_mask")
    def score(self, samples, data):
        return super().score(samples, data)


@pytest.mark.parametrize(
    ("kind", "reward_fn", "is_ahead"),
    [
        (PPOTrainer, NaiveRewardManager, True),
        (DAPOTrainer, NaiveRewardManager, True),
        (OwnScore, NaiveRewardManager, False),
        (OwnGeneration, NaiveRewardManager, False),
        (PPOTrainer, OwnName, True),
        (PPOTrainer, OwnManager, False),
        (PPOTrainer, DeclaredManager, True),
        (PPOTrainer, WritingManager, False),
    ],
)
def test_scoring_waits_for_the_batch_if_custom_code_may_change_it(
    tmp_path, kind, reward_fn, is_ahead
):
    options = [*PPO, "trainer.max_steps=1", "reward_model.launch_reward_fn_async=True"]
    trainer = kind(load_config(command_line(tmp_path, *options)))
    reward = reward_fn(trainer.tokenizer, num_examine=0)
    with trainer.scoring_ahead(reward, next(iter(trainer.train_loader)), 4) as on_emit:
        assert (on_emit is not None) == is_ahead


@pytest.mark.parametrize(
    "body", ["raise ValueError('odd one')", "time.sleep(60)", "return float('nan')"]
)
def test_a_failing_reward_stops_the_run_as_without_overlap(tmp_path, capsys, body):
    file = tmp_path / "failing.py"
    file.write_text(
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 2:\n"
        f"        {body}\n"
        "    return 1.0\n"
    )

    outputs = []
    for asked in ("null", "False"):
        options = [
            f"custom_reward_function.path={file}",
            "reward_model.preflight=False",
            "reward_model.timeout_s=0.5",
        ]
        options += [
            f"reward_model.launch_reward_fn_async={asked}",
            "actor_rollout_ref.rollout.max_num_seqs=4",
        ]
        assert run(tmp_path / asked, *options) == 1
        outputs.append(capsys.readouterr().err.partition("The reward function failed on")[2])

    assert outputs[0]
    assert outputs[0].partition("prompt ends")[0] == outputs[1].partition("prompt ends")[0]
    assert outputs[0].partition("response starts")[2] == outputs[1].partition("response starts")[2]


def test_a_custom_reward_manager_comes_first_unless_configured_otherwise(tmp_path):
    begun: list[bool] = []
    for asked in ((), ("reward_model.launch_reward_fn_async=True",)):
        options = [*PPO, *asked, "trainer.max_steps=1", "trainer.test_freq=-1"]
        trainer = PPOTrainer(load_config(command_line(tmp_path / str(len(asked)), *options)))
        trainer.reward_fn = OwnManager(trainer.tokenizer, num_examine=0)
        trainer.init_workers()
        batch = trainer.generate(next(iter(trainer.train_loader)))
        trainer.begin_passes(batch)
        begun.append(trainer.begun[0] is batch)
        trainer.evaluate_policies(trainer.score(batch))
    assert begun == [False, True]


def test_samples_with_dropped_rewards_count_in_no_metric(tmp_path):
    """Remove dropped samples from the response mask, which the metrics of log-probs read."""
    file = tmp_path / "failing.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if len(solution_str) % 2:\n"
        "        raise ValueError('odd')\n"
        "    return float(len(solution_str))\n"
    )
    options = [
        *KL,
        f"custom_reward_function.path={file}",
        "reward_model.on_error=drop",
        "trainer.max_steps=1",
    ]

    assert run(tmp_path / "overlapped", *options, "reward_model.launch_reward_fn_async=True") == 0
    assert run(tmp_path / "after", *options, "reward_model.launch_reward_fn_async=False") == 0
    (line,), (other,) = (
        without_times(step_lines(tmp_path / name)) for name in ("overlapped", "after")
    )
    assert line == other
    assert line["reward/num_errors"] > 0
