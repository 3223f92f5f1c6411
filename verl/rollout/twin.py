"""A second module of the trainer's model class; an engine reads its weights."""

import copy
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

from verl.models.alibi import set_attention
from verl.models.load import torch_dtype
from verl.models.lora import adapted_layers, plain_modules, plain_parameters
from verl.rollout.eight_bits import SCALE_BYTES, EightBitLinear, Rows, replace_linears
from verl.utils.arithmetic import round_up
from verl.utils.errors import RolloutError
from verl.utils.registry import nearest_names
from verl.utils.reserved_memory import ReservedMemory
from verl.weight_sync.base import NamedTensors, TensorStream
from verl.weight_sync.fingerprint import Fingerprint, Part, fingerprints, parts_of

# Linear layers that transformers' modules apply to one input.
_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# bytes; the widest loads of matrix kernels need 16, and memory moves in lines of 128
_ALIGNMENT = 256


def engine_dtype(name: str | None, model: PreTrainedModel, device: torch.device) -> torch.dtype:
    """Return the dtype that `rollout.dtype` names.

    None is bfloat16 on CUDA, and the trainer's own dtype on CPU.
    """
    if name is not None:
        return torch_dtype(name)
    return torch.bfloat16 if device.type == "cuda" else next(model.parameters()).dtype


