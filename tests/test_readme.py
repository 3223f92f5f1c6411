"""Commands of the README work: the first steps run exactly as written, other examples are
parsed."""

import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.launches import launch, run_module
from verl.algorithms.advantages import advantage_estimators
from verl.cli.commands import COMMANDS
from verl.config import load_config
from verl.config.load import ROOTS
from verl.rollout.base import rollout_engines
from verl.utils.errors import MissingDependencyError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs/tutorial/first_run.md").read_text()
HOW_TO = [page.read_text() for page in sorted((ROOT / "docs/how_to").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(block: str) -> list[list[str]]:
    """Return the words of each command, without comments."""
    return [
        words
        for line in block.replace("\\\n", " ").splitlines()
        if (words := shlex.split(line, comments=True))
    ]


FIRST_STEPS = lines(blocks(README.split("\n## First steps\n")[1], "sh")[0])
EXAMPLES = [
    words
    for text in (README, TUTORIAL, *HOW_TO)
    for block in blocks(text, "sh")
    for words in lines(block)
]
# that users derive from
OPTIONAL_PACKAGES = {"gymnasium"}
PIECES_OF_CODE = [code for text in HOW_TO for code in blocks(text, "python")]


def run_code(code: str) -> None:
    """Run `python -c code`, as a program of `launch`."""
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_steps(tmp_path: Path):
    """Run each step in the folder with the files of the previous one."""
    assert [words[:2] for words in FIRST_STEPS] == [
        ["verl", name] for name in ("doctor", "plan", "train", "merge", "generate", "eval")
    ]
    outputs = {}
    status = {}
    for _, name, *arguments in FIRST_STEPS:
        done = launch(1, run_module, "verl.cli.main", [name, *arguments], folder=tmp_path)
        outputs[name], status[name] = done.stdout, done.returncode
        assert done.returncode == 0 or name == "doctor", done.stdout + done.stderr
    verdict = outputs["doctor"].splitlines()[-1]
    assert re.match(
        r"Nothing is broken, \d+" if status["doctor"] == 0 else r"\d+ broken \(", verdict
    ), verdict
    assert "Batch: 4 prompts x 32 samples" in outputs["plan"]
    assert "[Step 10/10] Actor loss: " in outputs["train"]
    assert (tmp_path / "merged/model.safetensors").exists()
    responses = pq.read_table(tmp_path / "out.parquet").column("responses").to_pylist()
    assert [len(of_prompt) for of_prompt in responses] == [8] * 10
    mean = re.search(r"^toy +mean +([\d.]+)", outputs["eval"], re.MULTILINE)
    assert mean is not None, outputs["eval"]
    assert float(mean[1]) > 0.6, "the packaged model has 0.3, and it was trained"

    # The Python examples follow in the same folder, like a reader pastes them.
    done = launch(1, run_code, "\n\n".join(blocks(README, "python")), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[Step 10/10] Actor loss: " in done.stdout, "it trains, and resumes no other run"
    assert "I Device: " in done.stdout


@pytest.mark.parametrize("words", EXAMPLES, ids=" ".join)
def test_an_example_names_a_command_and_keys_that_load(words: list[str]):
    if words[0] == "verl":
        assert words[1] in COMMANDS or " ".join(words[1:3]) in COMMANDS
    module = words[words.index("-m") + 1] if "-m" in words else ""
    root = {about.module: name for name, about in ROOTS.items()}.get(module)
    if root is not None and not any("..." in word for word in words):
        load_config(words[words.index(module) + 1 :], root=root)


def test_the_tutorial_has_the_first_steps_of_the_readme():
    of_tutorial = [
        words for block in blocks(TUTORIAL, "sh") for words in lines(block) if words[0] == "verl"
    ]
    assert of_tutorial == FIRST_STEPS


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(code, marks=pytest.mark.slow if "verl.train(" in code else ())
        for code in PIECES_OF_CODE
    ],
)
def test_a_code_example_runs(code: str, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for registry in (advantage_estimators, rollout_engines):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    try:
        exec(compile(code, "page", "exec"), {"__name__": "page"})
    except MissingDependencyError as error:
        pytest.skip(str(error))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_PACKAGES:
            raise
        pytest.skip(str(error))
