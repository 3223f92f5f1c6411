"""The record of a run: what every step did, in files that a killed process cannot damage.

- records/run.json: configuration, versions, machine, and the names of the trained tensors
- records/steps.jsonl: a line for each step or event, with metrics and digests; all are kept
- records/steps/N.arrow: the samples of step N, one row each; those of the newest steps are kept

A file of samples appears whole or not at all. It is an Arrow file (`pyarrow.ipc.open_file`,
`pandas.read_feather`), which takes a third of the time of Parquet to write. It has one list column
for each column of the batch with a value for every response token, JSON for everything that is no
number, and in its metadata the spans of all processes, the prompts that were drawn, and the text of
each token.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from verl.tracking.json_lines import (
    drop_lines_after,
    plain,
    repair_last_line,
    to_json,
    to_json_line,
)
from verl.utils.errors import DataError, shortage_while_reading
from verl.utils.json_text import parse_json, parse_object
from verl.utils.registry import nearest_names
from verl.utils.whole_file import errors_name, whole_file

FOLDER = "records"
RUN_FILE = "run.json"
STEPS_FILE = "steps.jsonl"
SAMPLES_FOLDER = "steps"
FORMAT = 2
SUFFIX = ".arrow"
_SHOWN_RUNS = 8  # that an error lists at most
REWARD_PARTS = "reward_parts"  # columns of JSON objects: the parts of the reward, and all else
FIELDS = "fields"
# Keys of a file's metadata; each holds JSON.
_LANES = b"verl.lanes"
_PROMPTS = b"verl.prompts"
_PIECES = b"verl.pieces"
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="zstd")


class RecordWriter:
    """Write the record of a run in `folder/records`.

    Args:
        folder: the folder of the run.
        keep_steps: newest steps whose samples are kept.
        max_bytes: size that all kept samples may take; the newest step always stays.
    """

    def __init__(self, folder: Path, keep_steps: int, max_bytes: float) -> None:
        self.folder = folder / FOLDER
        self.keep_steps = keep_steps
        self.max_bytes = max_bytes
        self._lines = self.folder / STEPS_FILE
        self._samples = self.folder / SAMPLES_FOLDER
        self._sizes = self._read_sizes()  # bytes of the samples of each step that is kept

    def start(self, facts: Mapping[str, Any], step: int) -> None:
        """Write `run.json`, and forget all steps after `step`, from which the run continues."""
        self._samples.mkdir(parents=True, exist_ok=True)
        repair_last_line(self._lines)
        drop_lines_after(self._lines, step)
        for path in _sample_files(self._samples):
            if int(path.stem) > step or step == 0:
                path.unlink()
        self._sizes = self._read_sizes()
        for leftover in self._samples.glob(".*.tmp-*"):
            leftover.unlink()
        text = json.dumps(plain({"format": FORMAT, **facts}))
        with whole_file(self.folder / RUN_FILE) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def add_line(self, line: Mapping[str, Any]) -> None:
        """Append a step or an event; one write, so a reader sees it whole."""
        with errors_name(self._lines), self._lines.open("ab") as file:
            file.write(to_json_line(line))

    def add_samples(self, step: int, table: pa.Table) -> None:
        """Write the samples of a step, then remove those of the oldest steps."""
        path = self._path(step)
        with whole_file(path) as temporary:
            with (
                pa.OSFile(str(temporary), "wb") as file,
                pa.ipc.new_file(file, table.schema, options=_COMPRESSED) as writer,
            ):
                writer.write_table(table)
            self._sizes.pop(step, None)
            self._sizes[step] = temporary.stat().st_size
        self._prune()

    def _prune(self) -> None:
        sizes = self._sizes
        while len(sizes) > self.keep_steps or sum(sizes.values()) > self.max_bytes:
            if len(sizes) == 1:
                return
            oldest = min(sizes)
            self._path(oldest).unlink(missing_ok=True)
            del sizes[oldest]

    def _read_sizes(self) -> dict[int, int]:
        return {int(path.stem): path.stat().st_size for path in _sample_files(self._samples)}

    def _path(self, step: int) -> Path:
        return self._samples / f"{step}{SUFFIX}"


def samples_table(
    columns: Mapping[str, Any],
    *,
    lanes: Any = (),
    prompts: Any = (),
    pieces: Mapping[int, str] | None = None,
) -> pa.Table:
    """Make the table of a step's samples.

    Args:
        columns: pyarrow arrays by name.
        lanes: spans of the processes, see `verl.trainer.recorder`.
        prompts: rows of the training data that the step drew, [number, row] each.
        pieces: the text of every token id that occurs.
    """
    notes = {_LANES: lanes, _PROMPTS: prompts, _PIECES: pieces or {}}
    metadata = {name: to_json(value) for name, value in notes.items()}
    return pa.table(dict(columns)).replace_schema_metadata(metadata)


def token_lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """Make a list column of values that follow each other, `lengths` of them in each row."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.array(np.ascontiguousarray(values))
    return pa.ListArray.from_arrays(pa.array(offsets), flat)


