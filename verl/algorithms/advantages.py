"""Signature and registry of advantage estimators, and generalised advantage estimation."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from verl.algorithms.masked import masked_whiten
from verl.utils.errors import ConfigError
from verl.utils.phases import phase
from verl.utils.registry import Registry

Function = TypeVar("Function", bound=Callable[..., Any])


class AdvantageInputs(NamedTuple):
    """One batch. Give fields by name: estimators to come may add some, always with a default."""

    token_level_rewards: Float[Tensor, "B R"]  # 0 where there is no reward
    response_mask: Shaped[Tensor, "B R"]  # 1 where the model made the token
    group: Int[Tensor, " B"] | None = None  # rows of one prompt share a number
    values: Float[Tensor, "B R"] | None = None  # the critic's, before each token
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    # rewards of several kinds, which gdpo keeps apart
    components: Float[Tensor, "B K"] | None = None
    component_weights: Float[Tensor, " K"] | None = None
    # any other column that a user's own estimator reads: tensors, and arrays of objects, such as
    # the fields that the reward returns
    columns: Mapping[str, Any] = MappingProxyType({})
    config: Any = None  # the run's section `algorithm`, for a user's own estimator


# advantages and returns, both 0 where response_mask is 0
Advantages = tuple[Float[Tensor, "B R"], Float[Tensor, "B R"]]
# estimator(AdvantageInputs, **algorithm.adv_kwargs) -> Advantages
AdvantageEstimator = Callable[..., Advantages]
advantage_estimators: Registry[AdvantageEstimator] = Registry(
    "advantage estimator (algorithm.adv_estimator)"
)


def formula(text: str) -> Callable[[Function], Function]:
    """Attach the formula of an estimator or a loss, for the log at start.

    `{name}` in it stands for a setting of that name; other braces stay.
    """

    def note(function: Function) -> Function:
        function.__dict__["formula"] = text
        return function

    return note


def formula_of(function: Callable[..., Any], otherwise: str, settings: Mapping[str, Any]) -> str:
    """Return the formula of an estimator or a loss with its settings, or `otherwise`."""
    text = getattr(function, "formula", otherwise)
    for name, value in settings.items():
        text = text.replace("{" + name + "}", str(value))
    return text


@advantage_estimators.register("gae")
@formula(
    "sum over k of (gamma lam)^k (r + gamma V' - V), gamma = {gamma}, lam = {lam}; whitened over "
    "all tokens"
)
@phase(reads="token_level_rewards response_mask values")
def gae(inputs: AdvantageInputs) -> Advantages:
    """Estimate advantages by GAE, eqs. (11) and (16) of Schulman et al. 2016 (arXiv:1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t = delta_t + gamma lam A_{t+1},    return_t = A_t + V_t

    t counts the model's own tokens: the token after t is the next one under the mask, however many
    tool tokens stand between, which are not decayed through. A reward among those belongs to the
    model's token before them. V after the last token is 0. Advantages are then whitened over all
    tokens of the batch, as PPO does; returns are not.
    """
    if inputs.values is None:
        raise ConfigError(
            "adv_estimator=gae needs a critic's values, got none. Train a critic, or use grpo."
        )
    mask = inputs.response_mask.bool()
    advantages = unwhitened_gae(
        inputs.token_level_rewards, inputs.values, mask, inputs.gamma, inputs.lam
    )
    returns = torch.where(mask, advantages + inputs.values, 0.0)
    return masked_whiten(advantages, mask), returns


def unwhitened_gae(
    rewards: Float[Tensor, "B R"],
    values: Float[Tensor, "B R"],
    response_mask: Shaped[Tensor, "B R"],
    gamma: float,
    lam: float,
) -> Float[Tensor, "B R"]:
    """Compute A_t of `gae`, 0 where the mask is 0."""
    mask = response_mask.bool()
    # Number of the row's own token at or before each column (-1: none yet). Own tokens then move
    # together to the left, so that the next token is the next column.
    token = mask.long().cumsum(-1) - 1
    slot = token.clamp(min=0)
    counted = torch.where(token >= 0, rewards, 0.0)
    rewards = torch.zeros_like(rewards).scatter_add(-1, slot, counted)
    own_values = torch.where(mask, values, 0.0)
    values = torch.zeros_like(values).scatter_add(-1, slot, own_values)

    next_values = values
    if values.shape[1]:
        next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    deltas = rewards + gamma * next_values - values
    advantages = torch.zeros_like(deltas)
    last = deltas.new_zeros(len(deltas))
    for t in reversed(range(deltas.shape[1])):
        last = torch.add(deltas[:, t], last, alpha=gamma * lam)
        advantages[:, t] = last
    return torch.where(mask, advantages.gather(-1, slot), 0.0)
