"""Whole runs of the asynchronous schedules: staleness 0 has the bits of the synchronous run."""

import datetime
import os
import runpy
import shutil
import signal
import sys
from collections import Counter
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.trainer.runs import (
    PPO,
    run,
    run_in_child,
    run_until_killed,
    same_bits,
    step_lines,
    weights,
    without_times,
)
from verl.protocol import DataProto
from verl.tracking.records import load_run
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import ConfigError

STEPS = 6
BASE = [f"trainer.max_steps={STEPS}", f"trainer.save_freq={STEPS}", "data.train_batch_size=3"]
ASYNC = "trainer.mode=fully_async"


def numbers(folder: Path) -> list[dict]:
    """Return the metrics that the synchronous run has, too."""
    return without_times(step_lines(folder), "fully_async/")


@pytest.mark.parametrize(
    "algorithm", [[], pytest.param(PPO, marks=pytest.mark.slow)], ids=["grpo", "ppo"]
)
def test_staleness_zero_has_the_bits_of_the_synchronous_run(tmp_path, algorithm):
    steps = 20
    length = [f"trainer.max_steps={steps}", f"trainer.save_freq={steps}", *BASE[2:]]
    assert run(tmp_path / "sync", *length, *algorithm) == 0
    zero = [ASYNC, "async_training.staleness_threshold=0"]
    assert run(tmp_path / "async", *length, *algorithm, *zero) == 0
    assert len(numbers(tmp_path / "sync")) == steps
    assert numbers(tmp_path / "async") == numbers(tmp_path / "sync")
    for role in ("actor", "critic")[: 2 if algorithm else 1]:
        ours = weights(tmp_path / "async", steps, role)
        assert same_bits(ours, weights(tmp_path / "sync", steps, role))
    for line in step_lines(tmp_path / "async"):
        assert line["fully_async/age/max"] == 0


@pytest.mark.slow
def test_a_named_checkpoint_continues_in_another_schedule(tmp_path, capfd):
    """Without anything ahead the resumed run has the bits of one that kept its schedule."""
    length = ["trainer.max_steps=4", "trainer.save_freq=2", "data.train_batch_size=3"]
    assert run(tmp_path / "sync", *length) == 0
    named = "trainer.resume_mode=resume_path"
    half_way = f"trainer.resume_from_path={tmp_path}/sync/global_step_2"
    zero = [ASYNC, "async_training.staleness_threshold=0"]
    assert run(tmp_path / "async", *length, *zero, named, half_way) == 0
    assert same_bits(weights(tmp_path / "async", 4), weights(tmp_path / "sync", 4))
    assert step_lines(tmp_path / "async")[-1]["fully_async/book/consumed"] == 4 * 3 * 4

    ahead = "trainer.mode=one_step_off"
    assert run(tmp_path / "ahead", *length, ahead, named, half_way) == 0
    assert [line["step"] for line in step_lines(tmp_path / "ahead")] == [3, 4]
    assert run(tmp_path / "ahead", *length, ahead, "trainer.resume_mode=disable") == 0
    half_way = f"trainer.resume_from_path={tmp_path}/ahead/global_step_2"
    assert run(tmp_path / "back", *length, named, half_way) == 0
    assert "3 prompts that were read ahead then are not learned from" in capfd.readouterr().out


def test_a_run_with_stale_tokens_keeps_the_bound(tmp_path):
    assert run(tmp_path, *BASE, ASYNC) == 0
    lines = step_lines(tmp_path)
    assert len(lines) == STEPS
    ages = [line["fully_async/age/max"] for line in lines]
    assert max(ages) == 1
    assert any(line["fully_async/partial/total_partial_num"] > 0 for line in lines)
    assert lines[-1]["fully_async/discarded_tokens"] == 0
    last = {
        name: lines[-1][f"fully_async/book/{name}"] for name in ("running", "frozen", "waiting")
    }
    assert set(last.values()) == {0}, "all that was generated is learned from"
    assert lines[-1]["fully_async/book/consumed"] == STEPS * 3 * 4


KEPT = ["async_training.keep_kv_cache=True", "actor_rollout_ref.rollout.free_cache_engine=False"]


