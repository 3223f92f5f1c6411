"""A resumed run names the run that it continues, lists the changes since, and rejects a mixture of
two runs."""

import io
import json
import logging
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from tests.trainer.runs import run, same_bits, step_lines, weights
from verl.checkpoint.manifest import write_manifest
from verl.checkpoint.unpickling import load_state, save_state
from verl.data.toy import TOY, TOY_MODEL, packaged_files
from verl.jobs.main_merge import main as model_merger
from verl.jobs.main_sft import main as fine_tune
from verl.trainer.api import RLTrainer
from verl.trainer.roles import RunOfRoles
from verl.utils.logging import logger

FIRST = ["trainer.save_freq=1", "trainer.test_freq=-1", "trainer.max_steps=1"]
LONGER = [*FIRST[:2], "trainer.max_steps=2"]
ESTIMATOR = "algorithm.adv_estimator"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one step."""
    folder = tmp_path_factory.mktemp("first")
    assert run(folder, *FIRST, "trainer.project_name=http://me:pa55w0rd@host") == 0
    return folder


@pytest.fixture
def log(first: Path, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Capture the lines of the log as a command prints them."""
    handler = logging.StreamHandler(lines := io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname).1s %(message)s"))
    monkeypatch.setattr(logger, "handlers", [handler])
    return lines


@pytest.fixture
def folder(first: Path, tmp_path: Path) -> Path:
    """Copy the folder for one test."""
    return Path(shutil.copytree(first, tmp_path / "run"))


def test_the_resumed_checkpoint_is_named_with_step_and_time(folder, log):
    assert run(folder, *LONGER) == 0
    out = log.getvalue()
    assert f"Resumed from {folder}/global_step_1: step 1 of 2, written 20" in out
    assert "Changed since" not in out
    assert f"Saved {folder}/global_step_2" in out


def test_changed_keys_are_listed_with_both_values(folder, log):
    changed = ["actor_rollout_ref.actor.optim.lr=5e-4", "data.train_batch_size=5"]
    assert run(folder, *LONGER, *changed) == 0
    out = log.getvalue()
    (line,) = [line for line in out.splitlines() if line.startswith("W Changed since ")]
    assert "actor_rollout_ref.actor.optim.lr (0.001 then, 0.0005 now)" in line
    assert "data.train_batch_size (4 then, 5 now)" in line
    assert line.count(" then, ") == 2


@pytest.mark.parametrize("controller", ["kl", "entropy"])
def test_an_adaptive_coefficient_begins_in_a_resumed_run(folder, log, controller):
    kind = f"algorithm.{controller}_ctrl.type"
    assert run(folder, *LONGER, f"{kind}=adaptive") == 0
    assert f"{kind} ('fixed' then, 'adaptive' now)" in log.getvalue()

    assert f"Saved {folder}/global_step_2" in log.getvalue()


def test_length_outputs_and_speed_may_change_silently(folder, log):
    free = [
        *("trainer.save_freq=2", "trainer.test_freq=2", 'trainer.logger=["console"]'),
        *("trainer.max_steps=2", "trainer.experiment_name=other", "trainer.deadline_s=99"),
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.rollout.val_kwargs.n=1",
    ]
    assert run(folder, *free) == 0
    assert "Changed since" not in log.getvalue()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        (f"{ESTIMATOR}=rloo", rf"{ESTIMATOR} ('grpo' then, 'rloo' now)"),
        (f"{ESTIMATOR}=gae", rf"{ESTIMATOR} ('grpo' then, 'gae' now)"),
        (
            "actor_rollout_ref.actor.optim.optimizer=Muon",
            "actor_rollout_ref.actor.optim.optimizer ('AdamW' then, 'Muon' now)",
        ),
        ("trainer.mode=fully_async", "trainer.mode ('sync' then, 'fully_async' now)"),
    ],
)
def test_a_mixture_of_two_runs_is_rejected_with_the_alternatives(
    folder, capfd, monkeypatch, override, key
):
    def load(self):
        raise AssertionError("models load before the check")

    with monkeypatch.context() as patch:
        patch.setattr(RunOfRoles, "_start_roles", load)
        assert run(folder, *LONGER, override) == 1
    err = capfd.readouterr().err
    assert len(err.splitlines()) == 1
    assert err.startswith(f"CheckpointError: {folder}/global_step_1 was saved by another run")
    assert key in err
    for way_out in ("resume_mode=disable", "experiment_name", "default_local_dir", "resume_path"):
        assert way_out in err
    assert [line["step"] for line in step_lines(folder)] == [1]
    assert run(folder, *LONGER, override, "trainer.resume_mode=disable") == 0


