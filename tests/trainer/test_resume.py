"""A run killed at any moment and restarted ends with the bits of an uninterrupted run."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import verl.checkpoint.manager
import verl.checkpoint.sharded
import verl.engine.base
import verl.workers.rollout
from tests.cases import cases
from tests.launches import launch, run_module
from tests.trainer.runs import (
    command_line,
    metric_lines,
    moments,
    run,
    run_in_child,
    same_bits,
    weights,
    without_times,
)
from verl.checkpoint.manager import CheckpointManager
from verl.engine.base import TrainEngine
from verl.engine.memory import PassGuard
from verl.tracking.console import ConsoleBackend
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import CheckpointError, OutOfMemoryError, WorkerError

LAST = 4
VALIDATION = Path(__file__).parent / "two_prompts.jsonl"
REWARD = Path(__file__).parent / "fine_reward.py"
# A checkpoint in the middle of an epoch (three batches), and every feature with a state: schedule,
# adaptive KL, the order of rows in an update, sampled validation.
COMMAND = [
    f"trainer.max_steps={LAST}",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
    f"data.val_files={VALIDATION}",
    f"custom_reward_function.path={REWARD}",
    "data.train_batch_size=3",
    "data.val_batch_size=1",
    "data.validation_shuffle=True",
    "data.seed=3",  # gives the two rows of validation first in one order, then in the other
    "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    "actor_rollout_ref.rollout.val_kwargs.temperature=2",
    "actor_rollout_ref.rollout.val_kwargs.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.optim.warmup_style=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=1",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.05",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.kl_ctrl.target_kl=0.01",
]
ALGORITHMS = {
    "grpo": [],
    "ppo": ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3", "critic.ppo_mini_batch_size=3"],
}

Patch = pytest.MonkeyPatch


def die_at_call(
    patch: Patch, owner: Any, name: str, number: int, by: signal.Signals = signal.SIGKILL
) -> None:
    """Kill this process in the `number`th call of a function, after the call has done its work."""
    original = getattr(owner, name)
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == number:
            os.kill(os.getpid(), by)
        return result

    patch.setattr(owner, name, wrapped)


def in_rollout(patch: Patch, algorithm: str) -> None:
    """Kill step 3 after its tokens were drawn: two validation batches follow the second step."""
    die_at_call(patch, verl.workers.rollout, "assemble", 2 + 2 + 1)


def in_update(patch: Patch, algorithm: str) -> None:
    """Kill step 3 between two mini-batches of the actor, after the one update of the critic."""
    updates = {"grpo": 3, "ppo": 4}[algorithm]
    die_at_call(patch, TrainEngine, "step", 2 * updates + updates - 1)


def in_weights(patch: Patch, algorithm: str) -> None:
    """Kill the run when the second checkpoint has its actor and nothing else."""
    roles = {"grpo": 1, "ppo": 2}[algorithm]
    die_at_call(patch, verl.engine.base, "save_state", roles + 1)


def in_manifest(patch: Patch, algorithm: str) -> None:
    """Kill the run when the second checkpoint is complete, but not yet renamed."""
    die_at_call(patch, verl.checkpoint.manager, "write_manifest", 2)


def before_latest(patch: Patch, algorithm: str) -> None:
    """Kill the run when the second checkpoint is renamed, but `latest` still names the first."""
    die_at_call(patch, verl.checkpoint.manager, "whole_file", 2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of an uninterrupted run of an algorithm, created once."""
    folders: dict[str, Path] = {}

    def folder_of(algorithm: str) -> Path:
        if algorithm not in folders:
            folders[algorithm] = tmp_path_factory.mktemp(algorithm)
            assert run(folders[algorithm], *COMMAND, *ALGORITHMS[algorithm]) == 0
        return folders[algorithm]

    return folder_of


def assert_same_end(folder: Path, whole: Path, algorithm: str) -> None:
    lines = metric_lines(folder)
    assert [line["step"] for line in lines] == list(range(1, LAST + 1))
    assert without_times(lines) == without_times(metric_lines(whole))
    for role in ("actor", "critic") if algorithm == "ppo" else ("actor",):
        assert same_bits(weights(folder, LAST, role), weights(whole, LAST, role))
        assert same_bits(moments(folder, LAST, role), moments(whole, LAST, role))


