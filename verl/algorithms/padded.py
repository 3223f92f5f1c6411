"""Adapt losses and estimators between verl's padded signatures and ours, both ways.

A user's padded loss sees one micro-batch at a time. Where it aggregates by `agg_loss` its share of
the mini-batch is the right one; where it looks at the micro-batch as a whole (means, quantiles,
random picks) its gradient depends on micro-batching, which no adapter can fix. The log at start
says so.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from verl.algorithms.advantages import AdvantageInputs
from verl.algorithms.masked import aggregation_weights
from verl.algorithms.policy_losses import (
    PolicyLossInputs,
    PolicyLossOutput,
    SelectionInputs,
    policy_losses,
    selections,
)
from verl.config import ActorConfig, AlgorithmConfig
from verl.config.choices import SEQUENCE_LOSSES
from verl.utils.signatures import taken_by
from verl.utils.user_parts import NamedPart

Scalar = Float[Tensor, ""]
_METRICS = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")


def loss_settings(config: Any = None) -> dict[str, Any]:
    """Collect the settings that a policy loss gets by name, from the actor's section.

    Args:
        config: that section, a mapping or an object with some of its fields (the others have their
            defaults), or None.
    """
    defaults = ActorConfig()
    both = setting_of(config, "clip_ratio", defaults.clip_ratio)
    settings = {
        "clip_ratio_low": setting_of(config, "clip_ratio_low", both),
        "clip_ratio_high": setting_of(config, "clip_ratio_high", both),
        "clip_ratio_c": setting_of(config, "clip_ratio_c", defaults.clip_ratio_c),
    }

    policy_loss = setting_of(config, "policy_loss", {})
    for name, default in asdict(defaults.policy_loss).items():
        settings[name] = setting_of(policy_loss, name, default)
    settings |= settings.pop("loss_kwargs")

    settings["actor"] = config  # for users' padded losses, which take the section itself
    return settings


def setting_of(section: Any, key: str, default: Any = None) -> Any:
    """Return a value of a section, a mapping or an object; `default` if it is missing or None."""
    value = section.get(key) if isinstance(section, Mapping) else getattr(section, key, None)
    return default if value is None else value


class ConfigView:
    """A section of the configuration with the reads of verl: attribute, `[]`, `get` and `in`."""

    def __init__(self, section: Any) -> None:
        self._section = section

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        return ConfigView(value) if is_dataclass(value) else value

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and hasattr(self._section, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name) if name in self else default


def _viewed(section: Any) -> Any:
    return ConfigView(section) if is_dataclass(section) else section


class PaddedPolicyLoss:
    """A policy loss made of a function of padded tensors, (rows, longest response).

    Called as `function(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)`,
    it returns (loss, clip_fraction, ppo_kl, clip_fraction_lower), or, as in later versions of verl,
    (loss, {name of a metric: number}).
    """

    formula = (
        "a loss of verl's padded signature, called a micro-batch at a time: it may depend on their "
        "size"
    )

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__module__ = function.__module__  # a user's

    def __call__(
        self, inputs: PolicyLossInputs, *, loss_agg_mode: str, actor: Any = None, **_: Any
    ) -> PolicyLossOutput:
        rows, slot = torch.unique(inputs.sequence, return_inverse=True)
        order = slot.argsort(stable=True)
        lengths = torch.bincount(slot, minlength=len(rows))
        first = lengths.cumsum(0) - lengths
        column = torch.empty_like(order)
        column[order] = torch.arange(len(order), device=order.device) - first[slot[order]]
        width = int(lengths.max()) if len(rows) else 0

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(len(rows), width).index_put((slot, column), values)

        mask = padded(inputs.own.long())
        scale = _share(inputs, aggregation_weights(mask, loss_agg_mode)[slot, column])
        old, new, advantages = map(
            padded, (inputs.old_log_probs, inputs.log_probs, inputs.advantages)
        )
        answer = self.function(old, new, advantages, mask, loss_agg_mode, _viewed(actor))
        loss, metrics = self._read(answer)
        means = {}
        for name, number in metrics.items():
            number = number.detach().to(inputs.advantages)
            means[name.removeprefix("actor/")] = number.expand_as(inputs.advantages)
        return PolicyLossOutput(loss=loss * scale, means=means)

    def _read(self, answer: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of either form, as scalars."""
        part = NamedPart("policy loss", self.function.__name__, self.function)
        values = list(answer) if isinstance(answer, tuple | list) else []
        if len(values) == 2 and isinstance(values[1], Mapping):
            metrics = dict(values.pop())
        else:
            metrics = dict(zip(_METRICS, values[1:]))
            values = values[: -len(metrics)] if metrics else values

        loss = _as_scalar(values[0]) if len(values) == 1 else None
        scalars = {}
        for name, value in metrics.items():
            scalar = _as_scalar(value)
            if scalar is None:
                raise part.must_return(f"a number as the metric '{name}'", value)
            scalars[str(name)] = scalar
        if loss is None:
            raise part.must_return(
                f"four numbers, (loss, {', '.join(_METRICS)}), or a number and a dict of numbers, "
                "(loss, metrics)",
                answer,
            )
        return loss, scalars


