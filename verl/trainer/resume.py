"""Read the checkpoint of a run that resumes, and compare both runs."""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl.checkpoint.manifest import read_manifest
from verl.checkpoint.unpickling import load_state
from verl.config.keys import Key, keys_of
from verl.config.load import config_to_show
from verl.config.placement import inactive_sections
from verl.config.train import TrainConfig
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.json_text import parse_object
from verl.utils.logging import logger

CONFIG_FILE = "config.json"  # next to the driver's own state
# A key with one of these endings must not change: the resumed run would be neither the old one nor
# the new one. Models and tokenizers may have moved: the same last part of a path is the same one.
_FIXED = ("algorithm.adv_estimator", "optim.optimizer", "data.dataset_name", "trainer.mode")
_FIXED_PATHS = ("actor_rollout_ref.model.path", "model.path", "critic.model.path", "data.tokenizer")
# Keys that may change without a word: they say where and how fast a run computes, how long it is,
# and which records it keeps. Each entry stands for all keys that contain it.
_FREE = (
    *("ray_init.", "trainer.", ".checkpoint.", "fsdp_config.", "parallel_size", "strategy"),
    *("micro_batch_size", "max_token_len", "use_dynamic_bsz", "gradient_checkpointing"),
    *("activation_offload", "attention_kernel", "fused_kernels", "torch_compile", "share_prompts"),
    *("gpu_memory_utilization", "num_pages", "page_size", "prefix_caching", "max_num_seqs"),
    *("max_num_batched_tokens", "max_model_len", "enforce_eager", "free_cache_engine"),
    *("bucket_megabytes", "fingerprint_interval", "max_concurrent", "timeout_s", "requests."),
    *("preflight", "val_files", "val_batch_size", "validation_shuffle", "val_kwargs."),
)
_NOT_FREE = (
    *("trainer.seed", "trainer.critic_warmup", "trainer.mode"),
    "fsdp_config.compute_dtype",
)
_OF_TRAINING = "algorithm.adv_estimator"  # a key that fine-tuning does not have
_MAX_LISTED = 20
# Parts of the driver's state that only one schedule has.
_OF_SCHEDULES = ("ahead", "book", "prompts")


@dataclass(frozen=True)
class Change:
    """A key with its value in the checkpoint and in this run."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} ({self.then!r:.100} then, {self.now!r:.100} now)"


def save_config(folder: Path, config: Any) -> None:
    """Write the configuration, without secrets, for `check_config` of a run that resumes."""
    values = json.dumps(_values(config), indent=1)
    (folder / CONFIG_FILE).write_text(values + "\n", encoding="utf-8")


def check_config(folder: Path, config: Any, *, may_differ: bool) -> None:
    """Log the keys that changed since the checkpoint `folder` (`global_step_N`) was saved.

    Args:
        may_differ: the run may go on with any other configuration.

    Raises:
        CheckpointError: a change makes the resumed run neither the old one nor the new one.
    """
    then = _read_config(folder / "trainer" / CONFIG_FILE)
    if then is None:
        logger.info("%s does not say by which configuration it was saved.", folder)
        return

    _refuse_another_kind(folder, then, config)
    changes = _changes(then, config)
    if not may_differ:
        _refuse_another_run(folder, changes)
    if changes:
        logger.warning("Changed since %s was saved: %s.", folder, _listed(changes))


def require_same_run(folder: Path, config: Any) -> None:
    """Raise the error of `check_config`, from the checkpoint's configuration alone, without a log.

    A run calls it before its models load, and `check_config` for the checkpoint that it takes. A
    damaged file is left to the latter: such a checkpoint may be skipped.
    """
    try:
        then = _read_config(folder / "trainer" / CONFIG_FILE)
    except CheckpointError:
        return
    if then is not None:
        _refuse_another_kind(folder, then, config)
        _refuse_another_run(folder, _changes(then, config))


def refuse_to_pass_over(run: Any) -> None:
    """Raise ConfigError where the `fit` of a subclass passes over a checkpoint of its run."""
    trainer = run.config.trainer
    if trainer.resume_mode == "disable":
        return
    found = trainer.resume_from_path or run.checkpoints.newest_readable()
    if found is not None:
        raise ConfigError(
            f"{type(run).__name__}.fit begins with step {run.global_step + 1} and passes over the "
            f"checkpoint {found}. Call self.load_checkpoint() first to go on from there, or set "
            "trainer.resume_mode=disable."
        )


def _refuse_another_kind(folder: Path, then: Mapping[str, Any], config: Any) -> None:
    """Raise CheckpointError if fine-tuning would resume reinforcement learning.

    Their data sets and steps have nothing in common, so a named checkpoint is refused as well. The
    reverse fails at the driver's state, which has other parts.
    """
    if _OF_TRAINING in then and not isinstance(config, TrainConfig):
        raise CheckpointError(
            f"Expected a checkpoint of fine-tuning in {folder}, but reinforcement learning saved "
            "it. Set another trainer.experiment_name or trainer.default_local_dir. To start from "
            f"its weights, merge them: verl merge --local_dir {folder / 'actor'} --target_dir merged"
        )


def _refuse_another_run(folder: Path, changes: Iterable[Change]) -> None:
    refused = [change for change in changes if _is_fixed(change)]
    if refused:
        raise CheckpointError(
            f"{folder} was saved by another run, and resuming it would give neither that run nor "
            f"this one: {_listed(refused)}. Start from the beginning with "
            "trainer.resume_mode=disable; give this run a folder of its own with another "
            "trainer.experiment_name or trainer.default_local_dir; or go on anyway with "
            f"trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )


def read_state(file: Path, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the driver's part of a checkpoint in the form of the run that resumes from it.

    Args:
        file: that holds it.
        own: the state of the run that resumes, before its first step.

    Raises:
        CheckpointError: another kind of run saved it.
    """
    state = _in_schedule_of(own, load_state(file))
    for name, expected in own.items():
        found = state.get(name)
        fits = name in state
        if isinstance(expected, (int, dict)):
            fits = isinstance(found, type(expected))
        if isinstance(found, dict) and isinstance(expected, dict):
            fits = expected.keys() <= found.keys()
        if not fits:
            raise CheckpointError(
                f"Expected the state of a run of this kind in {file}, but its '{name}' is "
                f"{found!r:.50}. Another kind of run saved it (fine-tuning, say): set another "
                "trainer.default_local_dir, or trainer.resume_mode=disable."
            )

    return state


