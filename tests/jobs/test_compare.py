"""`verl compare`: the planted difference is found, and nothing else."""

import shutil
from pathlib import Path

import pytest
import torch

import verl
from tests.trainer.runs import run
from verl.cli.main import main
from verl.jobs.compare import Comparison, Difference, Tolerances, compare_runs
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import ConfigError

COMMON = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.max_steps=8",
    "trainer.test_freq=-1",
]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    assert run(folder, *COMMON, "trainer.save_freq=7") == 0
    return folder


def flip_one_bit(monkeypatch: pytest.MonkeyPatch, at_step: int) -> None:
    """Flip the last bit of one weight after the update of a step."""
    update = PPOTrainer.update

    def flipping(self: PPOTrainer, batch) -> None:
        update(self, batch)
        if self.global_step == at_step:
            model = self.actor_wg.worker.engine.hf_model
            weight = model.get_parameter("model.layers.1.mlp.up_proj.weight").data
            weight.view(torch.int32)[3, 5] ^= 1

    monkeypatch.setattr(PPOTrainer, "update", flipping)


def test_the_same_run_is_equal_to_the_last_bit(first: Path, tmp_path: Path, capsys):
    assert run(tmp_path, *COMMON) == 0
    capsys.readouterr()
    assert main(["compare", str(first), str(tmp_path)]) == 0
    assert "Steps 0 to 8 are equal to the last bit." in capsys.readouterr().out


def test_one_equal_step_is_no_range():
    difference = Difference(step=1, phase="generate", name="rollout_log_probs", place="")
    shown = str(Comparison([difference], keys=[], steps=[0, 1, 2], notes=[]))
    assert shown.startswith("Step 0 is equal to the last bit.\n")
    assert str(Comparison([], keys=[], steps=[3], notes=[])) == "Step 3 is equal to the last bit."


