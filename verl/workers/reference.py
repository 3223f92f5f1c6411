"""The reference: the policy as it was before training, frozen."""

import torch

from verl.config import ActorRolloutRefConfig, log_prob_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.models.load import load_causal_lm
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.single_controller import Dispatch, Worker, register


class ReferenceWorker(Worker):
    """Tells the log-probs that a KL penalty is taken against."""

    def __init__(self, config: ActorRolloutRefConfig, *, device: torch.device) -> None:
        self.config = config
        assert config.model.path is not None
        model = load_causal_lm(
            config.model.path,
            dtype=config.model.dtype or torch.float32,
            trust_remote_code=config.model.trust_remote_code,
            override_config=config.model.override_config,
            max_length=config.rollout.max_model_len or config.rollout.prompt_length + config.rollout.response_length,
            check=False,  # the actor's load has checked the same model
        )
        self.engine = TrainEngine(
            PackedCausalLM(model.requires_grad_(False)),
            optim=None,
            fsdp=config.ref.fsdp_config,
            grad_clip=None,
            device=device,
            total_steps=0,
            gradient_checkpointing=False,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` (B, R)."""
        budget = TokenBudget(*log_prob_micro_batch(self.config.ref))
        answer = self.engine.infer(batch, budget, temperature=self.config.rollout.temperature)
        return DataProto.from_dict(tensors={"ref_log_prob": answer["log_probs"]})