def json_column(fields: Mapping[str, Sequence[Any]], num_rows: int) -> pa.DictionaryArray:
    """Make a column of JSON objects; rows that share all their values share one text."""
    numbers: dict[Any, int] = {}
    texts = []
    rows = []
    for values in zip(*fields.values()) if fields else [()] * num_rows:
        key = tuple([value if type(value) is str else id(value) for value in values])
        number = numbers.get(key)
        if number is None:
            number = numbers[key] = len(texts)
            texts.append(to_json(dict(zip(fields, values))))
        rows.append(number)

    return pa.DictionaryArray.from_arrays(
        pa.array(rows, pa.int32()), pa.array(texts, pa.binary()).cast(pa.string())
    )


def pack_digests(values: Sequence[int]) -> str:
    """Write 64-bit digests as one short text."""
    return base64.b64encode(np.array(values, dtype="<i8").tobytes()).decode()


def unpack_digests(text: str) -> list[int]:
    """Undo `pack_digests`."""
    return np.frombuffer(base64.b64decode(text), dtype="<i8").tolist()


# ---- reading -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One trajectory of a step.

    `tokens` has an array for each column with a value for every response token, such as
    `response_ids`, `response_mask`, `rollout_log_probs` and `advantages`. `fields` has everything
    else of the row: score, uid, the parts of the reward, messages of an agent.
    """

    row: int
    prompt: str
    response: str
    prompt_ids: np.ndarray
    tokens: dict[str, np.ndarray]
    fields: dict[str, Any]

    @property
    def uid(self) -> str:
        """Return the name of the sample's group."""
        return self.fields["uid"]

    @property
    def score(self) -> float:
        """Return the score of the reward."""
        return self.fields["score"]


