"""Our training engine at the work of `training.py`, which starts this script.

It trains by AdamW and FSDP2 over a mesh of one.
"""

import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from rollout_models import versions
from tensordict import TensorDict
from training_work import (
    CLIP_NORM,
    LEARNING_RATE,
    Job,
    Numbers,
    Row,
    padded,
    serve,
    trained_model,
)

from verl.config import ActorConfig, FSDPConfig, OptimConfig
from verl.distributed.fsdp import full_tensor
from verl.engine.base import LossOutput, TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.attention import prepare
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.utils.logging import configure_logging
from verl.workers.objective import Columns
from verl.workers.policy_objective import PolicyObjective


class Ours:
    """A `Side`."""

    def __init__(self, job: Job) -> None:
        configure_logging()
        self.versions = versions(job.device)
        self.entropy = job.entropy
        self.budget = TokenBudget(max_tokens=job.micro_tokens)
        self.objective = PolicyObjective(ActorConfig())
        model = trained_model(job)
        prepare(model)
        if job.lora:
            from verl.models.lora import apply_lora

            apply_lora(model, rank=job.lora, alpha=2 * job.lora)
        self.engine = TrainEngine(
            PackedCausalLM(model),
            EngineOptions(
                device=torch.device(job.device),
                fsdp_config=FSDPConfig(reshard_after_forward=False if job.keep_gathered else None),
                optim=OptimConfig(lr=LEARNING_RATE),  # its moments come with the first step
                grad_clip=CLIP_NORM,
                enable_gradient_checkpointing=job.checkpointing,
                gradient_checkpointing_share=job.checkpointing_share,
                use_torch_compile=job.compile,
                compile_backend=job.backend,
                use_fused_kernels=True,
                share_prompts=job.share_prompts,
            ),
            total_steps=100,
        )

    def gradients(self, rows: list[Row]) -> Numbers:
        batch = as_batch(rows)
        columns = self.objective.columns(set(batch.batch.keys()))
        metrics = self.engine.forward_backward(
            batch, self.budget, self._loss, columns, temperature=1.0, entropy=self.entropy
        )
        return Numbers(metrics["actor/pg_loss"], metrics["log_prob"])

    def _loss(self, outputs: Columns, columns: Columns, sequence: torch.Tensor) -> LossOutput:
        log_probs = outputs["log_probs"]
        result = self.objective({"entropy": log_probs, **outputs}, columns, sequence)
        return LossOutput(
            loss=result.loss,
            means={**result.means, "log_prob": log_probs.detach()},
            sums=result.sums,
        )

    def norm(self) -> float:
        gradients = [
            parameter.grad
            for parameter in self.engine.module.parameters()
            if parameter.grad is not None
        ]
        return full_tensor(torch.nn.utils.get_total_norm(gradients)).item()

    def step(self) -> float:
        result = self.engine.step()
        if result.skipped:
            raise RuntimeError("the gradient is not finite")
        return result.grad_norm

    def log_probs(self, rows: list[Row]) -> float:
        batch = as_batch(rows)
        answer = self.engine.infer(batch, self.budget, temperature=1.0)
        return (answer["log_probs"].sum() / batch.batch["response_mask"].sum()).item()


def as_batch(rows: list[Row]) -> DataProto:
    """Return the columns that a rollout and an advantage estimator leave."""
    ids, mask, prompt_width = padded(rows)
    response_mask = mask[:, prompt_width:]
    advantages = torch.tensor([[row.advantage] for row in rows])
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "response_mask": response_mask,
        "advantages": advantages * response_mask,
        "weights": response_mask / response_mask.sum(),
    }

    prompts = [row.prompt.numpy().tobytes() for row in rows]
    numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
    uids = np.array([f"prompt-{numbers[prompt]}" for prompt in prompts], dtype=object)
    return DataProto(
        batch=TensorDict(columns, batch_size=[len(rows)]), non_tensor_batch={"uid": uids}
    )


if __name__ == "__main__":
    serve(Ours, __doc__)
