"""The finished batches of a generation run: one file each, joined when all are complete."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.checkpoint.claim import Claim
from verl.utils.errors import ConfigError, DataError
from verl.utils.limits import make_writable
from verl.utils.logging import logger
from verl.utils.whole_file import sync, whole_file

_METADATA = b"verl.generation"  # in the output: the identity of the run that wrote it
_IDENTITY = "identity.json"
_WHOLE = "whole.parquet"


class FinishedBatches:
    """The folder `<output>.parts`, with the responses of each batch and the identity of the run.

    No file is ever incomplete: files are written under another name, synced and renamed. A run
    claims the folder while it works in it.

    Args:
        output: the Parquet file to make.
        identity: settings that determine the responses; a run of another identity is refused.
        table: the input, with the rows of the responses.
        column: name of the column of responses.
        batch_size: rows of a batch.
    """

    def __init__(
        self,
        output: Path,
        identity: Mapping[str, Any],
        table: pa.Table,
        column: str,
        batch_size: int,
    ) -> None:
        self.output = output
        self.table = table
        self.column = column
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        self.folder = output.with_name(f"{output.name}.parts")
        self._claim = Claim(self.folder)
        starts = range(0, table.num_rows, batch_size)
        self.batches = [range(start, min(start + batch_size, table.num_rows)) for start in starts]

    def discard(self) -> None:
        """Delete earlier batches and a complete output.

        Raises ConfigError if another run is writing them.
        """
        self._take_folder()
        self._claim.give_back()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.output.unlink(missing_ok=True)

    def is_complete(self) -> bool:
        """Check whether the output exists.

        Raises ConfigError if it belongs to another run, or to an unknown one.
        """
        if not self.output.exists():
            return False
        try:
            metadata = pq.read_schema(self.output).metadata or {}
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(
                f"{self._occupied()}: it is not readable as Parquet ({error}). {_WAY_OUT}"
            ) from error

        if _METADATA not in metadata:
            raise ConfigError(
                f"{self._occupied()}, and not by verl.trainer.main_generation. {_WAY_OUT}"
            )

        self._compare(json.loads(metadata[_METADATA]), self._occupied())
        # A run that was killed between its last two steps left the folder behind.
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def waiting(self) -> dict[int, range]:
        """Return the remaining batches: {number: rows}.

        Raises ConfigError if another run has begun them or is writing them.
        """
        self._take_folder()
        known = self.folder / _IDENTITY
        waiting: dict[int, range] = {}
        for number, rows in enumerate(self.batches):
            if not self._place(number).exists():
                waiting[number] = rows

        if known.exists() and any(self.folder.glob("batch_*")):
            self._compare(
                json.loads(known.read_text(encoding="utf-8")),
                f"{self.folder} has batches of a killed run",
            )
        else:
            text = json.dumps(self.identity, indent=1)
            with whole_file(known, flush=True) as path:
                path.write_text(text, encoding="utf-8")

        if len(waiting) < len(self.batches):
            logger.info(
                "Resumed: %d of %d batches are done.",
                len(self.batches) - len(waiting),
                len(self.batches),
            )

        return waiting

    def keep(self, number: int, responses: list[list[str]]) -> None:
        """Write the responses of one batch, a list of texts for each of its rows."""
        assert len(responses) == len(self.batches[number])
        table = pa.table({self.column: pa.array(responses, pa.list_(pa.string()))})
        with whole_file(self._place(number), flush=True) as path:
            pq.write_table(table, path)

    def join(self) -> None:
        """Write the output, with a row group per batch, and remove the folder."""
        schema = self.table.schema.append(pa.field(self.column, pa.list_(pa.string())))
        schema = schema.with_metadata({_METADATA: json.dumps(self.identity)})

        whole = self.folder / _WHOLE  # removed with the folder if this process is killed
        with (
            whole_file(whole, flush=True) as path,
            pq.ParquetWriter(path, schema) as writer,
        ):
            for number, rows in enumerate(self.batches):
                part = self.table.slice(rows.start, len(rows))
                columns = [*part.columns, self._read(number).column(self.column)]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))

        os.replace(whole, self.output)
        sync(self.output.parent)
        self._claim.give_back()  # some file systems cannot delete a folder with an open file
        shutil.rmtree(self.folder)

    def _take_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        holder = self._claim.take()
        if holder is not None:
            raise ConfigError(
                f"Another run ({holder}) generates data.output_path='{self.output}'. Wait until it "
                "ends, or give this one another data.output_path."
            )

    def _read(self, number: int) -> pa.Table:
        place = self._place(number)
        try:
            return pq.read_table(place)
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"The finished batch '{place}' is damaged: {error}. Delete it and run the same "
                "command again, which generates that batch again."
            ) from error

    def _place(self, number: int) -> Path:
        return self.folder / f"batch_{number:06d}.parquet"

    def _occupied(self) -> str:
        return f"data.output_path='{self.output}' is written already"

    def _compare(self, theirs: Mapping[str, Any], fact: str) -> None:
        differences: list[str] = []
        for name in {**theirs, **self.identity}:
            before = theirs.get(name)
            now = self.identity.get(name)
            if before != now:
                differences.append(f"{name} was {before}, now {now}")

        if differences:
            raise ConfigError(
                f"{fact}, with another configuration: {'; '.join(differences)}. {_WAY_OUT}"
            )


_WAY_OUT = (
    "Give the same configuration again, another data.output_path, or trainer.resume_mode=disable "
    "to replace the earlier responses."
)


def require_writable(path: Path) -> None:
    """Create the folder of an output file.

    Raises ConfigError if the file cannot be written. Otherwise hours of work could be lost at the
    end.
    """
    if path.is_dir():
        raise ConfigError(
            f"data.output_path must name a file, got the folder '{path}'. Name a file in it."
        )
    try:
        make_writable(path.parent)
    except OSError as error:
        raise ConfigError(
            f"data.output_path='{path}' cannot be written: {error.strerror}. Name a file in a "
            "writable folder."
        ) from error
