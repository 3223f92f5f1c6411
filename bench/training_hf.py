"""Plain transformers at the work of `training.py`, which starts this script; as TRL's trainer.

Rows are padded, attention is sdpa, parameters are fp32 under bf16 autocast, and the logits of all
response tokens are fp32.
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the FLOPs of the common part

import torch
from rollout_models import versions
from torch import Tensor
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


class Plain:
    """A base of the sides without our engine: a model of transformers, AdamW, clipping."""

    model: Any

    def train(self, job: Job) -> None:
        """Make checkpointing and the optimizer ready for `model`."""
        if job.checkpointing:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LEARNING_RATE, fused=True)

    def norm(self) -> float:
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        return torch.nn.utils.get_total_norm(gradients).item()

    def step(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.trained, CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm.item()


class HF(Plain):
    """A `Side`. A micro-batch has as many rows as fit into `micro_tokens`, padding included."""

    def __init__(self, job: Job) -> None:
        self.versions = versions(job.device)
        self.device = torch.device(job.device)
        self.micro_tokens = job.micro_tokens
        self.entropy = job.entropy
        self.model = with_lora(trained_model(job), job.lora).train()
        self.train(job)

    def gradients(self, rows: list[Row]) -> Numbers:
        self.optimizer.zero_grad(set_to_none=True)
        tokens = sum(len(row.response) for row in rows)
        total = torch.zeros(2, device=self.device)
        for part in self._parts(rows):
            log_probs, mask = self._log_probs(part, entropy=self.entropy)
            loss = policy_loss(log_probs, self._advantages(part)[:, None], mask / tokens)
            loss.backward()
            total += torch.stack([loss.detach(), (log_probs.detach() * mask).sum() / tokens])
        return Numbers(*total.tolist())

    @torch.no_grad()
    def log_probs(self, rows: list[Row]) -> float:
        total = torch.zeros((), device=self.device)
        for part in self._parts(rows):
            log_probs, mask = self._log_probs(part, entropy=False)
            total += (log_probs * mask).sum()
        return total.item() / sum(len(row.response) for row in rows)

    def _parts(self, rows: list[Row]) -> list[list[Row]]:
        count = max(1, self.micro_tokens // max(row.length for row in rows))
        return [rows[start : start + count] for start in range(0, len(rows), count)]

    def _advantages(self, rows: list[Row]) -> Tensor:
        return torch.tensor([row.advantage for row in rows], device=self.device)

    def _log_probs(self, rows: list[Row], *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Return log-probs and mask (b, R) of the responses, padded on the right."""
        ids, mask, width = padded(rows)
        longest = ids.shape[1] - width
        ids = ids.to(self.device)
        mask = mask.to(self.device)
        with autocast(self.device):
            output = self.model(
                input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=longest + 1
            )

        # accelerate hands the outputs of a model under autocast over in fp32.
        logits = output.logits.float()[:, :-1]
        targets = ids[:, width:]
        chosen = logits.gather(-1, targets[..., None]).squeeze(-1)
        # Row by row: all normalizers at once would double the memory of the logits.
        log_probs = chosen - torch.stack([row.logsumexp(-1) for row in logits])

        if entropy:
            with torch.no_grad():
                for row in logits:
                    torch.special.entr(row.softmax(-1)).sum(-1)

        return log_probs, mask[:, width:]


def policy_loss(log_probs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    return -((log_probs - log_probs.detach()).exp() * advantages * weights).sum()


def autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return bf16 autocast on CUDA. A CPU only tries the script, in the parameters' dtype."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def with_lora(model: Any, rank: int) -> Any:
    """Add peft's adapters in fp32 to all linear layers but the head, within the module itself."""
    if not rank:
        return model
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


if __name__ == "__main__":
    serve(HF, __doc__)
