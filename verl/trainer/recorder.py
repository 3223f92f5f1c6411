"""Collect the record of each step, and write it from a thread while the next step runs."""

import copy
import functools
import hashlib
import os
import platform
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

import verl
from verl.checkpoint.background import Background
from verl.checkpoint.claim import Claim
from verl.config.load import config_to_show
from verl.config.trainer import RecordConfig
from verl.data import RLDataLoader
from verl.protocol import DataProto
from verl.tracking.records import (
    FIELDS,
    FOLDER,
    REWARD_PARTS,
    RecordWriter,
    json_column,
    pack_digests,
    samples_table,
    token_lists,
)
from verl.trainer.capsule import write_capsule
from verl.trainer.rows import counted_rows
from verl.trainer.timeline import lanes_of, spans_of_processes
from verl.utils.commands import verl_command
from verl.utils.devices import describe_device
from verl.utils.errors import DataError, describe_error
from verl.utils.json_text import whole_characters
from verl.utils.logging import logger
from verl.utils.timing import PhaseTimer
from verl.utils.units import MIB

_PACKAGES = ("torch", "transformers", "numpy", "pyarrow", "tensordict", "ray")
# Columns that are views of others, or too large: hidden states.
_LEFT_OUT = ("prompts", "responses", "input_ids", "attention_mask", "position_ids")
_LEFT_OUT_FIELDS = (
    *("raw_prompt_ids", "prepared_pictures", "images", "uid", "prompt_row", "turn_rewards"),
    *("__num_turns__", "reward_scores"),  # num_turns, and a part of agent_info
)


class RecordedRun(Protocol):
    """The parts of a training run that its record reads."""

    config: Any
    device: torch.device
    tokenizer: Any
    train_loader: RLDataLoader
    pool: Any
    global_step: int
    total_steps: int
    metrics: dict[str, float]
    timer: PhaseTimer

    def worker_groups(self) -> list[Any]: ...

    def checkpointed_groups(self) -> Mapping[str, Any]: ...


