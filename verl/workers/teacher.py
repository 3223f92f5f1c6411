"""The teacher of on-policy distillation: a frozen language model that scores the actor's tokens."""

from typing import Any

import torch

from verl.config import ActorRolloutRefConfig, DistillationConfig, log_prob_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.load import check_vocabulary, load_causal_lm, load_tokenizer
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.errors import ModelError
from verl.workers.trained import EngineWorker, frozen_dtype


class TeacherWorker(EngineWorker):
    """Compute the targets of distillation for responses that the actor drew.

    Args:
        config: the `distillation` section.
        roles: the `actor_rollout_ref` section, for the sampling temperature and lengths.
        tokenizer: the actor's. The teacher's must have the same vocabulary.
    """

    def __init__(
        self,
        config: DistillationConfig,
        roles: ActorRolloutRefConfig,
        *,
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        self.config = config
        self.temperature = roles.rollout.temperature
        teacher = config.teacher_models.teacher_model
        assert teacher.model_path is not None, "the configuration was checked"
        check_same_vocabulary(
            tokenizer,
            load_tokenizer(teacher.model_path, trust_remote_code=teacher.trust_remote_code),
            student_path=roles.model.path,
            teacher_path=teacher.model_path,
        )

        model = load_causal_lm(
            teacher.model_path,
            dtype=frozen_dtype(device) if teacher.dtype is None else teacher.dtype,
            trust_remote_code=teacher.trust_remote_code,
            override_config=teacher.override_config,
            max_length=roles.rollout.longest_sequence,
            weights=self.reads_weights,
        )
        packed = PackedCausalLM(
            model.requires_grad_(False), attention_kernel=roles.model.attention_kernel
        )
        check_vocabulary(model, tokenizer)
        self.engine = TrainEngine(packed, EngineOptions.of(config, device, policy=roles))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_teacher_log_prob(self, batch: DataProto) -> DataProto:
        """Compute `teacher_log_prob` (B, R), and `teacher_states` (B, R, H) for a divergence over
        the whole vocabulary."""
        budget = TokenBudget(
            *log_prob_micro_batch(self.config),
            key="distillation.log_prob_max_token_len_per_gpu",
            phase="the teacher's pass",
        )
        answer = self.engine.infer(
            batch, budget, temperature=self.temperature, states=self.config.is_exact
        )
        columns = {"teacher_log_prob": answer["log_probs"]}
        if "states" in answer:
            columns["teacher_states"] = answer["states"]
        return DataProto.from_dict(tensors=columns)


def check_same_vocabulary(
    student: Any,
    teacher: Any,
    *,
    student_path: str | None,
    teacher_path: str,
    needs: str = "Distillation needs a teacher",
    key: str = "distillation.teacher_models.teacher_model.model_path",
) -> None:
    """Raise ModelError where both tokenizers give a token different ids, or an id different tokens.

    A token that one of them lacks is no contradiction: later models of a family add some.

    Args:
        needs, key: the feature that needs one vocabulary, and where the model is set, for errors.
    """
    ours = student.get_vocab()
    theirs = teacher.get_vocab()
    token_of = {number: token for token, number in theirs.items()}
    differing = []
    for token, number in ours.items():
        if theirs.get(token, number) != number or token_of.get(number, token) != token:
            differing.append(token)
    if not differing:
        return

    example = min(differing)
    raise ModelError(
        f"{needs} with the actor's vocabulary, but '{teacher_path}' and "
        f"'{student_path}' differ in {len(differing)} tokens: {example!r} has the id "
        f"{ours[example]} in the actor's and {theirs.get(example)} in the other one. Choose models "
        f"that share a tokenizer ({key})."
    )
