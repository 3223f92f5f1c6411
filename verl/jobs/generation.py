"""Responses to every prompt of a file, a batch at a time, so that a killed run goes on where it
stopped."""

import hashlib
import io
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from verl.config.generation import PLACE_AND_SPEED, SHARED, GenerationConfig
from verl.config.keys import keys_of, value_at
from verl.config.rollout import RolloutConfig
from verl.data.files import ArrowRows
from verl.data.lengths import tokenizer_fingerprint
from verl.data.rl_dataset import RLDataset
from verl.data.toy import TOY, toy_files
from verl.jobs.finished_batches import FinishedBatches
from verl.models.load import resolve_path
from verl.protocol import DataProto
from verl.rollout import check_engine
from verl.trainer import setup
from verl.trainer.pools import join_pool
from verl.utils.devices import describe_device, visible_device
from verl.utils.errors import ConfigError, DataError
from verl.utils.logging import logger
from verl.workers import RolloutWorker

_READ_BYTES = 1 << 16
_READS_A_FILE = 32


class Prompts(RLDataset):
    """The prompts as in training, and the rows they stand in as a table."""

    def table(self) -> pa.Table:
        """Return all columns of the kept rows, in the types of their files.

        Raises DataError for values that Parquet cannot hold.
        """
        parts = []
        for number, (file, rows) in enumerate(zip(self.files, self._sources)):
            kept = self._kept[self._kept[:, 0] == number, 1]
            try:
                if isinstance(rows, ArrowRows):
                    parts.append(rows.table.take(kept))
                else:
                    parts.append(pa.Table.from_pylist([rows.row(int(row)) for row in kept]))
            except pa.ArrowException as error:
                raise DataError(
                    f"{file}: a column cannot be written as Parquet: {error}. Give its values one "
                    "type in all rows."
                ) from error

        try:
            table = pa.concat_tables(parts, promote_options="permissive").replace_schema_metadata(
                None
            )
            # told now, not after hours of generation
            pq.write_table(table.slice(0, 1), io.BytesIO())
        except pa.ArrowException as error:
            raise DataError(
                f"{', '.join(self.files)}: the columns cannot be written as one Parquet file: "
                f"{error}. Give a column one type in all files, and no row an empty dict."
            ) from error

        return table


def _check_engine(rollout: RolloutConfig) -> None:
    """Raise ConfigError, with the names that keys have here, for what the engine lacks."""
    try:
        check_engine(rollout)
    except ConfigError as error:
        raise ConfigError(SHARED.names_here(str(error))) from error


def generate(config: GenerationConfig) -> None:
    """Generate responses for every prompt.

    `data.output_path` gets all columns of the input, and the responses.
    """
    data = config.data
    train = SHARED.as_train_config(config)
    rollout = train.actor_rollout_ref.rollout
    if config.trainer.num_threads is not None:
        torch.set_num_threads(config.trainer.num_threads)
    device = visible_device(config.trainer.device)
    setup.load_user_code(train)
    _check_engine(rollout)
    pool = join_pool(train, device)

    tokenizer = setup.build_tokenizer(train)
    prompts = Prompts(toy_files() if data.path == [TOY] else data.path, tokenizer, train.data)
    table = prompts.table()

    if data.response_key in table.column_names:
        raise DataError(
            f"{', '.join(prompts.files)}: there is a column '{data.response_key}' already. Name "
            "another one for the responses with data.response_key."
        )

    assert data.output_path is not None, "the configuration was checked"
    finished = FinishedBatches(
        Path(data.output_path), identity(config, prompts), table, data.response_key, data.batch_size
    )
    if config.trainer.resume_mode == "disable":
        finished.discard()

    if finished.is_complete():
        logger.info(
            "%s is complete: nothing to do. trainer.resume_mode=disable makes it anew.",
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
                DataProto.from_dict(
                    non_tensors={
                        "raw_prompt_ids": [prompts[row]["raw_prompt_ids"] for row in rows],
                        "prompt_row": list(rows),
                    }
                ),
                n=data.n_samples,
                params=setup.sampling_params(rollout),
                seed=rollout.seed,
            )
            finished.keep(number, list(answer.non_tensor_batch["responses"]))
            progress.tell(answer.non_tensor_batch)

    finished.join()
    logger.info(
        "Wrote %d prompts with %d responses each to %s.",
        len(prompts),
        data.n_samples,
        data.output_path,
    )


def identity(config: GenerationConfig, prompts: RLDataset) -> dict[str, Any]:
    """Return the settings that decide the responses, by key.

    Two runs that agree in them may finish each other's work. Files count by their content, wherever
    they are.
    """
    by_content = {
        "data.path": prompts.fingerprint,
        "model.path": weights_fingerprint(str(config.model.path)),
        "data.tokenizer": tokenizer_fingerprint(prompts.tokenizer),
        "model.custom_chat_template": None,  # the tokenizer's
    }
    keys = [
        path
        for path, key in keys_of(GenerationConfig).items()
        if key.setting.alias_of is None
        and key.setting.no_effect is None
        and not path.startswith(PLACE_AND_SPEED)
    ]
    return {path: value_at(config, path) for path in keys} | by_content


def weights_fingerprint(path: str) -> str:
    """Compute a digest of a folder's weight files: names, sizes and samples of their bytes.

    It takes less than a second for any size. A hub name is returned as it is.
    """
    source = resolve_path(path)
    if not Path(source).is_dir():
        return source
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(
        part for part in Path(source).iterdir() if part.suffix in (".safetensors", ".bin", ".json")
    ):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            for start in range(0, size, max(size // _READS_A_FILE, _READ_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_READ_BYTES))
    return digest.hexdigest()


class Progress:
    """A line a batch: how far, how fast, how long still.

    Args:
        num_prompts: those that this run has to do.
    """

    def __init__(self, num_prompts: int, n_samples: int) -> None:
        self.num_prompts = num_prompts
        self.n_samples = n_samples
        self.done = self.tokens = 0
        self.started = time.perf_counter()

    def tell(self, answers: dict[str, Any]) -> None:
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
