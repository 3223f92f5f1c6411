"""Smaller sizes of passes that a run which is out of memory leaves for the next start."""

import json
from collections.abc import Iterable
from pathlib import Path

from verl.single_controller import WorkerGroup
from verl.utils.errors import CheckpointError, OutOfMemoryError
from verl.utils.json_text import parse_object
from verl.utils.logging import logger
from verl.workers.trained import EngineWorker

_FILE = "lowered_budgets.json"


class LoweredBudgets:
    """The file of sizes, {key of a budget: tokens or rows}, in a folder of checkpoints.

    One rank alone begins a pass again with a smaller size; several ranks cannot.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / _FILE

    def note(self, error: BaseException) -> None:
        """Leave a smaller size for a restart, if a rank ran out of memory."""
        shortage = error
        if not isinstance(error, OutOfMemoryError):
            shortage = error.__cause__
        if not isinstance(shortage, OutOfMemoryError) or not shortage.lowered:
            return

        self.file.parent.mkdir(parents=True, exist_ok=True)
        sizes = {**self._read(), **shortage.lowered}
        self.file.write_text(json.dumps(sizes), encoding="utf-8")
        logger.error(
            "The same command again begins with %s, which %s says.",
            dict(shortage.lowered),
            self.file,
        )

    def apply(self, groups: Iterable[WorkerGroup]) -> None:
        """Let the engines of worker groups begin with the sizes of the file, if there is one."""
        sizes = self._read()
        if not sizes:
            return

        logger.warning(
            (
                "Passes are made with at most %s, where memory ran out before. Remove %s to forget "
                "it."
            ),
            sizes,
            self.file,
        )
        for group in groups:
            if issubclass(group.worker_class, EngineWorker):
                group.lower_budgets(sizes)  # pyright: ignore[reportAttributeAccessIssue]

    def _read(self) -> dict[str, int]:
        if not self.file.is_file():
            return {}
        try:
            sizes = parse_object(self.file.read_text(encoding="utf-8"))
            if any(type(size) is not int for size in sizes.values()):
                raise ValueError("expected an object of whole numbers")
        except ValueError as error:
            raise CheckpointError(
                f"Expected the sizes of passes in {self.file}, as a run that was out of memory "
                f"leaves them, and it is no JSON ({error}). Remove it: the run begins with the "
                "configured sizes and lowers them again if need be."
            ) from error
        return sizes
