"""Rollouts of small models on a CPU: numba's kernels in 1, 2, 4, ... lanes, and torch's operations.

All ways generate the same batches in turn, in one process; a figure is the median over the
repetitions, in output tokens a second. `chosen` is the engine's own choice.

Run `python bench/host_lanes.py --threads 2` on a machine that does nothing else.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.rollout import RolloutConfig
from verl.rollout import Request, SamplingParams, create_rollout_engine
from verl.rollout.embedded import host_lanes

# Hidden size, layers: 0.7, 15 and 50 million parameters with a vocabulary of 1,024.
MODELS = ((128, 4), (384, 8), (640, 10))
VOCABULARY = 1024


def make_model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden if hidden > 128 else 256,
        num_hidden_layers=layers,
        num_attention_heads=max(4, hidden // 64),
        num_key_value_heads=max(2, hidden // 128),
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config).eval()


@contextmanager
def going(way: str) -> Iterator[None]:
    """Let the engine work one way: by 'torch', in so many lanes, or as it is 'chosen'."""
    pay = host_lanes.pay
    count = host_lanes.count_lanes
    if way == "torch":
        host_lanes.pay = lambda *_: False  # type: ignore[assignment]
    elif way != "chosen":
        host_lanes.pay = lambda decoder, _: pay(decoder, 1 << 40)  # type: ignore[assignment]
        host_lanes.count_lanes = lambda rows, *_: min(int(way), rows)
    try:
        yield
    finally:
        host_lanes.pay = pay
        host_lanes.count_lanes = count


def measure(model: Any, rows: int, new: int, ways: list[str], repetitions: int) -> dict[str, float]:
    """Return the median output tokens a second of each way."""
    config = RolloutConfig(
        name="embedded", prompt_length=32, response_length=new, max_num_seqs=rows
    )
    engine = create_rollout_engine(config, model=model, tokenizer=None, device=torch.device("cpu"))
    draw = np.random.default_rng(0)
    samples = min(rows, 8)
    requests = []
    for first in range(0, rows, samples):
        prompt_ids = tuple(draw.integers(0, VOCABULARY, 16).tolist())
        sample_ids = tuple(range(first, min(first + samples, rows)))
        requests.append(Request(prompt_ids=prompt_ids, sample_ids=sample_ids))

    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(1 + repetitions):
        for way in ways:
            with going(way):
                start = time.perf_counter()
                completions = list(engine.generate(requests, params, seed=0, step=step))
                seconds = time.perf_counter() - start
            tokens = sum(len(completion.token_ids) for completion in completions)
            speeds[way].append(tokens / seconds)

    return {way: statistics.median(measured[1:]) for way, measured in speeds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--new", type=int, default=64, help="tokens a sample")
    parser.add_argument(
        "--models", type=int, default=len(MODELS), help="how many of the models, the smallest first"
    )

    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        lanes = [str(1 << power) for power in range(threads.bit_length()) if 1 << power <= threads]
        ways = ["torch", *lanes, "chosen"]
        print(f"{threads} threads, {arguments.new} tokens a sample, output tokens a second")
        print("| model | rows | " + " | ".join(ways) + " |\n|" + "---|" * (2 + len(ways)))
        for hidden, layers in MODELS[: arguments.models]:
            model = make_model(hidden, layers)
            size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
            for rows in arguments.rows:
                speeds = measure(model, rows, arguments.new, ways, arguments.repetitions)
                cells = " | ".join(f"{speeds[way]:,.0f}" for way in ways)
                print(f"| {size:.1f} M | {rows} | {cells} |")


if __name__ == "__main__":
    main()