class StepRecorder:
    """Records a run in `folder/records`, as `trainer.record` says.

    A record that cannot be written ends with a warning; the run goes on without it.

    Args:
        config: the section `trainer.record`.
        folder: the folder of the run.
    """

    def __init__(self, config: RecordConfig, folder: Path) -> None:
        self.config = config
        self.folder = folder
        self._writer = RecordWriter(folder, config.keep_steps, config.max_mib * MIB)
        self._claim = Claim(folder / FOLDER)
        self._background = Background()
        self.is_on = False  # whether this run is recorded
        self._has_failed = False
        self._step = 0
        self._tokenizer: Any = None
        self._pieces: dict[int, str] = {}
        self._drawn: list[tuple[int, dict[str, Any]]] = []

    def start(self, run: RecordedRun) -> None:
        """Begin the record, or continue it after the step from which the run resumes."""
        if not self.config.enable:
            return
        try:
            self._claim.file.parent.mkdir(parents=True, exist_ok=True)
            holder = self._claim.take()
        except OSError as error:
            self._stop(error)
            return
        if holder is not None:
            logger.warning(
                "This run is not recorded, because another one (%s) records into %s. Set "
                "trainer.experiment_name or trainer.default_local_dir.",
                holder,
                self.folder,
            )
            return

        # A copy: a fast tokenizer that two threads use at the same time may raise.
        self._tokenizer = copy.deepcopy(run.tokenizer)
        self.is_on = True
        self._step = run.global_step
        names, digests = self._weight_digests(run)
        try:
            self._writer.start(_facts(run, names), run.global_step)
            self._writer.add_line({"event": "start", "step": run.global_step, "time": time.time()})
            self._writer.add_line(_line(run.global_step, {}, weights=digests))
        except OSError as error:
            self._stop(error)
            return
        run.train_loader.on_drawn = self._note_drawn

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics outside of a training step, those of the first validation for example."""
        self._write(lambda: self._writer.add_line(_line(step, metrics)))

    def add_step(self, run: RecordedRun, batch: DataProto) -> None:
        """Record the step that has just ended. The files are written while the next one runs."""
        if not self.is_on:
            return
        step = self._step = run.global_step
        metrics = dict(run.metrics)
        skipped = {name: value for name, value in metrics.items() if "skipped_updates" in name}
        _, digests = self._weight_digests(run)
        spans = spans_of_processes(run.worker_groups(), run.timer.started_at_ns)
        started_ns = run.timer.started_at_ns
        drawn = self._take_drawn()

        def write() -> None:
            columns = self._columns(batch)
            texts = self._pieces_of(columns)
            table = samples_table(
                columns, lanes=lanes_of(spans, started_ns), prompts=drawn, pieces=texts
            )
            self._writer.add_samples(step, table)
            metrics.update(_group_metrics(batch))
            line = _line(step, metrics, weights=digests, columns=_column_digests(columns))
            self._writer.add_line(line)
            if any(skipped.values()):
                self._writer.add_line(_event(step, "skipped", f"updates skipped: {skipped}"))
                self._keep_capsule(step)

        self._write(write)

    def note_failure(self, run: RecordedRun, error: BaseException) -> None:
        """Record the error that ends the run, and the prompts of the step in which it came.

        Between two steps there is no step to execute again, and the samples of the last one stay.
        """
        if not self.is_on:
            return
        self._has_failed = True
        step = run.global_step
        has_begun = step > self._step
        drawn = self._take_drawn()

        def write() -> None:
            self._writer.add_line(_event(step, "failed", describe_error(error)))
            # An interrupt is no fault of the step.
            if has_begun and drawn and isinstance(error, Exception):
                self._writer.add_samples(step, samples_table({}, prompts=drawn))
                self._keep_capsule(step)

        self._write(write)

    def finish(self) -> None:
        """Wait for everything to be written, and give the folder back."""
        self.wait()
        if self.is_on and not self._has_failed:
            self._write(lambda: self._writer.add_line(_event(self._step, "end", "")))
            self.wait()
        self.is_on = False
        self._claim.give_back()

    def wait(self) -> None:
        """Wait for the step before to be written."""
        try:
            self._background.is_done(wait=True)
        except Exception as error:  # noqa: BLE001 - reported; the training is worth more
            self._stop(error)

    # ---------------------------------------------------------------- parts

    def _note_drawn(self, rows: Sequence[int], items: Sequence[dict[str, Any]]) -> None:
        self._drawn += zip(rows, items)

    def _take_drawn(self) -> list[tuple[int, dict[str, Any]]]:
        drawn = self._drawn
        self._drawn = []
        return drawn

    def _weight_digests(self, run: RecordedRun) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Return names and packed digests of the trained tensors of every role."""
        names = {}
        digests = {}
        if self.config.weights:
            for role, group in run.checkpointed_groups().items():
                names[role], values = group.weight_digests()[0]
                digests[role] = pack_digests(values)
        return names, digests

    def _write(self, work: Any) -> None:
        """Do this work after the work before; at most one is under way."""
        self.wait()
        if self.is_on:
            self._background.start(work)

    def _keep_capsule(self, step: int) -> None:
        """Write a capsule of a step that went wrong, for `verl replay`."""
        try:
            path = write_capsule(self.folder, step)
        except DataError as error:
            logger.info("No capsule of step %d: %s", step, error)
        else:
            logger.warning("Execute step %d again: %s", step, verl_command("replay", path))

    def _stop(self, error: BaseException) -> None:
        self.is_on = False
        logger.warning(
            "The record of this run ends here, because it cannot be written into %s (%s: %s). "
            "trainer.record.enable=false leaves it out.",
            self.folder / FOLDER,
            type(error).__name__,
            error,
        )

    def _columns(self, batch: DataProto) -> dict[str, Any]:
        """Return the batch without padding, as arrays by name; nothing without responses."""
        if not _has_responses(batch):
            return {}

        tensors = batch.batch.cpu()
        mask = tensors["attention_mask"].bool()
        width = tensors["prompts"].shape[1]
        prompt_mask = mask[:, :width]
        response_mask = mask[:, width:]
        prompt_lengths = prompt_mask.sum(-1).numpy()
        lengths = response_mask.sum(-1).numpy()
        prompt_ids = tensors["prompts"][prompt_mask].to(torch.int32).numpy()
        response_ids = tensors["responses"][response_mask].to(torch.int32).numpy()

        uids = [str(uid) for uid in batch.non_tensor_batch["uid"]]
        scores = tensors["token_level_scores"].sum(-1)
        rewards, fields = _fields(batch)
        columns: dict[str, Any] = {
            "uid": pa.array(uids),
            "score": pa.array(scores.double().numpy()),
            "prompt": pa.array(self._texts(prompt_ids, prompt_lengths)),
            "response": pa.array(self._texts(response_ids, lengths)),
            REWARD_PARTS: json_column(rewards, len(lengths)),
            FIELDS: json_column(fields, len(lengths)),
            "prompt_ids": token_lists(prompt_ids, prompt_lengths),
            "response_ids": token_lists(response_ids, lengths),
        }

        for name, tensor in tensors.items():
            is_of_tokens = tensor.shape == response_mask.shape
            if is_of_tokens and name not in _LEFT_OUT:
                columns[name] = token_lists(_narrow(tensor[response_mask]), lengths)
            elif tensor.dim() == 1:
                columns[name] = pa.array(_narrow(tensor))
        return columns

    def _texts(self, ids: np.ndarray, lengths: np.ndarray) -> list[str]:
        """Decode rows that follow each other; rows that are equal once."""
        text_of: dict[bytes, str] = {}
        texts = []
        end = 0
        for length in lengths.tolist():
            row = ids[end : end + length]
            end += length
            key = row.tobytes()
            if key not in text_of:
                text = self._tokenizer.decode(row)
                text_of[key] = whole_characters(text)  # Arrow does not take others
            texts.append(text_of[key])
        return texts

    def _pieces_of(self, columns: Mapping[str, Any]) -> dict[int, str]:
        """Return the text of every token id that occurs."""
        found: set[int] = set()
        for name in ("prompt_ids", "response_ids"):
            if name in columns:
                found.update(np.unique(columns[name].values.to_numpy()).tolist())
        for token in found - self._pieces.keys():
            self._pieces[token] = self._tokenizer.decode([token])
        return {token: self._pieces[token] for token in sorted(found)}


