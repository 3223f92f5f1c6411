"""No room imports upward by string: the import contract checks only import statements."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULE = re.compile(r"verl(\.[A-Za-z_]\w*)+")

MAY_NAME_ANY_ROOM = {
    "verl/__init__.py": "public names, and old paths",
    "verl/utils/__init__.py": "public names",
    "verl/utils/lazy.py": "old names of verl.utils and verl.protocol",
    "verl/config/load.py": "programs, as messages name them; nothing is imported",
}


def floors() -> dict[str, int]:
    """Read the floor of every room, 0 at the top, from the import contract."""
    # tomllib comes with Python 3.11
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = re.search(r"^layers = (\[.*?^\])", settings, re.MULTILINE | re.DOTALL)
    assert layers is not None
    found = {}
    for number, layer in enumerate(ast.literal_eval(layers[1])):
        for room in layer.split("|"):
            found[room.strip()] = number
    return found


def named_modules(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every string that is a dotted path into the package."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if MODULE.fullmatch(node.value):
            yield node.lineno, node.value


def refused(room: str, text: str, floor_of: dict[str, int]) -> list[tuple[int, str]]:
    """Return the modules named in `text` that a file of `room` must not import."""
    found = []
    for line, name in named_modules(text):
        other = name.split(".")[1]
        if other == room or other not in floor_of:
            continue
        if floor_of[other] <= floor_of[room]:
            found.append((line, name))
    return found


@pytest.mark.parametrize(
    ("room", "name", "is_refused"),
    [
        ("engine", "verl.trainer.api", True),
        ("engine", "verl.rollout.types", True),  # a neighbor
        ("engine", "verl.engine.adamw_8bit", False),
        ("engine", "verl.models.rope", False),
        ("engine", "verl.nothing", False),
    ],
)
def test_the_floors_match_the_contract(room: str, name: str, is_refused: bool):
    found = refused(room, f"module = import_module({name!r})", floors())
    assert found == ([(1, name)] if is_refused else [])


def test_the_exceptions_exist():
    for path in MAY_NAME_ANY_ROOM:
        assert (ROOT / path).is_file(), path


def test_no_file_names_a_module_above_its_floor():
    floor_of = floors()
    found = []
    for file in sorted((ROOT / "verl").rglob("*.py")):
        path = file.relative_to(ROOT)
        if path.as_posix() in MAY_NAME_ANY_ROOM:
            continue
        room = path.parts[1].removesuffix(".py")
        for line, name in refused(room, file.read_text(encoding="utf-8"), floor_of):
            found.append(f"{path}:{line} names {name}")
    assert not found, "\n".join(found)
