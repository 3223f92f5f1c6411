"""Optimizers, and their state in a checkpoint."""

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.config import OptimConfig
from verl.config.choices import OPTIMIZERS
from verl.distributed.fsdp import shard_like
from verl.models.vision import language_layers
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.imports import require


def build_optimizer(module: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer that `optim.optimizer` names, over the trained parameters of `module`.

    Call it after sharding, which replaces the parameters.

    AdamW: Loshchilov & Hutter 2019 (arXiv:1711.05101, algorithm 2), fused: one kernel on CUDA, one
    pass on CPU. Weights, biases and norms decay alike, as users of verl's recipes expect of
    `optim.weight_decay`.
    AdamW8bit: the same with moments of 8 bits, on one rank.
    Muon: matrices of the decoder layers by orthogonalised momentum (Jordan et al. 2024), at the
    size of AdamW's updates (Liu et al. 2025, arXiv:2502.16982), so that one learning rate serves
    both; all else by AdamW.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"Trained parameters must be fp32, found {parameter.dtype}: small updates would be "
                "rounded away. Load the model with dtype=torch.float32; on CUDA forward and "
                "backward still run in bf16."
            )

    if config.optimizer == "AdamW":
        return _adamw(trained, config)
    if config.optimizer == "AdamW8bit":
        return _adamw_8bit(trained, config)
    if config.optimizer == "Muon":
        return _muon_and_adamw(trained, module, config)
    raise ConfigError(
        f"optim.optimizer must be one of {', '.join(OPTIMIZERS)}, got '{config.optimizer}'."
    )


def moment_tensors(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Return the tensors that an optimizer has made so far."""
    tensors: list[Tensor] = []
    for state in optimizer.state.values() if optimizer is not None else ():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers over different parameters, with one `step`, `state` and list of groups."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for part in parts for group in part.param_groups], {})
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        for part in self.parts:
            part.step()


def _muon_and_adamw(
    trained: list[nn.Parameter], module: nn.Module, config: OptimConfig
) -> JointOptimizer:
    hidden: set[int] = set()  # matrices of the decoder layers
    for layer in language_layers(module):
        hidden |= {id(weight) for weight in layer.parameters() if weight.ndim == 2}

    muon = torch.optim.Muon(
        [parameter for parameter in trained if id(parameter) in hidden],
        lr=config.lr,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    others = [parameter for parameter in trained if id(parameter) not in hidden]
    return JointOptimizer(_adamw(others, config), muon)


def _adamw(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=True, **_settings(config))


def _adamw_8bit(parameters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if any(parameter.device_mesh.size() > 1 for parameter in sharded):
        raise ConfigError(
            "optim.optimizer=AdamW8bit works on one rank: its blocks of moments cannot be put "
            "together from several. Set optim.optimizer=AdamW; over several ranks every one keeps "
            "only its share of the moments."
        )
    require("torchao.optim", "optim.optimizer=AdamW8bit", "pip install torchao")
    return importlib.import_module("verl.engine.adamw_8bit").AdamW8bit(
        parameters, **_settings(config)
    )


def _settings(config: OptimConfig) -> dict[str, Any]:
    betas = (config.betas[0], config.betas[1])
    return {"lr": config.lr, "betas": betas, "eps": config.eps, "weight_decay": config.weight_decay}


# ---------------------------------------------------------------- moments in a checkpoint


def restore_moments(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    saved: dict[str, dict[str, Any]],
) -> None:
    """Put moments into the optimizer's state, whole or sharded as their parameter is.

    Args:
        saved: moments by the name of their parameter.

    Raises CheckpointError where they are of other parameters or of another optimizer.
    """
    from_saved = getattr(optimizer, "moment_from_saved", _moment_from_saved)
    parameters = dict(named_parameters)
    names = _moment_names(optimizer)

    optimizer.state.clear()
    for name, moments in saved.items():
        parameter = parameters.get(name)
        expected = None if parameter is None else names.get(parameter)
        if parameter is None or expected != set(moments):
            fact = "does not keep"
            keys = "optim.optimizer"
            if expected is None:
                fact = "does not train"
                keys = "optim.optimizer, freeze_vision_tower and lora_rank"
            raise CheckpointError(
                f"The checkpoint has moments {sorted(moments)} of '{name}', which this run {fact}. "
                f"Set {keys} as when they were saved, or start another run from the checkpoint's "
                "weights."
            )

        state = {}
        for key, value in moments.items():
            state[key] = from_saved(key, value, parameter)
        optimizer.state[parameter] = state


def _moment_from_saved(key: str, saved: Any, parameter: Tensor) -> Tensor:
    if isinstance(saved, dict):
        raise CheckpointError(
            "The checkpoint's moments are in 8 bits. Set optim.optimizer=AdamW8bit, as it was then."
        )
    # The fused step counts on the device; the counter is a scalar and never sharded.
    if key == "step":
        return saved.to(parameter.device)
    return shard_like(saved, parameter.detach())


def _moment_names(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, set[str]]:
    """Return the names of the moments that the optimizer keeps for each of its parameters."""
    parts = optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,)
    names: dict[nn.Parameter, set[str]] = {}
    for part in parts:
        kept = {"step", "exp_avg", "exp_avg_sq"}
        if isinstance(part, torch.optim.Muon):
            kept = {"momentum_buffer"}
        for group in part.param_groups:
            names |= dict.fromkeys(group["params"], kept)
    return names