def test_a_named_checkpoint_continues_with_another_estimator(folder, log):
    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_1"]
    assert run(folder, *LONGER, f"{ESTIMATOR}=rloo", *named) == 0
    assert f"{ESTIMATOR} ('grpo' then, 'rloo' now)" in log.getvalue()


def test_only_a_named_checkpoint_continues_with_a_longer_data_set(tmp_path, log, capfd):
    (prompts,) = packaged_files(TOY, "train")
    rows = Path(prompts).read_text().splitlines(keepends=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(rows[:-2]))
    folder = tmp_path / "run"
    own = [
        "data.dataset_name=null",
        f"data.train_files={data}",
        f"data.val_files={data}",
        f"actor_rollout_ref.model.path={TOY}",
    ]
    assert run(folder, *FIRST, *own) == 0

    data.write_text("".join(rows))
    capfd.readouterr()
    assert run(folder, *LONGER, *own) == 1
    assert "with another data set: 8 rows" in (err := capfd.readouterr().err)
    assert "trainer.resume_mode=resume_path" in err

    named = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_1"]
    assert run(folder, *LONGER, *own, *named) == 0
    assert "another data set (8 rows then, 10 now)" in log.getvalue()
    state = load_state(folder / "global_step_2" / "trainer" / "state.pt")
    assert state["train_loader"]["num_rows"] == len(rows)
    assert state["train_loader"]["epoch"] == 0
    assert run(folder, *FIRST[:2], "trainer.max_steps=3", *own) == 0


@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_fine_tuning_does_not_resume_a_checkpoint_of_training(mode, folder, capfd):
    step = folder / "global_step_1"
    arguments = [
        "model.path=toy",
        f"data.train_files={packaged_files(TOY, 'train')[0]}",
        "data.prompt_key=data_source",
        "data.response_key=ability",
        "data.train_batch_size=4",
        f"trainer.default_local_dir={folder}",
        f"trainer.resume_mode={mode}",
    ]
    if mode == "resume_path":
        arguments.append(f"trainer.resume_from_path={step}")
    assert fine_tune(arguments) == 1
    err = capfd.readouterr().err
    assert "reinforcement learning saved it" in err
    assert f"verl merge --local_dir {step}/actor" in err


def test_a_moved_model_is_the_same_and_one_of_another_name_is_not(tmp_path, capfd, log):
    for place in ("a/model", "b/model", "b/other"):
        shutil.copytree(TOY_MODEL, tmp_path / place)
    key = "actor_rollout_ref.model.path"
    assert run(tmp_path / "run", *FIRST, f"{key}={tmp_path}/a/model") == 0
    assert run(tmp_path / "run", *LONGER, f"{key}={tmp_path}/b/model/") == 0
    assert "W Changed since" in log.getvalue()
    assert run(tmp_path / "run", *LONGER, f"{key}={tmp_path}/b/other") == 1
    err = capfd.readouterr().err
    assert f"{key} ('{tmp_path}/b/model/' then, '{tmp_path}/b/other' now)" in err


def rewrite(folder: Path, file: str, content: object) -> None:
    """Replace a file of the checkpoint, and update its checksum in the manifest."""
    path = folder / "global_step_1" / "trainer" / file
    if isinstance(content, str):
        path.write_text(content)
    else:
        torch.save(content, path)
    write_manifest(folder / "global_step_1", step=1)


@pytest.mark.parametrize("content", ["[]", "null", "{", "[" * 10**5, "9" * 5000])
def test_a_malformed_stored_configuration_is_reported_in_one_line(folder, capfd, content):
    rewrite(folder, "config.json", content)
    assert run(folder, *LONGER) == 1
    err = capfd.readouterr().err
    assert err.startswith(f"CheckpointError: {folder}/global_step_1/trainer/config.json cannot be")
    assert len(err.splitlines()) == 1


def test_a_stored_configuration_of_other_keys_and_types_is_compared_where_possible(folder):
    rewrite(folder, "config.json", '{"no.key": 3, "data.seed": [1], "trainer.seed": {"a": null}}')
    assert run(folder, *LONGER) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("kl_controller"),
        lambda state: state.update(global_step="1"),
        lambda state: state.update(train_loader=[]),
        lambda state: state.update(train_loader={}),
        lambda state: state.update(rng={"python": 1}),
        lambda state: state["rng"].update(python=3),
        lambda state: state["rng"].update(torch=torch.zeros(3)),
        lambda state: state["train_loader"].update(epoch="x"),
    ],
)
def test_a_malformed_state_is_reported_in_one_line(folder, capfd, change):
    file = folder / "global_step_1" / "trainer" / "state.pt"
    state = load_state(file)
    change(state)
    save_state(file, state)
    write_manifest(folder / "global_step_1", step=1)
    assert run(folder, *LONGER) == 1
    err = capfd.readouterr().err
    assert err.startswith("CheckpointError: ")
    assert "state.pt" in err
    assert len(err.splitlines()) == 1


