"""How long one decode step takes, for `rollout.py --decode-step`.

Two workloads differ by the decode steps alone: all samples end with their first token, or with
their last. Contexts grow from 256 to 512 tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_work import Workload
from roofline import Roofline

PROMPT_TOKENS = 256
TOKENS = 256


def workloads_of(rows: int) -> tuple[Workload, Workload]:
    """The workload that ends with the first token, and the whole one, with so many rows at once."""
    first, whole = (
        Workload(prompts=rows, samples=1, prompt_tokens=PROMPT_TOKENS, lengths=f"fixed:{tokens}")
        for tokens in (1, TOKENS)
    )
    return first, whole


def print_decode_steps(
    model: str,
    workloads: Sequence[Workload],
    bounds: Sequence[Roofline],
    seconds: Mapping[str, Sequence[float]],
    names: Mapping[str, str],
) -> dict[int, dict[str, Any]]:
    """Print what a decode step takes with each number of rows; gives the table.

    Args:
        workloads: pairs of `workloads_of`, one behind the other.
        bounds: of the workloads.
        seconds: of each engine, its best for each workload.
        names: of the engines.
    """
    longest = PROMPT_TOKENS + TOKENS
    print(f"\n{model}: decode steps, contexts of {PROMPT_TOKENS} to {longest} tokens")
    print("| rows | engine | ms | roofline ms | ms / roofline |\n|---|---|---|---|---|")
    table: dict[int, dict[str, Any]] = {}
    for number in range(0, len(workloads), 2):
        rows = workloads[number].prompts
        bound = bounds[number + 1]
        roofline_ms = 1e3 * bound.decode_s / bound.decode_steps
        table[rows] = {}
        for engine, taken in seconds.items():
            first, whole = taken[number : number + 2]
            step_ms = 1e3 * (whole - first) / (TOKENS - 1)
            ratio = step_ms / roofline_ms
            table[rows][engine] = {"step_ms": step_ms, "roofline_ms": roofline_ms, "ratio": ratio}
            print(f"| {rows} | {names[engine]} | {step_ms:.3f} | {roofline_ms:.3f} | {ratio:.2f} |")
    return table
