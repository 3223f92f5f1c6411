"""How families of mixtures of experts choose experts, by the modules of transformers."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

# Families with Llama's decoder layer, in which all or some layers have experts for an MLP.
FUSED_EXPERT_FAMILIES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe")


class Routing(NamedTuple):
    """How a router turns the logits of E experts into scores of the k largest."""

    top_k: int
    # softmax over the chosen experts instead of all (gpt-oss)
    of_chosen: bool = False
    normalized: bool = False  # the k scores sum to one
    rounded: bool = True  # scores have the dtype of the states


class Weights(NamedTuple):
    """The weights of E experts, and the function between their products."""

    gate_up: Tensor  # (E, 2 I, H), any strides: the gates in front, or a gate before each up
    down: Tensor  # (E, H, I), any strides
    gate_up_bias: Tensor | None = None  # (E, 2 I)
    down_bias: Tensor | None = None  # (E, H)
    interleaved: bool = False
    # gpt-oss clamps gates and ups to `limit`, scales the gate's sigmoid and adds 1 to the ups.
    limit: float | None = None
    alpha: float = 1.0


class Mixture(NamedTuple):
    """The parts of a layer's mixture of experts.

    `shared` is an MLP that every token visits, weighted by the sigmoid of `shared_gate`.
    """

    router: Any
    routing: Routing
    experts: Any
    shared: Any = None
    shared_gate: Any = None

    @classmethod
    def of(cls, block: nn.Module, family: str) -> "Mixture | None":
        """Return the parts of a feed-forward block; None for a dense one or an unknown family."""
        parts: Any = block
        router = getattr(parts, "gate", None) or getattr(parts, "router", None)
        experts = getattr(parts, "experts", None)
        if router is None or experts is None or not hasattr(experts, "gate_up_proj"):
            return None

        if family == "gpt_oss":
            routing = Routing(router.top_k, of_chosen=True)
        elif family == "mixtral":
            routing = Routing(router.top_k, normalized=True, rounded=False)
        elif family in ("olmoe", "qwen2_moe", "qwen3_moe"):
            routing = Routing(router.top_k, normalized=router.norm_topk_prob)
        else:
            return None
        shared = getattr(parts, "shared_expert", None)
        shared_gate = getattr(parts, "shared_expert_gate", None)
        return cls(router, routing, experts, shared, shared_gate)

    @property
    def modules(self) -> list[nn.Module]:
        """Return the modules whose code this description replaces."""
        modules = [self.router, self.experts]
        if self.shared is not None:
            modules.append(self.shared)
        return modules

    @property
    def weights(self) -> Weights:
        """Return the experts' parameters as they are now."""
        experts = self.experts
        transposed = bool(getattr(experts, "is_transposed", False))
        return Weights(
            gate_up=experts.gate_up_proj.mT if transposed else experts.gate_up_proj,
            down=experts.down_proj.mT if transposed else experts.down_proj,
            gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
            down_bias=getattr(experts, "down_proj_bias", None),
            interleaved=not getattr(experts, "is_concatenated", True),
            limit=getattr(experts, "limit", None),
            alpha=getattr(experts, "alpha", 1.0),
        )


def mixtures(model: PreTrainedModel) -> list[Mixture]:
    """Return the mixtures of a model's layers, first layer first. Dense layers have none."""
    family = model.config.get_text_config().model_type
    found = []
    for module in model.modules():
        mixture = Mixture.of(module, family)
        if mixture is not None:
            found.append(mixture)
    return found
