"""Forward and backward of a policy on groups of responses, on one CUDA device.

Compares computing each prompt once with plain packing. Random weights of the Qwen2.5-1.5B shape in
bf16, gradient checkpointing, one group a pass as the update has it. Tokens are those of all rows,
prompts included, on both sides.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

# the shapes of the other benchmarks, and the package of this repository, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from rollout_models import SHAPES
from transformers import AutoConfig, AutoModelForCausalLM

from verl.models.attention import apply_checkpointing
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.utils.peaks import phase_peaks
from verl.utils.units import GIB

SHAPE = SHAPES["1.5b"]


def load(checkpointing: bool) -> PackedCausalLM:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen2", **SHAPE), dtype=torch.bfloat16
        )
    if checkpointing:
        apply_checkpointing(model)
    return PackedCausalLM(model).train()


def batch(prompt: int, response: int, rows: int, share: bool) -> PackedBatch:
    ids = torch.randint(SHAPE["vocab_size"], (1, prompt + response)).repeat(rows, 1)
    ids[:, prompt:] = torch.randint(SHAPE["vocab_size"], (rows, response))
    packed = PackedBatch.from_rows(ids, torch.ones_like(ids), response)
    if share:
        packed = packed.with_shared_prompts([0] * rows, [prompt] * rows)
    return packed.to("cuda")


def measure(module: PackedCausalLM, packed: PackedBatch) -> tuple[float, float, float]:
    """Return milliseconds of forward, and of forward and backward, and peak GiB of the latter."""

    def forward() -> None:
        with torch.no_grad():
            module(packed)

    def update() -> None:
        module(packed, entropy=True)["log_probs"].sum().backward()

    times: list[Any] = []
    for work in (forward, update):
        phase_peaks.take(torch.device("cuda"))
        times.append(triton.testing.do_bench(work, warmup=2000, rep=4000, return_mode="median"))
    return times[0], times[1], phase_peaks.take(torch.device("cuda"))[0] / GIB


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["1024,512,16", "256,1024,16", "4096,512,8", "1024,512,2"],
        help="prompt tokens, response tokens, responses",
    )
    parser.add_argument("--no-checkpointing", action="store_true")

    arguments = parser.parse_args()
    module = load(not arguments.no_checkpointing)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, Qwen2.5-1.5B shape")

    for shape in arguments.shapes:
        prompt, response, rows = (int(number) for number in shape.split(","))
        results = [measure(module, batch(prompt, response, rows, share)) for share in (False, True)]
        tokens = rows * (prompt + response)
        print(f"{rows} x ({prompt} + {response}):")
        for name, (log_probs, update, peak) in zip(("plain", "shared"), results):
            print(
                f"  {name:6} log-probs {log_probs:7.1f} ms {tokens / log_probs * 1e3:9,.0f} tok/s  "
                f" update {update:7.1f} ms {tokens / update * 1e3:9,.0f} tok/s   peak {peak:.1f} "
                "GiB"
            )
        ratios = [one / other for one, other in zip(results[0], results[1])]
        print(f"  ratio  log-probs {ratios[0]:.2f}, update {ratios[1]:.2f}")


if __name__ == "__main__":
    main()