class ModelTwin:
    """`module` computes the same as the trainer's model, with its own attention, in eval mode.

    It is built on meta, so nothing that the trainer hangs on its module (adapters, checkpointing,
    compile, hooks, train mode) reaches it. On CPU a parameter of the same dtype is the trainer's
    own: an optimizer step is seen at once and nothing is copied. Every other parameter, a weight
    that LoRA has adapters for among them, is a copy at an address of its own, which on CUDA
    outlives `release` and `restore`; there the weights that several linear layers apply to one
    input lie behind one another (see `stacked`).

    `cuts` maps names of parameters to functions of the whole parameter. The twin has the results of
    these functions, always as copies.

    `quantization`: "fp8" or "int8" for weights of linear layers in eight bits. Every new value is
    rounded when it comes (see `verl.rollout.eight_bits`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        attention: str,
        dtype: torch.dtype,
        device: torch.device,
        cuts: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        quantization: str | None = None,
    ) -> None:
        assert not (quantization and cuts), "cut weights are not quantized"
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self._cuts = cuts or {}
        self._parameters = dict(plain_parameters(model))
        self._merged = {f"{name}.weight" for name in adapted_layers(model)}
        self._shapes: dict[str, torch.Size] = {}
        for name, parameter in self._parameters.items():
            whole = torch.empty(parameter.shape, device="meta")
            self._shapes[name] = self._cut(name, whole).shape

        self._places = _places(model, self._parameters)
        self._aliased: set[str] = set()
        self._held: dict[str, nn.Parameter] = {}
        self._num_updates = 0
        self.module = _meta_copy(model, attention)
        # by name of the weight
        self._linears: dict[str, EightBitLinear] = {}
        if quantization is not None:
            self._linears = replace_linears(self.module, quantization)
        # of weights in eight bits, as they came
        self._arrived: dict[str, Tensor] = {}
        self._memory: ReservedMemory | None = None
        self._offsets: dict[str, int] = {}
        self._scale_offsets: dict[str, int] = {}

        if device.type == "cuda":
            num_bytes = self._lay_out()
            self._memory = ReservedMemory(num_bytes, device)
            self._memory.grow(num_bytes)

        # False while some weight is missing: after `release`, or a hand-over that failed
        self.ready = True
        for name, parameter in self._parameters.items():
            if self._can_alias(name) and name not in self._merged:
                self._alias(name)
                continue

            self._place(name, self._new_copy(name))
            if name in self._linears:
                scales = (self._shapes[name][0], 1)
                self._linears[name].scales = self._empty(
                    self._scale_offsets, name, scales, torch.float32
                )
            if isinstance(parameter, DTensor) or parameter.is_meta:
                self.ready = False  # a shard is not the parameter: the first `update` brings it
            else:
                with torch.no_grad():
                    self._fill(name, parameter)

        _share_other_tensors(model, self.module, device)
        self.module.eval()

    @property
    def version(self) -> object:
        """Return a value that differs whenever the weights do.

        It holds the number of updates, and autograd's counts of changes in place.
        """
        return self._num_updates, sum(self._parameters[name]._version for name in self._aliased)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes of the parameters that are not the trainer's own."""
        return sum(self._num_bytes(name) for name in self._parameters if name not in self._aliased)

    @torch.no_grad()
    def update(self, named_tensors: NamedTensors) -> None:
        """Take every parameter by name.

        Raises RolloutError where a name is unknown or missing, or a shape differs. The weights are
        incomplete then, until an update succeeds.
        """
        self.ready = False
        self._num_updates += 1
        missing = set(self._parameters)
        tied: dict[str, str] = {}  # place of a parameter -> its name
        for name, places in self._places.items():
            tied |= dict.fromkeys(places, name)

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
                    f"update_weights got '{given}' of shape {tuple(tensor.shape)}, the model has "
                    f"{tuple(expected)}. Hand over whole parameters, gathered from all shards."
                )
            self._take(name, tensor)
            del tensor  # or it would live while the next one is made
            missing.discard(name)

        if missing:
            shown = ", ".join(sorted(missing)[:5])
            if len(missing) > 5:
                shown += " ..."
            raise RolloutError(
                f"update_weights must give all {len(self._parameters)} parameters, {len(missing)} "
                f"are missing: {shown}."
            )
        self.ready = True

    def named_weights(self) -> TensorStream:
        """Yield every parameter as it is here."""
        yield from self._held.items()

    def place(self, name: str) -> Tensor | None:
        """Return the memory that may receive a whole new value before `update` does.

        None means that `update` must get the value first.
        """
        if name in self._aliased or name in self._cuts or name in self._linears:
            return None
        return self._held.get(name)

    def fingerprints(self) -> dict[str, Fingerprint]:
        """Return the fingerprint of every parameter as it is here.

        For a parameter that is cut, it is this part's share of the whole one. For a weight in eight
        bits, it is that of the value that came, before it was rounded.
        """
        names: list[str] = []
        tensors: list[Tensor] = []
        parts: list[Part] = []

        for name, parameter in self._parameters.items():
            if name in self._linears:
                continue
            placed = self._held[name]
            taken = [(..., Part())]
            if name in self._cuts:
                placed = placed.view(-1, *(1, *placed.shape)[-2:])
                taken = parts_of(self._cuts[name], parameter.shape)
            for place, part in taken:
                names.append(name)
                tensors.append(placed[place])
                parts.append(part)

        sums = Counter[str]()
        for name, value in zip(names, fingerprints(tensors, parts).tolist()):
            sums[name] += value
        if self._arrived:
            arrived = torch.cat(list(self._arrived.values())).tolist()
            sums.update(dict(zip(self._arrived, arrived)))

        found: dict[str, Fingerprint] = {}
        for name, value in sums.items():
            found[name] = Fingerprint(value, is_part=name in self._cuts)
        return found

    def release(self) -> None:
        """Give the memory of copies on CUDA back. Their addresses stay, and nothing may read them
        until `restore`."""
        if self._memory is not None:
            self._memory.release()
            self.ready = False

    def restore(self) -> None:
        """Allocate again the memory that `release` gave back. `update` has to fill it."""
        if self._memory is not None:
            self._memory.grow(self._memory.num_bytes)

    def stacked(self, linears: Sequence[nn.Linear]) -> tuple[Tensor | Rows, Tensor | None]:
        """Weight (sum of N, K) and bias (sum of N,) of linear layers with one input: one matrix
        over their memory."""
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        scales: list[Tensor] = []
        for linear in linears:
            weights.append(linear.weight)
            if linear.bias is not None:
                biases.append(linear.bias)
            if isinstance(linear, EightBitLinear):
                scales.append(linear.scales)
        assert len(biases) in (0, len(linears))

        name = self._name_of(weights[0])
        weight = self._joined(weights, self._offsets[name])
        bias = None
        if biases:
            bias = self._joined(biases, self._offsets[self._name_of(biases[0])])
        if scales:
            return Rows(weight, self._joined(scales, self._scale_offsets[name])), bias
        return weight, bias

    def _name_of(self, parameter: Tensor) -> str:
        return next(name for name in self._parameters if self._held[name] is parameter)

    def _joined(self, parts: Sequence[Tensor], offset: int) -> Tensor:
        first = parts[0]
        rows = 0
        for part in parts:
            place = first.data_ptr() + rows * first.stride(0) * first.itemsize
            assert part.data_ptr() == place, "not stacked"
            rows += part.shape[0]
        assert self._memory is not None
        return self._memory.tensor(offset, (rows, *first.shape[1:]), first.dtype)

    def _lay_out(self) -> int:
        """Choose the offset of each parameter and of its scales. Return the bytes of all."""
        end = 0
        for names in _stacks(self.module, list(self._parameters)):
            end = round_up(end, _ALIGNMENT)
            for name in names:
                self._offsets[name] = end
                end += self._num_bytes(name) - self._num_scale_bytes(name)
            end = round_up(end, _ALIGNMENT)
            for name in names:
                if name in self._linears:
                    self._scale_offsets[name] = end
                    end += self._num_scale_bytes(name)
        return end

    def _take(self, name: str, tensor: Tensor) -> None:
        if tensor is self._held[name]:
            return  # gathered at its place
        source = self._parameters[name]
        if self._can_alias(name) and tensor.data_ptr() == source.data_ptr():
            self._alias(name)
            return
        if name in self._aliased:
            # Other memory than the trainer's: writing through the alias would change the trainer's
            # weights.
            self._aliased.discard(name)
            self._place(name, self._new_copy(name))
        self._fill(name, tensor)

    def _fill(self, name: str, tensor: Tensor) -> None:
        """Copy a whole value to the twin's own memory."""
        if name not in self._linears:
            self._held[name].copy_(self._cut(name, tensor))
            return
        exact = tensor.detach().to(self.device, self.dtype)
        self._linears[name].take(exact)
        self._arrived[name] = fingerprints([exact])

    def _alias(self, name: str) -> None:
        """Compute with the trainer's own parameter; `version` then has to see its changes."""
        _count_optimizer_steps()
        self._aliased.add(name)
        self._place(name, self._parameters[name])

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        return self._cuts[name](whole) if name in self._cuts else whole

    def _can_alias(self, name: str) -> bool:
        parameter = self._parameters[name]
        is_here = self.device.type == "cpu" and parameter.device == self.device
        if not is_here or isinstance(parameter, DTensor):
            return False
        return parameter.dtype == self._dtype_of(name) and name not in self._cuts

    def _num_bytes(self, name: str) -> int:
        numbers = self._shapes[name].numel() * self._dtype_of(name).itemsize
        return numbers + self._num_scale_bytes(name)

    def _num_scale_bytes(self, name: str) -> int:
        return SCALE_BYTES * self._shapes[name][0] if name in self._linears else 0

    def _dtype_of(self, name: str) -> torch.dtype:
        if name in self._linears:
            return self._linears[name].dtype
        parameter = self._parameters[name]
        return self.dtype if parameter.is_floating_point() else parameter.dtype

    def _new_copy(self, name: str) -> Tensor:
        return self._empty(self._offsets, name, self._shapes[name], self._dtype_of(name))

    def _empty(
        self, offsets: Mapping[str, int], name: str, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        """Return new memory; on CUDA, at the offset of `name`."""
        if self._memory is not None:
            return self._memory.tensor(offsets[name], shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device)

    def _place(self, name: str, tensor: Tensor) -> None:
        parameter = tensor
        if not isinstance(parameter, nn.Parameter):
            parameter = nn.Parameter(tensor, requires_grad=False)
        for place in self._places[name]:
            owner, _, attribute = place.rpartition(".")
            setattr(self.module.get_submodule(owner), attribute, parameter)
        self._held[name] = parameter


@functools.cache
def _count_optimizer_steps() -> None:
    """Count optimizer steps as changes. Autograd does not count those of fused kernels."""

    def count(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            increment_version(group["params"])

    register_optimizer_step_post_hook(count)


def _places(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    """List the places of each parameter: its own name, and those tied to it."""
    first_name = {id(parameter): name for name, parameter in parameters.items()}
    places: dict[str, list[str]] = {name: [] for name in parameters}
    for name, parameter in plain_parameters(model, remove_duplicate=False):
        places[first_name[id(parameter)]].append(name)
    return places


def _stacks(module: nn.Module, names: Sequence[str]) -> list[list[str]]:
    """Group `names` of parameters: those of one group are stacked in memory."""
    known = set(names)
    stacks: list[list[str]] = []
    for path, owner in module.named_modules():
        for siblings in _ONE_INPUT:
            linears = [getattr(owner, sibling, None) for sibling in siblings]
            if not all(isinstance(linear, nn.Linear) for linear in linears):
                continue
            for kind in ("weight", "bias"):
                stack = [f"{path}.{sibling}.{kind}" for sibling in siblings]
                if set(stack) <= known:
                    stacks.append(stack)

    stacked = set(chain.from_iterable(stacks))
    for name in names:
        if name not in stacked:
            stacks.append([name])
    return stacks


def _meta_copy(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    # fully_shard puts a class of its own in front of the model's.
    model_class = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        twin: Any = model_class(config)
    set_attention(twin, attention)
    return twin


def _share_other_tensors(model: nn.Module, twin: nn.Module, device: torch.device) -> None:
    """Give the twin the model's buffers, and tensors that are plain attributes of modules."""
    for name, original in plain_modules(model):
        mine = twin.get_submodule(name)
        for key, buffer in original._buffers.items():
            if buffer is not None:
                mine._buffers[key] = buffer.to(device)
        for key, value in vars(mine).items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(mine, key, getattr(original, key).to(device))
    tensors = (*twin.named_parameters(), *twin.named_buffers())
    stranded = [name for name, tensor in tensors if tensor.is_meta]
    assert not stranded, f"tensors left on meta: {stranded}"
