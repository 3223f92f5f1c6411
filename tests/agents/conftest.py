"""Files of tools, simulated users and loops, and one process that forks the helpers of tools."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agents.tool_files import INTERACTION, TOOLS
from tests.agents.user_loop_files import HELPER, LOOPS
from verl.agents.tools import processes
from verl.agents.tools.nursery import Nursery


class _Kept(Nursery):
    """Stays after the end of a set of tools, for the next one."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def one_nursery() -> Iterator[None]:
    """Use one nursery for all sets of tools, because its imports take a third of a second."""
    nursery = _Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "Nursery", lambda: nursery)
        yield
    nursery.end()


@pytest.fixture
def tools(tmp_path: Path) -> str:
    path = tmp_path / "tools.py"
    path.write_text(textwrap.dedent(TOOLS))
    return str(path)


@pytest.fixture
def quiz(tmp_path: Path) -> str:
    log = str(tmp_path / "finalized")
    (tmp_path / "quiz.py").write_text(textwrap.dedent(INTERACTION.format(log=log)))
    path = tmp_path / "interactions.yaml"
    path.write_text(
        f"interaction:\n  - name: quiz\n    class_name: {tmp_path}/quiz.py:Quiz\n    config: {{}}\n"
    )
    return str(path)


@pytest.fixture
def loops(tmp_path: Path) -> str:
    (tmp_path / "loops.py").write_text(textwrap.dedent(LOOPS))
    names = {
        "old": "Old",
        "new": "New",
        "retokenizes": "Retokenizes",
        "warm": "Warm",
        "stops": "Stops",
        "free": "Free",
        "later": "Later",
        "unprepared": "Unprepared",
        "earlier": "Earlier",
        "unmade": "Unmade",
        "raises": "Raises",
        "nothing": "Nothing",
        "unscored": "Unscored",
        "empty": "Empty",
        "seven": "Seven",
        "asserts": "Asserts",
        "blocks": "Blocks",
        "waits": "Waits",
        "short": "Short",
        "weighted": "Weighted",
        "overlong": "Overlong",
        "exits": "Exits",
        "plain": "Plain",
        "generator": "Generator",
        "hidden": "Hidden",
    }

    # Files of loops may be next to the YAML file.
    lines = [f"- name: {name}\n  _target_: loops.py:{cls}" for name, cls in names.items()]
    lines[0] += "\n  word: once more"
    lines[list(names).index("seven")] += "\n  word: And now?"

    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "loops.yaml").write_text("\n".join(lines))
    return str(tmp_path / "loops.yaml")
