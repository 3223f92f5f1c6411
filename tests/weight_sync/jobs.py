"""The two processes of a test: one sends, the other receives. Both return their tensors or their
error."""

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.distributed import jobs
from tests.tiny_models import tiny_model
from verl.distributed.collectives import ALONE, Axis
from verl.distributed.mesh import Mesh, init_mesh
from verl.distributed.peers import PeerGroup, find_store, open_store
from verl.rollout.twin import ModelTwin
from verl.utils.errors import RolloutError
from verl.weight_sync import (
    DirectSender,
    Fingerprint,
    FingerprintLog,
    WeightReceiver,
    WeightSender,
    receive_into,
)
from verl.weight_sync.broadcast import BroadcastReceiver, BroadcastSender
from verl.weight_sync.disk import DiskReceiver, DiskSender
from verl.weight_sync.fingerprint import fingerprints
from verl.weight_sync.ipc import SharedMemoryReceiver, SharedMemorySender
from verl.weight_sync.shards import gathered

BUCKET_BYTES = 1000  # odd, and smaller than some tensors
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trip:
    """One transfer of weights from rank 0 to rank 1, and the fault injected into it."""

    transport: str
    folder: Path
    dtype: torch.dtype = torch.float32  # of the receiver
    hand_overs: int = 1
    fault: str = ""
    device: str = "cpu"


class Store:
    """A minimal engine: keeps copies in its dtype."""

    def __init__(self, dtype: torch.dtype, fault: str = "", device: str = "cpu") -> None:
        self.weight_dtype = dtype
        self.fault = fault
        self.device = device
        self.tensors: Tensors = {}

    def update_weights(self, named_tensors: Any) -> None:
        for name, tensor in named_tensors:
            if self.fault == "refuses" and name == "rows":
                raise RolloutError("no such weight: rows")
            dtype = self.weight_dtype if tensor.is_floating_point() else tensor.dtype
            self.tensors[name] = tensor.to(self.device, dtype, copy=True)
        damage(self.tensors, self.fault)

    def weight_fingerprints(self) -> dict[str, Fingerprint]:
        values = fingerprints(list(self.tensors.values())).tolist()
        return {name: Fingerprint(value) for name, value in zip(self.tensors, values)}


def damage(tensors: Tensors, fault: str) -> None:
    if fault == "bit":
        tensors["large"].view(torch.int32)[17, 3] ^= 1 << 5
    if fault == "rows":
        tensors["rows"][[2, 9]] = tensors["rows"][[9, 2]]


