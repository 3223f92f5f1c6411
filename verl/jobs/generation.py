"""Generate responses to every prompt of a file, batch by batch, so that a killed run can resume."""

import hashlib
import io
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.config.generation import PLACE_AND_SPEED, SHARED, GenerationConfig
from verl.config.keys import keys_of, value_at
from verl.data.files import ArrowRows, Rows, open_rows
from verl.data.lengths import tokenizer_fingerprint
from verl.data.rl_dataset import RLDataset
from verl.data.toy import TOY, toy_files
from verl.jobs.finished_batches import FinishedBatches, require_writable
from verl.models.load import resolve_path
from verl.protocol import DataProto
from verl.trainer import setup
from verl.trainer.pools import join_pool
from verl.utils.devices import describe_device
from verl.utils.errors import DataError
from verl.utils.logging import logger
from verl.workers import RolloutWorker

_READ_BYTES = 1 << 16
_READS_A_FILE = 32


class Prompts(RLDataset):
    """The prompts as in training, and their rows as a table."""

    def _open_files(self, split: str) -> list[Rows]:
        return [open_rows(file, split, key="data.path") for file in self.files]

    def _columns_of_items(self) -> list[str]:
        # An engine reads the prompt alone, and `table` keeps every column under its name.
        return []

    def table(self) -> pa.Table:
        """Return all columns of the kept rows, in the types of their files.

        Raises DataError for values that Parquet cannot hold.
        """
        parts = []
        for number, (file, rows) in enumerate(zip(self.files, self._sources)):
            kept = self._kept[self._kept[:, 0] == number, 1]
            if isinstance(rows, ArrowRows):
                parts.append(rows.table.take(kept))
            else:
                parts.append(_as_table(file, rows, kept.tolist()))

        try:
            table = pa.concat_tables(parts, promote_options="permissive")
            table = table.replace_schema_metadata(None)
            # Fail now, not after hours of generation.
            pq.write_table(table.slice(0, 1), io.BytesIO())
        except pa.ArrowException as error:
            raise DataError(
                f"{', '.join(self.files)}: the columns cannot be written as one Parquet file: "
                f"{str(error).rstrip('.')}. Give a column one type in all files, and no row an empty dict."
            ) from error

        return table


def _as_table(file: str, rows: Rows, kept: Iterable[int]) -> pa.Table:
    """Return rows as a table. Raises DataError with the name of a column that Parquet cannot hold."""
    records = [rows.row(number) for number in kept]
    columns = {}
    for name in rows.columns:
        try:
            columns[name] = pa.array([record[name] for record in records])
        except (pa.ArrowException, OverflowError) as error:
            raise DataError(
                f"{file}: the column '{name}' cannot be written as Parquet: {error}. Give its "
                "values one type in all rows, and whole numbers at most 64 bits."
            ) from error

    return pa.table(columns)


def generate(config: GenerationConfig) -> None:
    """Generate responses for every prompt.

    The file `data.output_path` gets all columns of the input, and the responses.
    """
    data = config.data
    assert data.output_path is not None, "the configuration was checked"
    output = Path(data.output_path)
    require_writable(output)
    train = SHARED.as_train_config(config)
    rollout = train.actor_rollout_ref.rollout
    device = setup.prepare_for_generation(config.trainer, train)
    pool = join_pool(train, device)

    tokenizer = setup.build_tokenizer(train)
    setup.check_stops(train, tokenizer)
    files = toy_files() if data.path == [TOY] else data.path
    pictures = setup.picture_reader(train, tokenizer)
    prompts = Prompts(files, tokenizer, train.data, pictures=pictures)

    finished = _finished_batches(config, prompts, output)
    if finished.is_complete():
        logger.info(
            "%s is complete: nothing to do. trainer.resume_mode=disable generates it again.",
            data.output_path,
        )
        return

    waiting = finished.waiting()
    if waiting:
        logger.info("Device: %s", describe_device(device))
        group: Any = pool.start(
            "rollout",
            RolloutWorker,
            train.actor_rollout_ref,
            device=device,
            tokenizer=tokenizer,
            loads_weights=True,
            deadline_s=config.trainer.deadline_s,
        )
        progress = Progress(sum(map(len, waiting.values())), data.n_samples)
        for number, rows in waiting.items():
            answer = group.generate_texts(
                batch_of(prompts, rows),
                n=data.n_samples,
                params=setup.sampling_params(rollout),
                seed=rollout.seed,
            )
            finished.keep(number, list(answer.non_tensor_batch["responses"]))
            progress.report(answer.non_tensor_batch)

    finished.join()
    logger.info(
        "Wrote %d prompts with %d responses each to %s.",
        len(prompts),
        data.n_samples,
        data.output_path,
    )


