"""The reference: the policy as it was before training, frozen."""

import torch

from verl.config import ActorRolloutRefConfig, RefConfig, log_prob_micro_batch
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.load import load_causal_lm
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.single_controller import Dispatch, register
from verl.utils.imports import import_user_code
from verl.workers.trained import EngineWorker, model_source, parameter_dtype


def reference_budget(config: RefConfig) -> TokenBudget:
    """Return the size of passes for reference log-probs, in any role."""
    return TokenBudget(
        *log_prob_micro_batch(config),
        key="actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
        phase="the pass for reference log-probs",
    )


def reference_columns(
    engine: TrainEngine, batch: DataProto, config: ActorRolloutRefConfig
) -> DataProto:
    """Compute `ref_log_prob` (B, R), and `ref_states` (B, R, H) where the loss has the exact KL."""
    answer = engine.infer(
        batch,
        reference_budget(config.ref),
        temperature=config.rollout.temperature,
        states=config.actor.needs_exact_kl,
    )
    columns = {"ref_log_prob": answer["log_probs"]}
    if "states" in answer:
        columns["ref_states"] = answer["states"]
    return DataProto.from_dict(tensors=columns)


class ReferenceWorker(EngineWorker):
    """Compute the log-probs that a KL penalty is taken against."""

    def __init__(self, config: ActorRolloutRefConfig, *, device: torch.device) -> None:
        self.config = config
        import_user_code(config.model.external_lib)

        model = load_causal_lm(
            **model_source(config.model),
            dtype=parameter_dtype(config.model, device, is_trained=False),
            max_length=config.rollout.longest_sequence,
            weights=self.reads_weights,
            check=False,  # the actor's load has checked the same model
        )
        self.engine = TrainEngine(
            PackedCausalLM(
                model.requires_grad_(False), attention_kernel=config.model.attention_kernel
            ),
            EngineOptions.of(config.ref, device, policy=config),
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """Compute `reference_columns`."""
        return reference_columns(self.engine, batch, self.config)
