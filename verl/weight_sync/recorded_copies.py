"""Replay the copies that a model's own `load_weights` made, instead of calling it again.

`load_weights` of an inference engine is Python over hundreds of tensors. For most models it only
copies each tensor, or a part of it, to a fixed place of a parameter.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.utils.logging import logger
from verl.weight_sync.base import NamedTensors
from verl.weight_sync.fingerprint import fingerprints

_COPY = torch.ops.aten.copy_.default
_FILL = torch.ops.aten.fill_.Scalar
_Form = tuple[torch.Size, torch.dtype]
_Place = tuple[int, int]  # address and bytes
_Batch = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Copy:
    """A view of a handed tensor, and the view of a parameter that gets it."""

    name: str  # of the handed tensor
    offset: int  # elements from its beginning
    stride: tuple[int, ...]
    destination: Tensor

    def source(self, handed: Tensor) -> Tensor:
        """Return the view of the tensor as it was handed now."""
        start = handed.storage_offset() + self.offset
        return handed.as_strided(self.destination.shape, self.stride, start)


class RecordedLoad:
    """Loads hand-overs into `model`: the first one by `load_weights`, later ones by its copies.

    The record is used only if every element of every parameter got exactly one plain copy of an
    element of a handed tensor, or a constant. A model that computes with its weights, or keeps them
    elsewhere, loads all hand-overs by `load_weights`; the log says why. The first replay is proved
    by fingerprints. Parameters that have moved are recorded anew.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._record: _Record | None = None
        self._can_record = True

    @property
    def is_recorded(self) -> bool:
        """Return whether the next hand-over is a replay."""
        return self._record is not None and self._record.fits()

    def load(self, buckets: Iterable[NamedTensors]) -> None:
        """Load one hand-over. The tensors of a bucket are valid until the next bucket."""
        if self._record is not None and not self._record.fits():
            self._record = None
            logger.info("Parameters of the engine have moved: their copies are recorded anew.")

        if self._record is None and self._can_record:
            self._load_watched(buckets)
            return
        for bucket in buckets:
            self._load_bucket(list(bucket))
        if self._record is not None:
            self._record.is_proved = True

    def _load_watched(self, buckets: Iterable[NamedTensors]) -> None:
        """Load by `load_weights`, and record its copies if they are all that it does."""
        watch = _Watch(self._model)
        for bucket in buckets:
            tensors = list(bucket)
            with watch.over(tensors):
                self._model.load_weights(tensors)
            watch.check_values(tensors)

        fault = watch.end()
        if fault is not None:
            self._refuse(fault)
            return
        self._record = _Record(watch)
        logger.info("Later hand-overs replay %d copies of load_weights.", len(watch.copies))

    def _load_bucket(self, tensors: _Batch) -> None:
        if self._record is None:
            self._model.load_weights(tensors)
            return

        fault = self._record.unknown(tensors)
        if fault is not None:
            self._model.load_weights(tensors)
            self._refuse(fault)
            return
        self._record.replay(tensors)
        if not self._record.is_proved:
            self._prove(tensors)

    def _prove(self, tensors: _Batch) -> None:
        """Load the tensors of a replay once more by `load_weights`, which must change nothing."""
        parameters = dict(self._model.named_parameters())
        replayed = fingerprints(list(parameters.values())).tolist()
        self._model.load_weights(tensors)
        loaded = fingerprints(list(parameters.values())).tolist()
        for name, one, other in zip(parameters, replayed, loaded):
            if one != other:
                self._refuse(f"a replay left '{name}' with other values")
                return

    def _refuse(self, fault: str) -> None:
        self._record = None
        self._can_record = False
        logger.info(
            "All hand-overs go through load_weights of %s, copies are not replayed: %s.",
            type(self._model).__name__,
            fault,
        )


