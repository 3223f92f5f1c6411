"""Parts that the pages show train by the commands below them, and log documented metrics."""

import re
from pathlib import Path

import pytest

from tests.test_docs import documented_metrics, may_be
from tests.test_readme import REGISTRIES, ROOT, blocks, lines
from tests.trainer.runs import PPO, run, step_lines

SMALL = [
    "actor_rollout_ref.rollout.n=4",
    "data.max_response_length=8",
    "trainer.max_steps=1",
    "trainer.val_before_train=False",
    "trainer.test_freq=-1",
]
# keys of a page's command that say where its run lies
PLACE = ("trainer.experiment_name=", "trainer.max_steps=")


def files_of(page: str) -> dict[str, str]:
    """Return the files that a page has its reader write: their first line is a name."""
    files: dict[str, str] = {}
    for code in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\n", code)
        if named:
            files[named[1]] = f"{files.get(named[1], '')}\n\n{code}"
    return files


def commands_of(page: str) -> list[list[str]]:
    """Return the arguments of the commands that train with a file of the page."""
    files = files_of(page)
    found = []
    for block in blocks(page, "sh"):
        for words in lines(block):
            named = {word.rpartition("=")[2] for word in words}
            if words[:2] == ["verl", "train"] and named & set(files):
                found.append(words[2:])
    return found


PAGES = {page.name: page.read_text() for page in sorted((ROOT / "docs/how_to").glob("*.md"))}
COMMANDS = [
    pytest.param(files_of(text), words, id=f"{name}-{number}")
    for name, text in PAGES.items()
    for number, words in enumerate(commands_of(text))
]


def undocumented(folder: Path) -> set[str]:
    """Return the metrics of a run that the index of metrics does not have."""
    logged = {name for line in step_lines(folder) for name in line} - {"step"}
    return {name for name in logged if not any(may_be(name, each) for each in documented_metrics())}


def test_the_pages_have_commands_for_every_kind_of_part():
    assert len(COMMANDS) == 7, "algorithm, reward function and manager, data, engine, tool, loop"


@pytest.mark.parametrize(("files", "words"), COMMANDS)
def test_a_part_of_a_page_trains(files, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for name, code in files.items():
        (tmp_path / name).write_text(code)

    keys = [word for word in words if not word.startswith(PLACE)]
    assert run(tmp_path / "run", *SMALL, base=keys) == 0
    assert undocumented(tmp_path / "run") == set()


def test_metrics_of_further_features_are_documented(tmp_path):
    features = [
        "algorithm.use_kl_in_reward=True",
        "algorithm.rollout_correction.rollout_is=token",
        "actor_rollout_ref.rollout.speculative.method=ngram",
    ]
    assert run(tmp_path, *PPO, *features) == 0
    assert undocumented(tmp_path) == set()
