"""Capsules: a step executed again in this and another process, with and without a planted fault."""

import zipfile
from pathlib import Path

import pytest

import verl
from tests.diagnostics.view.toy_records import toy_table, write_record
from tests.launches import launch, run_module
from tests.trainer.runs import run
from verl.cli.main import main
from verl.jobs.compare import Tolerances
from verl.jobs.replay import replay
from verl.tracking import Tracker
from verl.trainer.capsule import write_capsule
from verl.trainer.ppo_trainer import PPOTrainer
from verl.utils.errors import ConfigError, DataError, RewardError

COMMON = [
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.max_steps=5",
    "trainer.save_freq=2",
    "trainer.test_freq=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    assert run(folder, *COMMON) == 0
    return folder


@pytest.mark.parametrize(("step", "start"), [(5, 4), (4, 2), (1, 0)])
def test_a_replay_gives_the_same_bits(trained: Path, tmp_path: Path, step: int, start: int):
    replayed = replay(write_capsule(trained, step, tmp_path / "capsule.zip"))
    assert replayed.is_equal, str(replayed)
    assert replayed.comparison.steps == list(range(start, step + 1))
    assert "equal to the last bit" in str(replayed)


@pytest.mark.parametrize(
    "mode", [pytest.param("one_step_off", marks=pytest.mark.slow), "fully_async"]
)
def test_a_schedule_that_draws_ahead_is_replayed(tmp_path: Path, mode: str):
    assert run(tmp_path / "run", *COMMON, f"trainer.mode={mode}") == 0
    for step, steps in ((5, [4, 5]), (1, [0, 1])):
        replayed = replay(write_capsule(tmp_path / "run", step, tmp_path / f"{step}.zip"))
        assert replayed.is_equal, str(replayed)
        assert replayed.comparison.steps == steps


@pytest.mark.parametrize("step", [0, -3, 30_000_000])
def test_a_step_without_samples_is_an_error(trained: Path, step: int):
    with pytest.raises(DataError, match=rf"no samples of step {step}\. Kept are \[1, 2, 3, 4, 5\]"):
        write_capsule(trained, step)


def test_steps_to_choose_from_are_those_of_training(tmp_path: Path):
    writer = write_record(tmp_path, steps=0)
    writer.add_samples(0, toy_table(4, ["x"]))
    with pytest.raises(DataError, match="has samples. Train at least one step"):
        write_capsule(tmp_path, 0)
    writer.add_samples(1, toy_table(4, ["x"]))
    with pytest.raises(DataError, match=r"no samples of step 0\. Kept are \[1\]; choose"):
        write_capsule(tmp_path, 0)


def test_a_folder_is_no_file_for_a_capsule(tmp_path: Path, capfd):
    assert main(["capsule", str(tmp_path), "--step", "1", "--output", str(tmp_path)]) == 1
    assert f"--output must name a file, got the folder '{tmp_path}'" in capfd.readouterr().err


def test_an_unknown_changed_key_is_named(trained: Path, tmp_path: Path):
    capsule = write_capsule(trained, 1, tmp_path / "capsule.zip")
    with pytest.raises(ConfigError, match=r"'trianer.device'. Nearest known: trainer.device"):
        replay(capsule, keys={"trianer.device": "cpu"})


def test_changed_keys_are_read_as_by_other_commands(trained: Path, tmp_path: Path, capfd):
    capsule = str(write_capsule(trained, 1, tmp_path / "capsule.zip"))
    a_list = "trainer.logger=[console]"
    another_name = "+trainer.max_steps=7"
    dashes = "--actor_rollout_ref.actor.optim.lr=2e-3"
    assert main(["replay", capsule, a_list, another_name, dashes]) == 1
    written = "".join(capfd.readouterr())
    assert "[Step 1/7]" in written
    assert "step 1, phase update, metric actor/lr: 0.001 and 0.002" in written


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("run.yaml", "Expected words key=value alone, got 'run.yaml'."),
        ("--aotl", "Expected key=value, got '--aotl'."),
    ],
)
def test_words_after_a_capsule_are_keys_alone(tmp_path: Path, word: str, message: str, capfd):
    assert main(["replay", str(tmp_path / "capsule.zip"), word]) == 1
    assert message in capfd.readouterr().err


def test_a_tolerance_of_an_unknown_name_is_refused_before_the_step_is_executed(
    trained: Path, tmp_path: Path, monkeypatch
):
    capsule = write_capsule(trained, 1, tmp_path / "capsule.zip")
    monkeypatch.setattr(PPOTrainer, "init_workers", lambda self: pytest.fail("it was executed"))
    with pytest.raises(ConfigError, match="Nearest: rollout_log_probs"):
        replay(capsule, tolerances=Tolerances(by_name={"rolout_log_probs": 1e-3}))


