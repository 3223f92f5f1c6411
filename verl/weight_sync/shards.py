"""Gather whole tensors from FSDP2's shards in buckets: one is gathered while the last is read."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from verl.utils.arithmetic import ceil_div
from verl.weight_sync.base import NamedTensors, TensorStream
from verl.weight_sync.buckets import travel_dtype
from verl.weight_sync.fingerprint import FingerprintLog, Part, fingerprints

# At most three gathers are in memory: one on its way, one that arrived, and the latter in order.
# Together that is two buckets.
_SHARE = 2 / 3
# its name in torch 2.13
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


def gathered(
    named_tensors: NamedTensors,
    *,
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    log: FingerprintLog | None = None,
    place: Callable[[str], Tensor | None] = lambda name: None,
) -> TensorStream:
    """Yield (name, whole tensor) of tensors that may be sharded over several ranks.

    All of those ranks must iterate to the end. A tensor that this rank holds whole is an alias:
    read it, don't write. Apart from tensors that the caller keeps, at most two buckets are in
    memory, or two tensors where those are larger.

    Args:
        named_tensors: parameters, sharded or whole.
        bucket_bytes: size of a bucket.
        dtype: of the receiver. Wider floating-point tensors are cast before they travel.
        log: gets the fingerprints in the receiver's dtype, computed from the shards themselves.
        place: returns the receiver's own contiguous tensor of a name, if it may be written to. The
            gathered values go into it directly.
    """
    waiting: list[_Bucket] = []
    proved: list[_Bucket] = []
    proofs: list[Tensor] = []  # one of each proved bucket

    for bucket in _buckets(named_tensors, int(bucket_bytes * _SHARE), dtype):
        bucket.start()
        if log is not None:
            proved.append(bucket)
            proofs.append(bucket.fingerprints(dtype))
        waiting.append(bucket)
        # The newest stays on its way meanwhile; whole tensors need no waiting.
        while waiting and (len(waiting) > 1 or bucket.mesh is None):
            yield from waiting.pop(0).finish(place)
    for bucket in waiting:
        yield from bucket.finish(place)

    if log is not None:
        _add_up(proved, proofs)
        for bucket, values in zip(proved, proofs):
            log.add(bucket.names, values)


@torch.no_grad()
def whole_fingerprints(named_tensors: NamedTensors) -> tuple[list[str], list[int]]:
    """Return names and fingerprints of whole tensors, computed from the shards of each rank.

    All ranks that share the tensors must call it; all get the same.
    """
    buckets: list[_Bucket] = []
    values: list[Tensor] = []
    names: list[str] = []
    for bucket in _buckets(named_tensors, 1 << 30, None):
        bucket.shards = [_local(tensor) for tensor in bucket.shards]
        if bucket.mesh is not None:
            bucket.cut()
        found = bucket.fingerprints(None)
        if bucket.mesh is not None:
            found = found.to(_device_of(bucket.mesh))
        buckets.append(bucket)
        values.append(found)
        names += bucket.names

    _add_up(buckets, values)
    sums: list[int] = []
    for value in values:
        sums += value.tolist()
    return names, sums


@dataclass
class _Bucket:
    """Tensors of one dtype that are sharded alike, or, without a mesh, whole on this rank."""

    dtype: torch.dtype  # in which they travel
    mesh: DeviceMesh | None
    axis: int  # of the mesh, along which they are sharded
    names: list[str] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    # this rank's shards; from `start` on, in the dtype in which they travel
    shards: list[Tensor] = field(default_factory=list)
    num_bytes: int = 0

    @torch.no_grad()
    def start(self) -> None:
        """Begin to gather. Shards are copied to their places in the result, and not kept twice."""
        self.shards = [_local(tensor) for tensor in self.shards]
        if self.mesh is None:
            return

        self.cut()
        size = self.mesh.size(self.axis)
        device = _device_of(self.mesh)
        self._whole = torch.empty(size, sum(self._chunks), dtype=self.dtype, device=device)
        mine = self._whole[self.mesh.get_local_rank(self.axis)]

        # The last ranks have fewer rows, or none: the rest of their chunks is never read.
        flat = [shard.reshape(-1) for shard in self.shards]
        chunks = mine.split_with_sizes(self._chunks)
        places = [chunk[: len(shard)] for chunk, shard in zip(chunks, flat)]
        torch._foreach_copy_(places, flat)
        self.shards = places

        group = self.mesh.get_group(self.axis)
        self._work: Any = _all_gather(self._whole.view(-1), mine, group=group, async_op=True)

    def cut(self) -> None:
        """Note how many elements of each tensor a rank has; the last ranks may have fewer."""
        assert self.mesh is not None
        size = self.mesh.size(self.axis)
        self._chunks = []
        for shape in self.shapes:
            rows = ceil_div(shape[0], size)
            self._chunks.append(rows * shape[1:].numel())

    @torch.no_grad()
    def fingerprints(self, dtype: torch.dtype | None) -> Tensor:
        """Compute fingerprints of this rank's shards, in the receiver's dtype."""
        cast = []
        for shard in self.shards:
            is_cast = dtype is not None and shard.is_floating_point()
            cast.append(shard.to(dtype) if is_cast else shard)
        if self.mesh is None:
            return fingerprints(cast)

        rank = self.mesh.get_local_rank(self.axis)
        parts = [Part(rank * chunk) for chunk in self._chunks]
        return fingerprints(cast, parts)

    def finish(self, place: Callable[[str], Tensor | None]) -> TensorStream:
        """Yield the whole tensors, and keep no reference to them."""
        tensors = self.shards
        self.shards = []
        if self.mesh is not None:
            tensors = self._in_order(place)
        yield from zip(self.names, tensors)

    @torch.no_grad()
    def _in_order(self, place: Callable[[str], Tensor | None]) -> list[Tensor]:
        """Wait for the gather, and copy its columns into one tensor after the other."""
        self._work.wait()
        whole = self._whole
        ranks = len(whole)
        del self._whole, self._work

        sizes = [shape.numel() for shape in self.shapes]
        padded = [ranks * chunk for chunk in self._chunks]
        places: list[Tensor | None] = []
        missing: list[int] = []  # sizes of the tensors without a place of the receiver's
        for name, size, with_padding in zip(self.names, sizes, padded):
            given = place(name)
            # With unequal shares, the chunks of the last ranks hold more than the tensor.
            if given is not None and (size < with_padding or given.dtype != self.dtype):
                given = None
            places.append(given)
            if given is None:
                missing.append(with_padding)
        if len(places) == 1 and places[0] is None:
            return [whole.view(-1)[: sizes[0]].view(self.shapes[0])]

        memory = torch.empty(sum(missing), dtype=self.dtype, device=whole.device)
        scratch = iter(memory.split_with_sizes(missing))
        flat = []
        for given in places:
            flat.append(next(scratch) if given is None else given.view(-1))
        columns = [tensor.view(ranks, -1) for tensor in flat]
        torch.split_with_sizes_copy(whole, self._chunks, dim=1, out=columns)

        tensors = []
        for given, tensor, size, shape in zip(places, flat, sizes, self.shapes):
            tensors.append(tensor[:size].view(shape) if given is None else given)
        return tensors


def _add_up(buckets: Sequence[_Bucket], values: Sequence[Tensor]) -> None:
    """Turn fingerprints of shards into those of whole tensors, in place, by a sum over ranks."""
    groups = []
    for bucket in buckets:
        groups.append(None if bucket.mesh is None else bucket.mesh.get_group(bucket.axis))

    for group in dict.fromkeys(groups):
        if group is None:
            continue
        own = [value for value, other in zip(values, groups) if other is group]
        total = torch.cat(own)
        dist.all_reduce(total, group=group)
        sizes = [len(value) for value in own]
        torch._foreach_copy_(own, list(total.split(sizes)))


def _buckets(
    named_tensors: NamedTensors, most_bytes: int, dtype: torch.dtype | None
) -> Iterator[_Bucket]:
    """Group neighbors of one dtype and sharding into buckets of at most `most_bytes`."""
    bucket: _Bucket | None = None
    for name, tensor in named_tensors:
        mesh, axis = _sharding(tensor)
        travel = travel_dtype(tensor, dtype)
        num_bytes = tensor.numel() * travel.itemsize
        kind = (travel, mesh, axis)

        if bucket is not None:
            is_alike = (bucket.dtype, bucket.mesh, bucket.axis) == kind
            if not is_alike or bucket.num_bytes + num_bytes > most_bytes:
                yield bucket
                bucket = None
        if bucket is None:
            bucket = _Bucket(*kind)

        bucket.names.append(name)
        bucket.shapes.append(tensor.shape)
        bucket.shards.append(tensor)
        bucket.num_bytes += num_bytes
        del tensor  # the caller may have made it for this loop alone, as the next one
        if bucket.num_bytes >= most_bytes:
            yield bucket
            bucket = None

    if bucket is not None:
        yield bucket


def _sharding(tensor: Tensor) -> tuple[DeviceMesh | None, int]:
    """Return the mesh and the axis along which `tensor` is sharded; no mesh if it is whole here."""
    if not isinstance(tensor, DTensor):
        return None, 0
    axis = _sharded_axis(tensor.device_mesh, tensor.placements)
    if axis is None:
        return None, 0
    return tensor.device_mesh, axis


@functools.cache
def _sharded_axis(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> int | None:
    axes = []
    for axis, kind in enumerate(placements):
        if not isinstance(kind, Replicate) and mesh.size(axis) > 1:
            axes.append(axis)
    if not axes:
        return None
    assert len(axes) == 1, f"sharded along {len(axes)} axes of {mesh}"
    assert placements[axes[0]] == Shard(0), f"{placements}: FSDP2 shards rows"
    return axes[0]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _device_of(mesh: DeviceMesh) -> torch.device:
    # Shards on the host would be gathered by gloo, at a fraction of the speed.
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
