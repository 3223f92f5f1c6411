"""Log-probs of a head without logits beside those of chunks of logits and beside the product alone,
on one CUDA device.

Hidden states and head of Qwen2.5-1.5B, without gradients. All are called in turn; the median of a
dozen rounds.
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

# the package beside us, installed or not
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

    def log_probs(fused: bool, entropy: bool) -> Callable[[], torch.Tensor]:
        def work() -> torch.Tensor:
            logprobs.fused_head = lambda device: fused
            return token_log_probs(hidden, weight, targets, entropy=entropy)[0]

        return work

    works = {"product alone": product} | {
        f"{'fused' if fused else 'in chunks'}{', entropies' if entropy else ''}": log_probs(
            fused, entropy
        )
        for fused in (False, True)
        for entropy in (False, True)
    }
    difference = (works["fused"]() - works["in chunks"]()).abs().max().item()
    for what, taken in in_turn(works).items():
        tflops = 2 * TOKENS * HIDDEN * VOCABULARY / taken / 1e9
        print(f"{what:<22} {taken:6.2f} ms, {tflops:4.0f} TFLOP/s")
    print(f"largest difference of a log-prob: {difference:.1e}")


def in_turn(works: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each."""
    taken = {what: list[float]() for what in works}
    for what, work in [*works.items()] * (ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            work()
        end.record()
        torch.cuda.synchronize()
        taken[what].append(start.elapsed_time(end) / CALLS)
    return {what: statistics.median(values[1:]) for what, values in taken.items()}


if __name__ == "__main__":
    with torch.no_grad():
        main()
