"""The documentation site: its navigation, and the figures that the front pages show."""

import re
from pathlib import Path

import yaml

from bench import plot

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def nav_files(entry: object) -> list[str]:
    """Return the files of a navigation entry: a file, or titles with entries below them."""
    if isinstance(entry, str):
        return [entry]

    below = entry.values() if isinstance(entry, dict) else entry
    files = []
    for part in below:
        files += nav_files(part)
    return files


def test_the_navigation_names_every_page_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(nav_files(site["nav"])) == sorted(pages)


def test_options_of_the_api_page_are_yaml():
    """The site is not built in tests, and a line that is wrapped as prose breaks the build."""
    page = (DOCS / "reference/api.md").read_text()
    blocks = re.findall(r"^::: \S+\n((?: +.*\n)+)", page, re.MULTILINE)
    assert len(blocks) >= 6
    for block in blocks:
        options = yaml.safe_load(block)["options"]
        assert options
        for value in options.values():
            assert isinstance(value, list | bool)


def test_the_pictures_show_the_figures():
    """Run `python bench/plot.py` after a failure."""
    for scheme in plot.COLORS:
        picture = plot.IMAGES / f"speed-{scheme}.svg"
        assert picture.read_text() == plot.svg(plot.load(), scheme)


def test_the_results_open_with_the_figures():
    """Run `python bench/plot.py` after a failure: it prints the table."""
    figures = plot.load()
    assert len(figures) <= 12
    assert plot.table(figures) in (ROOT / "bench/RESULTS.md").read_text()


def test_the_readme_repeats_figures_of_the_table():
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \| ([\d.]+) \|", readme, re.MULTILINE)
    known = set()
    for figure in plot.load():
        peer = f"{figure['peer']}: {figure['theirs']}"
        known.add((figure["work"], figure["ours"], peer, f"{figure['times_as_fast']:.2f}"))

    assert 3 <= len(rows) <= 6
    assert set(rows) <= known


def test_a_ratio_is_that_of_its_two_figures():
    for figure in plot.load():
        ours = leading_number(figure["ours"])
        theirs = leading_number(figure["theirs"])
        is_time = figure["ours"].endswith(" s")
        ratio = theirs / ours if is_time else ours / theirs
        assert abs(ratio - figure["times_as_fast"]) < 0.011, figure["work"]


def leading_number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))
