"""Commands of the README work: the first steps run exactly as written, other examples are
parsed."""

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.launches import launch, run_module
from verl.agents.loops.base import agent_loops
from verl.algorithms.advantages import advantage_estimators
from verl.algorithms.policy_losses import extra_losses, policy_losses
from verl.cli.commands import COMMANDS
from verl.config import load_config
from verl.config.load import ROOTS
from verl.rewards.managers import reward_managers
from verl.rollout import rollout_engines
from verl.utils.errors import MissingDependencyError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs/tutorial/first_run.md").read_text()
HOW_TO = [page.read_text() for page in sorted((ROOT / "docs/how_to").glob("*.md"))]
FURTHER = [
    (ROOT / page).read_text()
    for page in ("docs/reference/rewards.md", "docker/README.md", "examples/stories/README.md")
]


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
    for text in (README, TUTORIAL, *HOW_TO, *FURTHER)
    for block in blocks(text, "(?:ba)?sh")
    for words in lines(block)
]
YAML_EXAMPLES = [yaml.safe_load(block) for text in HOW_TO for block in blocks(text, "yaml")]
JSON_EXAMPLES = [
    json.loads(line)
    for text in (*HOW_TO, *FURTHER)
    for block in blocks(text, "json")
    for line in block.splitlines()
]
KEYS_OF_THE_TOY = {
    "ppo_trainer": ["data.dataset_name=toy", "data.train_batch_size=4"],
    "sft_trainer": ["model.path=toy"],
    "generation": ["model.path=toy"],
    "serve": ["model.path=toy"],
}
# name of a module -> name of the configuration's root
ROOT_OF = {about.module: name for name, about in ROOTS.items()} | {
    "verl.diagnostics.plan": "ppo_trainer",
    "verl.cli.reward_check": "ppo_trainer",
}
# that users derive from
OPTIONAL_PACKAGES = {"gymnasium"}
COLUMNS_OF_ROWS = ("prompt", "data_source", "reward_model", "extra_info", "images", "videos")
# that examples add to
REGISTRIES = (
    *(advantage_estimators, policy_losses, extra_losses, reward_managers),
    *(rollout_engines, agent_loops),
)
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
def test_an_example_names_a_command_and_keys_that_load(words: list[str], monkeypatch, tmp_path):
    """Load the keys of each command. Add those of the toy where `...` or a file has the others."""
    monkeypatch.chdir(tmp_path)
    for file in ("reward.py", "my_reward.py"):  # pages tell the reader to write them
        (tmp_path / file).write_text("def compute_score(*row): return 0.0\n")

    module, arguments = module_and_arguments(words)
    if module not in ROOT_OF:
        return
    root = ROOT_OF[module]
    keys = [word for word in arguments if re.match(r"[\w.]+=", word) and "..." not in word]
    if keys != arguments:
        keys = [*KEYS_OF_THE_TOY[root], *keys]
    load_config(keys, root=root)


def module_and_arguments(words: list[str]) -> tuple[str, list[str]]:
    """Return the module that a command runs, and what follows its name."""
    if "-m" in words:
        module = words[words.index("-m") + 1]
        return module, words[words.index(module) + 1 :]
    if re.match(r"[a-z_]+\.[\w.]+=", words[0]):  # keys alone
        return "verl.trainer.main_ppo", ["...", *words]
    if "verl" not in words:
        return "", []

    words = words[words.index("verl") + 1 :]
    if words[0] == "...":  # some command that trains
        return "verl.trainer.main_ppo", words
    name = words[0] if words[0] in COMMANDS else " ".join(words[:2])
    return COMMANDS[name].module, words[len(name.split()) :]


@pytest.mark.parametrize("example", YAML_EXAMPLES, ids=lambda example: "-".join(example))
def test_a_yaml_example_loads(example: dict, tmp_path: Path):
    """Load configurations of runs. Other files begin with the key that their reader expects."""
    if {"actor_rollout_ref", "defaults"} & set(example):
        whole = {"defaults": ["ppo_trainer", "_self_"], **example}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(whole))
        file = [f"--config-path={tmp_path}", "--config-name=run"]
        load_config([*file, *KEYS_OF_THE_TOY["ppo_trainer"]])
    else:
        assert next(iter(example)) in {"tools", "interaction", "base_url"}


def test_examples_of_rows_have_the_columns_of_data():
    assert len(JSON_EXAMPLES) >= 3
    for row in JSON_EXAMPLES:
        assert {"prompt"} <= set(row) <= {*COLUMNS_OF_ROWS}


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
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    try:
        exec(compile(code, "page", "exec"), {"__name__": "page"})
    except MissingDependencyError as error:
        pytest.skip(str(error))
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL_PACKAGES:
            raise
        pytest.skip(str(error))
