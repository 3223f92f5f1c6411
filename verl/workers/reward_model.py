"""The reward model: scores responses of the actor, in tokens and a chat template of its own."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from verl.config import RewardModelConfig, reward_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.guard import row_name
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.load import load_tokenizer
from verl.models.packed import padded_rows
from verl.models.reward_model import RewardModel, check_scores
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.errors import RewardError
from verl.utils.imports import import_user_code
from verl.utils.logging import say_once
from verl.workers.reward_inputs import Describe, RewardReader, conversations_of
from verl.workers.trained import EngineWorker, frozen_dtype


class RewardModelWorker(EngineWorker):
    """A frozen sequence classifier.

    Args:
        config: the `reward_model` section.
        input_tokenizer: the actor's tokenizer, which made the tokens of the batches.
    """

    def __init__(
        self, config: RewardModelConfig, *, input_tokenizer: Any, device: torch.device
    ) -> None:
        self.config = config
        self.input_tokenizer = input_tokenizer
        model = config.model
        assert model.path is not None, "the configuration was checked"
        import_user_code(model.external_lib)

        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        self.retemplates = model.input_tokenizer is not None
        if not self.retemplates and tokenizer.get_vocab() != input_tokenizer.get_vocab():
            self.retemplates = True
            say_once(
                "reward_model.model.input_tokenizer=null passes the actor's tokens on, but the "
                "reward model's are others: texts are decoded and put under its own chat template."
            )
        reward_model = RewardModel.from_pretrained(
            model.path,
            dtype=frozen_dtype(device),
            trust_remote_code=model.trust_remote_code,
            max_length=config.max_length,
            weights=self.reads_weights,
        )
        both = (config.max_length, reward_model.max_length)
        limits = [limit for limit in both if limit is not None]
        self.reader = RewardReader(tokenizer, min(limits, default=None), config.truncation)
        options = EngineOptions.of(config, device)
        self.engine = TrainEngine(
            reward_model.packed.requires_grad_(False),
            # A score is read after the last token of a whole sequence.
            replace(options, share_prompts=False),
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Compute `rm_scores` (B, R): the score of each response, at its last token.

        A RewardError names the row.
        """
        responses = batch.batch["responses"]
        lengths = batch.batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
        uids = batch.non_tensor_batch.get("uid")
        describe = partial(row_name, uids=uids, data=self.engine.mesh.data)
        if bool((lengths == 0).any()):
            raise RewardError(
                f"The response of {describe(int(lengths.argmin()))} has no token to be scored at."
            )

        if self.retemplates:
            conversations = conversations_of(batch, self.input_tokenizer, describe)
            sequences = self.reader.read(conversations, describe)
        else:
            real = batch.batch["attention_mask"].bool()
            sequences = [ids[mask].tolist() for ids, mask in zip(batch.batch["input_ids"], real)]
            sequences = self.reader.fit(sequences, describe)

        scores = torch.zeros(responses.shape, dtype=torch.float32)
        scores[torch.arange(len(batch)), lengths.cpu() - 1] = self._score(sequences, describe)
        return DataProto.from_dict(tensors={"rm_scores": scores})

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def longest_input(self) -> int | None:
        """Return the most tokens that an input may have."""
        return self.reader.max_length

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def score_tokens(self, inputs: DataProto) -> DataProto:
        """Compute `scores` (B,) of the object column `token_ids`, in the reward model's own tokens.

        Errors name `response`.
        """
        sequences = list(inputs.non_tensor_batch["token_ids"])
        numbers = list(inputs.non_tensor_batch["response"])
        for number, ids in zip(numbers, sequences):
            if len(ids) < 2:  # a packed row has a token before the one that is scored
                raise RewardError(
                    f"The input of response {number} has one token, and two at least are scored. "
                    "Give it as a text, which comes under the reward model's chat template."
                )

        scores = self._score(sequences, lambda row: f"response {numbers[row]}")
        return DataProto.from_dict(tensors={"scores": scores})

    def _score(self, sequences: Sequence[Sequence[int]], describe: Describe) -> torch.Tensor:
        """Compute the scores (B,) of rows of token ids."""
        # Padded on the left, so that the last column is a response of one token: the last one of
        # every row.
        rows, mask = padded_rows(sequences, side="left")
        columns = {"input_ids": rows, "attention_mask": mask, "response_mask": mask[:, -1:]}
        budget = TokenBudget(
            *reward_micro_batch(self.config),
            key="reward_model.forward_max_token_len_per_gpu",
            rows_key="reward_model.micro_batch_size_per_gpu",
            phase="the reward model",
        )

        scores = self.engine.infer(DataProto.from_dict(tensors=columns), budget)["rewards"][:, 0]
        decode = self.reader.tokenizer.decode
        check_scores(
            scores, lambda row: f"{describe(row)}, which ends {decode(sequences[row][-40:])!r},"
        )
        return scores