class _Record:
    """The copies of one hand-over, and the parameters that they are for."""

    def __init__(self, watch: "_Watch") -> None:
        self.is_proved = False
        self._forms = watch.forms
        self._fills = watch.fills
        self._owners = watch.owners
        self._copies: dict[str, list[_Copy]] = {name: [] for name in watch.forms}
        for copy in watch.copies:
            self._copies[copy.name].append(copy)

    def fits(self) -> bool:
        """Return whether the model has the same parameters at the same addresses."""
        return all(owner.is_unchanged() for owner in self._owners)

    def unknown(self, tensors: _Batch) -> str | None:
        """Return a description of a tensor that was not recorded like this."""
        for name, tensor in tensors:
            if name not in self._forms:
                return f"'{name}' was not part of the first hand-over"
            form = _form(tensor)
            if self._forms[name] != form or not tensor.is_contiguous():
                return f"'{name}' came as {_text(self._forms[name])} and comes as {_text(form)}"
        return None

    @torch.no_grad()
    def replay(self, tensors: _Batch) -> None:
        """Copy all tensors to their places."""
        destinations = []
        sources = []
        for name, tensor in tensors:
            for copy in self._copies[name]:
                destinations.append(copy.destination)
                sources.append(copy.source(tensor))
        if destinations:
            torch._foreach_copy_(destinations, sources)
        # Padding, which a sleep of the engine may have dropped.
        for destination, value in self._fills:
            destination.fill_(value)


@dataclass(frozen=True)
class _Owner:
    """A module's parameter as it was recorded."""

    parameters: dict[str, Any]  # of the module
    key: str
    parameter: Tensor
    address: int

    def is_unchanged(self) -> bool:
        is_same = self.parameters.get(self.key) is self.parameter
        return is_same and self.parameter.data_ptr() == self.address


