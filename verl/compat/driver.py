"""The padded prompts, and the one group that generates and learns, of a `fit` of verl 0.5."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from verl.compat.tensors import compute_position_id_with_mask
from verl.config import RolloutConfig, config_to_dict
from verl.protocol import DataProto
from verl.rollout.types import SamplingParams
from verl.trainer import setup
from verl.trainer.updates import update_actor
from verl.trainer.weights import ActorRolloutGroups
from verl.utils.column_dicts import object_column
from verl.utils.errors import BatchError, ConfigError


class PaddedPrompts:
    """A loader that yields dicts of columns, with prompts also as tensors padded on the left.

    Args:
        loader: a loader of this package; attributes that are not here are its own.
        width: of the columns `input_ids`, `attention_mask` and `position_ids`.
        pad_token_id: fills `input_ids`.
    """

    def __init__(self, loader: Any, width: int, pad_token_id: int) -> None:
        self.loader = loader
        self._width = width
        self._pad_token_id = pad_token_id

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet, as in a copy that is being built
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            ids = torch.full((len(batch), self._width), self._pad_token_id)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch.non_tensor_batch["raw_prompt_ids"]):
                ids[row, self._width - len(prompt) :] = torch.as_tensor(prompt)
                mask[row, self._width - len(prompt) :] = 1

            padded = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": compute_position_id_with_mask(mask),
            }
            tensors = {} if batch.batch is None else dict(batch.batch.items())
            yield {**padded, **tensors, **batch.non_tensor_batch}


@contextmanager
def typed_sections_as_trees() -> Iterator[None]:
    """Let OmegaConf.to_container take typed sections within the context, as it takes a DictConfig.

    Sections hold resolved values, so the options of the call make no difference to them.
    """
    original = OmegaConf.to_container

    def to_container(cfg: Any, **options: Any) -> Any:
        if is_dataclass(cfg) and not isinstance(cfg, type):
            return config_to_dict(cfg)
        return original(cfg, **options)

    OmegaConf.to_container = staticmethod(to_container)
    try:
        yield
    finally:
        OmegaConf.to_container = staticmethod(original)


def claiming(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Let a `fit` of verl 0.5 hold the folder of checkpoints, as `TrainingRun.fit` does.

    A checkpoint that is written in the background (`trainer.async_save`) is completed at the end.
    """

    @functools.wraps(fit)
    def claimed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        claims = trainer.claim_folder()
        try:
            with typed_sections_as_trees():
                answer = fit(trainer, *args, **kwargs)
            trainer.checkpoints.finish()
            return answer
        except (Exception, KeyboardInterrupt, SystemExit):
            trainer.checkpoints.rescue()
            raise
        finally:
            if claims:
                trainer.checkpoints.release()

    return claimed


class UpdateMetrics(dict[str, float]):
    """Metrics of an update, which verl 0.5 reads as `meta_info["metrics"]`."""

    @property
    def meta_info(self) -> dict[str, Any]:
        """Return the metrics as the meta entry of a batch."""
        return {"metrics": dict(self)}


def with_meta_info(update: Callable[..., dict[str, float]]) -> Callable[..., UpdateMetrics]:
    """Let an update return UpdateMetrics."""

    def updated(*args: Any, **kwargs: Any) -> UpdateMetrics:
        return UpdateMetrics(update(*args, **kwargs))

    return updated


