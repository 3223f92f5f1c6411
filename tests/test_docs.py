"""The pages are correct: quoted messages, findings, keys, metrics, defaults, rejected settings,
import paths, links, lengths of lines."""

import ast
import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.shared_files import SHARED, needs_shared
from verl import compat
from verl.config import TrainConfig, load_config
from verl.config.key_table import ROOTS
from verl.config.keys import keys_of
from verl.tracking.console import SECTIONS
from verl.utils.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGES = [
    pytest.param(page, id=page.name)
    for page in (
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        ROOT / "bench/RESULTS.md",
    )
]
HAND_WRITTEN = [
    pytest.param(page, id=page.name)
    for page in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docker/README.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "examples").rglob("*.md")),
    )
    if page.name not in ("keys.md", "import_paths.md")
]
TROUBLES = (ROOT / "docs/how_to/troubles.md").read_text()
MOVING = (ROOT / "docs/how_to/moving_from_verl.md").read_text()
ARCHITECTURE = (ROOT / "docs/explanation/architecture.md").read_text()
HOLE = "\0"  # marks the position of a value in a message


def section(page: str, heading: str) -> str:
    return page.split(f"\n## {heading}")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the tables in a text, without their headers."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [cells for cells in lines if cells[0].startswith("`")]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def with_holes(text: str) -> str:
    return re.sub(r"<[^>]*>", HOLE, text)


def template(node: ast.AST) -> str | None:
    """Return a text of the code with HOLE for each value; None for other nodes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdrg]", HOLE, node.value)
    return None


@cache
def nodes() -> list[ast.AST]:
    return [
        node
        for file in (ROOT / "verl").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
    ]


@cache
def texts_of_the_code() -> list[str]:
    return [text for node in nodes() if (text := template(node)) is not None]


def is_of_the_code(message: str) -> bool:
    """Check whether a text of the code contains the message, with its values at the same
    positions."""
    wanted = with_holes(message)
    assert len(wanted.replace(HOLE, "").strip()) >= 10, f"too short to tell: {message}"
    return any(wanted in text for text in texts_of_the_code())


def quoted_messages() -> list[str]:
    blocks = re.findall(r"^```text\n(.*?)^```", TROUBLES, re.MULTILINE | re.DOTALL)
    in_table = [
        message
        for cells in rows(section(TROUBLES, "Rollouts, rewards"))
        for message in quoted(cells[0])
    ]
    return [line for block in blocks for line in block.splitlines()] + in_table


@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_in_the_code(message: str):
    assert is_of_the_code(message)


def test_a_changed_message_is_found():
    assert is_of_the_code("The engine returned sample <3> twice; each is due exactly once.")
    assert not is_of_the_code("The engine returned sample 3 twice; each is due exactly once.")
    assert not is_of_the_code("The engine returned sample <3> twice; each is due once.")


def test_every_finding_of_the_doctor_is_in_the_table():
    documented = {
        with_holes(name)
        for cells in rows(section(TROUBLES, "Findings of the doctor"))
        for name in quoted(cells[0])
    }
    calls = [
        node for node in nodes() if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    made = {template(call.args[0]) or HOLE for call in calls if call.func.id == "Finding"}  # pyright: ignore
    assert len(made) > 30
    assert documented == made


@pytest.mark.parametrize("page", PAGES)
def test_keys_that_a_page_names_exist(page: Path):
    keys = {path: key for root in ROOTS.values() for path, key in keys_of(root).items()}
    parts = {
        ".".join(words[:end])
        for path in keys
        for words in [path.split(".")]
        for end in range(1, len(words) + 1)
    }
    mappings = tuple(f"{path}." for path, key in keys.items() if isinstance(key.default, dict))

    text = re.sub(r"^```python.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    # a column
    named = set(re.findall(r"(?<![\w./-])(\w+(?:\.\w+)+)(?==|`|,)", text)) - {
        "reward_model.ground_truth"
    }
    sections = {path.split(".")[0] for path in keys}
    wrong = {
        name
        for name in named - parts
        if name.split(".")[0] in sections and not name.startswith(mappings)
    }

    assert wrong == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_target(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if path.startswith("http"):
            continue
        file = (page.parent / path) if path else page
        assert file.exists(), target
        if file.suffix == ".svg":
            continue  # its anchor names the color scheme that shows it
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        anchors = {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        assert not anchor or anchor in anchors, target


def test_the_page_of_import_paths_is_up_to_date():
    """Run `python -m verl.compat > docs/reference/import_paths.md` after a failure."""
    assert (ROOT / "docs/reference/import_paths.md").read_text() == compat.page()


@pytest.mark.parametrize(
    ("written", "instead"), [cells[:2] for cells in rows(section(MOVING, "Refused"))]
)
def test_rejected_settings_name_their_alternative(written: str, instead: str):
    for keys in quoted(written):
        with pytest.raises(ConfigError) as raised:
            load_config(["data.dataset_name=toy", "data.train_batch_size=4", *keys.split()])
        assert quoted(instead)[0] in str(raised.value)


@needs_shared("verl05_keys.txt")
def test_every_default_that_differs_is_documented():
    table = rows(section(MOVING, "Other"))
    documented = {
        quoted(key)[0]: (quoted(theirs)[0], quoted(ours)[0]) for key, theirs, ours in table
    }
    keys = keys_of(TrainConfig)
    differ = {}
    lines = (SHARED / "verl05_keys.txt").read_text()

    for path, theirs in re.findall(r"^(\S+) = (.*?)(?:\s+#.*)?$", lines, re.MULTILINE):
        key = keys.get(path)
        if (
            key is None
            or key.setting.no_effect
            or key.interpolation
            or path.endswith(("path", "_files"))
        ):
            continue
        theirs = theirs.strip("'")
        ours = "null" if key.default is None else str(key.default)
        if theirs != ours and not _same_number(theirs, ours):
            of_every_role = "fsdp_config.reshard_after_forward"
            differ[of_every_role if path.endswith(of_every_role) else path] = (theirs, ours)

    assert differ == documented


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return False


# ---- the index of metrics ------------------------------------------------------------------------


def names_in(cell: str) -> Iterator[str]:
    """Yield the metrics of a table's cell, with HOLE for `<x>` and each of `{a,b}` in turn."""
    for name in quoted(cell):
        parts = re.split(r"\{(.*?)\}", with_holes(name))
        yield from map("".join, itertools.product(*(part.split(",") for part in parts)))


@cache
def documented_metrics() -> set[str]:
    schedules = section((ROOT / "docs/how_to/asynchronous.md").read_text(), "Metrics")
    names = set()
    for cells in rows((ROOT / "docs/reference/metrics.md").read_text()) + rows(schedules):
        of_cell = list(names_in(cells[0]))
        for name in of_cell:
            if "/" in name:
                names.add(name)
            elif "/" in of_cell[0]:  # leaves out the section of the first one
                names.add(f"{of_cell[0].rpartition('/')[0]}/{name}")
            else:  # a phase
                names |= {f"timing_s/{name}", f"timing_per_token_ms/{name}"}
    return names


def may_be(name: str, template: str) -> bool:
    """Check whether a name, which may have holes, is one that a template with holes can give."""
    pattern = "[^/]+".join(map(re.escape, template.split(HOLE)))
    return re.fullmatch(pattern, name) is not None


def templates_of_metrics() -> set[str]:
    sections = {name.split("/")[0] for name in documented_metrics()} - {f"policy_{HOLE}"}
    shaped = re.compile(rf"({'|'.join(sections)})(/[\w@{HOLE}-]+)+")
    found = {text for text in texts_of_the_code() if shaped.fullmatch(text)}
    calls = [node for node in nodes() if isinstance(node, ast.Call) and len(node.args) > 1]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "timed":
            phase = template(call.args[0])
            found |= {f"timing_s/{phase}"} if phase else set()
    return found


def test_the_console_knows_the_metrics_that_are_not_a_users_own():
    sections = {name.split("/")[0] for name in documented_metrics()}
    assert sections == SECTIONS | {f"policy_{HOLE}"}


def test_every_metric_of_the_code_is_in_the_index():
    documented = documented_metrics() - {f"actor/{HOLE}"}  # of a user's loss
    missing = set()
    for text in templates_of_metrics():
        is_known = any(may_be(text, name) or may_be(name, text) for name in documented)
        is_piece = any(name.startswith(text) for name in documented)  # of a name, as in `_spread`
        if not is_known and not is_piece:
            missing.add(text)
    missing.discard(f"agent_loop/{HOLE}/count")  # left out where engines are combined
    assert missing == {"val/generations"}, "a table of samples for some trackers"


def test_every_metric_of_the_index_is_in_the_code():
    """Find each name whole, or its last part where the code composes the name."""
    templates = templates_of_metrics()
    parts = {part for text in texts_of_the_code() for part in re.split(r"[/,\s]", text)}
    unknown = set()
    for name in documented_metrics():
        last = name.rpartition("/")[2]
        # counters of an engine that are times have this prefix
        is_composed = bool({last, last.removeprefix("rollout_")} & parts)
        if name not in templates and HOLE not in last and not is_composed:
            unknown.add(name)
    assert unknown == set()


# ---- where things are ----------------------------------------------------------------------------


def test_files_of_the_architecture_exist():
    rooms = {path.name for path in (ROOT / "verl").iterdir() if path.is_dir()}
    text = re.sub(r"^```.*?^```", "", ARCHITECTURE, flags=re.MULTILINE | re.DOTALL)
    missing = []
    for path in quoted(text):
        room, _, rest = path.partition("/")
        if room in rooms and rest and "<" not in rest:
            found = [*ROOT.glob(f"verl/{path}"), *ROOT.glob(f"verl/{path}.py")]
            missing += [] if found else [path]
    assert missing == []


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_floors_are_those_of_the_import_contract(page: str):
    tomllib = pytest.importorskip("tomllib", reason="comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = project["tool"]["importlinter"]["contracts"][0]["layers"]
    floors = {}  # by room
    for floor, layer in enumerate(reversed(layers), start=1):
        floors |= dict.fromkeys(layer.split(" | "), floor)
    del floors["__main__"]

    written = {}
    for floor, rooms in re.findall(r"^\| (\d+) \| (.*?) \|", (ROOT / page).read_text(), re.M):
        written |= dict.fromkeys(quoted(rooms), int(floor))
    assert written == floors


# ---- lines that a reader of the source can read --------------------------------------------------


@pytest.mark.parametrize("page", HAND_WRITTEN)
def test_lines_of_prose_are_short(page: Path):
    """Wrap lines of more than 140 characters at about 120. Tables and code may be wider."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [
        line for line in text.splitlines() if len(line) > 140 and not line.startswith(("|", "  <"))
    ]
    assert long == []
