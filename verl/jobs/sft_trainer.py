"""Supervised fine-tuning: the loop around `SFTWorker`, with validation, checkpoints and logs."""

from typing import Any

from verl.config.sft import RULES_OF_FILES, SHARED, SFTConfig, as_train_config, in_steps
from verl.data import RLDataLoader
from verl.data.build import build_picture_reader, build_sft_dataset
from verl.data.collate import pad_examples
from verl.data.loader import MapDataset
from verl.diagnostics.parts import load_user_code
from verl.protocol import DataProto
from verl.single_controller import GroupOf
from verl.trainer import setup
from verl.trainer.pools import join_pool
from verl.trainer.run import TrainingRun
from verl.utils.errors import ConfigError
from verl.utils.logging import logger, show_log
from verl.workers.sft import SFTWorker


class SFTTrainer(TrainingRun[SFTConfig]):
    """Train a causal LM on the answers in conversations: all its weights, or LoRA adapters.

    Args:
        config: the whole configuration, already validated.
        tokenizer, train_dataset, val_dataset: replace those of the config; items are like those of
            `SFTDataset`.
    """

    sft_wg: GroupOf[SFTWorker]

    def __init__(
        self,
        config: SFTConfig,
        *,
        tokenizer: Any = None,
        train_dataset: MapDataset | None = None,
        val_dataset: MapDataset | None = None,
    ) -> None:
        show_log()
        for given, rule in zip((train_dataset, val_dataset), RULES_OF_FILES):
            if given is not None:
                continue
            for problem in rule(config):
                raise ConfigError(
                    f"{problem} A program may also pass train_dataset and val_dataset to "
                    "SFTTrainer."
                )

        super().__init__(config, config.trainer.max_ckpt_to_keep)
        self.train_config = train = as_train_config(config)  # for parts that RL training shares
        load_user_code(train)
        self.pool = join_pool(train, self.device)
        self.tokenizer = tokenizer or setup.build_tokenizer(train)
        data = config.data
        pictures = build_picture_reader(train.actor_rollout_ref.model, self.tokenizer)
        if train_dataset is None:
            train_dataset = build_sft_dataset(
                data, self.tokenizer, split="train", pictures=pictures
            )
            assert train_dataset is not None, "the configuration was checked"
        if val_dataset is None:
            val_dataset = build_sft_dataset(data, self.tokenizer, split="val", pictures=pictures)

        self.train_loader = RLDataLoader(
            train_dataset,
            data.train_batch_size,
            shuffle=data.shuffle,
            seed=data.seed,
            drop_last=True,
            num_workers=data.num_workers or 0,
            workers_key="data.num_workers",
        )
        self.config = in_steps(config, len(self.train_loader))
        self.val_loader = None

        if val_dataset is not None:
            rows = data.val_batch_size or data.train_batch_size
            self.val_loader = RLDataLoader(
                val_dataset, rows, shuffle=False, seed=data.seed, drop_last=False
            )

        self.total_steps = setup.count_steps(train, len(self.train_loader), SHARED.names_here)

    def init_workers(self) -> None:
        """Load the model. The trackers start first, so a missing package fails within seconds."""
        self.start_tracker()
        with self.tracker.closed_after_error():
            self.sft_wg = self.start_role(
                "actor",  # the role that determines the placement of ranks
                SFTWorker,
                self.train_config.actor_rollout_ref,
                max_length=self.config.data.max_length,
                total_steps=self.total_steps,
                device=self.device,
                tokenizer=self.tokenizer,
            )

    def step(self, prompts: DataProto) -> DataProto:
        """Take one optimizer step over (B,) conversations, which come back padded."""
        padded = pad_examples(prompts)
        self.metrics.update(self.sft_wg.train_batch(padded))
        return padded

    def validate(self) -> dict[str, float]:
        """Compute `val/loss`: the mean over all trained tokens of the validation set."""
        assert self.val_loader is not None
        loss = tokens = 0.0
        for number, batch in enumerate(self.val_loader):
            self.reports.note(number, len(self.val_loader), "batches")
            batch_loss, count = self.sft_wg.sum_loss(pad_examples(batch))
            loss = loss + batch_loss
            tokens = tokens + count

        logger.info(
            "Validation after step %d: loss %.4f (%d tokens)",
            self.global_step,
            loss / tokens,
            tokens,
        )
        return {"val/loss": loss / tokens}

    def checkpointed_groups(self) -> dict[str, GroupOf[SFTWorker]]:
        return {"actor": self.sft_wg}

    def step_metrics(self, batch: DataProto) -> dict[str, float]:
        seconds = self.timer.seconds
        tokens = int(batch.batch["attention_mask"].sum())
        return {
            **{f"timing_s/{name}": value for name, value in seconds.items()},
            "perf/total_num_tokens": tokens,
            "perf/time_per_step": seconds["step"],
            "perf/throughput": tokens / (seconds["step"] * self.pool.world_size),  # of one device
            "train/num_tokens": int(batch.batch["response_mask"].sum()),  # of the loss
        }
