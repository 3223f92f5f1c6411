"""A language model that learns from texts."""

import torch
from transformers import PreTrainedTokenizerBase

from verl.config import ActorRolloutRefConfig, update_micro_batch
from verl.distributed.collectives import all_reduce_sum
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.workers.objective import LanguageModelObjective
from verl.workers.trained import TrainedWorker
from verl.workers.updates import run_updates


class SFTWorker(TrainedWorker):
    """Fine-tune all weights or adapters with supervision: an actor without rollout.

    Args:
        config: the `actor_rollout_ref` section, of which `model` and `actor` are read.
        max_length: longest row, in tokens.
        total_steps: training steps of the run, for the learning-rate schedule.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        *,
        max_length: int,
        total_steps: int,
        device: torch.device,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.checkpoint = config.actor.checkpoint
        self.objective = LanguageModelObjective()

        model = self.load_policy(config, device, max_length=max_length)
        self.engine = TrainEngine(
            PackedCausalLM(model, attention_kernel=config.model.attention_kernel),
            EngineOptions.of(config.actor, device, policy=config),
            total_steps=total_steps,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def train_batch(self, batch: DataProto) -> dict[str, float]:
        """Make one optimizer step on the mean over all tokens with a `response_mask` of 1."""
        return run_updates(
            self.engine,
            batch,
            self.objective,
            name="train",
            mini_batch_rows=None,
            epochs=1,
            shuffle=False,
            loss_agg_mode="token-mean",
            budget=self._budget("the update"),
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def sum_loss(self, batch: DataProto) -> tuple[float, float]:
        """Sum the cross-entropy of tokens with a `response_mask` of 1; count them as well."""
        mask = batch.batch["response_mask"].double()
        log_probs = self.engine.infer(batch, self._budget("validation"))["log_probs"]
        sums = torch.stack([-(log_probs * mask).sum(), mask.sum()])
        loss, tokens = all_reduce_sum(sums, self.engine.mesh.data).tolist()
        return loss, tokens

    def _budget(self, phase: str) -> TokenBudget:
        return TokenBudget(
            *update_micro_batch(self.config.actor), key="data.max_token_len_per_gpu", phase=phase
        )