@pytest.mark.parametrize(
    ("algorithm", "moment"),
    [
        pytest.param("grpo", in_manifest, marks=pytest.mark.slow),
        ("grpo", before_latest),
        # The others resume from the checkpoint of in_manifest, and leave fewer files.
        *(
            pytest.param("grpo", moment, marks=pytest.mark.slow)
            for moment in (in_rollout, in_update, in_weights)
        ),
        *(
            pytest.param("ppo", moment, marks=pytest.mark.slow)
            for moment in (in_update, in_weights)
        ),
    ],
)
def test_a_killed_run_ends_with_the_same_bits(tmp_path, undisturbed, capfd, algorithm, moment):
    command = [*COMMAND, *ALGORITHMS[algorithm]]
    with pytest.MonkeyPatch.context() as patch:
        moment(patch, algorithm)
        status = run_in_child(lambda: run(tmp_path, *command))
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    last_line = 4 if moment in (in_weights, in_manifest, before_latest) else 2
    assert [line["step"] for line in metric_lines(tmp_path)] == list(range(1, last_line + 1))
    capfd.readouterr()

    assert run(tmp_path, *command) == 0
    saved = 4 if moment is before_latest else 2
    assert f"global_step_{saved}: step {saved} of {LAST}" in capfd.readouterr().out
    assert_same_end(tmp_path, undisturbed(algorithm), algorithm)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == [".in_use"]


@pytest.mark.slow
def test_a_new_process_ends_with_the_same_bits_too(tmp_path, undisturbed):
    with pytest.MonkeyPatch.context() as patch:
        in_update(patch, "grpo")
        assert os.WIFSIGNALED(run_in_child(lambda: run(tmp_path, *COMMAND)))
    again = launch(1, run_module, "verl.trainer.main_ppo", command_line(tmp_path, *COMMAND))
    assert again.returncode == 0, again.stderr
    assert "global_step_2: step 2 of" in again.stdout
    assert_same_end(tmp_path, undisturbed("grpo"), "grpo")


@pytest.mark.slow
def test_a_run_killed_during_a_background_save_ends_with_the_same_bits(
    tmp_path, undisturbed, capfd
):
    """Kill the process when the second of three checkpoints has all its files and no final name.

    The first one has its name.
    """
    command = [*COMMAND, "trainer.async_save=True", "trainer.save_freq=1"]
    with pytest.MonkeyPatch.context() as patch:
        die_at_call(patch, verl.checkpoint.sharded, "write_sharded", 2)
        status = run_in_child(lambda: run(tmp_path, *command))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert [folder.name for folder in tmp_path.glob("global_step_*")] == ["global_step_1"]
    assert len(list(tmp_path.glob(".tmp-global_step_2-*"))) == 1
    capfd.readouterr()

    assert run(tmp_path, *command) == 0
    assert f"global_step_1: step 1 of {LAST}" in capfd.readouterr().out
    assert_same_end(tmp_path, undisturbed("grpo"), "grpo")
    assert sorted(folder.name for folder in tmp_path.glob("*global_step_*")) == [
        f"global_step_{step}" for step in range(1, LAST + 1)
    ]


@pytest.mark.parametrize("in_background", cases([True, False], quick=lambda background: background))
def test_sigterm_waits_for_a_save(tmp_path, undisturbed, capfd, in_background):
    command = [*COMMAND, f"trainer.async_save={in_background}", "trainer.save_freq=1"]
    with pytest.MonkeyPatch.context() as patch:
        die_at_call(patch, verl.checkpoint.sharded, "write_sharded", 2, signal.SIGTERM)
        status = run_in_child(lambda: run(tmp_path, *command))
    assert os.WIFEXITED(status), "by SystemExit"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert not list(tmp_path.glob(".tmp-*"))
    capfd.readouterr()

    assert run(tmp_path, *command) == 0
    assert f"global_step_2: step 2 of {LAST}" in capfd.readouterr().out
    assert_same_end(tmp_path, undisturbed("grpo"), "grpo")


def test_a_background_save_resumes_with_the_same_bits(tmp_path, undisturbed):
    command = [*COMMAND, *ALGORITHMS["ppo"], "trainer.async_save=True"]
    assert run(tmp_path, *command) == 0
    assert same_bits(moments(tmp_path, 2, "critic"), moments(undisturbed("ppo"), 2, "critic"))
    shutil.rmtree(tmp_path / f"global_step_{LAST}")
    assert run(tmp_path, *command) == 0
    assert_same_end(tmp_path, undisturbed("ppo"), "ppo")