def log_resumed(run: Any, folder: Path) -> None:
    """Log the checkpoint from which a run goes on.

    A program without log hears of a resume that nothing in its arguments asked for.
    """
    trainer = run.config.trainer
    default_folder = f"checkpoints/{trainer.project_name}/{trainer.experiment_name}"
    is_asked_for = trainer.resume_mode == "resume_path" or (
        trainer.default_local_dir != default_folder
    )
    logger.log(
        logging.INFO if is_asked_for else logging.WARNING,
        "Resumed from %s: step %d of %d, written %s. To start from the beginning: "
        "trainer.resume_mode=disable, or another trainer.experiment_name.",
        folder,
        run.global_step,
        run.total_steps,
        _when_saved(folder),
    )


def _in_schedule_of(own: Mapping[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return the driver's part of a checkpoint in the form of the schedule that resumes from it.

    `trainer.mode` may change with `trainer.resume_mode=resume_path`. Responses that another
    schedule drew ahead are left out then, and the log says how many.

    Args:
        own: the state of the run that resumes, before its first step.
        saved: the state in the checkpoint.
    """
    state = dict(saved)
    groups = (state.get("book") or {}).get("groups", ())
    dropped = 0 if "book" in own else len(groups)
    if state.get("ahead") and "ahead" not in own:
        dropped = len(set(state["ahead"]["objects"]["uid"]))
    if dropped:
        logger.warning(
            "The checkpoint was saved with another trainer.mode: %d prompts that were read ahead "
            "then are not learned from.",
            dropped,
        )

    for name in _OF_SCHEDULES:
        if name not in own:
            state.pop(name, None)
        elif name not in state and "global_step" in state:
            state[name] = own[name]
    return state


def _when_saved(folder: Path) -> str:
    """Return the date and time at which a checkpoint was written, by the clock of that time."""
    seconds = read_manifest(folder).saved_at_ns / 1e9
    try:
        saved_at = datetime.fromtimestamp(seconds, tz=timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "at an unknown time"
    return f"{saved_at:%Y-%m-%d %H:%M} UTC"


def _changes(then: dict[str, Any], config: Any) -> list[Change]:
    keys = keys_of(type(config))
    now = _values(config)
    unread = inactive_sections(config) if isinstance(config, TrainConfig) else ()
    changed = {key: then[key] for key in now if key in then and then[key] != now[key]}

    changes = []
    for key, value in changed.items():
        if _is_free(key) or key.startswith(unread):
            continue
        source = keys[key].followed  # listed itself, where both changed alike
        if source in changed and value == then[source] and now[key] == now[source]:
            continue
        changes.append(Change(key, value, now[key]))
    return changes


def _values(config: Any) -> dict[str, Any]:
    """Return {key: value} in JSON's own types, without secrets, second names and dead keys."""
    values: dict[str, Any] = {}
    shown = config_to_show(config)
    for key in keys_of(type(config)).values():
        if _is_read(key):
            value: Any = shown
            for part in key.path.split("."):
                value = value[part]
            values[key.path] = json.loads(json.dumps(value, default=str))
    return values


def _is_read(key: Key) -> bool:
    return key.setting.alias_of is None and key.setting.no_effect is None


def _is_free(key: str) -> bool:
    return not key.endswith(_NOT_FREE) and any(part in key for part in _FREE)


def _is_fixed(change: Change) -> bool:
    if change.key in _FIXED_PATHS:
        return _last_part(change.then) != _last_part(change.now)
    return change.key.endswith(_FIXED)


def _last_part(path: Any) -> str:
    return str(path).rstrip("/").rpartition("/")[2]


def _listed(changes: Iterable[Change]) -> str:
    texts = list(map(str, changes))
    shown = texts[:_MAX_LISTED]
    if len(texts) > _MAX_LISTED:
        shown.append(f"and {len(texts) - _MAX_LISTED} more")
    return "; ".join(shown)


def _read_config(file: Path) -> dict[str, Any] | None:
    """Read the file of `save_config`; None where an earlier version saved the checkpoint."""
    if not file.is_file():
        return None
    try:
        return parse_object(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}). Copy the checkpoint again, or use another."
        ) from error
