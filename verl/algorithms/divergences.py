"""Divergences of two distributions over the whole vocabulary, with their exact gradients.

p is the policy (the student), q the frozen reference or teacher, both given as log-probs. Gradients
are by the policy's logits y, of which log p = log_softmax(y).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from verl.utils.errors import ConfigError

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def divergence(
    log_p: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"], kind: str, beta: float = 0.5
) -> Float[Tensor, " M"]:
    """Compute the divergence of each token, in nats.

        reverse_kl  KL(p || q) = sum p (log p - log q)
        forward_kl  KL(q || p) = sum q (log q - log p)
        jsd         beta KL(q || m) + (1 - beta) KL(p || m),  m = beta q + (1 - beta) p

    jsd is the generalized Jensen-Shannon divergence, eq. (1) of Agarwal et al. 2024
    (arXiv:2306.13649) with the teacher q as its P: divided by beta it tends to forward_kl as beta
    goes to 0, divided by 1 - beta to reverse_kl as beta goes to 1.
    """
    if kind == "reverse_kl":
        return _kl(log_p, log_q)
    if kind == "forward_kl":
        return _kl(log_q, log_p)
    if kind == "jsd":
        log_m = _log_mixture(log_p, log_q, beta)
        return beta * _kl(log_q, log_m) + (1 - beta) * _kl(log_p, log_m)
    raise _unknown(kind)


def divergence_gradient(
    log_p: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"], kind: str, beta: float = 0.5
) -> Float[Tensor, "M V"]:
    """Compute the gradient of each token's `divergence` by its logits.

    reverse_kl  p (log p - log q - KL(p || q))
    forward_kl  p - q
    jsd         (1 - beta) p (log p - log m - KL(p || m))
    """
    if kind == "reverse_kl":
        return _reverse_gradient(log_p, log_q)
    if kind == "forward_kl":
        return log_p.exp() - log_q.exp()
    if kind == "jsd":
        return (1 - beta) * _reverse_gradient(log_p, _log_mixture(log_p, log_q, beta))
    raise _unknown(kind)


def _kl(log_a: Float[Tensor, "M V"], log_b: Float[Tensor, "M V"]) -> Float[Tensor, " M"]:
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def _reverse_gradient(
    log_p: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"]
) -> Float[Tensor, "M V"]:
    p = log_p.exp()
    difference = log_p - log_q
    mean = (p * difference).sum(-1, keepdim=True)
    return p * (difference - mean)


def _log_mixture(
    log_p: Float[Tensor, "M V"], log_q: Float[Tensor, "M V"], beta: float
) -> Float[Tensor, "M V"]:
    if not 0 < beta < 1:
        raise ConfigError(
            f"The generalized JSD needs a beta between 0 and 1, got {beta}. For the limits take "
            "forward_kl (0) or reverse_kl (1)."
        )
    return torch.logaddexp(log_q + math.log(beta), log_p + math.log(1 - beta))


def _unknown(kind: str) -> ConfigError:
    return ConfigError(f"Divergence must be one of {', '.join(DIVERGENCES)}, got '{kind}'.")
