"""Compute the losses of actor, critic and fine-tuning from packed outputs and batch columns.

The actor's is a policy loss of `verl.algorithms` plus its further terms (`PolicyObjective`).
"""

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.divergences import DIVERGENCES
from verl.algorithms.kl import cut_log_ratio, kl_penalty
from verl.algorithms.mismatch import mismatch_metrics
from verl.algorithms.padded import loss_settings
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    SelectionInputs,
    extra_losses,
    means_of,
    policy_losses,
    selections,
)
from verl.algorithms.rollout_correction import (
    bounded_weights,
    loglinear_proximal,
    reinforce_of_rollout,
)
from verl.algorithms.value_losses import clipped_value_loss
from verl.config import ActorConfig
from verl.distributed.collectives import ALONE, Axis, gather_objects
from verl.engine.base import LossOutput
from verl.engine.memory import shortage_of
from verl.protocol import DataProto
from verl.utils.errors import AlgorithmError
from verl.utils.logging import say_once
from verl.utils.user_parts import NamedPart

Columns = dict[str, Tensor]

AGGREGATION_FORMULAS = {
    "token-mean": "sum over all response tokens of the mini-batch / their number",
    "seq-mean-token-sum": "sum over a response's tokens, mean over the responses of the mini-batch",
    "seq-mean-token-mean": (
        "mean over a response's tokens, mean over the responses of the mini-batch"
    ),
    "seq-mean-token-sum-norm": (
        "sum over a response's tokens / data.max_response_length, mean over the responses of the "
        "mini-batch"
    ),
}


class Objective:
    """A loss function of the engine that also knows which columns it reads."""

    def columns(self, available: set[str]) -> list[str]:
        """Choose the batch columns to pack for it."""
        raise NotImplementedError

    def begin(self, mini_batch: DataProto, infer: Callable[[], Columns], data: Axis) -> None:
        """Begin a mini-batch: add the columns that depend on the whole of it.

        Every rank along `data` makes this call.

        Args:
            infer: compute its outputs, (B, R) each, by the weights before the update.
        """

    def restart(self) -> None:
        """Forget the passes over this mini-batch: they start again, because memory ran out."""

    def end(self) -> None:
        """End the passes over this mini-batch. Later calls look for rows that are not finite."""

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DistillationTerm:
    """Term of the actor's loss for distillation: coef * divergence from the teacher."""

    kind: str  # of KL_KINDS, or of DIVERGENCES, which the model's pass computes
    coef: float
    is_whole_loss: bool  # without a policy loss

    @property
    def is_exact(self) -> bool:
        """Return whether the divergence is over the whole vocabulary."""
        return self.kind in DIVERGENCES

    def per_token(self, outputs: Columns, columns: Columns) -> Tensor:
        """Return the divergence of each token (M,)."""
        if self.is_exact:
            return outputs["teacher_divergence"]
        return kl_penalty(outputs["log_probs"], columns["teacher_log_prob"], self.kind)


@dataclass(frozen=True, kw_only=True)
class RolloutReinforce:
    """The policy loss that replaces the registered one, see `reinforce_of_rollout`."""

    weigh_by: str | None  # token, sequence, or None for weights of 1
    weight_band: tuple[float, float]
    outside: str  # truncate or mask

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        return reinforce_of_rollout(
            inputs, weigh_by=self.weigh_by, weight_band=self.weight_band, outside=self.outside
        )

    def describe(self) -> str:
        """Return the formula of a token, as the log gives it."""
        if self.weigh_by is None:
            return "reinforce: -A log pi"
        lower, upper = self.weight_band
        bounds = f"by {self.weigh_by}, within [{lower:g}, {upper:g}] ({self.outside})"
        return f"reinforce: -sg(w) A log pi, w = r {bounds}"


@dataclass(frozen=True, kw_only=True)
class LoglinearProximal:
    """Old log-probs of the decoupled objective without a pass, see `loglinear_proximal`.

    With `weighs`, tokens also weigh pi_old / mu, bounded by `weight_band` as in `correct_rollout`.
    """

    weighs: bool
    weight_band: tuple[float, float]
    outside: str  # truncate or mask

    def columns(self, log_probs: Tensor, columns: Columns) -> Columns:
        """Return `old_log_probs`, and `rollout_is_weights` if tokens are weighed."""
        rollout = columns["rollout_log_probs"]
        old = loglinear_proximal(log_probs, rollout, columns["token_age"])
        if not self.weighs:
            return {"old_log_probs": old}

        ratios = cut_log_ratio(old - rollout).exp()
        weights, _ = bounded_weights(ratios, self.weight_band, self.outside)
        if "rollout_is_weights" in columns:  # those of tokens beyond the bound on staleness
            weights = weights * columns["rollout_is_weights"]
        return {"old_log_probs": old, "rollout_is_weights": weights}


