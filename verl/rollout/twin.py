"""A second module object of the trainer's model class, whose weights an engine reads."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.models.lora import adapted_layers, plain_modules, plain_parameters
from verl.utils.errors import ConfigError, RolloutError
from verl.utils.registry import nearest_names
from verl.utils.reserved_memory import ReservedMemory

# Linear layers that transformers' modules apply to one input.
_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_ALIGNMENT = 256  # bytes; the widest loads of matrix kernels need 16, and memory moves in lines of 128

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "float64": torch.float64,
}


def engine_dtype(name: str | None, model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """The dtype that `rollout.dtype` names; None is bfloat16 on CUDA and the trainer's own dtype on CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else next(model.parameters()).dtype
    if name not in _DTYPES:
        raise ConfigError(f"Unknown actor_rollout_ref.rollout.dtype '{name}'. Known: {', '.join(_DTYPES)}.")
    return _DTYPES[name]


class ModelTwin:
    """`module` computes what the trainer's model computes, with its own attention, in eval mode.

    It is built on meta, so nothing that the trainer hangs on its module (adapters, checkpointing, compile, hooks, train
    mode) reaches it. On CPU a parameter whose dtype agrees is the trainer's own: an optimizer step is seen at once and
    nothing is copied. Every other parameter, a weight that LoRA has adapters for among them, is a copy at an address of
    its own, which on CUDA outlives `release` and `restore`; there the weights that several linear layers apply to one
    input lie behind one another (see `stacked`).
    """

    def __init__(self, model: PreTrainedModel, *, attention: str, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.dtype = dtype
        self._source = model
        self._parameters = dict(plain_parameters(model))
        self._merged = {f"{name}.weight" for name in adapted_layers(model)}
        self._places = _places(model, self._parameters)
        self._aliased: set[str] = set()
        self._num_updates = 0
        self.module = _meta_copy(model, attention)
        self._memory: ReservedMemory | None = None
        self._offsets: dict[str, int] = {}
        if device.type == "cuda":
            self._offsets, num_bytes = self._lay_out()
            self._memory = ReservedMemory(num_bytes, device)
            self._memory.grow(num_bytes)
        self.ready = True  # False while some weight is missing: after `release`, or a hand-over that failed
        for name, parameter in self._parameters.items():
            if self._can_alias(parameter) and name not in self._merged:
                self._aliased.add(name)
                self._place(name, parameter)
            else:
                self._place(name, self._new_copy(name, parameter))
                self._fill_at_start(name, parameter)
        _share_other_tensors(model, self.module, device)
        self.module.eval()

    @property
    def version(self) -> object:
        """Differs whenever the weights do: the number of updates, and what autograd counts of changes in place."""
        return self._num_updates, sum(self._parameters[name]._version for name in self._aliased)

    @property
    def copied_bytes(self) -> int:
        """Memory of the parameters that are not the trainer's own."""
        copies = (self._parameters[name] for name in self._parameters if name not in self._aliased)
        return sum(parameter.numel() * self._dtype_of(parameter).itemsize for parameter in copies)

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take every parameter by name. Raises RolloutError where a name is unknown, missing or of another shape; the
        weights count as incomplete then, until an update succeeds."""
        self.ready = False
        self._num_updates += 1
        missing = set(self._parameters)
        tied = {place: name for name, places in self._places.items() for place in places}
        for given, tensor in named_tensors:
            if given not in tied:
                raise RolloutError(
                    f"update_weights got '{given}', which the model does not have. "
                    f"Nearest of its parameters: {nearest_names(given, list(self._parameters))}."
                )
            name = tied[given]
            expected = self._parameters[name].shape
            if tensor.shape != expected:
                raise RolloutError(
                    f"update_weights got '{given}' of shape {tuple(tensor.shape)}, the model has {tuple(expected)}. "
                    "Hand over whole parameters, gathered from all shards."
                )
            self._take(name, tensor)
            missing.discard(name)
        if missing:
            shown = ", ".join(sorted(missing)[:5])
            raise RolloutError(
                f"update_weights must give all {len(self._parameters)} parameters, {len(missing)} are missing: {shown}"
                f"{' ...' if len(missing) > 5 else ''}."
            )
        self.ready = True

    def release(self) -> None:
        """Give the memory of copies on CUDA back. Their addresses stay, and nothing may read them until `restore`."""
        if self._memory is not None:
            self._memory.release()
            self.ready = False

    def restore(self) -> None:
        """Memory for what `release` gave back. `update` has to fill it."""
        if self._memory is not None:
            self._memory.grow(self._memory.num_bytes)

    def stacked(self, linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight (sum of N, K) and bias (sum of N,) of linear layers with one input: one matrix over their memory."""
        weights = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        return self._joined(weights), self._joined(biases) if biases else None

    def _joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        first, rows = parts[0], 0
        for part in parts:
            assert part.data_ptr() == first.data_ptr() + rows * first.stride(0) * first.itemsize, "not stacked"
            rows += part.shape[0]
        assert self._memory is not None
        offset = next(self._offsets[name] for name in self._parameters if self._placed(name) is first)
        return self._memory.tensor(offset, (rows, *first.shape[1:]), first.dtype)

    def _lay_out(self) -> tuple[dict[str, int], int]:
        """Where each parameter starts, and how many bytes all take."""
        offsets: dict[str, int] = {}
        end = 0
        for names in _stacks(self.module, list(self._parameters)):
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            for name in names:
                offsets[name] = end
                parameter = self._parameters[name]
                end += parameter.numel() * self._dtype_of(parameter).itemsize
        return offsets, end

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        source = self._parameters[name]
        if self._can_alias(source) and tensor.data_ptr() == source.data_ptr():
            self._aliased.add(name)
            self._place(name, source)
            return
        if name in self._aliased:
            # Other memory than the trainer's: writing through the alias would change the trainer's weights.
            self._aliased.discard(name)
            self._place(name, self._new_copy(name, source))
        with torch.no_grad():
            self._placed(name).copy_(tensor)

    def _can_alias(self, parameter: torch.Tensor) -> bool:
        if self.device.type != "cpu" or parameter.device != self.device or isinstance(parameter, DTensor):
            return False
        return parameter.dtype == self._dtype_of(parameter)

    def _dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        return self.dtype if parameter.is_floating_point() else parameter.dtype

    def _new_copy(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        if self._memory is not None:
            return self._memory.tensor(self._offsets[name], parameter.shape, self._dtype_of(parameter))
        return torch.empty(parameter.shape, dtype=self._dtype_of(parameter), device=self.device)

    def _fill_at_start(self, name: str, parameter: torch.Tensor) -> None:
        if isinstance(parameter, DTensor) or parameter.is_meta:
            self.ready = False  # a shard is not the parameter: the first `update` brings it
            return
        with torch.no_grad():
            self._placed(name).copy_(parameter)

    def _placed(self, name: str) -> torch.Tensor:
        return self.module.get_parameter(name)

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        parameter = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=False)
        for place in self._places[name]:
            owner, _, attribute = place.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)