def _finished_batches(config: GenerationConfig, prompts: Prompts, output: Path) -> FinishedBatches:
    """Return the batches that earlier runs have finished, unless these are to be discarded.

    Raises DataError where a column of the input has the name of the responses.
    """
    data = config.data
    table = prompts.table()
    if data.response_key in table.column_names:
        raise DataError(
            f"{', '.join(prompts.files)}: there is a column '{data.response_key}' already. Set "
            "data.response_key to another name for the responses."
        )

    finished = FinishedBatches(
        output, identity(config, prompts), table, data.response_key, data.batch_size
    )
    if config.trainer.resume_mode == "disable":
        finished.discard()
    return finished


def batch_of(prompts: RLDataset, rows: Sequence[int]) -> DataProto:
    """Return the columns of these prompts that a rollout reads."""
    items = [prompts[row] for row in rows]
    columns: dict[str, Any] = {"prompt_row": list(rows)}
    for name in ("raw_prompt_ids", "prepared_pictures"):
        if name in items[0]:
            columns[name] = [item[name] for item in items]
    return DataProto.from_dict(non_tensors=columns)


def identity(config: GenerationConfig, prompts: RLDataset) -> dict[str, Any]:
    """Return the settings that determine the responses, by key.

    Two runs with equal settings may finish each other's work. Files are compared by their contents,
    not by their paths.
    """
    by_content = {
        "data.path": prompts.fingerprint,
        "model.path": weights_fingerprint(str(config.model.path)),
        "data.tokenizer": tokenizer_fingerprint(prompts.tokenizer),
        "model.custom_chat_template": None,  # part of the tokenizer's fingerprint
    }

    values: dict[str, Any] = {}
    for path, key in keys_of(GenerationConfig).items():
        has_effect = key.setting.alias_of is None and key.setting.no_effect is None
        if has_effect and not path.startswith(PLACE_AND_SPEED):
            values[path] = value_at(config, path)
    return values | by_content


def weights_fingerprint(path: str) -> str:
    """Compute a digest of a folder's weight files: names, sizes and samples of their bytes.

    It takes less than a second for any size. A hub name is returned as it is.
    """
    source = resolve_path(path)
    if not Path(source).is_dir():
        return source

    suffixes = (".safetensors", ".bin", ".json")
    files = [file for file in Path(source).iterdir() if file.suffix in suffixes]
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(size // _READS_A_FILE, _READ_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_READ_BYTES))
    return digest.hexdigest()


class Progress:
    """Log one line per batch: progress, speed and remaining time.

    Args:
        num_prompts: prompts that this run has to answer.
    """

    def __init__(self, num_prompts: int, n_samples: int) -> None:
        self.num_prompts = num_prompts
        self.n_samples = n_samples
        self.done = 0
        self.tokens = 0
        self.started = time.perf_counter()

    def report(self, answers: dict[str, Any]) -> None:
        """Count the answers of one batch, and log."""
        rows = len(answers["num_tokens"])
        tokens = sum(answers["num_tokens"])
        self.done += rows
        self.tokens += tokens

        seconds = time.perf_counter() - self.started
        left = round(seconds / self.done * (self.num_prompts - self.done))
        logger.info(
            (
                "%d of %d prompts, %.0f tokens/s, %.0f tokens a response (%.1f %% cut at the "
                "limit), ETA %d:%02d:%02d"
            ),
            self.done,
            self.num_prompts,
            self.tokens / seconds,
            tokens / (rows * self.n_samples),
            100 * sum(answers["num_cut"]) / (rows * self.n_samples),
            left // 3600,
            left // 60 % 60,
            left % 60,
        )