class PolicyObjective(Objective):
    """The actor's loss.

    policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy, reference) + extra terms
    """

    def __init__(self, config: ActorConfig) -> None:
        self.config = config
        self.policy_loss = policy_losses.get(config.policy_loss.loss_mode)
        self.part = NamedPart("policy loss", config.policy_loss.loss_mode, self.policy_loss)
        self.selection: Callable[..., Tensor] | None = None
        if config.policy_loss.loss_mode in selections:
            self.selection = selections.get(config.policy_loss.loss_mode)
        self.settings = {**loss_settings(config), "loss_agg_mode": config.loss_agg_mode}
        self.entropy_coeff = config.entropy_coeff

        self.distillation: DistillationTerm | None = None
        self.reinforce: RolloutReinforce | None = None
        self.proximal: LoglinearProximal | None = None
        self.compares_first = False  # the rollout with the first mini-batch, see `take_mismatch`
        self.extra_terms: list[tuple[NamedPart, float]] = []

        for term in config.loss_extra:
            part = NamedPart("extra loss term", term.name, extra_losses.get(term.name))
            self.extra_terms.append((part, term.coef))

        self._names: list[str] | None = None  # of the policy loss's metrics
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._seen_by_age: list[tuple[Tensor, ...]] = []
        self._num_updates = 0  # mini-batches since `take_mismatch`
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
        if self.extra_terms:  # a user's term may read anything
            unpacked = {"input_ids", "attention_mask", "position_ids", "prompts"}
            wanted += sorted(available - unpacked.union(wanted))

        return [name for name in wanted if name in available]

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        log_probs = outputs["log_probs"]
        weights = columns["weights"]
        if "rollout_log_probs" in columns and not self._is_looking_for_offenders:
            self._note_mismatch(log_probs, columns)
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

        # Only the policy loss is corrected: KL and entropy belong to the current policy, whichever
        # policy drew the token.
        correction = columns.get("rollout_is_weights")
        corrected = inputs
        if correction is not None:
            corrected = inputs._replace(weights=weights * correction)
        if self.distillation is not None and self.distillation.is_whole_loss:
            policy = PolicyLossOutput(log_probs.new_zeros(()), means_of(inputs))
        elif self.reinforce is not None:
            policy = self.reinforce(corrected)
        else:
            policy = self._policy_loss(corrected)

        loss = policy.loss
        sums = {"actor/pg_loss": policy.loss.detach()}
        means = {metric_name(name): value for name, value in policy.means.items()}
        means["actor/entropy"] = outputs["entropy"].detach()

        if self.entropy_coeff != 0:
            loss = loss - self.entropy_coeff * (outputs["entropy"] * weights).sum()
        if self.config.use_kl_loss:
            kl = self._kl(outputs, columns)
            kl_loss = (kl * weights).sum()
            loss = loss + self.config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        if self.distillation is not None:
            distance = (self.distillation.per_token(outputs, columns) * weights).sum()
            loss = loss + self.distillation.coef * distance
            sums["actor/distillation_loss"] = distance.detach()

        for part, coef in self.extra_terms:
            with part.naming_errors(passes=_is_shortage):
                term = part.function(inputs, columns)
            if isinstance(term, Tensor) and term.numel() != 1:
                raise part.must_return("a scalar", term)
            loss = loss + coef * term

        return LossOutput(loss=loss, means=means, sums=sums)

    def _note_mismatch(self, log_probs: Tensor, columns: Columns) -> None:
        """Keep what `take_mismatch` compares."""
        seen = (log_probs.detach(), columns["rollout_log_probs"], columns["response_mask"])
        is_first = self.compares_first and self._num_updates == 0
        if is_first or "old_log_probs" not in columns:
            self._seen.append(seen)
        if "token_age" in columns:
            self._seen_by_age.append((*seen, columns["token_age"]))

    def _policy_loss(self, inputs: PolicyLossInputs) -> PolicyLossOutput:
        """Compute the policy loss. Raises AlgorithmError where a user's returns something else."""
        with self.part.naming_errors(passes=_is_shortage):
            policy = self.policy_loss(inputs, **self.settings)

        loss = getattr(policy, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            expected = "a PolicyLossOutput with a scalar tensor as loss"
            raise self.part.must_return(expected, policy if loss is None else loss)
        if inputs.log_probs.requires_grad and not loss.requires_grad:
            raise AlgorithmError(
                f"{self.part} must return a loss that depends on inputs.log_probs, or nothing is "
                "learnt, got one without a gradient (was it detached?)."
            )
        if self._is_looking_for_offenders:
            self._warn_of_non_finite(loss, inputs)
        return policy._replace(means=self._per_token(policy.means, inputs))

    def _per_token(self, means: Mapping[str, Any], inputs: PolicyLossInputs) -> Columns:
        """Return the metrics of a policy loss with a value for each token.

        Raises AlgorithmError for another shape, and for names that differ from those of the call
        before: ranks add the metrics up in their order.
        """
        if not isinstance(means, Mapping):
            raise self.part.must_return("a dict of metrics as means", means)
        log_probs = inputs.log_probs.detach()
        per_token = {}
        for name, value in means.items():
            is_number = isinstance(value, Tensor | int | float)
            tensor = torch.as_tensor(value).detach().to(log_probs.device) if is_number else None
            if tensor is not None and tensor.numel() == 1:
                tensor = tensor.reshape(()).expand_as(log_probs)
            if tensor is None or tensor.shape != log_probs.shape:
                expected = f"a number, or one for each token, as means['{name}']"
                raise self.part.must_return(expected, value)
            per_token[name] = tensor

        if self._names is None:
            self._names = sorted(per_token)
        if sorted(per_token) != self._names:
            raise AlgorithmError(
                f"{self.part} must return the same metrics each time, got "
                f"{', '.join(sorted(per_token)) or 'none'} after "
                f"{', '.join(self._names) or 'none'}. Return 0 for one without a value."
            )
        return {name: per_token[name] for name in self._names}

    def _kl(self, outputs: Columns, columns: Columns) -> Tensor:
        """Return the KL to the reference (M,): exact, or estimated from the drawn tokens."""
        if self.config.needs_exact_kl:
            return outputs["ref_kl"]
        kind = self.config.kl_loss_type
        return kl_penalty(outputs["log_probs"], columns["ref_log_prob"], kind)

    def _warn_of_non_finite(self, loss: Tensor, inputs: PolicyLossInputs) -> None:
        """Warn where the loss is not finite for finite inputs."""
        read = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.weights)
        if not loss.isfinite() and all(column.isfinite().all() for column in read):
            say_once(
                f"{self.part} gave {loss.item()} for finite log-probs and advantages.",
                logging.WARNING,
            )

    def begin(self, mini_batch: DataProto, infer: Callable[[], Columns], data: Axis) -> None:
        """Write `selected` for a loss that has a selection. See `Objective.begin`."""
        self._is_looking_for_offenders = False
        is_read = self.distillation is None or not self.distillation.is_whole_loss
        if self.selection is None or not is_read:
            return

        columns = mini_batch.batch
        mask = columns["response_mask"].bool()
        log_probs = infer()["log_probs"]
        old = columns["old_log_probs"] if "old_log_probs" in columns.keys() else log_probs
        read = (log_probs, old, columns["advantages"], token_noise(mini_batch))
        mine = [column[mask].cpu() for column in read]
        by_rank = gather_objects(mine, data)
        whole = SelectionInputs(*map(torch.cat, zip(*by_rank)))
        chosen = self.selection(whole, **self.settings)

        first = sum(len(pieces[0]) for pieces in by_rank[: data.rank])
        selected = torch.zeros(mask.shape)
        selected[mask] = chosen[first : first + len(mine[0])].float()
        columns["selected"] = selected

    def restart(self) -> None:
        """Forget the rows of this mini-batch. See `Objective.restart`."""
        if self._num_updates == 0:
            self._seen = []
        self._seen_by_age = []

    def end(self) -> None:
        """End the passes: rows that run again do not count again in the mismatch."""
        self._num_updates += 1
        self._is_looking_for_offenders = True

    def take_mismatch(self, data: Axis = ALONE) -> dict[str, float]:
        """Return how far trainer and rollout engine disagree on the tokens of the last update.

        Tokens are those of all ranks along `data`. Empty unless the update computed the old
        log-probs itself, except for the mismatch by age, where tokens have one. With
        `compares_first` they are those of the first mini-batch, before the weights change.
        """
        self._num_updates = 0
        seen = self._seen
        self._seen = []
        by_age = mismatch_by_age(self._seen_by_age, data)
        self._seen_by_age = []
        if not seen:
            return by_age
        trainer, rollout, mask = map(torch.cat, zip(*seen))
        return {**mismatch_of_all(rollout, trainer, mask, data), **by_age}


