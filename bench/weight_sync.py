"""The hand-over of weights from the trainer's shards to the rollout engine, against an all-gather.

    python bench/weight_sync.py                                   # one GPU
    torchrun --nproc_per_node=4 bench/weight_sync.py              # several
    torchrun --nproc_per_node=2 bench/weight_sync.py --tiny       # tries the script on a CPU

Random weights of the shapes in `rollout_models.py`, fp32 in FSDP2's shards, go to an engine's bf16
copies at stable addresses, as `RolloutWorker.take_weights` does it with a trainer that stays
on the device. GB/s count the engine's weights. The bound is measured in the same run: as
many bytes all-gathered in flat buckets, over several GPUs; on one, as many numbers cast from one
flat fp32 buffer into one of bf16. "fingerprints" is the extra time of a hand-over with
fingerprints, and "of all" the same spread over the default `rollout.fingerprint_interval`.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rollout_models import SHAPES, random_model, versions, write_config
from training_work import synchronize

from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import Axis, barrier, gather_objects
from verl.engine.base import TrainEngine
from verl.engine.options import EngineOptions
from verl.models.packed import PackedCausalLM
from verl.rollout.twin import ModelTwin
from verl.utils.units import GIB
from verl.weight_sync import DirectSender, Fingerprint, FingerprintLog

HEADER = (
    "| model | ranks | GB | bound GB/s | hand-over GB/s | of the bound | s | fingerprints s | of a "
    "hand-over | of all | extra peak GiB |"
)


class Engine:
    """The weights of an engine, and nothing else of it."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.twin = ModelTwin(model, attention="sdpa", dtype=dtype, device=device)
        self.weight_dtype = dtype

    def update_weights(self, named_tensors: Any) -> None:
        self.twin.update(named_tensors)

    def weight_place(self, name: str) -> torch.Tensor | None:
        return self.twin.place(name)

    def weight_fingerprints(self) -> dict[str, Fingerprint]:
        return self.twin.fingerprints()


class Result(NamedTuple):
    """Seconds are the best of the repeats, of the slowest rank."""

    model: str
    ranks: int
    num_bytes: int  # of the engine's weights
    bound_s: float
    hand_over_s: float
    proved_s: float
    # of the hand-over, without the trainer's weights (the engine's are outside torch's allocator)
    peak_gib: float

    def row(self) -> str:
        size = self.num_bytes / 1e9
        proof_s = self.proved_s - self.hand_over_s
        share = proof_s / self.hand_over_s
        cells = [
            self.model,
            f"{self.ranks}",
            f"{size:.2f}",
            f"{size / self.bound_s:.1f}",
            f"{size / self.hand_over_s:.1f}",
            f"{self.bound_s / self.hand_over_s:.2f}",
            f"{self.hand_over_s:.4f}",
            f"{proof_s:.4f}",
            f"{share:.1%}",
            f"{share / RolloutConfig().fingerprint_interval:.2%}",
            f"{self.peak_gib:.2f}",
        ]

        return "| " + " | ".join(cells) + " |"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", default="0.5b,1.5b,7b", help=f"of {', '.join(SHAPES)}; several with commas"
    )
    parser.add_argument(
        "--bucket-mb", type=float, default=512, help="rollout.update_weights_bucket_megabytes [512]"
    )

    parser.add_argument(
        "--repeats", type=int, default=5, help="timed runs, of which the best counts [5]"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the CPU")
    arguments = parser.parse_args(words)

    if arguments.tiny:
        arguments.models = "tiny"
        arguments.bucket_mb = 0.1

    for model in arguments.models.split(","):
        if model not in SHAPES:
            parser.error(f"--models must be of {', '.join(SHAPES)}, got '{model}'.")

    return arguments


def best(device: torch.device, world: Axis, repeats: int, call: Callable[[], object]) -> float:
    """Return the best seconds of the slowest rank, after a run that warms up."""
    taken = []
    for _ in range(repeats + 1):
        synchronize(device.type)
        barrier(world)
        started = time.perf_counter()
        call()
        synchronize(device.type)
        taken.append(max(gather_objects(time.perf_counter() - started, world)))
    return min(taken[1:])


def bound(
    num_bytes: int, bucket_bytes: int, dtype: torch.dtype, device: torch.device, world: Axis
) -> Callable[[], object]:
    """Return the least work of a hand-over of so many bytes: gathers, or on one rank a cast."""
    if world.size == 1:
        source = torch.empty(num_bytes // dtype.itemsize, device=device)
        target = torch.empty_like(source, dtype=dtype)
        return lambda: target.copy_(source)
    count = min(num_bytes, bucket_bytes) // world.size
    shard = torch.empty(count, dtype=torch.uint8, device=device)
    whole = torch.empty(count * world.size, dtype=torch.uint8, device=device)

    def gather() -> None:
        for _ in range(max(1, round(num_bytes / len(whole)))):
            dist.all_gather_into_tensor(whole, shard, group=world.group)

    return gather


def measure(name: str, bucket_bytes: int, repeats: int, device: torch.device) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), name, device.type)
        model = random_model(folder, device.type).float()
    trainer = TrainEngine(PackedCausalLM(model), EngineOptions(device=device))
    world = trainer.mesh.world
    device = trainer.device
    engine = Engine(model, torch.bfloat16, device)
    sender = DirectSender(engine, world=world)

    def hand_over(log: FingerprintLog | None) -> None:
        named = trainer.parameters_for_rollout(
            dtype=engine.weight_dtype, bucket_bytes=bucket_bytes, log=log, place=engine.weight_place
        )
        sender.send(named, log)

    num_bytes = engine.twin.copied_bytes
    bound_s = best(
        device, world, repeats, bound(num_bytes, bucket_bytes, engine.weight_dtype, device, world)
    )
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    hand_over_s = best(device, world, repeats, lambda: hand_over(None))
    peak = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else 0
    proved_s = best(device, world, repeats, lambda: hand_over(FingerprintLog()))
    return Result(name, world.size, num_bytes, bound_s, hand_over_s, proved_s, peak / GIB)


def main(words: Sequence[str] | None = None) -> list[Result]:
    arguments = parse_arguments(words)
    device = torch.device("cpu" if arguments.tiny else "cuda")
    results = []

    for name in arguments.models.split(","):
        results.append(measure(name, int(arguments.bucket_mb * 2**20), arguments.repeats, device))
        if not dist.is_initialized() or dist.get_rank() == 0:
            if len(results) == 1:
                print(
                    versions(device.type),
                    HEADER,
                    "|" + " --- |" * (HEADER.count("|") - 1),
                    sep="\n",
                )
            print(results[-1].row(), flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    return results


if __name__ == "__main__":
    main()