def test_a_damaged_line_is_reported_and_its_step_does_not_count_as_equal(
    first: Path, tmp_path: Path, capsys
):
    copied = copy_of_run(first, tmp_path)
    file = copied / "records/steps.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    (place,) = [number for number, line in enumerate(lines) if line.startswith('{"step": 3,')]
    lines[place] = lines[place][:100] + "\n"
    file.write_text("".join(lines))
    capsys.readouterr()

    assert main(["compare", str(first), str(copied)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Steps 0 to 2, 4 to 8 are equal to the last bit."
    assert f"A line of {file} is damaged" in shown[1]
    assert shown[2:] == ["Step 3 is recorded by the first run alone."]


def test_parts_that_one_run_alone_has_recorded_are_named(first: Path, tmp_path: Path):
    one = verl.load_run(first)
    other = verl.load_run(copy_of_run(first, tmp_path))
    for step in (7, 8):
        del one.steps[step]
    for line in other.steps.values():
        line.columns.pop("advantages", None)
        line.metrics.pop("actor/pg_loss", None)
        line.weights.clear()

    found = compare_runs(one, other)
    assert str(found).splitlines()[-3:] == [
        "Steps 0 to 6 are equal to the last bit.",
        "Recorded by the first run alone, and not compared: advantages, metric actor/pg_loss, "
        "weights of the actor.",
        "Steps 7 to 8 are recorded by the second run alone.",
    ]
    assert compare_runs(one, one).notes == []


def copy_of_run(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder / "records", target / "records")).parent


def test_times_of_agents_do_not_differ(tmp_path: Path, capsys):
    agents = ["data.dataset_name=calculator", "data.train_batch_size=2", "trainer.max_steps=1"]
    quiet = ["trainer.test_freq=-1", "trainer.val_before_train=False"]
    folders = [tmp_path / "one", tmp_path / "other"]
    for number, folder in enumerate(folders):
        assert main(["train", *agents, *quiet, f"trainer.default_local_dir={folder}"]) == 0
        file = folder / "records/steps.jsonl"
        written = file.read_text()
        measured = '"agent_loop/generate_sequences/min": '
        assert measured in written
        times = f'"tools/add/seconds/max": {number}, "policy_b/timing_s/step": {number}, '
        file.write_text(written.replace(measured, times + measured))
    capsys.readouterr()

    status = main(["compare", *map(str, folders)])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("saves", [True, False])
def test_one_bit_of_one_weight_at_step_7_is_found(
    first: Path, tmp_path: Path, monkeypatch, capsys, saves: bool
):
    flip_one_bit(monkeypatch, at_step=7)
    assert run(tmp_path, *COMMON, f"trainer.save_freq={7 if saves else -1}") == 0
    found = compare_runs(verl.load_run(first), verl.load_run(tmp_path))
    (difference,) = found.differences
    assert (difference.step, difference.phase) == (7, "update")
    assert difference.name == "weight model.layers.1.mlp.up_proj.weight (actor)"
    assert "1 of 30 tensors differ" in difference.place
    if saves:
        assert "element [3, 5] of [" in difference.place
        assert "1 elements differ" in difference.place
    capsys.readouterr()
    assert main(["compare", str(first), str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "Steps 0 to 6 are equal" in shown


def test_another_seed_and_another_kernel_differ_in_their_own_phase(first: Path, tmp_path: Path):
    one = verl.load_run(first)
    assert run(tmp_path / "seed", *COMMON, "actor_rollout_ref.rollout.seed=5") == 0
    found = compare_runs(one, verl.load_run(tmp_path / "seed"))
    assert (found.differences[0].step, found.differences[0].phase) == (1, "generate")
    assert found.differences[0].name == "response_ids"
    assert any("rollout.seed" in key for key in found.keys)

    # Another engine for the rollout: the same tokens, other roundings of their log-probs.
    assert run(tmp_path / "engine", *COMMON, "actor_rollout_ref.rollout.name=hf") == 0
    found = compare_runs(one, verl.load_run(tmp_path / "engine"))
    assert found.differences[0].phase == "generate"
    assert found.differences[0].step == 1


def test_tolerances_are_by_key(first: Path, tmp_path: Path, monkeypatch):
    flip_one_bit(monkeypatch, at_step=7)
    assert run(tmp_path, *COMMON, "trainer.save_freq=7") == 0
    pair = verl.load_run(first), verl.load_run(tmp_path)
    assert compare_runs(*pair, Tolerances(atol=1e-3, rtol=1e-3)).differences == []
    (difference,) = compare_runs(*pair, Tolerances(by_name={"returns": 1e-3})).differences
    assert difference.step == 7, "the tolerance of another name changes nothing"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rolout_log_probs", "rollout_log_probs"),
        ("actor/gradnorm", "actor/grad_norm"),
        ("model.layers.1.mlp.up_proj.wieght", "model.layers.1.mlp.up_proj.weight"),
        ("metric critic/score/mean", "critic/score/mean"),
    ],
)
def test_a_tolerance_of_an_unknown_name_is_refused(first: Path, capsys, name: str, nearest: str):
    assert main(["compare", str(first), str(first), "--tolerance", f"{name}=1e-3"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: The tolerance '{name}' names no column, metric or")
    assert nearest in error.partition("Nearest: ")[2]

    assert main(["compare", str(first), str(first), "--tolerance", f"{nearest}=1e-3"]) == 0


@pytest.mark.parametrize("name", ["response_ids", "timing_s/step", "qqqqqqqqqqqq"])
def test_a_tolerance_without_effect_is_refused_in_a_short_line(first: Path, name: str):
    run = verl.load_run(first)
    with pytest.raises(ConfigError, match="Nearest: ") as raised:
        compare_runs(run, run, Tolerances(by_name={name: 1e-3}))
    assert len(str(raised.value)) < 700


@pytest.mark.parametrize("value", ["nan", "-1", "inf"])
@pytest.mark.parametrize("option", ["--atol=", "--rtol=", "--tolerance=values="])
def test_a_tolerance_must_be_finite_and_not_negative(tmp_path: Path, capsys, option: str, value):
    assert main(["compare", str(tmp_path), str(tmp_path), f"{option}{value}"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    assert f"expected a finite number >= 0, got {float(value)}" in error


@pytest.mark.parametrize("option", ["--atol=1e-3", "--rtol=1e-3", "--tolerance=advantages=1e-3"])
def test_only_an_exact_comparison_speaks_of_the_last_bit(first: Path, capsys, option: str):
    assert main(["compare", str(first), str(first), option]) == 0
    shown = capsys.readouterr().out
    assert "Steps 0 to 8 are equal within the tolerances." in shown
    assert "last bit" not in shown

    assert main(["compare", str(first), str(first), "--atol=0"]) == 0
    assert "Steps 0 to 8 are equal to the last bit." in capsys.readouterr().out
