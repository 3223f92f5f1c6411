"""The command `verl`: its output, its speed, and the module behind each command."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import verl
from tests.readers import run_without_reader
from verl.cli import main as cli
from verl.cli.commands import COMMANDS

HEAVY = ("torch", "transformers", "numpy", "hydra", "omegaconf", "ray", "psutil")


@pytest.fixture
def called(monkeypatch):
    """Record (module, argv) of each command instead of running it."""
    calls = []

    def fake(name: str) -> SimpleNamespace:
        return SimpleNamespace(main=lambda argv: calls.append((name, argv)) or 0)

    monkeypatch.setattr(cli.importlib, "import_module", fake)
    return calls


def test_help_is_fast_and_imports_no_heavy_package():
    code = (
        "import sys, time; start = time.process_time(); from verl.cli.main import main; "
        f"main(['--help']); print(time.process_time() - start, [name for name in {HEAVY} if name "
        "in sys.modules])"
    )
    outputs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        outputs.append(done.stdout.splitlines()[-1].split(maxsplit=1))
    assert min(float(seconds) for seconds, _ in outputs) < 0.5
    assert outputs[0][1] == "[]"


def test_help_lists_every_command_with_an_example(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for command in COMMANDS.values():
        assert command.summary in text
        assert f"$ {command.example}" in text
        assert command.example.startswith(f"verl {command.words}")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"verl {verl.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_command_module_exists(command):
    assert importlib.util.find_spec(command.module) is not None


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        (["trian", "data.x=1"], "No command 'trian'. Nearest: train."),
        (["doctro"], "No command 'doctro'. Nearest: doctor."),
        (["reward", "chek"], "No command 'reward chek'. Nearest: reward check."),
        (["reward"], "No command 'reward'. Nearest: reward check, replay."),
    ],
)
def test_unknown_command_suggests_the_nearest(capsys, called, argv, near):
    assert cli.main(argv) == 2
    assert near in capsys.readouterr().err
    assert called == []


def test_remaining_arguments_are_passed_unchanged(called):
    cli.main(
        [
            "train",
            "a.b=1",
            "+c=2",
            "--d.e=x",
            "--config-name",
            "run.yaml",
            "data.train_files=x.yaml",
        ]
    )
    argv = ["a.b=1", "+c=2", "--d.e=x", "--config-name", "run.yaml", "data.train_files=x.yaml"]
    assert called == [("verl.trainer.main_ppo", argv)]


@pytest.mark.parametrize(
    "argv", [["train", "--dry-run", "a=1"], ["train", "a=1", "--dry-run"], ["plan", "a=1"]]
)
def test_dry_run_calls_the_plan(monkeypatch, argv):
    called = []
    monkeypatch.setattr("verl.diagnostics.plan.main", called.append)
    cli.main(argv)
    assert called == [["a=1"]]


def test_merge_needs_no_backend(called):
    cli.main(["merge", "--local_dir", "actor"])
    assert called == [("verl.jobs.main_merge", ["merge", "--local_dir", "actor"])]


def test_command_help_begins_with_its_example(capsys, called):
    cli.main(["eval", "--help"])
    assert COMMANDS["eval"].example in capsys.readouterr().out
    assert called == [("verl.jobs.main_eval", ["--help"])]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_usage_shows_the_command_as_typed(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.words.split(), "--help"])
    assert ended.value.code == 0
    (usage,) = [line for line in capsys.readouterr().out.splitlines() if line[:7] == "usage: "]
    assert usage.startswith(f"usage: verl {command.words} ")


def test_missing_package_error_names_the_install_command(capsys, monkeypatch):
    def missing(name: str):
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra")

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    assert cli.main(["train"]) == 1
    assert "pip install hydra-core" in capsys.readouterr().err


def test_plan_of_a_yaml_file(tmp_path: Path, capsys):
    text = (
        "data: {dataset_name: toy, train_batch_size: 4}\n"
        "actor_rollout_ref: {model: {path: toy}}\ntrainer: {device: cpu}\n"
    )
    (tmp_path / "small.yaml").write_text(text)
    assert (
        cli.main(
            ["train", "--dry-run", str(tmp_path / "small.yaml"), "actor_rollout_ref.rollout.n=3"]
        )
        == 0
    )
    assert "Batch: 4 prompts x 3 samples" in capsys.readouterr().out


TOY = ["data.dataset_name=toy", "data.train_batch_size=4", "actor_rollout_ref.model.path=toy"]


def test_reward_check_passes(capsys):
    assert cli.main(["reward", "check", "--rows", "2", *TOY]) == 0
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("row ")]) == 2 * 5 + 1
    assert text.endswith("Gold answers score above wrong ones.\n")


def test_reward_check_reports_a_failing_function(tmp_path: Path, capsys):
    path = tmp_path / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return "
        "None\n"
    )
    assert cli.main(["reward", "check", *TOY, f"custom_reward_function.path={path}"]) == 1
    text = capsys.readouterr().out
    assert "FAULT: the reward function failed on" in text
    assert "Gold answers score" not in text


def test_reward_check_without_gold_answers_does_not_call_the_reward_good(tmp_path: Path, capsys):
    file = tmp_path / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": "Write."}], "data_source": "mine"}
    file.write_text(json.dumps(row) + "\n")
    path = tmp_path / "length.py"
    path.write_text("def compute_score(solution_str, **others): return len(solution_str)\n")

    keys = [f"data.train_files={file}", f"custom_reward_function.path={path}"]
    assert cli.main(["reward", "check", *keys]) == 0
    text = capsys.readouterr().out
    assert "No row has a gold answer to try" in text
    assert "Gold answers score above" not in text


@pytest.mark.parametrize("rows", ["0", "-1"])
def test_reward_check_needs_a_row(capsys, rows: str):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["reward", "check", "--rows", rows, *TOY])
    assert f"--rows must be at least 1, got {rows}" in capsys.readouterr().err


def test_reward_check_needs_no_model_and_accepts_long_prompts(tmp_path, capsys):
    files = []
    for number in range(2):
        row = {
            "prompt": [{"role": "user", "content": "word " * 50_000}],
            "data_source": "gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(number)},
        }
        files.append(tmp_path / f"rows{number}.jsonl")
        files[-1].write_text(json.dumps(row) + "\n")

    keys = [f"data.train_files=[{files[0]},{files[1]}]", "data.train_batch_size=2"]
    assert cli.main(["reward", "check", "--rows", "2", *keys]) == 0
    text = capsys.readouterr().out
    assert "row 0 " in text
    assert "row 1 " in text
    assert text.endswith("Gold answers score above wrong ones.\n")


def test_user_errors_are_one_line(capsys):
    assert cli.main(["reward", "check", "no.such.key=1"]) == 1
    assert capsys.readouterr().err.startswith("ConfigError: ")


def test_the_package_is_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "verl", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"verl {verl.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 141),
        (["--version"], 141),
        (["view", "--help"], 141),
        (["train", "--help"], 141),
        (["view", "--port=x", "--help"], 2),
    ],
)
def test_a_reader_that_has_exited_ends_every_command_silently(argv: list[str], code: int):
    done = run_without_reader([sys.executable, "-m", "verl", *argv])
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert "BrokenPipeError" not in done.stderr