def test_a_failure_while_resuming_is_before_the_first_step(folder, log):
    """The checkpoint's step would be one that this run does not make."""
    file = folder / "global_step_1" / "trainer" / "state.pt"
    state = load_state(file)
    state["global_step"] = 2
    state["rng"].update(python=3)
    rewrite(folder, "state.pt", state)

    assert run(folder, *FIRST) == 1
    ended = "W Stopped by CheckpointError before its first step. Newest checkpoint in"
    assert f"{ended} {folder}: global_step_1.\n" in log.getvalue()


@pytest.mark.parametrize("content", [[1, 2], 3, None])
def test_an_invalid_state_is_reported_in_one_line(folder, capfd, content):
    rewrite(folder, "state.pt", content)
    assert run(folder, *LONGER) == 1
    assert "CheckpointError: Expected the state of a run" in capfd.readouterr().err


def test_a_checkpoint_without_configuration_is_resumed(folder, first, tmp_path):
    """Resume from the format of earlier versions, without a count in the manifest."""
    (folder / "global_step_1" / "trainer" / "config.json").unlink()
    write_manifest(folder / "global_step_1", step=1)
    manifest = folder / "global_step_1" / "manifest.json"
    values = json.loads(manifest.read_text())
    del values["sequence"]
    manifest.write_text(json.dumps(values))
    assert run(folder, *LONGER) == 0
    shutil.copytree(first, tmp_path / "other")
    assert run(tmp_path / "other", *LONGER) == 0
    assert same_bits(weights(folder, 2), weights(tmp_path / "other", 2))


def test_the_stored_configuration_has_no_secrets(first):
    files = [file for file in first.rglob("*") if file.is_file()]
    assert not [file for file in files if b"pa55w0rd" in file.read_bytes()]
    stored = json.loads((first / "global_step_1" / "trainer" / "config.json").read_text())
    assert stored["trainer.project_name"] == "http://***@host"


def test_a_program_learns_that_nothing_was_left_to_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    keywords = {"data.dataset_name": "toy", "trainer.max_steps": 1, "trainer.save_freq": 1}
    assert RLTrainer(**keywords).train()
    capsys.readouterr()
    assert RLTrainer(**keywords).train() == {}
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("W ")]
    assert any(f"Resumed from {tmp_path}/checkpoints/toy/toy" in line for line in warnings)
    (nothing,) = [line for line in warnings if "Nothing is left to train" in line]
    assert f"{tmp_path}/checkpoints/toy/toy" in nothing
    assert "trainer.resume_mode=disable" in nothing


def test_the_end_of_a_run_names_its_results_and_the_command_that_exports_them(tmp_path, log):
    folder = tmp_path / "my run"
    assert run(folder, *FIRST) == 0
    out = log.getvalue()
    assert f"I Metrics: {folder}/metrics.jsonl" in out
    assert f"I Checkpoint: {folder}/global_step_1" in out
    assert "save_freq=-1" not in out
    command = out.partition("Weights for transformers: ")[2].splitlines()[0]
    _, merge, *arguments = shlex.split(command)
    assert model_merger([merge, "--backend", "fsdp", *arguments]) == 0
    assert (folder / "global_step_1_hf" / "model.safetensors").is_file()


def test_the_end_of_a_run_names_weights_that_transformers_loads_already(tmp_path, log):
    parts = "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    assert run(tmp_path, *FIRST, parts) == 0
    folder = tmp_path / "global_step_1" / "actor" / "huggingface"
    assert f"I Weights for transformers: {folder}\n" in log.getvalue()
    assert (folder / "model.safetensors").is_file()


def test_a_run_that_saves_nothing_warns_at_its_start(tmp_path, log):
    assert run(tmp_path, "trainer.max_steps=1") == 0
    out = log.getvalue()
    warning = "W trainer.save_freq=-1: no checkpoint is written"
    assert out.index(warning) < out.index("I Example of toy")
    assert "Set trainer.save_freq=1 to keep" in out
    assert "verl merge" not in out
