"""Draw the headline figures (`bench/figures.json`) as SVG and print them as a Markdown table.

`python bench/plot.py` writes `docs/images/speed-light.svg` and `docs/images/speed-dark.svg`, and
prints the table that opens `bench/RESULTS.md`. It needs the standard library only.
"""

import json
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FIGURES = Path(__file__).with_name("figures.json")
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

COLORS = {
    "light": {"text": "#1f2328", "faint": "#59636e", "grid": "#d1d9e0", "bar": "#0b6e99"},
    "dark": {"text": "#e6edf3", "faint": "#9198a1", "grid": "#3d444d", "bar": "#4fb3d9"},
}

WIDTH = 800
LEFT = 350  # where the bars begin
UNIT = 66  # pixels for "once as fast"
TOP = 58
ROW = 40
BAR = 20
LONGEST = 6  # end of the axis, times as fast


def load() -> list[dict[str, Any]]:
    """Return the headline figures in the order of the table."""
    return json.loads(FIGURES.read_text())


def table(figures: list[dict[str, Any]]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| work | ours | peer | ours / peer, speed | machine | date | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        peer = f"{figure['peer']}: {figure['theirs']}"
        ratio = f"{figure['times_as_fast']:.2f}"
        command = figure["command"]
        if command != "as above":
            command = f"`{command}`"
        cells = [figure["work"], figure["ours"], peer, ratio]
        cells += [figure["machine"], figure["date"], command]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def svg(figures: list[dict[str, Any]], scheme: str) -> str:
    """Return a bar chart of the ratios, for a light or a dark page.

    Args:
        figures: rows of `figures.json`; the ones with `in_plot` are drawn.
        scheme: "light" or "dark".
    """
    colors = COLORS[scheme]
    shown = [figure for figure in figures if figure["in_plot"]]
    bottom = TOP + ROW * len(shown)
    height = bottom + 34

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
        "<title>Speed relative to vLLM, TRL and plain torch</title>",
        text(16, 28, "Times as fast as the peer", colors["text"], size=18, weight="600"),
    ]
    for tick in range(LONGEST + 1):
        parts.append(grid_line(tick, bottom, colors))
    for number, figure in enumerate(shown):
        parts += bar(figure, TOP + ROW * number, colors)

    parts.append("</svg>\n")
    return "\n".join(parts)


def grid_line(tick: int, bottom: int, colors: dict[str, str]) -> str:
    """Return the vertical line of one tick with its label; the line at 1 stands for the peer."""
    x = LEFT + UNIT * tick
    is_peer = tick == 1
    color = colors["faint"] if is_peer else colors["grid"]
    dashes = ' stroke-dasharray="4 3"' if is_peer else ""
    line = f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}" stroke="{color}"{dashes}/>'
    label = "peer = 1" if is_peer else str(tick)
    return line + text(x, bottom + 20, label, colors["faint"], anchor="middle")


def bar(figure: dict[str, Any], top: int, colors: dict[str, str]) -> list[str]:
    """Return the labels and the bar of one figure."""
    length = round(UNIT * figure["times_as_fast"])
    middle = top + BAR // 2
    peer = f"{figure['peer']}, {figure['machine']}"
    return [
        text(16, middle, figure["work"], colors["text"], size=14),
        text(16, middle + 16, f"against {peer}", colors["faint"]),
        f'<rect x="{LEFT}" y="{top}" width="{length}" height="{BAR}" rx="3" '
        f'fill="{colors["bar"]}"/>',
        text(
            LEFT + length + 8,
            middle + 5,
            f"{figure['times_as_fast']:.2f}",
            colors["text"],
            size=14,
            weight="600",
        ),
    ]


def text(
    x: int,
    y: int,
    words: str,
    color: str,
    *,
    size: int = 12,
    weight: str = "400",
    anchor: str = "start",
) -> str:
    """Return an SVG text element."""
    return (
        f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def main() -> None:
    """Write both pictures and print the table."""
    figures = load()
    IMAGES.mkdir(parents=True, exist_ok=True)
    for scheme in COLORS:
        (IMAGES / f"speed-{scheme}.svg").write_text(svg(figures, scheme))
    print(table(figures), end="")


if __name__ == "__main__":
    main()
