"""DAPO's dynamic sampling in asynchronous schedules."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import cases
from tests.launches import launch
from tests.trainer.runs import (
    command_line,
    run,
    run_until_killed,
    same_bits,
    start_trainer,
    step_lines,
    weights,
    without_times,
)
from tests.trainer.schedules.test_agents import BASE as AGENTS
from tests.trainer.schedules.test_agents import OF_A_SCHEDULE
from verl.protocol import DataProto
from verl.tracking.records import load_run
from verl.trainer.main_ppo import main
from verl.trainer.schedules.dynamic_sampling import OneStepOffDAPOTrainer
from verl.trainer.schedules.fully_async import FullyAsyncTrainer
from verl.trainer.schedules.one_step_off import OneStepOffTrainer
from verl.utils.errors import ConfigError, DataError, RewardError

STEPS = 8
PROMPTS = 3
SAMPLES = 4
FILTER = "algorithm.filter_groups"
LENGTH = [
    f"trainer.max_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    f"data.train_batch_size={PROMPTS}",
]
BASE = [*LENGTH, f"{FILTER}.enable=True"]
ASYNC = "trainer.mode=fully_async"
ONE_STEP = "trainer.mode=one_step_off"
ZERO = [ASYNC, "async_training.staleness_threshold=0"]
APART = "trainer.placement.rollout=[1]"


def prompts_learned_from(folder: Path) -> Counter[str]:
    """Count the samples of every prompt in the batches of a run, whose scores differ."""
    record = load_run(folder)
    learned: Counter[str] = Counter()
    for step in record.kept_steps:
        samples = record.samples(step)
        scores: dict[str, set[float]] = {}
        for row in range(len(samples)):
            scores.setdefault(samples[row].uid, set()).add(samples[row].score)
            learned[samples[row].uid] += 1
        assert len(scores) == PROMPTS
        assert all(len(values) > 1 for values in scores.values())
    return learned


def assert_books_are_kept(folder: Path, bound: int) -> None:
    """Check that full batches of prompts that differ were learned from, each prompt once."""
    lines = [line for line in step_lines(folder) if "train/kept_prompts" in line]
    assert len(lines) == STEPS
    learned = prompts_learned_from(folder)
    assert set(learned.values()) == {SAMPLES}, "no prompt is learned from twice"
    assert len(learned) == STEPS * PROMPTS

    drawn = 0.0
    for line in lines:
        drawn += line["train/num_gen_batches"] * PROMPTS
        assert line["fully_async/book/consumed"] == pytest.approx(drawn * SAMPLES)
        assert line["fully_async/age/max"] <= bound
        is_full = line["train/kept_prompts"] == 1
        assert (line["fully_async/filtered_tokens"] == 0) == is_full
    assert lines[-1]["fully_async/discarded_tokens"] == 0
    assert drawn > STEPS * PROMPTS, "some prompts are left out"

    at_end = {name: lines[-1][f"fully_async/book/{name}"] for name in ("frozen", "waiting")}
    assert set(at_end.values()) == {0}, "none is started that no step takes"
    assert lines[-1]["fully_async/book/admitted"] < PROMPTS * SAMPLES


@pytest.mark.parametrize(
    "threshold", cases([0.5, 1.0, 3.0], quick=lambda threshold: threshold == 1)
)
def test_prompts_with_equal_scores_are_replaced_within_the_bound(tmp_path, threshold):
    ahead = f"async_training.staleness_threshold={threshold}"
    assert run(tmp_path, *BASE, ASYNC, ahead) == 0
    assert_books_are_kept(tmp_path, bound=max(1, int(threshold)))
    assert max(line["fully_async/age/max"] for line in step_lines(tmp_path)) > 0


def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path):
    """Rounds are whole batches then, in the numbers of the synchronous rounds."""
    assert run(tmp_path / "sync", *BASE) == 0
    assert run(tmp_path / "async", *BASE, *ZERO) == 0
    sync = without_times(step_lines(tmp_path / "sync"))
    assert without_times(step_lines(tmp_path / "async"), "fully_async/") == sync
    assert max(line["train/num_gen_batches"] for line in sync) > 2
    assert same_bits(weights(tmp_path / "async", STEPS), weights(tmp_path / "sync", STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASYNC, ONE_STEP])
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, mode):
    command = [BASE[0], "trainer.save_freq=2", *BASE[2:], mode]
    assert run(tmp_path / "whole", *command) == 0
    run_until_killed(4, lambda: run(tmp_path / "killed", *command))
    assert not (tmp_path / "killed" / "global_step_4").exists()
    assert run(tmp_path / "killed", *command) == 0
    whole = without_times(step_lines(tmp_path / "whole"))
    assert without_times(step_lines(tmp_path / "killed")) == whole
    ours = weights(tmp_path / "killed", STEPS)
    assert same_bits(ours, weights(tmp_path / "whole", STEPS))


def test_a_checkpoint_of_the_synchronous_run_goes_on(tmp_path):
    """Without anything ahead with the bits of the run that kept its schedule."""
    length = ["trainer.max_steps=4", "trainer.save_freq=2", *BASE[2:]]
    assert run(tmp_path / "sync", *length) == 0
    half_way = f"trainer.resume_from_path={tmp_path}/sync/global_step_2"
    named = ["trainer.resume_mode=resume_path", half_way]
    assert run(tmp_path / "async", *length, *ZERO, *named) == 0
    assert same_bits(weights(tmp_path / "async", 4), weights(tmp_path / "sync", 4))


class Watched(OneStepOffDAPOTrainer):
    """Records the step in which each batch was begun, and the one that took it."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.begun_in: list[int] = []
        self.taken_in: list[int] = []

    def _begin_rollout(self, step: int, prompts: DataProto, first_row: int) -> None:
        self.begun_in.append(self.global_step)
        super()._begin_rollout(step, prompts, first_row)

    def generate(self, prompts: DataProto, first_row: int = 0, on_emit: Any = None) -> DataProto:
        self.taken_in.append(self.global_step)
        return super().generate(prompts, first_row, on_emit)