class ActorRollout(ActorRolloutGroups):
    """Actor and rollout of a trainer as one group, with the calls of verl 0.5.

    Args:
        trainer: a PPOTrainer with workers.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.actor_wg, trainer.rollout_wg)
        self._trainer = trainer
        self._next_row = (0, 0)  # step, prompts that were generated for in it

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Sample `rollout.n` responses to each prompt, its rows together.

        Prompts that were repeated n times before get one response for each row, and so do
        validation prompts (`meta_info["validate"]`). `meta_info["do_sample"]` False: the likeliest
        tokens, one response for each row.

        The noise depends on step, prompt and sample, as in `PPOTrainer.generate`.
        """
        trainer = self._trainer
        rollout = trainer.config.actor_rollout_ref.rollout
        if rollout.uses_agents:
            raise ConfigError(
                "actor_rollout_wg.generate_sequences gives one response a prompt, and "
                "actor_rollout_ref.rollout.multi_turn or agent asks for episodes. Call "
                "trainer.generate(prompts) with the batches of trainer.train_loader."
            )
        given = _with_prompt_ids(prompts)
        meta = prompts.meta_info
        params, seed, n = _draw(rollout, meta)
        if n > 1 and _is_repeated(given, n):
            given = given.select_idxs(range(0, len(given), n))

        step, first_row = self._next_row
        if step != trainer.global_step or meta.get("validate"):
            first_row = 0
        rows = range(first_row, first_row + len(given))
        given.non_tensor_batch["prompt_row"] = np.array(rows, dtype=object)
        if meta.get("do_sample", True) and not meta.get("validate"):
            self._next_row = trainer.global_step, rows.stop

        started = time.perf_counter()
        trainer.weights.provide()
        drawn = trainer.rollout_wg.generate_sequences(
            given, n=n, params=params, seed=seed, step=trainer.global_step
        )
        trainer.metrics.update(drawn.meta_info.pop("metrics", {}))
        drawn.meta_info["timing"] = {"generate_sequences": time.perf_counter() - started}
        return drawn

    def compute_log_prob(self, batch: DataProto, **kwargs: Any) -> DataProto:
        """Compute `old_log_probs` and `entropys`; metrics go to the trainer's."""
        columns = self._trainer.actor_wg.compute_log_prob(batch, **kwargs)
        self._trainer.metrics.update(columns.meta_info.pop("metrics", {}))
        return columns

    def update_actor(self, batch: DataProto) -> UpdateMetrics:
        """Update the actor on all rows, and hand its weights to the rollout.

        As in `PPOTrainer.update`, rows are corrected first as `algorithm.rollout_correction` says,
        and the controller of the entropy bonus gets the entropy.
        """
        trainer = self._trainer
        corrected = trainer.correct_rollout(batch)
        coeff = trainer.entropy_controller.value
        metrics = update_actor(trainer.actor_wg, corrected, batch, trainer.config, coeff)
        trainer.entropy_controller.update(metrics["actor/entropy"])
        trainer.sync_weights()
        return UpdateMetrics(metrics)


def add_get(section: Any) -> None:
    """Give the classes of all sections of a configuration the method `get` of a mapping."""
    if not is_dataclass(section):
        return
    section_class: Any = type(section)
    if not hasattr(section_class, "get"):
        section_class.get = _get
    for entry in fields(section):
        add_get(getattr(section, entry.name))


def _get(section: Any, key: str, default: Any = None) -> Any:
    """Return the value of a key, or `default` if there is no such key."""
    return getattr(section, key, default)


def _draw(rollout: RolloutConfig, meta: dict[str, Any]) -> tuple[SamplingParams, int, int]:
    """Return sampling parameters, seed, and the number of responses to each prompt."""
    if meta.get("validate"):
        return setup.validation_params(rollout), rollout.seed + 1, 1
    params = setup.sampling_params(rollout)
    if not meta.get("do_sample", True):
        return replace(params, temperature=0.0), rollout.seed, 1
    return params, rollout.seed, rollout.n


def _with_prompt_ids(prompts: DataProto) -> DataProto:
    """Return the object columns, and `raw_prompt_ids` of padded prompts that lack them."""
    given = prompts.select(batch_keys=[])
    if "raw_prompt_ids" in given.non_tensor_batch:
        return DataProto.from_dict(non_tensors=given.non_tensor_batch)

    names = ("input_ids", "attention_mask")
    if prompts.batch is None or any(name not in prompts.batch.keys() for name in names):
        raise BatchError(
            "generate_sequences needs raw_prompt_ids, or input_ids and attention_mask, got "
            f"columns {list(prompts._columns())}. Take them along: "
            'batch.pop(non_tensor_batch_keys=["raw_prompt_ids"], ...).'
        )
    ids, masks = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
    lists = [row[mask].tolist() for row, mask in zip(ids, masks)]
    columns = {**given.non_tensor_batch, "raw_prompt_ids": object_column(lists)}
    return DataProto.from_dict(non_tensors=columns)


def _is_repeated(prompts: DataProto, n: int) -> bool:
    """Return whether the rows are prompts that were repeated n times, interleaved."""
    ids = [list(row) for row in prompts.non_tensor_batch["raw_prompt_ids"]]
    if len(ids) % n:
        return False
    return all(row == ids[number // n * n] for number, row in enumerate(ids))
