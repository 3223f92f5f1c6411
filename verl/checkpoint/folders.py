"""Name and check folders `global_step_N`, each of which is one checkpoint."""

import os
import re
from pathlib import Path

from verl.checkpoint.manifest import SHARD_METADATA, SHARED_FILES
from verl.utils.errors import CheckpointError

NAME = re.compile(r"global_step_(\d{1,18})")


def step_of(folder: Path | str) -> int:
    """Return the step N of a folder named `global_step_N`."""
    found = NAME.fullmatch(Path(folder).name)
    if found is None:
        raise CheckpointError(f"Expected a folder named global_step_N, got {folder}.")
    return int(found.group(1))


def refuse_file(final: Path) -> None:
    """Raise CheckpointError if something other than a folder has the name of a checkpoint."""
    if os.path.lexists(final) and not final.is_dir():
        raise CheckpointError(
            f"{final} must be a folder, because checkpoints have this name, and is none. Move it "
            "away, or set trainer.default_local_dir to another folder."
        )


def refuse_folder_of_several(folder: Path) -> None:
    """Raise CheckpointError if a folder that should be one checkpoint holds several."""
    paths = folder.glob("global_step_*")
    steps = sorted(step_of(path) for path in paths if NAME.fullmatch(path.name))
    if not steps:
        return

    others = f" (or one of the steps {', '.join(map(str, steps[:-1]))})" if steps[1:] else ""
    raise CheckpointError(
        f"trainer.resume_from_path must be one checkpoint, got {folder}, a folder of "
        f"{len(steps)}. Set trainer.resume_from_path={folder / f'global_step_{steps[-1]}'}{others}."
    )


def check_files_of_all_hosts(folder: Path) -> None:
    """Raise CheckpointError if files of other hosts are not visible here."""
    for part in folder.iterdir():
        if not any(part.iterdir()):
            raise CheckpointError(
                f"The files that were written into {part} are not visible from this host. "
                f"{SHARED_FILES}"
            )
    for metadata in folder.rglob(SHARD_METADATA):
        # Not at the top: torch takes seconds to import.
        from verl.checkpoint.sharded import SavedTensors

        SavedTensors(metadata.parent)  # checks that the files of all ranks exist