def odd_tensors(step: int = 0) -> Tensors:
    """Return tensors of every kind: one element, odd rows, several dtypes, larger than a bucket."""
    generator = torch.Generator().manual_seed(step)
    shapes = {
        "one": (1,),
        "scalar": (),
        "odd": (3, 5),
        "rows": (13, 7),
        "large": (31, 77),
        "deep": (3, 5, 7),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["half"] = torch.randn(301, 5, generator=generator).to(torch.bfloat16)
    tensors["counts"] = torch.randint(-(1 << 40), 1 << 40, (9,), generator=generator)
    tensors["empty"] = torch.zeros(0, 4)
    return tensors


def sent(trip: Trip, step: int, log: FingerprintLog) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = [(name, tensor.to(trip.device)) for name, tensor in odd_tensors(step).items()]
    for name, tensor in gathered(tensors, bucket_bytes=BUCKET_BYTES, dtype=trip.dtype, log=log):
        if trip.fault == "breaks off" and name == "deep":
            raise RolloutError("no more")
        yield name, tensor


def travel(trip: Trip) -> tuple[Any, str]:
    """Return the weights of this rank's engine after each hand-over, and its error."""
    axis = init_mesh(torch.device(trip.device)).world
    is_sender = axis.rank == 0
    end = _sender(trip, axis) if is_sender else _receiver(trip, axis)
    received = []

    try:
        for step in range(trip.hand_overs):
            if is_sender:
                log = FingerprintLog()
                end.send(sent(trip, step, log), log)
            if trip.transport == "disk":
                dist.barrier()
            if not is_sender:
                store = Store(trip.dtype, trip.fault, trip.device)
                receive_into(store, end)
                received.append({name: tensor.cpu() for name, tensor in store.tensors.items()})
    except RolloutError as error:
        return received, str(error)

    return received, ""


def _sender(trip: Trip, axis: Axis) -> WeightSender:
    device = torch.device(trip.device)
    options = {"bucket_bytes": BUCKET_BYTES, "dtype": trip.dtype}
    if trip.transport == "broadcast":
        store, port = open_store("127.0.0.1")
        (trip.folder / "port").write_text(str(port))
        dist.barrier()
        return BroadcastSender(PeerGroup(store, 0, 2, device), device=device, **options)
    if trip.transport == "disk":
        return DiskSender(trip.folder, **options)
    with Listener(str(trip.folder / "socket"), family="AF_UNIX") as listener:
        dist.barrier()
        pin = trip.device == "cuda"
        ends = [listener.accept()]
        return SharedMemorySender(ends, device=torch.device("cpu"), pin=pin, **options)


def _receiver(trip: Trip, axis: Axis) -> WeightReceiver:
    device = torch.device(trip.device)
    if trip.transport == "broadcast":
        dist.barrier()
        store = find_store("127.0.0.1", int((trip.folder / "port").read_text()))
        return BroadcastReceiver(PeerGroup(store, 1, 2, device), device=device)
    if trip.transport == "disk":
        return DiskReceiver(trip.folder)
    dist.barrier()
    return SharedMemoryReceiver(Client(str(trip.folder / "socket"), family="AF_UNIX"), device)


# ---------------------------------------------------------------- shards


def gather_model(
    setup: jobs.Setup, dtype: torch.dtype | None, bucket_bytes: int
) -> tuple[Tensors, dict[str, int]]:
    """Return the weights that the trainer hands over, and their fingerprints."""
    log = FingerprintLog()
    named = jobs.fixed_engine(setup).parameters_for_rollout(
        dtype=dtype, bucket_bytes=bucket_bytes, log=log
    )
    tensors = {name: tensor.clone().cpu() for name, tensor in named}
    return tensors, log.read()


def gather_to_places(places: Tensors) -> tuple[Tensors, list[str]]:
    """Hand over a matrix of even rows and `odd_rows`.

    Returns the tensors, and the names of those gathered directly at their destination.
    """
    mesh: Mesh = init_mesh(torch.device("cpu"))
    module = odd_rows()
    module.append(torch.randn((6, 4), generator=torch.Generator().manual_seed(2)))
    fully_shard(module, mesh=mesh.weights)
    named = gathered(
        module.named_parameters(), bucket_bytes=400, dtype=torch.bfloat16, place=places.get
    )
    tensors = dict(named)
    return tensors, [name for name, tensor in tensors.items() if tensor is places.get(name)]


def gather_odd_rows() -> tuple[Tensors, dict[str, int]]:
    """Gather rows that the ranks do not divide: the last rank has fewer rows, or none."""
    mesh: Mesh = init_mesh(torch.device("cpu"))
    module = odd_rows()
    fully_shard(module, mesh=mesh.weights)
    log = FingerprintLog()
    named = gathered(module.named_parameters(), bucket_bytes=200, dtype=torch.bfloat16, log=log)
    return dict(named), log.read()


def odd_rows() -> nn.Module:
    module = nn.ParameterList(
        [
            torch.randn(shape, generator=torch.Generator().manual_seed(1))
            for shape in [(1, 9), (3,), (7, 5), (5, 3, 3)]
        ]
    )
    return module.requires_grad_(True)


def hand_over(damaged_rank: int | None, halves: bool) -> tuple[bool, str]:
    """Hand over to engines that have all weights, or half of some.

    Returns whether this rank's engine has the expected weights, and its error.
    """
    world = init_mesh(torch.device("cpu")).world
    model = tiny_model("qwen3_moe")

    def half(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(2, -1)[world.rank]

    def half_of_both(whole: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.chunk(2, -2)[world.rank] for part in whole.chunk(2, -2)], -2)

    layer = "model.layers.0"
    cuts = {
        f"{layer}.self_attn.o_proj.weight": half,
        f"{layer}.mlp.experts.gate_up_proj": half_of_both,
        f"{layer}.mlp.experts.down_proj": half,
        f"{layer}.input_layernorm.weight": half,
        f"{layer}.post_attention_layernorm.weight": lambda whole: (
            whole if world.rank == 0 else torch.zeros_like(whole)
        ),
    }
    cuts = cuts if halves else {}
    twin = ModelTwin(
        model, attention="eager", dtype=torch.bfloat16, device=torch.device("cpu"), cuts=cuts
    )
    engine: Any = Engine(twin, damaged=damaged_rank == world.rank)
    log = FingerprintLog()
    named = gathered(model.named_parameters(), bucket_bytes=10_000, dtype=torch.bfloat16, log=log)
    try:
        DirectSender(engine, world=world, sharing=world if halves else ALONE).send(named, log)
    except RolloutError as error:
        return False, str(error)
    own = dict(twin.module.named_parameters())
    whole: Tensors = dict(model.named_parameters())
    whole.update({name: cut(whole[name]) for name, cut in cuts.items()})
    return all(
        torch.equal(own[name], weight.to(torch.bfloat16)) for name, weight in whole.items()
    ), ""


class Engine:
    """A twin with the interface of an engine."""

    def __init__(self, twin: ModelTwin, damaged: bool = False) -> None:
        self.twin = twin
        self.damaged = damaged
        self.weight_dtype = twin.dtype

    def update_weights(self, named_tensors: Any) -> None:
        self.twin.update(named_tensors)
        if self.damaged:
            weight = self.twin.module.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
            weight.data[1, [3, 4]] = weight.data[1, [4, 3]]

    def weight_fingerprints(self) -> dict[str, Fingerprint]:
        return self.twin.fingerprints()