def test_rounds_of_one_step_off_follow_one_another(tmp_path):
    """The first round was begun in the step before, the others in their own."""
    trainer = start_trainer(tmp_path, *BASE, ONE_STEP, kind=Watched)
    trainer.fit()
    rounds = Counter(trainer.taken_in)
    assert len(rounds) == STEPS
    assert max(rounds.values()) > 1
    assert len(trainer.begun_in) == len(trainer.taken_in), "none is begun in vain"

    ages = Counter[int]()
    for begun, taken in zip(trainer.begun_in, trainer.taken_in):
        ages[taken - begun] += 1
    assert ages == {1: STEPS - 1, 0: sum(rounds.values()) - STEPS + 1}
    learned = prompts_learned_from(tmp_path)
    assert set(learned.values()) == {SAMPLES}
    assert len(learned) == STEPS * PROMPTS


def train_apart(folder: Path, *more: str) -> list[dict]:
    """Run the main job with a rollout on the second of two ranks."""
    done = launch(2, main, command_line(folder, *BASE, APART, *more))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return step_lines(folder)


VALIDATED = ["trainer.test_freq=2", "trainer.dynamic_validation=True"]


def test_a_rollout_of_its_own_goes_on_between_the_rounds(tmp_path):
    lines = train_apart(tmp_path, ASYNC, *VALIDATED)
    assert_books_are_kept(tmp_path, bound=1)
    written = [
        line["val-aux/written_in_step"] for line in lines if "train/kept_prompts" not in line
    ]
    assert written == [3, 5, 7]


@pytest.mark.slow
@pytest.mark.parametrize("version_steps", [2, 3])
def test_weights_that_several_steps_learn_with_keep_the_bound(tmp_path, version_steps):
    keys = [f"async_training.trigger_parameter_sync_step={version_steps}"]
    train_apart(tmp_path / "one", ASYNC, *keys)
    assert_books_are_kept(tmp_path / "one", bound=1)
    train_apart(tmp_path / "zero", *ZERO, *keys)
    assert_books_are_kept(tmp_path / "zero", bound=0)


