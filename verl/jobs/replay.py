"""Execute the step of a capsule again, and compare it with the record, phase by phase."""

import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.config import TrainConfig
from verl.config.keys import flatten, nest
from verl.config.load import config_from_dict, merge_values
from verl.jobs.compare import Comparison, Tolerances, compare_runs
from verl.tracking.records import Run, have_pictures, load_run
from verl.trainer.capsule import CAPSULE_FILE, CHECKPOINT_FOLDER, FORMAT, ROWS_FILE, digest_of
from verl.trainer.ppo_trainer import PPOTrainer
from verl.trainer.variants import trainer_class
from verl.utils.errors import ConfigError, DataError, VerlError, describe_error
from verl.utils.json_text import parse_json, parse_object
from verl.utils.logging import logger

# Errors of a file that is no archive of a capsule. A changed bit may be zlib's error, or ask for a
# password (RuntimeError) or another compression (NotImplementedError).
_DAMAGED = (
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class Replayed:
    """The result of a replay.

    Args:
        comparison: the recorded steps against those of now; None where the recorded step failed
            and nothing before it was executed.
        failure_then, failure_now: errors that ended the step, "" for none.
    """

    step: int
    comparison: Comparison | None
    failure_then: str
    failure_now: str

    @property
    def is_equal(self) -> bool:
        """Whether the step did the same again."""
        same_end = bool(self.failure_then) == bool(self.failure_now)
        return same_end and (self.comparison is None or not self.comparison.differences)

    def __str__(self) -> str:
        lines = []
        if self.comparison is not None:
            lines.append(str(self.comparison))
        if self.failure_then:
            lines.append(f"Step {self.step} failed in the run: {self.failure_then}")
        if self.failure_now:
            lines.append(f"Step {self.step} failed in the replay: {self.failure_now}")
        elif self.failure_then:
            lines.append(f"Step {self.step} did not fail in the replay.")
        return "\n".join(lines)


def replay(
    capsule: Path | str,
    *,
    checkpoint: Path | None = None,
    keys: Mapping[str, Any] | None = None,
    tolerances: Tolerances | None = None,
) -> Replayed:
    """Execute a capsule's step in this process, and compare.

    Args:
        capsule: a file of `verl capsule`.
        checkpoint: where the checkpoint lies now, if it has moved.
        keys: configuration keys to change, such as the device or a model's path: nested, or by
            their dotted names.
        tolerances: how far values may differ; None: not at all.

    Raises:
        DataError: the file is no capsule, or its checkpoint is missing or another one.
        ConfigError: a tolerance names nothing that the capsule has recorded, or a key is unknown.
    """
    with tempfile.TemporaryDirectory(prefix="verl-replay-") as name:
        folder = Path(name)
        facts = _unpack(Path(capsule).expanduser(), folder / "then")
        then = load_run(folder / "then")
        if tolerances is not None and then.steps:
            tolerances.check_names(then)
        start = _checkpoint_of(facts, folder / "then", checkpoint)
        config = _config(then, start, folder / "now", keys or {})
        failure_now = _execute(then, config, facts["step"])

        now = load_run(folder / "now")
        failures = [event for event in then.events if event["event"] == "failed"]
        comparison = None
        if then.steps.keys() & now.steps.keys():
            comparison = compare_runs(then, now, tolerances)
            changed = flatten(nest(keys or {}), TrainConfig)
            asked = [text for text in comparison.keys if text.partition(" ")[0] in changed]
            comparison = replace(comparison, keys=asked)
        failure_then = failures[-1]["text"] if failures else ""
        return Replayed(facts["step"], comparison, failure_then, failure_now)


class RecordedRows:
    """The rows of the training data that a capsule holds, under their numbers in the whole.

    They have a `fingerprint` if the data set had one. Until `is_training` is set, which checks at
    start precede, any of them stands in for another.
    """

    def __init__(self, run: Run) -> None:
        self._num_rows: int = run.facts["data"]["num_rows"]
        self._rows: dict[int, dict[str, Any]] = {}
        self.is_training = False
        if run.facts["data"]["fingerprint"] is not None:
            self.fingerprint: str = run.facts["data"]["fingerprint"]
        for number, row in parse_json((run.folder / ROWS_FILE).read_bytes()):
            if have_pictures([(number, row)]):
                raise ConfigError(
                    "A capsule of a run with pictures cannot be replayed yet: it does not hold them."
                )
            self._rows[number] = row

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item not in self._rows and not self.is_training:
            item = next(iter(self._rows))
        if item not in self._rows:
            raise DataError(
                f"The step draws row {item} of the training data, which the capsule lacks: the "
                "order of rows is not that of the run."
            )
        return dict(self._rows[item])


def _unpack(path: Path, folder: Path) -> dict[str, Any]:
    """Unpack a capsule, and return its facts."""
    if not path.is_file():
        there = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(
            f"Expected a capsule, but {path} {there}. Write one: verl capsule RUN --step N."
        )
    try:
        with zipfile.ZipFile(path) as file:
            facts = parse_object(file.read(CAPSULE_FILE))
            file.extractall(folder)  # names that lead out of the folder stay within it
    except _DAMAGED as error:
        raise DataError(
            f"{path} is no capsule, or is damaged ({error}). Write one: verl capsule RUN --step N."
        ) from error
    if facts.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {facts.get('format')!r:.20}, and this version reads {FORMAT}."
        )
    return facts


