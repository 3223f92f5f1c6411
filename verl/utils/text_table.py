"""Tables as text."""

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Container[str] = ()) -> list[str]:
    """Return lines with aligned columns. The first row names them; those in `right` end flush."""
    columns = []
    for cells in zip(*rows):
        align = str.rjust if cells[0] in right else str.ljust
        width = max(map(len, cells))
        columns.append([align(cell, width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*columns)]