class StepSamples:
    """The samples of one step, read from their file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with shortage_while_reading(path), pa.OSFile(str(path)) as file:
                self.table = pa.ipc.open_file(file).read_all()
            metadata = self.table.schema.metadata or {}
            self._notes = {name: metadata[name] for name in (_LANES, _PROMPTS, _PIECES)}
        except (OSError, pa.ArrowException, KeyError) as error:
            raise DataError(
                f"{path} is no file of samples, or is damaged ({error}). The other steps can still "
                "be read; remove this file."
            ) from error

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, row: int) -> Sample:
        row = range(len(self))[row]
        values = {}
        tokens = {}
        for name in self.table.column_names:
            cell = self.table[name][row]
            if isinstance(cell, pa.ListScalar):
                tokens[name] = cell.values.to_numpy(zero_copy_only=False)
            else:
                values[name] = cell.as_py()

        reward = parse_json(values.pop(REWARD_PARTS))
        fields = {**values, **reward, **parse_json(values.pop(FIELDS))}
        fields[REWARD_PARTS] = reward
        return Sample(
            row=row,
            prompt=fields.pop("prompt"),
            response=fields.pop("response"),
            prompt_ids=tokens.pop("prompt_ids"),
            tokens=tokens,
            fields=fields,
        )

    def values(self, column: str, row: int) -> np.ndarray:
        """Return the values of a list column in a row."""
        return self.table[column][row].values.to_numpy(zero_copy_only=False)

    def __repr__(self) -> str:
        return f"{len(self)} samples of {self.path}"

    @property
    def lanes(self) -> list[dict[str, Any]]:
        """Return the spans of each process, in seconds from the start of the step."""
        lanes = parse_json(self._notes[_LANES])
        for lane in lanes:
            lane["spans"] = [
                [name, row, start_us / 1e6, end_us / 1e6]
                for name, row, start_us, end_us in lane["spans"]
            ]
        return lanes

    @property
    def prompts(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the rows of the training data that the step drew, with their numbers."""
        return [(number, row) for number, row in parse_json(self._notes[_PROMPTS])]

    @cached_property
    def pieces(self) -> dict[int, str]:
        """Return the text of each token id that occurs."""
        pieces = parse_json(self._notes[_PIECES])
        return {int(token): text for token, text in pieces.items()}


@dataclass
class StepLine:
    """The line of one step: `metrics`, and the digests of its columns and of the weights after it.

    `weights` has for each role the digests of its tensors, in the order of `Run.tensor_names`.
    """

    step: int
    time: float
    metrics: dict[str, float]
    columns: dict[str, str] = field(default_factory=dict)
    weights: dict[str, list[int]] = field(default_factory=dict)


