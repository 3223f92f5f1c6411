"""Training on several CUDA devices: tokens per second of an update and of a log-prob pass.

    torchrun --nproc_per_node=1 bench/scaling.py
    torchrun --nproc_per_node=2 bench/scaling.py      the same rows a rank: twice as many in all

Our training engine at the work of `training.py` (Qwen2.5 shapes, rows of 4,096 tokens, compiled
layers), sharded over all ranks by FSDP2. The mini-batch has `--tokens` tokens a rank. `--tiny`
tries the script on CPU.
"""

import argparse
import tempfile
import time
from pathlib import Path

from training_ours import Ours  # first: it sets variables of the libraries below

# isort: split
import torch
from rollout_models import SHAPES, write_config
from training_work import Job, draw_rows, synchronize, update_flops

from verl.distributed.collectives import barrier, max_of
from verl.engine.flops import model_flops_utilization

TINY = {"model": "tiny", "length": 64, "tokens": 512, "micro_tokens": 200}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="1.5b", choices=SHAPES)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row [4096]")
    parser.add_argument(
        "--tokens", type=int, default=131_072, help="of the mini-batch, a rank [131072]"
    )

    parser.add_argument(
        "--micro-tokens", type=int, default=32_768, help="of a forward-backward pass [32768]"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="keep no activations within layers"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="timed updates, of which the best counts [2]"
    )

    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on CPU")
    arguments = parser.parse_args()
    if arguments.tiny:
        vars(arguments).update(TINY)
    return arguments


def make_job(arguments: argparse.Namespace, folder: Path) -> Job:
    device = "cpu" if arguments.tiny else "cuda"
    write_config(folder, arguments.model, device)
    return Job(
        folder=str(folder),
        device=device,
        vocabulary=SHAPES[arguments.model]["vocab_size"],
        lengths=f"fixed:{arguments.length}",
        prompt_tokens=arguments.length // 16,
        samples=1,
        tokens=arguments.tokens,
        micro_tokens=arguments.micro_tokens,
        checkpointing=arguments.checkpointing,
        optimizer=True,
        lora=0,
        entropy=True,
        compile=not arguments.tiny,
        share_prompts=False,
        backend="inductor",
        repeats=arguments.repeats,
        seed=0,
    )


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(arguments, Path(folder))
        side = Ours(job)
        rows = draw_rows(job)
        update_flops_of_a_rank, pass_flops = update_flops(job, rows)
    world = side.engine.mesh.world

    def seconds(work: str) -> float:
        """Return the seconds of the slowest rank."""
        barrier(world)
        synchronize(job.device)
        start = time.perf_counter()
        if work == "update":
            side.gradients(rows)
            side.step()
        else:
            side.log_probs(rows)
        synchronize(job.device)
        return max_of(round((time.perf_counter() - start) * 1e6), world) / 1e6

    for work, flops in (("update", update_flops_of_a_rank), ("log-prob pass", pass_flops)):
        seconds(work)
        best = min(seconds(work) for _ in range(job.repeats))
        if world.rank == 0:
            tokens = world.size * sum(row.length for row in rows)
            share = model_flops_utilization(flops, best, torch.device(job.device))
            mfu = "" if share is None else f", MFU {share:.3f} a rank"
            print(
                f"{world.size} ranks, {arguments.model}, {work}: {best:.3f} s, "
                f"{tokens / best:,.0f} tok/s{mfu}",
                flush=True,
            )


if __name__ == "__main__":
    main()