class _Watch(TorchDispatchMode):
    """Sees each operation of `load_weights`, and notes its copies or the first reason against."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.fault: str | None = None
        self.forms: dict[str, _Form] = {}
        self.owners: list[_Owner] = []
        for module in model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    address = parameter.data_ptr()
                    self.owners.append(_Owner(module._parameters, key, parameter, address))

        self._model = model
        self._parameters = _Ranges(model.named_parameters())
        self._buffers = _Ranges(model.named_buffers())
        self._handed = _Ranges(())
        # Of two copies to one place, as of tied weights, the last counts.
        self._copies: dict[_Place, _Copy] = {}
        self._fills: dict[_Place, tuple[Tensor, Any]] = {}
        if self._parameters.overlapping is not None:
            self.fault = f"'{self._parameters.overlapping}' shares memory with another parameter"

    @property
    def copies(self) -> list[_Copy]:
        """The copies of all buckets."""
        return list(self._copies.values())

    @property
    def fills(self) -> list[tuple[Tensor, Any]]:
        """Places that get a constant, such as padding, with their values."""
        return list(self._fills.values())

    def over(self, tensors: _Batch) -> "_Watch":
        """Return the context in which these tensors are loaded."""
        self._handed = _Ranges(tensors)
        if self._handed.overlapping is not None:
            self._note(f"'{self._handed.overlapping}' shares memory with another tensor")
        for name, tensor in tensors:
            self.forms[name] = _form(tensor)
            if not tensor.is_contiguous():
                self._note(f"'{name}' comes with gaps")
        return self

    def check_values(self, tensors: _Batch) -> None:
        """Compare the copies of a bucket, which is still valid, with their sources, bit by bit."""
        handed = dict(tensors)
        ours = [copy for copy in self.copies if copy.name in handed]
        handed_over = [copy.source(handed[copy.name]) for copy in ours]
        sources = fingerprints(handed_over).tolist()
        places = fingerprints([copy.destination for copy in ours]).tolist()
        for copy, source, place in zip(ours, sources, places):
            if source != place:
                self._note(f"'{copy.name}' is changed after it was copied")

    def end(self) -> str | None:
        """Return a reason why the copies are not all that happened, or None."""
        if self.fault is None and not all(owner.is_unchanged() for owner in self.owners):
            self.fault = "a parameter was replaced"
        return self.fault or self._gap()

    def _gap(self) -> str | None:
        """Return a reason if the places do not cover every parameter, each element once."""
        places = [copy.destination for copy in self.copies] + [place for place, _ in self.fills]
        ordered = sorted(places, key=Tensor.data_ptr)
        for one, other in itertools.pairwise(ordered):
            if one.data_ptr() + one.nbytes > other.data_ptr():
                return f"parts of '{self._parameters.find(one)}' are written twice"

        written = dict.fromkeys(self._parameters.starts, 0)
        for place in places:
            name = self._parameters.find(place)
            assert name is not None
            written[name] += place.nbytes
        for name, parameter in self._model.named_parameters():
            if parameter.nbytes != written.get(name, 0):
                return f"'{name}' is not filled by copies alone"
        return None

    # ---------------------------------------------------------------- each operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _COPY:
            self._note(self._fault_of_copy(args[0], args[1]))
        elif func is _FILL and self._parameters.find(args[0]) is not None:
            self._note(self._fault_of_fill(args[0], args[1]))
        else:
            self._note(self._fault_of_other(func, args, kwargs))
        return func(*args, **kwargs)

    def _note(self, fault: str | None) -> None:
        self.fault = self.fault or fault

    def _fault_of_copy(self, destination: Tensor, source: Tensor) -> str | None:
        parameter = self._parameters.find(destination)
        name = self._handed.find(source)
        if parameter is None and name is None:
            buffer = self._buffers.find(destination)
            return None if buffer is None else f"the buffer '{buffer}' is written"
        if name is None:
            return f"'{parameter}' gets values that were computed" if destination.numel() else None
        if parameter is None:
            return f"'{name}' is copied to memory that is no parameter's"

        is_plain = destination.shape == source.shape and destination.dtype == source.dtype
        if not is_plain or source.dtype != self.forms[name][1]:
            return f"'{name}' is cast or repeated on its way to '{parameter}'"
        if not destination.is_contiguous():
            return f"'{name}' goes to separate places of '{parameter}'"

        offset = (source.data_ptr() - self._handed.starts[name]) // source.itemsize
        copy = _Copy(name, offset, source.stride(), destination.detach())
        place = _place(destination)
        self._copies.pop(place, None)
        self._copies[place] = copy
        return None

    def _fault_of_fill(self, destination: Tensor, value: Any) -> str | None:
        if not destination.is_contiguous():
            return f"separate places of '{self._parameters.find(destination)}' are filled"
        self._fills[_place(destination)] = destination.detach(), value
        return None

    def _fault_of_other(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Allow views. Others may neither read a handed tensor nor write to the model."""
        is_view = False
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            is_view = is_view or (argument.alias_info is not None and not is_written)
            for tensor in filter(torch.is_tensor, tree_leaves(value)) if is_written else ():
                for ranges in (self._parameters, self._buffers):
                    if (name := ranges.find(tensor)) is not None:
                        return f"{func} writes to '{name}'"

        if not is_view:
            for tensor in filter(torch.is_tensor, tree_leaves((args, kwargs))):
                if (name := self._handed.find(tensor)) is not None:
                    return f"{func} reads '{name}'"
        return None


class _Ranges:
    """The memory of named tensors."""

    def __init__(self, named_tensors: NamedTensors) -> None:
        self.overlapping: str | None = None
        found = []
        for name, tensor in named_tensors:
            if tensor.numel():
                found.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name))

        self._found = sorted(found)
        self._addresses = [start for start, _, _ in self._found]
        self.starts = {name: start for start, _, name in self._found}
        for (_, end, _), (start, _, name) in itertools.pairwise(self._found):
            if end > start:
                self.overlapping = name

    def find(self, tensor: Tensor) -> str | None:
        """Return the name of the tensor that has the first element of `tensor`."""
        if not tensor.numel():
            return None
        position = bisect_right(self._addresses, tensor.data_ptr()) - 1
        if position < 0 or tensor.data_ptr() >= self._found[position][1]:
            return None
        return self._found[position][2]


def _place(tensor: Tensor) -> _Place:
    return tensor.data_ptr(), tensor.nbytes


def _form(tensor: Tensor) -> _Form:
    return tensor.shape, tensor.dtype


def _text(form: _Form) -> str:
    return f"{tuple(form[0])} {form[1]}"
