"""What the actor and the critic minimise: packed model outputs and batch columns in, one loss out."""

from dataclasses import asdict
from typing import Protocol

import torch

from verl.algorithms.importance import mismatch_metrics
from verl.algorithms.kl import kl_penalty
from verl.algorithms.policy_losses import PolicyLossInputs, extra_losses, policy_losses
from verl.algorithms.value_losses import clipped_value_loss
from verl.config import ActorConfig
from verl.distributed.collectives import ALONE, Axis, gather_objects
from verl.engine.base import LossOutput

Columns = dict[str, torch.Tensor]


class Objective(Protocol):
    """A loss function of the engine that also knows which columns it reads."""

    def columns(self, available: set[str]) -> list[str]:
        """The batch columns to pack for it, out of those there are."""
        ...

    def restart(self) -> None:
        """Forget the passes over this mini-batch: they start again, because memory ran out."""
        ...

    def __call__(self, outputs: Columns, columns: Columns, sequence: torch.Tensor) -> LossOutput: ...


class PolicyObjective:
    """policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference) + extra terms."""

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.policy_loss = policy_losses.get(config.policy_loss.loss_mode)
        self.settings = {
            "clip_ratio_low": config.clip_ratio_low,
            "clip_ratio_high": config.clip_ratio_high,
            "clip_ratio_c": config.clip_ratio_c,
            **asdict(config.policy_loss),
        }
        self.extra_terms = [(extra_losses.get(term.name), term.coef) for term in config.loss_extra]
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def columns(self, available: set[str]) -> list[str]:
        wanted = ["advantages", "old_log_probs", "rollout_log_probs"]
        if self.config.use_kl_loss:
            wanted.append("ref_log_prob")
        if self.extra_terms:  # a user's term may read anything
            wanted += sorted(available - {"input_ids", "attention_mask", "position_ids", "prompts", *wanted})
        return [name for name in wanted if name in available]

    def __call__(self, outputs: Columns, columns: Columns, sequence: torch.Tensor) -> LossOutput:
        log_probs, weights = outputs["log_probs"], columns["weights"]
        if "old_log_probs" not in columns and "rollout_log_probs" in columns:
            self._seen.append((log_probs.detach(), columns["rollout_log_probs"], columns["response_mask"]))
        # Without the column the whole batch is one update: the old policy is the current one.
        columns = {"old_log_probs": log_probs.detach(), **columns}
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=columns["old_log_probs"],
            advantages=columns["advantages"],
            weights=weights,
            sequence=sequence,
        )
        policy = self.policy_loss(inputs, **self.settings)
        loss = policy.loss
        sums = {"actor/pg_loss": policy.loss.detach()}
        means = {f"actor/{name}": value for name, value in policy.means.items()}
        means["actor/entropy"] = outputs["entropy"].detach()
        if self.config.entropy_coeff != 0:
            loss = loss - self.config.entropy_coeff * (outputs["entropy"] * weights).sum()
        if self.config.use_kl_loss:
            kl = kl_penalty(log_probs, columns["ref_log_prob"], self.config.kl_loss_type)
            kl_loss = (kl * weights).sum()
            loss = loss + self.config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        for term, coef in self.extra_terms:
            loss = loss + coef * term(inputs, columns)
        return LossOutput(loss=loss, means=means, sums=sums)

    def restart(self) -> None:
        """See `Objective.restart`. What is remembered is of one update of the whole batch."""
        self._seen = []

    def take_mismatch(self, data: Axis = ALONE) -> dict[str, float]:
        """How far trainer and rollout engine disagree on the tokens of the last update, those of all ranks along
        `data`, where it computed the old log-probs itself; empty otherwise."""
        seen, self._seen = self._seen, []
        if not seen:
            return {}
        trainer, rollout, mask = (torch.cat(pieces) for pieces in zip(*seen))
        return mismatch_of_all(rollout, trainer, mask, data)


def mismatch_of_all(rollout: torch.Tensor, trainer: torch.Tensor, mask: torch.Tensor, data: Axis) -> dict[str, float]:
    """`mismatch_metrics` over the tokens of all ranks along `data`. Every one of them must call this."""
    if data.size > 1:
        keep = mask.bool()
        pieces = gather_objects((rollout[keep].cpu(), trainer[keep].cpu()), data)
        rollout, trainer = (torch.cat(parts) for parts in zip(*pieces))
        mask = torch.ones_like(rollout)
    return mismatch_metrics(rollout, trainer, mask)


class ValueObjective:
    """The clipped value loss of PPO."""

    def __init__(self, cliprange_value: float) -> None:
        self.cliprange_value = cliprange_value

    def columns(self, available: set[str]) -> list[str]:
        return ["values", "returns"]

    def restart(self) -> None:
        """See `Objective.restart`. Nothing is remembered."""

    def __call__(self, outputs: Columns, columns: Columns, sequence: torch.Tensor) -> LossOutput:
        result = clipped_value_loss(
            outputs["values"],
            columns["values"],
            columns["returns"],
            columns["weights"],
            cliprange_value=self.cliprange_value,
        )
        means = {f"critic/{name}": value for name, value in result.means.items()}
        return LossOutput(loss=result.loss, means=means, sums={"critic/vf_loss": result.loss.detach()})
