"""Put one step of a recorded run into a file, from which `verl replay` executes it again.

A capsule is a zip file: `capsule.json`; `records/` with the lines and samples from the checkpoint
before the step up to the step; `rows.json`, the rows of the training data that were drawn; and, if
asked for, the checkpoint itself. Noise needs no place in it, because it is a function of the seed,
the step and the position.
"""

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import MANIFEST
from verl.tracking.records import (
    FOLDER,
    RUN_FILE,
    SAMPLES_FOLDER,
    STEPS_FILE,
    Run,
    have_pictures,
    load_run,
)
from verl.utils.commands import verl_command
from verl.utils.errors import DataError
from verl.utils.json_text import parse_json
from verl.utils.whole_file import whole_file

CAPSULE_FILE = "capsule.json"
ROWS_FILE = "rows.json"
CHECKPOINT_FOLDER = "checkpoint"
CAPSULES = "capsules"  # in the folder of records: those that a run wrote by itself
FORMAT = 1
_MOST_KEPT = 3


def write_capsule(
    folder: Path | str, step: int, path: Path | None = None, *, weights: bool = False
) -> Path:
    """Write a capsule of a step, and return its path.

    Args:
        folder: the folder of the run.
        step: the step to execute again; it may be the one in which the run failed.
        path: of the capsule; None: in the folder of records.
        weights: put the checkpoint into it, instead of a pointer to it and its digest.

    Raises:
        DataError: the prompts of a step since the last checkpoint are not kept, or have pictures.
    """
    run = load_run(folder)
    start, checkpoint = _start_of(run.folder, step)
    _check_kept(run, start, step)
    rows = _rows(run, step)
    if have_pictures(rows):
        raise DataError(
            f"A capsule does not hold pictures, and the rows of step {step} have some, so it could "
            f"not be replayed. Look at the samples of the step: {verl_command('view', run.folder)}"
        )

    facts: dict[str, Any] = {
        "format": FORMAT,
        "step": step,
        "start": start,
        "run": str(run.folder),
        "checkpoint": None,
    }
    if checkpoint is not None:
        facts["checkpoint"] = {
            "path": str(checkpoint),
            "sha256": digest_of(checkpoint),
            "included": weights,
        }

    target = path or run.records / CAPSULES / f"step_{step}.zip"
    with (
        whole_file(target) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        file.writestr(CAPSULE_FILE, json.dumps(facts, indent=1))
        file.writestr(ROWS_FILE, json.dumps(rows))
        _add_records(file, run, start, step)
        if weights and checkpoint is not None:
            _add_checkpoint(file, checkpoint)

    if path is None:
        _prune(target)
    return target


def digest_of(checkpoint: Path) -> str:
    """Return the digest of a checkpoint: that of its manifest, which has the sums of all files."""
    return hashlib.sha256((checkpoint / MANIFEST).read_bytes()).hexdigest()


def _check_kept(run: Run, start: int, step: int) -> None:
    """Raise DataError where the samples of a step after `start`, up to `step`, are not kept."""
    choices = [kept for kept in run.kept_steps if kept > 0]  # training begins with step 1
    if not choices:
        raise DataError(
            f"No step of {run.folder} has samples. Train at least one step with "
            "trainer.record.enable=true."
        )
    if step < 1 or step > max(choices):
        raise DataError(
            f"There are no samples of step {step}. Kept are {choices}; choose one of them."
        )

    missing = sorted(set(range(start + 1, step + 1)) - set(choices))
    if missing:
        raise DataError(
            f"A capsule of step {step} begins after step {start}, the newest checkpoint before it, "
            f"and the samples of these steps are not kept: {missing}. Kept are {choices}. Choose "
            "one of them, save more often (trainer.save_freq), or keep more "
            "(trainer.record.keep_steps)."
        )


def _rows(run: Run, step: int) -> list[tuple[int, dict[str, Any]]]:
    """Return the rows of the training data that were drawn, with their numbers.

    Asynchronous schedules draw ahead, so steps before the checkpoint and after `step` count as
    well.
    """
    draws_ahead = run.config["trainer"].get("mode", "sync") != "sync"
    rows = {}
    for each in run.kept_steps:
        if each <= step or draws_ahead:
            rows.update(run.samples(each).prompts)
    return list(rows.items())


def _start_of(folder: Path, step: int) -> tuple[int, Path | None]:
    """Return the newest checkpoint before a step, with its step; 0 and None for the beginning."""
    found: dict[int, Path | None] = {0: None}
    for path in folder.glob("global_step_*"):
        number = path.name.removeprefix("global_step_")
        if number.isdecimal() and int(number) < step and (path / MANIFEST).is_file():
            found[int(number)] = path
    start = max(found)
    return start, found[start]


def _add_records(file: zipfile.ZipFile, run: Run, start: int, step: int) -> None:
    """Add the record: its lines from `start` to `step`, and the samples of the steps between."""
    file.write(run.records / RUN_FILE, f"{FOLDER}/{RUN_FILE}")
    file.writestr(f"{FOLDER}/{STEPS_FILE}", _lines(run.records / STEPS_FILE, start, step))
    for each in range(start + 1, step + 1):
        samples = run.samples_file(each)
        name = f"{FOLDER}/{SAMPLES_FOLDER}/{samples.name}"
        file.write(samples, name, zipfile.ZIP_STORED)


def _lines(path: Path, start: int, step: int) -> str:
    """Return the lines of the steps from `start` to `step`."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            values = parse_json(line)
        except ValueError:
            continue  # a torn line; readers of the run report it
        if isinstance(values, dict) and start <= values.get("step", -1) <= step:
            kept.append(line)
    return "".join(kept)


def _add_checkpoint(file: zipfile.ZipFile, checkpoint: Path) -> None:
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file():
            name = f"{CHECKPOINT_FOLDER}/{path.relative_to(checkpoint).as_posix()}"
            file.write(path, name, zipfile.ZIP_STORED)


def _prune(newest: Path) -> None:
    others = [path for path in newest.parent.glob("step_*.zip") if path != newest]
    others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in others[_MOST_KEPT - 1 :]:
        path.unlink()