def metric_name(name: str) -> str:
    """Return the metric of an entry of a policy loss: `actor/<name>`, or a name with a slash."""
    return name if "/" in name else f"actor/{name}"


def mismatch_by_age(seen: Sequence[tuple[Tensor, ...]], data: Axis) -> dict[str, float]:
    """Compute the mismatch apart for tokens of each age, over all ranks along `data`.

    `fully_async/age_<a>/kl` is the mean of log p_rollout - log p_trainer in the update, an estimate
    of the KL divergence; `fully_async/age_<a>/ess` the effective share of these tokens under
    importance weighting, see `mismatch_metrics`.

    Args:
        seen: log-probs of the trainer and of the rollout, mask and age of packed tokens.
    """
    if not seen:
        return {}
    trainer, rollout, mask, age = map(torch.cat, zip(*seen))
    keep = mask.bool()
    mine = tuple(column[keep].cpu() for column in (trainer, rollout, age))
    trainer, rollout, age = map(torch.cat, zip(*gather_objects(mine, data)))
    metrics = {}
    for each in age.unique().tolist():
        own = age == each
        found = mismatch_metrics(rollout[own], trainer[own], own[own])
        metrics[f"fully_async/age_{each}/kl"] = found["training/rollout_kl"]
        metrics[f"fully_async/age_{each}/ess"] = found["training/rollout_ess"]
    return metrics


