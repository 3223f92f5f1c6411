"""The packaged task `shapes`: count the shapes of one colour and kind in a small picture.

Pictures are drawn when a file of the task is first asked for, from a fixed seed, and are kept in
the cache folder as PNG within the rows.
"""

import base64
import io
import json
import random
from typing import Any

from verl.models.shapes_model import CELL, CELLS
from verl.utils.cache import cache_folder
from verl.utils.imports import require
from verl.utils.whole_file import whole_file

SHAPES = "shapes"  # the name of the data set and of its model
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}
KINDS = ("square", "circle", "diamond")
MOST = 3  # largest right answer
SIZES = {"train": 1024, "val": 128, "demos": 1024}
_SEEDS = {"train": 1, "val": 2, "demos": 3}
_VERSION = 1  # raise it when rows change


def shapes_file(split: str) -> str:
    """Return the file of a split, "train", "val" or "demos" (for supervised training)."""
    path = cache_folder() / SHAPES / f"{split}-v{_VERSION}.jsonl"
    if not path.is_file():
        text = "".join(json.dumps(row) + "\n" for row in rows(split))
        with whole_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return str(path)


def rows(split: str) -> list[dict[str, Any]]:
    """Draw the rows of a split. Demos have the answer in addition."""
    draw = random.Random(_SEEDS[split])
    made = []
    for number in range(SIZES[split]):
        cells, color, kind, count = scene(draw)
        question = f"<image>how many {color} {kind}s ?"
        row = {
            "data_source": SHAPES,
            "prompt": [{"role": "user", "content": question}],
            "images": [picture(cells)],
            "reward_model": {"style": "rule", "ground_truth": str(count)},
            "extra_info": {"index": number, "split": split},
        }
        if split == "demos":
            row["answer"] = str(count)
        made.append(row)
    return made


Cells = list[tuple[str, str] | None]


def scene(draw: random.Random) -> tuple[Cells, str, str, int]:
    """Draw what is in each cell, and a question with its answer; all answers are as frequent."""
    color = draw.choice(list(COLORS))
    kind = draw.choice(KINDS)
    count = draw.randint(0, MOST)
    # A tiny model learns to tell colors apart, but not colors and kinds together.
    others = [(c, k) for c in COLORS if c != color for k in KINDS]
    cells: Cells = [(color, kind)] * count
    cells += [draw.choice(others) for _ in range(draw.randint(1, 4))]
    cells += [None] * (CELLS**2 - len(cells))
    draw.shuffle(cells)
    return cells, color, kind, count


def picture(cells: Cells) -> str:
    """Draw a scene, and return it as an address with the PNG in it."""
    image = require("PIL.Image", "The data set shapes", "pip install 'verl[vision]'")
    size = CELLS * CELL
    canvas = image.new("RGB", (size, size), (255, 255, 255))
    for number, content in enumerate(cells):
        if content is None:
            continue
        color, kind = content
        left = number % CELLS * CELL
        top = number // CELLS * CELL
        for x in range(CELL):
            for y in range(CELL):
                if _covers(kind, x, y):
                    canvas.putpixel((left + x, top + y), COLORS[color])

    stream = io.BytesIO()
    canvas.save(stream, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


def _covers(kind: str, x: int, y: int) -> bool:
    """Return whether a shape covers a pixel of its cell, whose border stays free."""
    middle = (CELL - 1) / 2
    across = abs(x - middle)
    down = abs(y - middle)
    if max(across, down) > middle - 1:
        return False
    if kind == "circle":
        return across**2 + down**2 <= (middle - 0.5) ** 2
    if kind == "diamond":
        return across + down <= middle - 0.5
    return True
