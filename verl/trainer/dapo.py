"""DAPO's dynamic sampling, Yu et al. 2025 (arXiv:2503.14476), section 3.2.

The rest of DAPO is configuration: clip-higher is `actor.clip_ratio_high`, the token mean
`actor.loss_agg_mode`, and the soft punishment of overlong responses a part of the reward.
"""

import numpy as np
import torch

from verl.config.algorithm import SCORE_METRICS
from verl.protocol import DataProto
from verl.rewards.results import no_such_field
from verl.trainer.episodes import episode_rows
from verl.trainer.ppo_trainer import GENERATED, PPOTrainer
from verl.trainer.rows import group_numbers, num_prompts, prompts_of
from verl.utils.errors import ConfigError, DataError
from verl.utils.logging import logger
from verl.utils.phases import phase


class DAPOTrainer(PPOTrainer):
    """Draws prompts until `data.train_batch_size` of them have responses that differ.

    They must differ in `algorithm.filter_groups.metric`: the other prompts have no advantage and
    thin the batch out. Every round takes the next batch of the loader. No prompt is kept for the
    next step, so a resumed run needs only the loader's cursor. A run by epochs has as many steps as
    if no prompt were left out, and reads further epochs.
    """

    @phase(writes=GENERATED + " token_level_scores rm_scores", chooses_rows=True)
    def collect(self, prompts: DataProto, first_row: int = 0) -> DataProto:
        """Collect prompts with responses that differ, in the order in which they were drawn.

        See `PPOTrainer.collect`.
        """
        options = self.config.algorithm.filter_groups
        wanted = len(prompts) or self.config.data.train_batch_size
        most_drawn = options.max_num_gen_batches * wanted
        num_drawn = 0
        kept: list[DataProto] = []
        alike: list[DataProto] = []
        scores = []

        while True:
            batch = super().collect(prompts, first_row + num_drawn)
            num_drawn += num_prompts(batch)
            scores.append(batch.batch["token_level_scores"].sum(-1))
            differ = rows_that_differ(batch, options.metric)
            kept.append(batch.select_idxs(differ))
            alike.append(batch.select_idxs(~differ))
            num_kept = sum(map(num_prompts, kept))
            if num_kept >= wanted or 0 < most_drawn <= num_drawn:
                break
            prompts = self.further_prompts(wanted - num_kept)

        if num_kept < wanted:
            self._report_exhausted(num_kept, wanted)
            kept += alike

        self.metrics |= {
            "train/num_gen_batches": num_drawn / wanted,
            "train/kept_prompts": num_kept / num_drawn,
            "train/score_of_all": torch.cat(scores).mean().item(),
        }
        return first_prompts(joined([part for part in kept if len(part)]), wanted)

    def further_prompts(self, missing: int) -> DataProto:
        """Return the prompts of the next round, of which `missing` must have responses that differ.

        Schedules that read prompts themselves return none.
        """
        return next(iter(self.train_loader))

    def _report_exhausted(self, num_kept: int, wanted: int) -> None:
        options = self.config.algorithm.filter_groups
        fact = (
            f"Step {self.global_step}: {options.max_num_gen_batches} batches of prompts gave "
            f"{num_kept} with responses that differ in '{options.metric}'; {wanted} are wanted"
        )
        if options.on_exhausted == "error":
            raise DataError(
                f"{fact}. The task may be too hard or too easy, or solved. Raise "
                "algorithm.filter_groups.max_num_gen_batches (0: no bound) or rollout.n, lower "
                "data.train_batch_size, or set algorithm.filter_groups.on_exhausted=fill."
            )
        logger.warning("%s. The batch is filled with prompts that have equal responses.", fact)


def rows_that_differ(batch: DataProto, metric: str) -> np.ndarray:
    """Mark (B,) rows of prompts that have two samples of different `metric`.

    Samples without a reward (dropped ones) do not count.
    """
    if metric in SCORE_METRICS:
        values = batch.batch["token_level_scores"].sum(-1).tolist()
    elif metric in batch.non_tensor_batch:
        values = batch.non_tensor_batch[metric].tolist()
    else:
        raise no_such_field(metric, ["score", *batch.meta_info.get("reward_fields", ())])

    values_of: dict[int, set] = {}
    groups = group_numbers(batch).tolist()
    rows = episode_rows(batch)
    # A field of an earlier part of an episode says nothing about its answer.
    counted = range(len(batch)) if rows is None else rows.last.tolist()
    for row in counted:
        group = groups[row]
        value = values[row]
        if hasattr(value, "tolist"):
            value = value.tolist()  # a set keeps equal tensors apart
        try:
            values_of.setdefault(group, set()).add(value)
        except TypeError as error:  # has no hash
            raise ConfigError(
                f"algorithm.filter_groups.metric='{metric}' must be a field of one number or text "
                f"a response, got {value!r:.80} of type {type(value).__name__}. Name another "
                "field, or set algorithm.filter_groups.metric=score."
            ) from error

    uids = batch.non_tensor_batch["uid"]
    uids_that_differ = set()
    for uid, group in zip(uids, groups):
        if len(values_of.get(group, ())) > 1:
            uids_that_differ.add(uid)
    return np.array([uid in uids_that_differ for uid in uids], dtype=bool)


def first_prompts(batch: DataProto, wanted: int) -> DataProto:
    """Select all rows of the first `wanted` prompts."""
    prompts = prompts_of(batch)
    chosen = set(list(dict.fromkeys(prompts))[:wanted])
    return batch.select_idxs(np.array([prompt in chosen for prompt in prompts], dtype=bool))


def joined(parts: list[DataProto]) -> DataProto:
    """Concatenate batches with different fields of the reward, with None where one is missing."""
    names: dict[str, None] = {}  # in the order of their first batch
    fields: dict[str, None] = {}
    for part in parts:
        names |= dict.fromkeys(part.non_tensor_batch)
        fields |= dict.fromkeys(part.meta_info.get("reward_fields", ()))

    for part in parts:
        for name in names:
            part.non_tensor_batch.setdefault(name, np.full(len(part), None, dtype=object))
    whole = DataProto.concat(parts)
    whole.meta_info["reward_fields"] = list(fields)
    return whole