def _facts(run: RecordedRun, tensor_names: Mapping[str, list[str]]) -> dict[str, Any]:
    """Return the contents of `run.json`."""
    loader = run.train_loader.state_dict()
    return {
        "config": config_to_show(run.config),
        "kind": type(run.config).__name__,
        "trainer": f"{type(run).__module__}.{type(run).__qualname__}",
        "versions": _versions(),
        "machine": socket.gethostname(),
        "pid": os.getpid(),
        "device": describe_device(run.device),
        "ranks": run.pool.world_size,
        "total_steps": run.total_steps,
        "data": {"num_rows": loader["num_rows"], "fingerprint": loader["fingerprint"]},
        "tensors": dict(tensor_names),
        "started": time.time(),
    }


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of packages. Read once a process: their files take 5 ms."""
    versions = {"verl": verl.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _line(
    step: int,
    metrics: Mapping[str, float],
    *,
    weights: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "step": step,
        "time": time.time(),
        "metrics": dict(metrics),
        "columns": columns or {},
        "weights": weights or {},
    }


def _event(step: int, kind: str, text: str) -> dict[str, Any]:
    return {"event": kind, "step": step, "time": time.time(), "text": text}


def _fields(batch: DataProto) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the columns of objects: the parts of the reward, and the others."""
    parts = batch.meta_info.get("reward_fields", ())
    rewards = {}
    others = {}
    for name, values in batch.non_tensor_batch.items():
        if name in parts:
            rewards[name] = list(values)
        elif name not in _LEFT_OUT_FIELDS:
            others[name] = list(values)
    return rewards, others


def _group_metrics(batch: DataProto) -> dict[str, float]:
    """Return the share of groups in which all samples have one score. Dropped ones have none."""
    if not _has_responses(batch):
        return {}
    uids = batch.non_tensor_batch["uid"]
    scores = batch.batch["token_level_scores"].sum(-1).tolist()
    scores_of: dict[str, set[float]] = {}
    for uid, score, counts in zip(uids, scores, counted_rows(batch).tolist()):
        if counts:
            scores_of.setdefault(uid, set()).add(score)

    flat = sum(len(each) == 1 for each in scores_of.values())
    return {"groups/flat_share": flat / len(scores_of)} if scores_of else {}


def _has_responses(batch: DataProto) -> bool:
    """Return whether a batch has rollouts; that of fine-tuning has none."""
    return batch.batch is not None and "responses" in batch.batch.keys()


def _narrow(tensor: torch.Tensor) -> np.ndarray:
    """Return the values in the narrowest type that holds them exactly."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    if tensor.dtype in (torch.int64, torch.bool) and tensor.numel():
        lowest, highest = tensor.min().item(), tensor.max().item()
        if lowest >= -128 and highest < 128:
            tensor = tensor.to(torch.int8)
    return tensor.numpy()


def _column_digests(columns: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of every column of token values."""
    digests = {}
    for name, column in columns.items():
        if isinstance(column, pa.ListArray):
            digest = hashlib.blake2b(column.values.to_numpy(), digest_size=8)
            digest.update(column.offsets.to_numpy())
            digests[name] = digest.hexdigest()
    return digests