def test_a_failed_background_save_stops_the_run(tmp_path, capfd, monkeypatch):
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(verl.checkpoint.sharded.FileSystemWriter, "write_data", fail)
    assert run(tmp_path, *COMMAND, "trainer.async_save=True", "trainer.save_freq=1") == 1
    assert "CheckpointError: While writing" in (error := capfd.readouterr().err)
    assert "Input/output error" in error
    assert not list(tmp_path.glob("*global_step_*"))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# The tests of the manager damage files in every way.
@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (flip_a_bit, "actor/sharded/__0_0.distcp"),
        (truncate, "manifest.json"),
        pytest.param(truncate, "actor/sharded/.metadata", marks=pytest.mark.slow),
        pytest.param(Path.unlink, "critic/progress.json", marks=pytest.mark.slow),
        pytest.param(flip_a_bit, "trainer/state.pt", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(
    tmp_path, undisturbed, capfd, damage, file
):
    shutil.copytree(undisturbed("ppo"), tmp_path, dirs_exist_ok=True)
    damage(tmp_path / f"global_step_{LAST}" / file)
    assert run(tmp_path, *COMMAND, *ALGORITHMS["ppo"]) == 0
    out = capfd.readouterr().out
    message = next(line for line in out.splitlines() if "Checkpoint skipped" in line)
    assert f"global_step_{LAST}" in message
    assert file in message
    assert f"global_step_2: step 2 of {LAST}" in out
    assert_same_end(tmp_path, undisturbed("ppo"), "ppo")


def test_a_run_without_any_sound_checkpoint_stops_instead_of_starting_over(
    tmp_path, undisturbed, capfd
):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    for folder in tmp_path.glob("global_step_*"):
        truncate(folder / "actor" / "sharded" / "__0_0.distcp")
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert run(tmp_path, *COMMAND) == 1
    assert "CheckpointError: None of the 2 checkpoints" in capfd.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_finished_run_does_nothing_more(tmp_path, undisturbed, capfd):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert run(tmp_path, *COMMAND) == 0
    out = capfd.readouterr().out
    assert (
        f"Nothing is left to train: step {LAST} is done, and the run ends with step {LAST}. Raise "
        "trainer"
    ) in out
    assert "Training completed" in out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_resume_mode_disable_starts_from_the_beginning(tmp_path, undisturbed):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    shorter = [
        override
        for override in COMMAND
        if override.partition("=")[0] not in ("trainer.max_steps", "trainer.save_freq")
    ]
    assert run(tmp_path, *shorter, "trainer.resume_mode=disable", "trainer.max_steps=1") == 0
    assert [line["step"] for line in metric_lines(tmp_path)] == [1]


def test_resume_path_takes_the_checkpoint_it_names(tmp_path, undisturbed):
    named = undisturbed("grpo") / "global_step_2"
    assert (
        run(
            tmp_path,
            *COMMAND,
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={named}",
        )
        == 0
    )
    assert same_bits(weights(tmp_path, LAST), weights(undisturbed("grpo"), LAST))


def test_a_named_checkpoint_without_one_role_is_rejected(tmp_path, undisturbed, capfd):
    named = tmp_path / "global_step_2"
    shutil.copytree(undisturbed("ppo") / "global_step_2", named)
    shutil.rmtree(named / "critic")
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}"]
    assert run(tmp_path, *COMMAND, *ALGORITHMS["ppo"], *resume) == 1
    output = capfd.readouterr().err
    assert output.startswith(f"CheckpointError: {named} is damaged: ")
    assert "critic/progress.json is missing" in output
    assert "actor/" not in output


def test_a_checkpoint_without_critic_does_not_serve_a_run_with_critic(tmp_path, undisturbed, capfd):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    named = tmp_path / f"global_step_{LAST}"
    resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={named}"]
    assert run(tmp_path, *COMMAND, *ALGORITHMS["ppo"], *resume) == 1
    output = capfd.readouterr().err
    assert "found no progress.json there. A run of other roles has saved it" in output
    assert f"global_step_{LAST}/critic" in output


def test_validation_only_validates_the_checkpoint(tmp_path, undisturbed, capfd):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    lines = metric_lines(tmp_path)
    expected = lines[-1]
    answers = tmp_path / "answers"
    folder = f"trainer.validation_data_dir={answers}"
    assert run(tmp_path, *COMMAND, "trainer.val_only=True", folder) == 0
    logged = capfd.readouterr().out
    assert f"I Samples: {answers / f'{LAST}.jsonl'}" in logged
    assert "No checkpoint" not in logged
    assert (answers / f"{LAST}.jsonl").is_file()
    *before, line = metric_lines(tmp_path)
    assert before == lines, "the training's"
    assert line["step"] == LAST
    scores = {name: value for name, value in line.items() if name.startswith("val-core/")}
    assert scores
    assert scores.items() <= expected.items()