@pytest.mark.slow
def test_one_step_off_on_two_ranks_has_the_numbers_of_one(tmp_path):
    """A validation in flight shares the rollout with the rounds."""
    lines = train_apart(tmp_path / "apart", ONE_STEP, *VALIDATED)
    assert run(tmp_path / "together", *BASE, ONE_STEP, VALIDATED[0]) == 0
    ours = [line for line in lines if "train/kept_prompts" in line]
    theirs = step_lines(tmp_path / "together")
    for name in ("train/num_gen_batches", "train/kept_prompts", "train/score_of_all"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    assert same_bits(weights(tmp_path / "apart", STEPS), weights(tmp_path / "together", STEPS))


@pytest.mark.slow
def test_a_rollout_of_its_own_has_the_bits_of_the_synchronous_run(tmp_path):
    sync = train_apart(tmp_path / "sync")
    ours = train_apart(tmp_path / "async", *ZERO)
    apart = ("rollout/memory_gib", "rollout/num_pages", "fully_async/", "trainer/", "rollouter/")
    assert without_times(ours, *apart) == without_times(sync, *apart)
    assert same_bits(weights(tmp_path / "async", STEPS), weights(tmp_path / "sync", STEPS))


def agents(loop: str) -> list[str]:
    """Return the keys of runs with agents, whose loop scores a quarter of the episodes."""
    replaced = ("trainer.", "data.train_batch_size", "actor_rollout_ref.rollout.agent.default")
    others = [key for key in AGENTS if not key.startswith(replaced)]
    return [*BASE, *others, f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}"]


@pytest.mark.slow
def test_agents_play_further_prompts(tmp_path):
    assert run(tmp_path, *agents("rare_uneven_turns"), ASYNC) == 0
    assert_books_are_kept(tmp_path, bound=1)


@pytest.mark.slow
def test_agents_without_staleness_have_the_bits_of_the_synchronous_run(tmp_path):
    keys = agents("rare_turns")
    assert run(tmp_path / "sync", *keys) == 0
    assert run(tmp_path / "async", *keys, *ZERO) == 0
    sync = without_times(step_lines(tmp_path / "sync"), *OF_A_SCHEDULE)
    assert without_times(step_lines(tmp_path / "async"), *OF_A_SCHEDULE) == sync
    assert same_bits(weights(tmp_path / "async", STEPS), weights(tmp_path / "sync", STEPS))


@pytest.mark.slow
def test_agents_of_one_step_off_are_counted_once(tmp_path):
    """Rounds of two steps have the same rows, but no two episodes of a batch are one."""
    assert run(tmp_path, *agents("rare_turns"), ONE_STEP) == 0
    learned = prompts_learned_from(tmp_path)
    assert set(learned.values()) == {SAMPLES}
    assert len(learned) == STEPS * PROMPTS


def alike(data: DataProto, return_dict: bool = False) -> Any:
    scores = torch.zeros(data.batch["response_mask"].shape)
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


@pytest.mark.parametrize("mode", [ASYNC, ONE_STEP])
def test_the_limit_of_dynamic_sampling(tmp_path, mode):
    bound = [*BASE, mode, f"{FILTER}.max_num_gen_batches=2", "trainer.max_steps=2"]
    stopped = start_trainer(tmp_path / "error", *bound, reward_fn=alike, val_reward_fn=alike)
    with pytest.raises(DataError, match=r"2 batches of prompts gave 0 .*3 are wanted"):
        stopped.fit()

    fill = f"{FILTER}.on_exhausted=fill"
    filled = start_trainer(tmp_path / "fill", *bound, fill, reward_fn=alike, val_reward_fn=alike)
    filled.fit()
    lines = step_lines(tmp_path / "fill")
    assert [line["train/num_gen_batches"] for line in lines] == [2, 2]
    assert [line["train/kept_prompts"] for line in lines] == [0, 0]


def test_a_step_looks_at_no_more_prompts_than_the_limit(tmp_path):
    limit = [f"{FILTER}.max_num_gen_batches=2", f"{FILTER}.on_exhausted=fill"]
    assert run(tmp_path, *BASE, ASYNC, *limit) == 0
    looked_at = [line["train/num_gen_batches"] for line in step_lines(tmp_path)]
    assert len(looked_at) == STEPS
    assert max(looked_at) == 2
    assert any(1 < batches < 2 for batches in looked_at)
    assert max(line["fully_async/age/max"] for line in step_lines(tmp_path)) == 1


def failing(lost: int) -> Any:
    """Return a reward that fails for all samples of every `lost`-th prompt that it scores."""
    prompts = 0

    def reward(data: DataProto, return_dict: bool = False) -> Any:
        nonlocal prompts
        result = alike(data, return_dict=True)
        scores = result["reward_tensor"]
        scores[:, 0] = torch.arange(len(data)) % 2
        result["dropped"] = []
        for first in range(0, len(data), SAMPLES):
            prompts += 1
            if prompts % lost == 0:
                rows = range(first, first + SAMPLES)
                result["dropped"] += rows
                scores[rows] = 0
        return result if return_dict else scores

    return reward


def test_a_round_without_any_score_is_followed_by_another_one(tmp_path):
    """A reward that fails for the one prompt that a batch lacks does not stop the run."""
    reward = failing(lost=2)
    keys = [*BASE, ASYNC, "trainer.val_before_train=False"]
    trainer = start_trainer(tmp_path / "some", *keys, reward_fn=reward, val_reward_fn=alike)
    trainer.fit()
    assert max(line["train/num_gen_batches"] for line in step_lines(tmp_path / "some")) > 5 / 3

    fill = [f"{FILTER}.on_exhausted=fill", f"{FILTER}.max_num_gen_batches=1"]
    trainer = start_trainer(
        tmp_path / "all", *keys, *fill, reward_fn=failing(lost=1), val_reward_fn=alike
    )
    with pytest.raises(RewardError, match="All samples of this step were dropped"):
        trainer.fit()


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_tokens_beyond_the_bound_are_counted_in_the_batch_alone(tmp_path, policy):
    bound = ["async_training.max_staleness=0", f"async_training.on_stale={policy}"]
    bound.append("async_training.staleness_threshold=1.0")
    assert run(tmp_path, *BASE, ASYNC, *bound) == 0
    for line in step_lines(tmp_path):
        aged = sum(
            value
            for name, value in line.items()
            if name.startswith("fully_async/age/tokens_") and not name.endswith("_0")
        )
        assert line["fully_async/tokens_beyond_bound"] == aged
    if policy == "drop":
        assert line["fully_async/discarded_tokens"] > 0


@pytest.mark.parametrize("kind", [FullyAsyncTrainer, OneStepOffTrainer])
def test_a_schedule_without_rounds_is_refused(tmp_path, kind):
    with pytest.raises(ConfigError, match="needs a trainer of verl.*dynamic_sampling, got"):
        start_trainer(tmp_path, *BASE, f"trainer.mode={kind.mode}", kind=kind)