def _places(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    """Where each parameter stands: its own name, and those of the modules tied to it."""
    first_name = {id(parameter): name for name, parameter in parameters.items()}
    places: dict[str, list[str]] = {name: [] for name in parameters}
    for name, parameter in plain_parameters(model, remove_duplicate=False):
        places[first_name[id(parameter)]].append(name)
    return places


def _stacks(module: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """`names` of parameters, those that belong behind one another together."""
    stacks: list[list[str]] = []
    for path, owner in module.named_modules():
        for siblings in _ONE_INPUT:
            linears = [getattr(owner, sibling, None) for sibling in siblings]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                for kind in ("weight", "bias"):
                    stack = [f"{path}.{sibling}.{kind}" for sibling in siblings]
                    if all(name in names for name in stack):
                        stacks.append(stack)
    stacked = {name for stack in stacks for name in stack}
    return [*stacks, *([name] for name in names if name not in stacked)]


def _meta_copy(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    # fully_shard puts a class of its own in front of the model's.
    model_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        twin: Any = model_class(config)
    twin.set_attn_implementation(attention)
    return twin


def _share_other_tensors(model: nn.Module, twin: nn.Module, device: torch.device) -> None:
    """Give the twin the model's buffers, and the tensors that stand on modules as plain attributes."""
    for name, original in plain_modules(model):
        mine = twin.get_submodule(name)
        for key, buffer in original._buffers.items():
            if buffer is not None:
                mine._buffers[key] = buffer.to(device)
        for key, value in vars(mine).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                setattr(mine, key, getattr(original, key).to(device))
    stranded = [name for name, tensor in (*twin.named_parameters(), *twin.named_buffers()) if tensor.is_meta]
    assert not stranded, f"tensors left on meta: {stranded}"