@pytest.mark.parametrize(
    ("mode", "keys"),
    [
        ("fully_async", []),
        pytest.param("fully_async", KEPT, marks=pytest.mark.slow),
        pytest.param("one_step_off", [], marks=pytest.mark.slow),
    ],
    ids=["fully_async", "kept", "one_step_off"],
)
def test_a_killed_run_resumes_with_the_same_bits(tmp_path, mode, keys):
    """No finished group is lost or repeated, and frozen responses go on."""
    command = [*BASE[:1], "trainer.save_freq=2", f"trainer.mode={mode}", *BASE[2:], *keys]
    assert run(tmp_path / "whole", *command) == 0

    run_until_killed(4, lambda: run(tmp_path / "killed", *command))
    assert not (tmp_path / "killed" / "global_step_4").exists()
    assert run(tmp_path / "killed", *command) == 0
    assert without_times(step_lines(tmp_path / "killed")) == without_times(
        step_lines(tmp_path / "whole")
    )
    ours = weights(tmp_path / "killed", STEPS)
    assert same_bits(ours, weights(tmp_path / "whole", STEPS))


@pytest.fixture(scope="module")
def half_way(tmp_path_factory) -> Path:
    """Return the folder of a run with a checkpoint whose books hold unfinished responses."""
    folder = tmp_path_factory.mktemp("half_way")

    def until_killed() -> int:
        step = PPOTrainer.run_step

        def die(self: PPOTrainer, prompts: DataProto) -> None:
            if self.global_step == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            step(self, prompts)

        PPOTrainer.run_step = die
        return run(folder, *BASE[:1], "trainer.save_freq=1", *BASE[2:], ASYNC)

    assert os.WTERMSIG(run_in_child(until_killed)) == signal.SIGKILL
    return folder


AGENTS = "actor_rollout_ref.rollout.agent.environment.name=number_guessing"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["actor_rollout_ref.rollout.n=2"], "rollout.n=2 now, n=4 then. Set it as it was"),
        (["actor_rollout_ref.rollout.n=8"], "rollout.n=8 now, n=4 then. Set it as it was"),
        (["data.max_response_length=3"], "rollout.response_length=3 now, "),
        ([AGENTS, "data.max_prompt_length=128"], "rollout with agents now, no agents then"),
    ],
    ids=["fewer", "more", "shorter", "agents"],
)
def test_books_that_a_changed_run_cannot_go_on_with_are_refused(
    half_way, tmp_path, capfd, keys, message
):
    shutil.copytree(half_way, tmp_path / "run")
    assert run(tmp_path / "run", *BASE, ASYNC, *keys) == 1
    shown = capfd.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("prompts", [1, 2, 4])
def test_a_resumed_run_learns_from_batches_of_another_size(half_way, tmp_path, capfd, prompts):
    shutil.copytree(half_way, tmp_path / "run")
    assert run(tmp_path / "run", *BASE, ASYNC, f"data.train_batch_size={prompts}") == 0
    lines = step_lines(tmp_path / "run")
    assert len(lines) == STEPS
    learned = [line["fully_async/book/consumed"] for line in lines]
    saved = max(step for step in range(STEPS) if (half_way / f"global_step_{step}").exists())
    assert learned[saved - 1] == saved * 3 * 4
    assert learned[-1] == saved * 3 * 4 + (STEPS - saved) * prompts * 4

    record = load_run(tmp_path / "run")
    sizes: Counter[str] = Counter()
    for step in record.kept_steps:
        samples = record.samples(step)
        sizes.update(samples[row].uid for row in range(len(samples)))
    assert set(sizes.values()) == {4}, "no two prompts are one group"

    warning = "of the prompts in the books will be learned from later"
    assert (warning in capfd.readouterr().out) == (prompts < 3)


@pytest.mark.parametrize("mode", ["fully_async", "one_step_off"])
def test_a_checkpoint_holds_the_dates_of_rows(tmp_path, mode):
    """Batches that were read ahead are saved with all columns of the data."""
    rows = []
    for number in range(8):
        row = {
            "prompt": [{"role": "user", "content": f"{number} + 1 = ?"}],
            "data_source": "toy",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"day": datetime.date(2026, 1, 1), "price": Decimal("1.25")},
            "written": datetime.datetime(2026, 1, 1, 12),
        }
        rows.append(row)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")

    data = ["data.dataset_name=null", f"data.train_files={tmp_path / 'rows.parquet'}"]
    keys = [*data, "actor_rollout_ref.model.path=toy", f"trainer.mode={mode}"]
    saving = ["data.train_batch_size=3", "trainer.save_freq=1", *keys]
    assert run(tmp_path / "run", "trainer.max_steps=2", *saving) == 0
    assert run(tmp_path / "run", "trainer.max_steps=3", *saving) == 0


