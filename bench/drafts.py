"""How many decode steps do drafts save, and do they change a token?

    python bench/drafts.py --model MODEL [--tokenizer FOLDER --answers FILE]

Two measurements on a CPU:

- Stories: a real model continues prompts at temperature 1, 8 samples each, a few prompts at a time,
  with and without `rollout.speculative.method=ngram`, both with `deterministic=true`. Exit code 1 if
  a token or a bit of a log-prob differs.
- Forced text: answers of a JSON-lines file (`question`, `answer`) count as drawn. A draft that
  equals the text saves a step. No model runs.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.rollout import Completion, Request, SamplingParams, create_rollout_engine
from verl.rollout.embedded.drafts import NgramDrafts
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Group, Sample
from verl.rollout.embedded.scheduler import Scheduler

NOUNS = ["cat", "dog", "ball", "tree", "bird", "boat", "cake", "king", "fish", "hat", "bear", "car"]
SAMPLES = 8
TOKENS = 200


def stories(engine: Any, tokenizer: Any, prompts_at_once: int) -> tuple[list[Completion], dict]:
    """Continue all prompts. Return the completions, and sums of the engine's statistics."""
    prompts = []
    for first, second in zip(NOUNS[::2], NOUNS[1::2]):
        text = f"This is a story about a {first} and a {second}."
        prompts.append(tuple(tokenizer(text)["input_ids"]))

    done: list[Completion] = []
    sums: dict[str, float] = {}
    begin = time.perf_counter()
    for start in range(0, len(prompts), prompts_at_once):
        requests = []
        for number, prompt in enumerate(prompts[start : start + prompts_at_once], start):
            ids = tuple(range(number * SAMPLES, (number + 1) * SAMPLES))
            requests.append(Request(prompt_ids=prompt, sample_ids=ids))
        params = SamplingParams(max_new_tokens=TOKENS)
        done += engine.generate(requests, params, seed=1, step=0)
        for name, value in engine.statistics().items():
            sums[name] = sums.get(name, 0.0) + value
    sums["seconds"] = time.perf_counter() - begin
    return sorted(done, key=lambda completion: completion.sample_id), sums


def make_engine(given: argparse.Namespace, tokenizer: Any, method: str | None) -> Any:
    """Make an engine that drafts by `method`; None: without drafts."""
    drafts = SpeculativeConfig(
        method=method, max_rows=given.max_rows, num_speculative_tokens=given.draft_tokens
    )
    config = RolloutConfig(
        deterministic=True, prompt_length=64, response_length=TOKENS, speculative=drafts
    )
    model: Any = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    return create_rollout_engine(
        config, model=model, tokenizer=tokenizer, device=torch.device("cpu")
    )


def measure_stories(given: argparse.Namespace) -> bool:
    """Print steps and seconds with and without drafts. Return whether tokens and bits agree."""
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    agree = True
    print("| prompts at once | drafts | decode steps | drafted | right | s |")
    print("|---|---|---|---|---|---|")
    for prompts_at_once in given.prompts_at_once:
        answers = []
        for method in (None, "ngram"):
            engine = make_engine(given, tokenizer, method)
            completions, sums = stories(engine, tokenizer, prompts_at_once)
            answers.append(completions)
            print(
                f"| {prompts_at_once} | {method} | {sums['decode_steps']:.0f} | "
                f"{sums.get('drafted_tokens', 0):.0f} | {sums.get('accepted_tokens', 0):.0f} | "
                f"{sums['seconds']:.2f} |",
                flush=True,
            )
        agree = agree and answers[0] == answers[1]
    print("tokens and log-probs agree to the last bit" if agree else "TOKENS OR BITS DIFFER")
    return agree


def forced_steps(prompt: list[int], answer: list[int], draft_tokens: int) -> int:
    """Return the decode steps of an answer whose drafts are verified against its text."""
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=draft_tokens)
    group = Group(prompt=tuple(prompt), unstarted=1)
    sample = Sample(0, group, limit=len(answer), key=np.uint64(0))
    pages = PageAllocator((len(prompt) + len(answer)) // 16 + 2, page_size=16)
    scheduler = Scheduler([sample], pages, max_num_seqs=1, max_num_batched_tokens=1 << 20)
    scheduler.admit()
    drafts = NgramDrafts(config)

    slots = scheduler.running
    place = 0
    steps = 0
    while place < len(answer):
        (draft,) = drafts.propose(scheduler, slots, draft_tokens)
        count = 1
        while count <= len(draft) and place + count < len(answer):
            if draft[count - 1] != answer[place + count - 1]:
                break
            count += 1
        for token in answer[place : place + count]:
            scheduler.record(slots, np.array([token]), np.zeros(1, np.float32))
        place += count
        steps += 1
    return steps


def measure_forced(given: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer)
    tokens = 0
    steps = 0
    shares = []
    lines = given.answers.read_text(encoding="utf-8").splitlines()[: given.rows]
    for line in lines:
        row = json.loads(line)
        prompt = tokenizer(row["question"])["input_ids"]
        answer = tokenizer(row["answer"])["input_ids"]
        needed = forced_steps(prompt, answer, given.draft_tokens)
        tokens += len(answer)
        steps += needed
        shares.append(1 - needed / len(answer))
    print(
        f"forced text, {len(lines)} answers: {tokens} tokens in {steps} steps, "
        f"{1 - steps / tokens:.1%} saved (median answer {statistics.median(shares):.1%})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="for the forced text")
    parser.add_argument("--answers", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--rows", type=int, default=1000, help="answers of the file")
    parser.add_argument("--prompts-at-once", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--max-rows", type=int, default=32)
    given = parser.parse_args()

    agree = measure_stories(given)
    if given.answers:
        measure_forced(given)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