def _checkpoint_of(facts: Mapping[str, Any], folder: Path, elsewhere: Path | None) -> Path | None:
    """Return the checkpoint from which the step starts; None for the beginning of the run."""
    pointer = facts["checkpoint"]
    if pointer is None:
        return None
    place = elsewhere or Path(pointer["path"])
    if pointer["included"]:
        # Its name holds the step, as a resumed run expects it.
        place = folder / f"global_step_{facts['start']}"
        (folder / CHECKPOINT_FOLDER).rename(place)
    if not place.is_dir():
        raise DataError(
            f"The capsule starts from the checkpoint {place}, which is missing here. Give its "
            "place with --checkpoint, or put it into the capsule: verl capsule RUN --step "
            f"{facts['step']} --weights."
        )
    if digest_of(place) != pointer["sha256"]:
        raise DataError(
            f"{place} is another checkpoint than the capsule's: its manifest has another digest."
        )
    return place.absolute()


def _config(
    run: Run, checkpoint: Path | None, folder: Path, keys: Mapping[str, Any]
) -> TrainConfig:
    """Return the run's configuration, changed to one that executes a step and nothing else."""
    if run.facts["kind"] != "TrainConfig":
        raise ConfigError("A capsule of supervised fine-tuning cannot be replayed yet.")

    values = dict(run.config)
    resume = {"resume_mode": "disable", "resume_from_path": None}
    if checkpoint is not None:
        resume = {"resume_mode": "resume_path", "resume_from_path": str(checkpoint)}

    values["trainer"] = (
        values["trainer"]
        | resume
        | {
            "total_training_steps": run.facts["total_steps"],
            "default_local_dir": str(folder),
            "logger": [],
            "save_freq": -1,
            "test_freq": -1,
            "val_only": False,
            "val_before_train": False,
            "rollout_data_dir": None,
            "validation_data_dir": None,
            "record": {"enable": True, "keep_steps": 10_000, "max_mib": 1e9, "weights": True},
        }
    )

    return config_from_dict(merge_values(values, keys))


def _execute(then: Run, config: TrainConfig, step: int) -> str:
    """Train up to `step`, with a record. Return the error that ended it, or ""."""
    rows = RecordedRows(then)
    own = trainer_class(config)
    if then.facts["trainer"] != f"{own.__module__}.{own.__qualname__}":
        logger.warning(
            "The run was made by %s, and is replayed by %s.", then.facts["trainer"], own.__name__
        )

    trainer = own(config, train_dataset=rows, val_dataset=rows)
    trainer.init_workers()
    trainer.load_checkpoint()
    trainer.recorder.start(trainer)
    rows.is_training = True
    try:
        _run_to(trainer, step)
    except VerlError as error:
        trainer.recorder.note_failure(trainer, error)
        return describe_error(error)
    finally:
        trainer.recorder.finish()
        trainer.tracker.rescue()  # the comparison is the result, also where a tracker fails
    return ""


def _run_to(trainer: PPOTrainer, step: int) -> None:
    while trainer.global_step < step:
        for prompts in trainer.prompt_batches():
            trainer.run_step(prompts)
            if trainer.global_step >= step:
                return
