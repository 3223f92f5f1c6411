"""Supervised fine-tuning: the loop around `SFTWorker`, with validation, checkpoints and a line a step."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint.manager import CheckpointManager
from verl.config.load import config_to_dict
from verl.config.sft import SFTConfig, as_train_config
from verl.data import RLDataLoader
from verl.data.loader import MapDataset
from verl.data.sft_dataset import SFTDataset, pad_examples
from verl.protocol import DataProto
from verl.tracking import Tracker
from verl.trainer import setup
from verl.trainer.placement import join_pool
from verl.utils.devices import describe_device, memory_metrics, visible_device
from verl.utils.errors import NonFiniteError
from verl.utils.logging import logger
from verl.utils.seeding import restore_rng_state, rng_state, seed_everything
from verl.utils.timing import PhaseTimer
from verl.workers.sft import SFTWorker


class SFTTrainer:
    """Trains a causal LM on the answers in conversations: all its weights, or LoRA adapters.

    Args:
        config: the whole configuration, already validated.
        tokenizer, train_dataset, val_dataset: taken instead of what the config names; items as those of `SFTDataset`.
    """

    sft_wg: Any

    def __init__(
        self,
        config: SFTConfig,
        *,
        tokenizer: Any = None,
        train_dataset: MapDataset | None = None,
        val_dataset: MapDataset | None = None,
    ) -> None:
        self.config = config
        self.train_config = train = as_train_config(config)  # for the parts that training has too
        if config.trainer.num_threads is not None:
            torch.set_num_threads(config.trainer.num_threads)
        self.device = visible_device(config.trainer.device)
        seed_everything(config.trainer.seed)
        setup.load_user_code(train)
        self.pool = join_pool(train, self.device)
        self.tokenizer = tokenizer or setup.build_tokenizer(train)
        data = config.data
        if train_dataset is None:
            train_dataset = SFTDataset(data.train_files, self.tokenizer, data)
        if val_dataset is None and data.val_files:
            val_dataset = SFTDataset(data.val_files, self.tokenizer, data, split="val")
        self.train_loader = RLDataLoader(
            train_dataset, data.train_batch_size, shuffle=data.shuffle, seed=data.seed, drop_last=True
        )
        self.val_loader = None
        if val_dataset is not None:
            rows = data.val_batch_size or data.train_batch_size
            self.val_loader = RLDataLoader(val_dataset, rows, shuffle=False, seed=data.seed, drop_last=False)
        self.total_steps = setup.count_steps(train, len(self.train_loader))
        self.checkpoints = CheckpointManager(
            Path(config.trainer.default_local_dir), max_to_keep=config.trainer.max_ckpt_to_keep
        )
        self.global_step = 0
        self.skipped_in_a_row = 0
        self.timer = PhaseTimer()

    def init_workers(self) -> None:
        """Load the model; before it the trackers, for a missing package is told in seconds."""
        trainer = self.config.trainer
        logger.info("Device: %s", describe_device(self.device))
        self.tracker = Tracker(
            trainer.logger,
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            config=config_to_dict(self.config),
            folder=Path(trainer.default_local_dir),
            total_steps=self.total_steps,
            log_interval=trainer.log_interval,
        )
        self.sft_wg = self.pool.start(
            "actor_rollout",  # by whose name ranks are placed
            SFTWorker,
            self.train_config.actor_rollout_ref,
            max_length=self.config.data.max_length,
            total_steps=self.total_steps,
            device=self.device,
            tokenizer=self.tokenizer,
        )

    def fit(self) -> None:
        """Train to the last step, validating and saving on the way; resumes where a killed run was saved."""
        started = time.perf_counter()
        try:
            self.load_checkpoint()
            if self.global_step == 0 and self.config.trainer.val_before_train and self.val_loader is not None:
                self.tracker.log(self.validate(), 0)
            while self.global_step < self.total_steps:
                for batch in self.train_loader:
                    self.run_step(batch)
                    if self.global_step >= self.total_steps:
                        break
        except Exception:
            self.checkpoints.rescue()
            raise
        finally:
            self.tracker.finish()
        print(f"Training completed in {time.perf_counter() - started:.1f}s", flush=True)

    def run_step(self, batch: DataProto) -> None:
        """One optimizer step with everything around it: timing, validation, checkpoint and log."""
        self.global_step += 1
        self.timer = PhaseTimer()
        with self.timer.phase("step"):
            padded = pad_examples(batch)
            metrics = self.sft_wg.train_batch(padded)
        self.checkpoints.advance()
        self._guard_against_skipped_steps(metrics)
        last = self.global_step >= self.total_steps
        if self.val_loader is not None and self._is_due(self.config.trainer.test_freq, last):
            with self.timer.phase("testing"):
                metrics |= self.validate()
            self.checkpoints.advance()
        metrics |= self._step_metrics(padded)
        if "console" in self.config.trainer.logger and (
            self.global_step % self.config.trainer.log_interval == 0 or self.global_step == 1 or last
        ):
            self._tell(metrics)
        # Logged before it is saved: a run killed in between repeats the step and rewinds the line.
        self.tracker.log(metrics, self.global_step)
        if self._is_due(self.config.trainer.save_freq, last):
            self.save_checkpoint()

    def validate(self) -> dict[str, float]:
        """`val/loss`: the mean over all tokens of the validation set that would be learnt."""
        assert self.val_loader is not None
        loss = tokens = 0.0
        for batch in self.val_loader:
            of_batch, count = self.sft_wg.sum_loss(pad_examples(batch))
            loss, tokens = loss + of_batch, tokens + count
        logger.info("Validation after step %d: loss %.4f (%d tokens)", self.global_step, loss / tokens, tokens)
        return {"val/loss": loss / tokens}

    def save_checkpoint(self) -> None:
        """Everything that a resumed run needs to end with the same bits."""
        # The last one in no background: there is no step beside which it could be written.
        in_background = self.config.trainer.async_save and self.global_step < self.total_steps
        writers: dict[str, Callable[[Path], Any]] = {
            "actor": partial(self.sft_wg.save_checkpoint, in_background=in_background),
            "trainer": lambda folder: torch.save(self.state_dict(), folder / "state.pt"),
        }
        is_written = lambda wait: self.sft_wg.checkpoint_is_written(wait=wait)  # noqa: E731
        self.checkpoints.save(self.global_step, writers, is_written if in_background else None)

    def load_checkpoint(self) -> None:
        """Go back to the newest sound checkpoint, or to the one that `trainer.resume_from_path` names."""
        trainer = self.config.trainer
        folder = self.checkpoints.resolve(trainer.resume_mode, trainer.resume_from_path)
        if folder is not None:
            self.sft_wg.load_checkpoint(folder / "actor")
            self.load_state_dict(torch.load(folder / "trainer" / "state.pt", weights_only=False))
            logger.info("Resumed from %s: step %d of %d.", folder, self.global_step, self.total_steps)
        self.tracker.rewind(self.global_step if folder is not None else -1)

    def state_dict(self) -> dict[str, Any]:
        """The driver's own part of a checkpoint."""
        return {
            "global_step": self.global_step,
            "skipped_in_a_row": self.skipped_in_a_row,
            "train_loader": self.train_loader.state_dict(),
            "rng": rng_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Undo `state_dict`."""
        self.global_step = state["global_step"]
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.train_loader.load_state_dict(state["train_loader"])
        restore_rng_state(state["rng"])

    def _step_metrics(self, padded: DataProto) -> dict[str, float]:
        seconds = self.timer.seconds
        tokens = int(padded.batch["attention_mask"].sum())
        return {
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            **memory_metrics(self.device),
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds["step"],
            "perf/throughput": tokens / (seconds["step"] * self.pool.world_size),  # of one device
            "train/num_tokens": int(padded.batch["response_mask"].sum()),  # of the loss
            "training/global_step": self.global_step,
            "training/epoch": (self.global_step - 1) // len(self.train_loader),
        }

    def _tell(self, metrics: dict[str, float]) -> None:
        logger.info(
            "[Step %d/%d] loss %.4f | lr %.3g | grad norm %.3f | %.0f tokens/s | %.2f s/step",
            self.global_step, self.total_steps, metrics["train/loss"], metrics["train/lr"], metrics["train/grad_norm"],
            metrics["perf/throughput"] * self.pool.world_size, metrics["timing_s/step"],
        )  # fmt: skip

    def _guard_against_skipped_steps(self, metrics: dict[str, float]) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics["train/skipped_updates"] else 0
        limit = self.config.trainer.max_nonfinite_steps
        if self.skipped_in_a_row >= limit:
            raise NonFiniteError(
                f"{limit} steps in a row had a non-finite loss or gradient and were skipped; the last is step "
                f"{self.global_step}. Lower optim.lr, or look at the rows named above (trainer.max_nonfinite_steps "
                "sets how many are tolerated)."
            )

    def _is_due(self, every: int, last: bool) -> bool:
        return every > 0 and (last or self.global_step % every == 0)
