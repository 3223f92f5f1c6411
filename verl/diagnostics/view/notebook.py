"""Recorded runs in a notebook: `verl.load_run(path).show()`."""

import html
from pathlib import Path

from verl.diagnostics.view.answers import Answers
from verl.diagnostics.view.page import exported_page
from verl.tracking import records
from verl.tracking.records import Run

_MAX_MIB = 16.0


class ShownRun(Run):
    """A recorded run that a notebook can show."""

    def show(self, *others: Run, height: int = 700) -> "Page":
        """Return the page of `verl view` for a cell of a notebook.

        Args:
            others: further runs, whose curves are drawn over those of this one.
            height: of the cell, in pixels.
        """
        text, _ = exported_page(Answers([self, *others]), max_mib=_MAX_MIB)
        return Page(text, height)


class Page:
    """A page that a notebook shows, in a frame without access to the notebook."""

    def __init__(self, text: str, height: int) -> None:
        self.text = text
        self.height = height

    def _repr_html_(self) -> str:
        return (
            f'<iframe sandbox="allow-scripts" title="verl view" width="100%" '
            f'height="{self.height}" srcdoc="{html.escape(self.text)}"></iframe>'
        )

    def save(self, path: Path | str) -> None:
        """Write the page into a file that opens offline."""
        Path(path).write_text(self.text, encoding="utf-8")


def load_run(path: Path | str) -> ShownRun:
    """Read the record of a run, see `verl.tracking.records.Run`.

    Args:
        path: the folder of the run (`trainer.default_local_dir`), or its folder `records`.

    Raises:
        DataError: no record is there, or it cannot be read.
    """
    return ShownRun(records.run_folder(path))