def _is_shortage(error: Exception) -> bool:
    """Return whether memory ran out: the engine handles that, by smaller passes."""
    return shortage_of(error, torch.device("cpu")) is not None


def describe_loss(
    config: ActorConfig,
    distillation: DistillationTerm | None = None,
    reinforce: RolloutReinforce | None = None,
) -> str:
    """Describe the actor's loss: the formula of a token, r = pi / pi_old, and the aggregation."""
    name = config.policy_loss.loss_mode
    loss = policy_losses.get(name)
    formula = getattr(loss, "formula", "a loss of your own")
    terms = [f"{name}: {formula.format(**loss_settings(config))}"]
    if reinforce is not None:
        terms = [reinforce.describe()]
    if distillation is not None:
        divergence = f"{distillation.coef:g} {distillation.kind}(pi, teacher)"
        if distillation.is_whole_loss:
            terms = [divergence]
        else:
            terms.append(f"+ {divergence}")
    if config.entropy_coeff != 0:
        terms.append(f"- {config.entropy_coeff:g} entropy")
    if config.use_kl_loss:
        terms.append(f"+ {config.kl_loss_coef:g} KL(pi, reference) by {config.kl_loss_type}")
    for term in config.loss_extra:
        terms.append(f"+ {term.coef:g} {term.name}")

    mode = config.loss_agg_mode
    return f"{' '.join(terms)}. {mode}: {AGGREGATION_FORMULAS[mode]}."


def token_noise(batch: DataProto) -> Tensor:
    """Draw uniform numbers in [0, 1) for the response tokens, (B, R).

    They are a function of uid (which includes the step), response and position, so they do not
    depend on the rank that has the row, nor on the other rows.
    """
    mask = batch.batch["response_mask"].bool()
    tokens = batch.batch["input_ids"][:, -mask.shape[1] :]
    uids = batch.non_tensor_batch.get("uid", np.full(len(mask), "", dtype=object))
    noise = []
    for uid, row, own in zip(uids, tokens, mask):
        response = row[own].cpu().numpy().tobytes()
        key = [zlib.crc32(str(uid).encode()), zlib.crc32(response)]
        noise.append(np.random.default_rng(key).random(mask.shape[1]))
    return torch.from_numpy(np.stack(noise))


def mismatch_of_all(rollout: Tensor, trainer: Tensor, mask: Tensor, data: Axis) -> dict[str, float]:
    """Compute `mismatch_metrics` over the tokens of all ranks along `data`; each must call.

    Empty without any token, as in a mini-batch of dropped episodes.
    """
    if data.size > 1:
        keep = mask.bool()
        pieces = gather_objects((rollout[keep].cpu(), trainer[keep].cpu()), data)
        rollout, trainer = map(torch.cat, zip(*pieces))
        mask = torch.ones_like(rollout)
    if not mask.any():
        return {}
    return mismatch_metrics(rollout, trainer, mask)


class ValueObjective(Objective):
    """The clipped value loss of PPO."""

    def __init__(self, cliprange_value: float) -> None:
        self.cliprange_value = cliprange_value

    def columns(self, available: set[str]) -> list[str]:
        return ["values", "returns"]

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        result = clipped_value_loss(
            outputs["values"],
            columns["values"],
            columns["returns"],
            columns["weights"],
            cliprange_value=self.cliprange_value,
        )
        means = {f"critic/{name}": value for name, value in result.means.items()}
        return LossOutput(
            loss=result.loss, means=means, sums={"critic/vf_loss": result.loss.detach()}
        )


class LanguageModelObjective(Objective):
    """Cross-entropy of the response tokens: supervised fine-tuning."""

    def columns(self, available: set[str]) -> list[str]:
        return []

    def __call__(self, outputs: Columns, columns: Columns, sequence: Tensor) -> LossOutput:
        loss = -(outputs["log_probs"] * columns["weights"]).sum()
        return LossOutput(loss=loss, sums={"train/loss": loss.detach()})