def test_another_process_replays_with_the_weights_inside(trained: Path, tmp_path: Path, capsys):
    capsule = tmp_path / "capsule.zip"
    arguments = ["capsule", str(trained), "--step", "5", "--weights", "--output", str(capsule)]
    assert main(arguments) == 0
    assert f"verl replay {capsule}" in capsys.readouterr().out
    hidden = trained.rename(trained.with_name("hidden"))  # nothing but the capsule is there
    try:
        done = launch(1, run_module, "verl.jobs.main_replay", [str(capsule)], folder=tmp_path)
    finally:
        hidden.rename(trained)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Steps 4 to 5 are equal to the last bit." in done.stdout


def test_a_planted_fault_is_named(trained: Path, tmp_path: Path, monkeypatch):
    capsule = write_capsule(trained, 5, tmp_path / "capsule.zip")
    estimate = PPOTrainer.estimate_advantages

    def wrong(self: PPOTrainer, batch):
        batch = estimate(self, batch)
        batch.batch["advantages"][3, 0] += 1e-6
        return batch

    monkeypatch.setattr(PPOTrainer, "estimate_advantages", wrong)
    replayed = replay(capsule)
    assert not replayed.is_equal
    first = replayed.comparison.differences[0]
    assert (first.step, first.phase, first.name) == (5, "estimate_advantages", "advantages")
    assert first.place.startswith("row 3, token 0: ")


def test_a_step_that_failed_leaves_a_capsule(tmp_path: Path, monkeypatch):
    score = PPOTrainer.score

    def failing(self: PPOTrainer, batch):
        if self.global_step == 4:
            raise RewardError("planted")
        return score(self, batch)

    monkeypatch.setattr(PPOTrainer, "score", failing)
    assert run(tmp_path, *COMMON) == 1
    (capsule,) = (tmp_path / "records" / "capsules").iterdir()
    assert capsule.name == "step_4.zip"
    with monkeypatch.context() as patch:
        patch.setattr(Tracker, "finish", lambda self: {}["a second error"])
        again = replay(capsule)
    assert again.is_equal
    assert again.failure_now == "RewardError: planted"
    assert again.comparison.steps == [2, 3]

    monkeypatch.setattr(PPOTrainer, "score", score)
    mended = replay(capsule)
    assert not mended.is_equal
    assert "Step 4 did not fail in the replay." in str(mended)


def test_a_skipped_step_leaves_a_capsule(tmp_path: Path, monkeypatch):
    estimate = PPOTrainer.estimate_advantages

    def infinite(self: PPOTrainer, batch):
        batch = estimate(self, batch)
        if self.global_step == 3:
            batch.batch["advantages"][:] = float("inf")
        return batch

    monkeypatch.setattr(PPOTrainer, "estimate_advantages", infinite)
    assert run(tmp_path, *COMMON) == 0
    assert [path.name for path in (tmp_path / "records" / "capsules").iterdir()] == ["step_3.zip"]
    assert [
        event["step"] for event in verl.load_run(tmp_path).events if event["event"] == "skipped"
    ] == [3]


def test_a_missing_or_other_checkpoint_is_an_error(trained: Path, tmp_path: Path):
    capsule = write_capsule(trained, 5, tmp_path / "capsule.zip")
    with pytest.raises(DataError, match="another digest"):
        replay(capsule, checkpoint=trained / "global_step_2")
    with pytest.raises(DataError, match="missing here"):
        replay(capsule, checkpoint=tmp_path / "nothing")
    with pytest.raises(DataError, match=r"a capsule, but .*nothing.zip does not exist\. Write one"):
        replay(tmp_path / "nothing.zip")
    with pytest.raises(DataError, match="a capsule, but .* is a folder"):
        replay(trained)
    (tmp_path / "text.zip").write_text("a text")
    with pytest.raises(DataError, match="text.zip is no capsule"):
        replay(tmp_path / "text.zip")

    with zipfile.ZipFile(tmp_path / "list.zip", "w") as file:
        file.writestr("capsule.json", "[]")
    with pytest.raises(DataError, match="is no capsule.*list instead of an object"):
        replay(tmp_path / "list.zip")

    damaged = bytearray(capsule.read_bytes())
    start = damaged.index(b"capsule.json") + len("capsule.json")
    damaged[start] = 0xFF  # a type of block that deflate lacks
    (tmp_path / "damaged.zip").write_bytes(damaged)
    with pytest.raises(DataError, match="damaged.zip is no capsule, or is damaged.*decompressing"):
        replay(tmp_path / "damaged.zip")

    with pytest.raises(DataError, match="no samples of step 9"):
        write_capsule(trained, 9, tmp_path / "no.zip")
