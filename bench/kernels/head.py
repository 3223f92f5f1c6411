"""Log-probs of a head that keeps no logits, on one CUDA device.

Compares it with chunks of logits, and with the product of states and head alone. Hidden states and
head have the shape of Qwen2.5-1.5B, without gradients. All are called in turn, and the median of a
dozen rounds counts.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# the package of this repository, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from verl.models import logprobs
from verl.models.logprobs import token_log_probs

TOKENS = 28_672
HIDDEN = 1536
VOCABULARY = 151_936
ROUNDS = 12
CALLS = 3


def main() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda").bfloat16()
    weight = 0.02 * torch.randn(VOCABULARY, HIDDEN, device="cuda").bfloat16()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    rows = logprobs.CHUNK_ELEMENTS_CUDA // VOCABULARY
    logits = torch.empty(rows, VOCABULARY, device="cuda")

    def product() -> None:
        for part in hidden.split(rows):
            torch.mm(part, weight.t(), out_dtype=torch.float32, out=logits[: len(part)])

    def log_probs(*, fused: bool = False, entropy: bool = False) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            logprobs.fused_head = lambda device: fused
            return token_log_probs(hidden, weight, targets, entropy=entropy)[0]

        return work

    works: dict[str, Callable[[], object]] = {
        "product alone": product,
        "in chunks": log_probs(),
        "in chunks, entropies": log_probs(entropy=True),
        "fused": log_probs(fused=True),
        "fused, entropies": log_probs(fused=True, entropy=True),
    }
    difference = log_probs(fused=True)() - log_probs()()
    for name, milliseconds in in_turn(works).items():
        tflops = 2 * TOKENS * HIDDEN * VOCABULARY / milliseconds / 1e9
        print(f"{name:<22} {milliseconds:6.2f} ms, {tflops:4.0f} TFLOP/s")
    print(f"largest difference of a log-prob: {difference.abs().max().item():.1e}")


def in_turn(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the milliseconds of each, a median of rounds after the first."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS + 1):
        for name, work in works.items():
            taken[name].append(milliseconds_of(work))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}


def milliseconds_of(work: Callable[[], object]) -> float:
    """Return the mean milliseconds of a few calls."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(CALLS):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


if __name__ == "__main__":
    with torch.no_grad():
        main()
