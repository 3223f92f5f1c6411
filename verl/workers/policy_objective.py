"""The loss of the actor: a policy loss of `verl.algorithms` plus its further terms."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from verl.algorithms.kl import kl_penalty
from verl.algorithms.padded import loss_settings
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    means_of,
    selections,
)
from verl.config import ActorConfig
from verl.distributed.collectives import ALONE, Axis
from verl.engine.base import LossOutput
from verl.protocol import DataProto
from verl.workers.checked_loss import CheckedLoss, CheckedTerm
from verl.workers.mismatch import SeenTokens
from verl.workers.objective import Columns, Objective
from verl.workers.policy_terms import DistillationTerm, LoglinearProximal, RolloutReinforce
from verl.workers.selection import select_tokens


class PolicyObjective(Objective):
    """The actor's loss.

    policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference) + extra terms
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.entropy_coeff = config.entropy_coeff
        self.distillation: DistillationTerm | None = None
        self.reinforce: RolloutReinforce | None = None
        self.proximal: LoglinearProximal | None = None
        self.seen = SeenTokens()

        name = config.policy_loss.loss_mode
        settings = {**loss_settings(config), "loss_agg_mode": config.loss_agg_mode}
        self._policy_loss = CheckedLoss(name, settings)
        self._selection: Callable[..., Tensor] | None = None
        if name in selections:
            self._selection = partial(selections.get(name), **settings)

        self._extra_terms = [(CheckedTerm(term.name), term.coef) for term in config.loss_extra]

        self._is_looking_for_offenders = False

    def columns(self, available: set[str]) -> list[str]:
        wanted = [
            "advantages",
            "old_log_probs",
            "rollout_log_probs",
            "rollout_is_weights",
            "token_age",
            "selected",
        ]

        if self.config.router_replay.mode != "disabled":
            wanted.append("routed_experts")
        if self.config.needs_exact_kl:
            wanted.append("ref_states")
        elif self.config.use_kl_loss:
            wanted.append("ref_log_prob")

        if self.distillation is not None and self.distillation.is_exact:
            wanted.append("teacher_states")
        elif self.distillation is not None:
            wanted.append("teacher_log_prob")
        if self._extra_terms:  # a user's term may read anything
            unpacked = {"input_ids", "attention_mask", "position_ids", "prompts"}
            wanted += sorted(available - unpacked.union(wanted))

        return [name for name in wanted if name in available]

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        log_probs = outputs["log_probs"]
        weights = columns["weights"]
        if "rollout_log_probs" in columns and not self._is_looking_for_offenders:
            self.seen.add(log_probs, columns)
        if self.proximal is not None:
            columns = {**columns, **self.proximal.columns(log_probs, columns)}

        # Without the column the whole batch is one update: the old policy is the current one.
        columns = {"old_log_probs": log_probs.detach(), **columns}
        inputs = PolicyLossInputs(
            log_probs=log_probs,
            old_log_probs=columns["old_log_probs"],
            advantages=columns["advantages"],
            weights=weights,
            sequence=sequence,
            mask=columns["response_mask"],
            selected=columns.get("selected"),
        )

        policy = self._policy_term(inputs, columns.get("rollout_is_weights"))
        loss = policy.loss
        sums = {"actor/pg_loss": policy.loss.detach()}
        means = {metric_name(name): value for name, value in policy.means.items()}
        means["actor/entropy"] = outputs["entropy"].detach()

        if self.entropy_coeff != 0:
            loss = loss - self.entropy_coeff * (outputs["entropy"] * weights).sum()
        if self.config.use_kl_loss:
            kl_loss = (self._kl(outputs, columns) * weights).sum()
            loss = loss + self.config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        if self.distillation is not None:
            distance = (self.distillation.per_token(outputs, columns) * weights).sum()
            loss = loss + self.distillation.coef * distance
            sums["actor/distillation_loss"] = distance.detach()

        for term, coef in self._extra_terms:
            value = term(inputs, columns, is_looking=self._is_looking_for_offenders)
            loss = loss + coef * value

        return LossOutput(loss=loss, means=means, sums=sums)

    def _policy_term(self, inputs: PolicyLossInputs, correction: Tensor | None) -> PolicyLossOutput:
        """Compute the policy loss, with weights corrected for the policy that drew the tokens.

        Nothing else is corrected: KL and entropy belong to the current policy, whichever policy
        drew the token.
        """
        if self.distillation is not None and self.distillation.is_whole_loss:
            return PolicyLossOutput(inputs.log_probs.new_zeros(()), means_of(inputs))

        if correction is not None:
            inputs = inputs._replace(weights=inputs.weights * correction)
        if self.reinforce is not None:
            return self.reinforce(inputs)
        return self._policy_loss(inputs, is_looking=self._is_looking_for_offenders)

    def _kl(self, outputs: Columns, columns: Columns) -> Tensor:
        """Return the KL to the reference (M,): exact, or estimated from the drawn tokens."""
        if self.config.needs_exact_kl:
            return outputs["ref_kl"]
        kind = self.config.kl_loss_type
        return kl_penalty(outputs["log_probs"], columns["ref_log_prob"], kind)

    def begin(self, mini_batch: DataProto, infer: Callable[[], Columns], data: Axis) -> None:
        """Write `selected` for a loss that has a selection. See `Objective.begin`."""
        self._is_looking_for_offenders = False
        is_read = self.distillation is None or not self.distillation.is_whole_loss
        if self._selection is not None and is_read:
            chosen = select_tokens(mini_batch, infer, data, self._selection)
            mini_batch.batch["selected"] = chosen

    def restart(self) -> None:
        """Forget the rows of this mini-batch. See `Objective.restart`."""
        self.seen.restart()

    def end(self) -> None:
        """End the passes: rows that run again do not count again in the mismatch."""
        self.seen.end()
        self._is_looking_for_offenders = True

    def take_mismatch(self, data: Axis = ALONE) -> dict[str, float]:
        """Return how far trainer and rollout engine disagree on the tokens of the last update.

        Tokens are those of all ranks along `data`. Empty unless the update computed the old
        log-probs itself, except for the mismatch by age, where tokens have one. With
        `seen.compares_first` they are those of the first mini-batch, before the weights change.
        """
        return self.seen.take(data)


def metric_name(name: str) -> str:
    """Return the metric of an entry of a policy loss: `actor/<name>`, or a name with a slash."""
    return name if "/" in name else f"actor/{name}"