def test_validation_only_names_the_folder_that_has_no_checkpoint(tmp_path, capfd):
    assert run(tmp_path, *COMMAND, "trainer.val_only=True") == 0
    expected = f"No checkpoint in {tmp_path}: actor_rollout_ref.model.path is validated as it is."
    assert expected in capfd.readouterr().out


def test_validation_only_takes_rows_of_its_own_and_none_to_train_on(tmp_path, undisturbed):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    rows = tmp_path / "val.jsonl"
    row = {"data_source": "toy", "prompt": [{"role": "user", "content": "2 + 2"}]}
    row["reward_model"] = {"style": "rule", "ground_truth": "4"}
    rows.write_text(f"{json.dumps(row)}\n" * 3)
    command = ["data.dataset_name=null", f"data.val_files={rows}", "data.train_batch_size=1000"]
    command += ["actor_rollout_ref.model.path=toy", "actor_rollout_ref.rollout.n=1"]
    assert run(tmp_path, *COMMAND, "trainer.val_only=True", *command) == 0
    assert metric_lines(tmp_path)[-1]["step"] == LAST


@pytest.mark.slow
def test_out_of_memory_on_one_of_several_ranks_lowers_the_next_start(tmp_path, capfd, monkeypatch):
    """Raise a WorkerError from the error of a rank, as calls on ranks do."""
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    error = OutOfMemoryError("Out of GPU memory in the update on rank 1 of 2.")
    error.lowered = {key: 40}

    def raises(*_: Any) -> None:
        raise WorkerError("actor.update_actor raised on rank 1") from error

    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "update", raises)
        assert run(tmp_path) == 1
    assert "Out of GPU memory" in capfd.readouterr().err
    seen: list[dict[str, int]] = []
    monkeypatch.setattr(PassGuard, "lower", lambda guard, sizes: seen.append(sizes))
    assert run(tmp_path) == 0
    assert seen == [{key: 40}]
    assert run(tmp_path, "trainer.resume_mode=disable") == 0
    assert len(seen) == 1, "a new run does not know it"
    for odd in ('{"half a', "[]", '{"a": null}', "[" * 10**5):
        (tmp_path / "lowered_budgets.json").write_text(odd)
        assert run(tmp_path) == 1
        assert "it is no JSON" in capfd.readouterr().err


def test_validation_only_from_the_start_keeps_earlier_metrics(tmp_path, undisturbed):
    shutil.copytree(undisturbed("grpo"), tmp_path, dirs_exist_ok=True)
    lines = metric_lines(tmp_path)
    assert run(tmp_path, *COMMAND, "trainer.val_only=True", "trainer.resume_mode=disable") == 0
    assert metric_lines(tmp_path)[:-1] == lines


def test_two_runs_without_checkpoints_do_not_share_a_file_of_metrics(tmp_path, capfd, monkeypatch):
    first = CheckpointManager(tmp_path)
    first.claim()
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "start_role", None)  # the refusal comes before models load
        status = run_in_child(lambda: run(tmp_path, "trainer.save_freq=-1"))
    assert os.waitstatus_to_exitcode(status) == 1
    assert f"Another run (pid {os.getpid()}" in capfd.readouterr().err
    first.release()
    assert run(tmp_path, "trainer.save_freq=-1") == 0


def test_trackers_are_closed_if_models_do_not_load(tmp_path, capfd, monkeypatch):
    closed = []
    monkeypatch.setattr(ConsoleBackend, "finish", lambda self: closed.append(self))

    def start_role(self, *args, **kwargs):
        raise CheckpointError("no weights")

    monkeypatch.setattr(PPOTrainer, "start_role", start_role)
    assert run(tmp_path, "trainer.logger=[console]") == 1
    assert "CheckpointError: no weights" in capfd.readouterr().err
    assert len(closed) == 1


def test_old_checkpoints_are_deleted(tmp_path):
    kept = ["trainer.max_actor_ckpt_to_keep=1", "trainer.save_freq=1"]
    assert run(tmp_path, *kept) == 0
    assert [folder.name for folder in tmp_path.glob("global_step_*")] == ["global_step_2"]