class Run:
    """A recorded run. It may still be training: `refresh` reads the lines that came since.

    Example:
        ```python
        import verl

        run = verl.load_run("checkpoints/toy/toy")
        print(run.metric("critic/score/mean"))
        worst = min(run.samples(run.kept_steps[-1]), key=lambda sample: sample.score)
        print(worst.prompt, worst.response)
        ```
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder  # of the run, in which `records` lies
        self.records = folder / FOLDER
        self.facts = _read_facts(self.records / RUN_FILE)
        self.steps: dict[int, StepLine] = {}
        self.events: list[dict[str, Any]] = []
        self.damage: list[str] = []
        self._seen = (0, 0)  # bytes of `steps.jsonl` that were read, and its inode
        self.refresh()

    @property
    def name(self) -> str:
        """Return the last two parts of the folder, which are project and experiment."""
        return "/".join(self.folder.parts[-2:])

    @property
    def config(self) -> dict[str, Any]:
        """Return the configuration as a tree, without secrets."""
        return self.facts["config"]

    @property
    def tensor_names(self) -> dict[str, list[str]]:
        """Return the names of the trained tensors of each role."""
        return self.facts.get("tensors", {})

    @property
    def kept_steps(self) -> list[int]:
        """Return the steps whose samples are kept."""
        return [int(path.stem) for path in _sample_files(self.records / SAMPLES_FOLDER)]

    def metric(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step.

        Raises:
            DataError: the run has steps, but none of them has a metric of this name.
        """
        known = {metric for line in self.steps.values() for metric in line.metrics}
        if known and name not in known:
            raise DataError(
                f"No step of {self.folder} has the metric '{name}'. Nearest known: "
                f"{nearest_names(name, list(known))}."
            )
        return self.find_metric(name)

    def find_metric(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step, or {} where no step has it."""
        found = {}
        for step, line in self.steps.items():
            if line.metrics.get(name) is not None:
                found[step] = line.metrics[name]
        return found

    def samples(self, step: int) -> StepSamples:
        """Read the samples of a step. Raises DataError if they are not kept, or damaged."""
        return StepSamples(self.samples_file(step))

    def samples_file(self, step: int) -> Path:
        """Return the file of a step's samples. Raises DataError if they are not kept."""
        path = self.records / SAMPLES_FOLDER / f"{step}{SUFFIX}"
        if not path.is_file():
            raise DataError(
                f"The samples of step {step} of {self.folder} are not kept; those of these steps "
                f"are: {self.kept_steps}. trainer.record.keep_steps keeps more."
            )
        return path

    def refresh(self) -> None:
        """Read the lines that were written since the last call."""
        path = self.records / STEPS_FILE
        if not path.is_file():
            return
        status = path.stat()
        offset, inode = self._seen
        if inode != status.st_ino or status.st_size < offset:
            offset = 0  # the run was started again, and has dropped lines
            self.steps.clear()
            self.events.clear()
            self.damage.clear()

        with path.open("rb") as file:
            file.seek(offset)
            content = file.read()
        whole = content[: content.rfind(b"\n") + 1]  # the rest is being written
        for line in whole.splitlines():
            self._add(line)
        self._seen = offset + len(whole), status.st_ino

    def __repr__(self) -> str:
        last = max(self.steps, default=0)
        return f"Run {self.folder}: {last} steps, samples of {len(self.kept_steps)}"

    def _add(self, line: bytes) -> None:
        try:
            values = parse_json(line)
            step = values["step"]
            if "event" in values:
                self.events.append(values)
                return
            known = self.steps.setdefault(step, StepLine(step, values["time"], {}))
            known.metrics.update(values["metrics"])
            known.columns.update(values.get("columns", {}))
            for role, digests in values.get("weights", {}).items():
                known.weights[role] = unpack_digests(digests)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.damage.append(f"A line of {self.records / STEPS_FILE} is damaged ({error!r:.80}).")


def load_run(path: Path | str) -> Run:
    """Read the record of the run in `path`, see `run_folder`."""
    return Run(run_folder(path))


def have_pictures(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> bool:
    """Return whether rows of the training data have pictures or videos.

    Records do not hold them, so a step that drew such rows cannot be executed again.
    """
    return any(row.get("prepared_pictures") for _, row in rows)


def run_folder(path: Path | str) -> Path:
    """Return the folder of a recorded run, which may be given by its folder `records`.

    Raises DataError if no record is there.
    """
    folder = Path(path).expanduser().absolute()
    if folder.name == FOLDER and (folder / RUN_FILE).is_file():
        folder = folder.parent
    if not (folder / FOLDER / RUN_FILE).is_file():
        fact = f"found no {FOLDER}/{RUN_FILE} in {folder}"
        if not folder.is_dir():
            fact = f"but there is no folder {folder}"
        raise DataError(
            f"Expected the folder of a recorded run, {fact}. "
            "Give the run's trainer.default_local_dir; trainer.record.enable=true records."
            f"{_runs_near(folder)}"
        )
    return folder


def _runs_near(folder: Path) -> str:
    """Return a sentence that names the recorded runs in a folder, or else those next to it."""
    if (folder.parent / FOLDER / RUN_FILE).is_file():
        return f" The folder above is one: {folder.parent}."

    inside = _names_of_runs(folder)
    if inside:
        more = ", ..." if len(inside) > _SHOWN_RUNS else ""
        return f" Recorded runs in it: {', '.join(inside[:_SHOWN_RUNS])}{more}."

    nearby = _names_of_runs(folder.parent)
    if nearby:
        return f" Nearest in {folder.parent}: {nearest_names(folder.name, nearby)}."
    return ""


def _names_of_runs(folder: Path) -> list[str]:
    return sorted(path.parent.parent.name for path in folder.glob(f"*/{FOLDER}/{RUN_FILE}"))


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = parse_object(path.read_bytes())
        if "config" not in facts:
            raise ValueError("it has no configuration")
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}). Copy the record again.") from error
    if facts.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {facts.get('format')!r:.20}, and this version reads {FORMAT}. Read "
            "it with the version that wrote it."
        )
    return facts


def _sample_files(folder: Path) -> list[Path]:
    files = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdigit()]
    return sorted(files, key=lambda path: int(path.stem))