def test_one_step_off_learns_from_the_last_weights_but_one(tmp_path):
    """The second batch is drawn by the first weights, before the first update."""
    command = [*BASE, "algorithm.rollout_correction.bypass_mode=True"]
    assert run(tmp_path / "sync", *command) == 0
    assert run(tmp_path / "ahead", *command, "trainer.mode=one_step_off") == 0
    ahead = numbers(tmp_path / "ahead")
    sync = numbers(tmp_path / "sync")
    assert ahead[0] == sync[0]
    assert len(ahead) == STEPS
    assert ahead[2] != sync[2]


def test_kept_keys_spare_their_prefill(tmp_path):
    """Responses go on with the keys in their full pages."""
    length = [*BASE, ASYNC, "actor_rollout_ref.rollout.page_size=4", *KEPT[1:]]
    assert run(tmp_path / "anew", *length) == 0
    assert run(tmp_path / "kept", *length, *KEPT[:1]) == 0
    computed = {}
    for name in ("anew", "kept"):
        lines = step_lines(tmp_path / name)
        assert lines[-1]["fully_async/book/consumed"] == STEPS * 3 * 4
        computed[name] = sum(line.get("rollout/prefill_tokens", 0) for line in lines)
    assert computed["kept"] < computed["anew"]


@pytest.mark.parametrize("policy", ["mask", "reweight", "drop"])
def test_tokens_beyond_the_bound_are_treated_as_asked(tmp_path, policy):
    """A bound of 0 with prompts ahead: all that is older is masked, weighed down or dropped."""
    bound = ["async_training.max_staleness=0", f"async_training.on_stale={policy}"]
    bound.append("async_training.staleness_threshold=0.34")  # one prompt more than a batch
    assert run(tmp_path, *BASE, ASYNC, *bound) == 0
    lines = step_lines(tmp_path)
    beyond = sum(line["fully_async/tokens_beyond_bound"] for line in lines)
    discarded = lines[-1]["fully_async/discarded_tokens"]
    assert (beyond == 0) == (policy == "drop")
    assert (discarded > 0) == (policy == "drop")


def test_old_log_probs_are_interpolated_by_age(tmp_path):
    correction = "algorithm.rollout_correction"
    keys = [f"{correction}.proximal=loglinear", f"{correction}.rollout_is=token"]
    assert run(tmp_path, *BASE, ASYNC, *keys) == 0
    lines = step_lines(tmp_path)
    assert all("timing_s/old_log_prob" not in line for line in lines), "no pass computes them"
    first = lines[0]
    assert first["fully_async/age_0/kl"] == pytest.approx(0, abs=1e-5)
    assert first["fully_async/age_0/ess"] == pytest.approx(1, abs=1e-5)
    older = [line["fully_async/age_1/ess"] for line in lines if "fully_async/age_1/ess" in line]
    assert older
    assert min(older) < 0.9999, "other weights drew these tokens"


def test_a_trainer_of_another_schedule_is_refused():
    keys = {"data.dataset_name": "toy", "trainer.mode": "fully_async"}
    with pytest.raises(ConfigError, match="fully_async.FullyAsyncTrainer or a subclass"):
        PPOTrainer(keys)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("one_step_off_policy.main_ppo", "one_step_off"),
        ("one_step_off_policy.async_main_ppo", "one_step_off"),
        ("fully_async_policy.fully_async_main", "fully_async"),
    ],
)
def test_old_names_of_recipes_set_the_schedule(monkeypatch, capsys, name, mode):
    keys = ["data.dataset_name=toy", "actor_rollout_ref.hybrid_engine=False", "--cfg", "job"]
    monkeypatch.setattr(sys, "argv", [name, *keys])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"recipe.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert f"mode: {mode}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["rollout.nnodes=1"], "named among those of the run: trainer.placement.rollout=[2,3]"),
        (["rollout.total_rollout_steps=9"], "the length of a run is trainer.total_training_steps"),
        (["rollout.test_freq=9"], "between two validations are trainer.test_freq"),
        (["algorithm.adv_estimator=remax"], "with a greedy response by the weights that drew"),
        (["async_training.trigger_parameter_sync_step=2"], "needs ranks of its own"),
        (["async_training.require_batches=3"], "is the batch of a step, got 3 x 3"),
        (["async_training.keep_kv_cache=True"], "gives it to the trainer"),
        ([*KEPT, "actor_rollout_ref.rollout.deterministic=True"], "Set one of them to False"),
        (["actor_rollout_ref.rollout.name=hf"], "goes on with frozen responses"),
    ],
)
def test_impossible_schedules_are_refused(tmp_path, keys, message, capfd):
    assert run(tmp_path, *BASE, ASYNC, *keys) != 0
    assert message in capfd.readouterr().err