def _as_scalar(value: Any) -> Tensor | None:
    """Return a number or a tensor of one number as a scalar; None for anything else."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor.reshape(()) if tensor.numel() == 1 else None


def _share(inputs: PolicyLossInputs, local: Tensor) -> float:
    """Return the share of the micro-batch's aggregate in the mini-batch's, equal for all tokens."""
    shares = inputs.weights[inputs.own] / local[inputs.own]
    if not shares.numel():
        return 0.0
    assert (shares - shares[0]).abs().max() <= 1e-4 * shares[0].abs(), (
        "weighed tokens are refused at start"
    )
    return shares[0].item()


def padded_signature(name: str) -> Callable[..., tuple[Scalar, Scalar, Scalar, Scalar]]:
    """Return the registered loss `name` as a function of padded (B, R) tensors, as in verl."""
    loss = policy_losses.get(name)
    if isinstance(loss, PaddedPolicyLoss):
        return loss.function
    return _of_padded_tensors(name, loss)


@functools.cache
def _of_padded_tensors(
    name: str, loss: Callable[..., PolicyLossOutput]
) -> Callable[..., tuple[Scalar, Scalar, Scalar, Scalar]]:
    def policy_loss(
        old_log_prob: Float[Tensor, "B R"],
        log_prob: Float[Tensor, "B R"],
        advantages: Float[Tensor, "B R"],
        response_mask: Shaped[Tensor, "B R"],
        loss_agg_mode: str = "seq-mean-token-mean" if name in SEQUENCE_LOSSES else "token-mean",
        config: Any = None,
    ) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        settings = loss_settings(config)
        return padded_loss(
            name, old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, settings
        )

    policy_loss.__name__ = name
    policy_loss.__doc__ = loss.__doc__
    return policy_loss


def padded_loss(
    name: str,
    old_log_prob: Float[Tensor, "B R"],
    log_prob: Float[Tensor, "B R"],
    advantages: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    loss_agg_mode: str,
    settings: Mapping[str, Any],
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """Compute (loss, clip_fraction, ppo_kl, clip_fraction_lower) of a whole mini-batch.

    Random picks come from torch's generator.
    """
    keep = response_mask.bool()
    weights = aggregation_weights(response_mask, loss_agg_mode).to(log_prob.dtype)
    rows = torch.arange(len(keep), device=keep.device)[:, None].expand_as(keep)
    new = log_prob[keep]
    old = old_log_prob[keep]
    gains = advantages[keep]

    selected = None
    if name in selections:
        noise = torch.rand(len(new), dtype=torch.float64, device=new.device)
        whole = SelectionInputs(new.detach(), old, gains, noise)
        selected = selections.get(name)(whole, **settings)

    inputs = PolicyLossInputs(new, old, gains, weights[keep], rows[keep], selected=selected)
    output = policy_losses.get(name)(inputs, loss_agg_mode=loss_agg_mode, **settings)

    def mean(metric: str) -> Scalar:
        if metric not in output.means:
            return torch.zeros_like(output.loss)
        values = torch.as_tensor(output.means[metric])
        return mean_of(values) if values.dim() else values

    return output.loss, mean("pg_clipfrac"), mean("ppo_kl"), mean("pg_clipfrac_lower")


def mean_of(values: Float[Tensor, " N"]) -> Scalar:
    """Average the values; 0 without any."""
    return values.sum() / max(len(values), 1)


class PaddedEstimator:
    """An advantage estimator made of `function(token_level_rewards, response_mask, index, ...)`.

    The function gets the arguments that it takes, by verl's names. `index` numbers the prompts.
    """

    formula = "an estimator of verl's signature"

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__module__ = function.__module__  # a user's

    def __call__(self, inputs: AdvantageInputs, **own: Any) -> tuple[Tensor, Tensor]:
        section = inputs.config or AlgorithmConfig(
            gamma=inputs.gamma, lam=inputs.lam, norm_adv_by_std_in_grpo=inputs.norm_by_std
        )
        given: dict[str, Any] = {
            "token_level_rewards": inputs.token_level_rewards,
            "response_mask": inputs.response_mask,
            "config": _viewed(section),
            "gamma": inputs.gamma,
            "lam": inputs.lam,
            "values": inputs.values,
            "index": None if inputs.group is None else inputs.group.cpu().numpy(),
            "reward_baselines": inputs.columns.get("reward_baselines"),
        }

        known = {name: value for name, value in given.items() if value is not None}
        return self.function(**taken_by(self.function, {**known, **own}))
