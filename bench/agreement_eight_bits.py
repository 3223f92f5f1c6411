"""KL per token of the embedded engine in eight bits to the same engine in bfloat16.

One after the other, engines in float32, bfloat16 and fp8 get the same weights and compute the whole
distribution of every next token of the same sequences, which the bfloat16 engine has drawn. The
table has KL(bfloat16 || fp8) and, as the size of ordinary rounding, KL(float32 || bfloat16): means
over tokens, and the largest ones. With `--kind fp8kv`, keys and values are in eight bits in place
of weights, with `fp8both` all three. Then the distributions are those after the drawn tokens, which
all engines compute from keys and values in their pages. `int8` in place of `fp8` is the other
format.

A folder with a pretrained model is taken as it is. Of a folder with a configuration alone, two sets
of random weights are measured: those of transformers' initialization, whose layers each outweigh
the residual stream before them, so that rounding is amplified from layer to layer; and damped ones,
nearer to trained models: embeddings of size 1, and output projections divided by the root of twice
the number of layers, as in GPT-2's initialization.

Run `python bench/agreement_eight_bits.py FOLDER`. `rollout.py` with engines in eight bits runs it as well.
"""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rollout_models import DTYPES, random_model
from rollout_work import draw_prompts
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl.config.rollout import RolloutConfig
from verl.rollout import Request, SamplingParams, create_rollout_engine
from verl.rollout.embedded.extension import extend_step

SEQUENCES = 8
PROMPT_TOKENS = 64
DRAWN_TOKENS = 192
CHUNK = 256  # tokens whose distributions are compared at once
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "fp8kv": {"kv_cache_dtype": "fp8"},
    "fp8both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    "int8": {"quantization": "int8"},
    "int8kv": {"kv_cache_dtype": "int8"},
    "int8both": {"quantization": "int8", "kv_cache_dtype": "int8"},
}


def make_engine(model: PreTrainedModel, device: torch.device, **settings: Any) -> Any:
    config = RolloutConfig(
        prompt_length=PROMPT_TOKENS,
        response_length=DRAWN_TOKENS,
        max_num_seqs=SEQUENCES,
        gpu_memory_utilization=0.85,
        **settings,
    )
    return create_rollout_engine(config, model=model, tokenizer=None, device=device)


def draw(engine: Any, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return prompts with the tokens that `engine` draws after them."""
    requests = []
    for number, prompt in enumerate(prompts):
        requests.append(Request(prompt_ids=tuple(prompt), sample_ids=(number,)))
    params = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
    completions = list(engine.generate(requests, params, seed=0, step=0))
    completions.sort(key=lambda completion: completion.sample_id)
    return [[*prompt, *own.token_ids] for prompt, own in zip(prompts, completions)]


@torch.inference_mode()
def hidden_states(engine: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the states (N, H) of all tokens of `sequences`, as a prefill computes them."""
    runner = engine.runner
    pages = pages_of(runner, sequences)
    ids, positions, step, _ = runner._pack(sequences, pages, [0] * len(sequences))
    states = runner._prefill_hidden(ids, positions, step)
    engine.forget_prefixes()  # their pages are overwritten
    return states.clone()


@torch.inference_mode()
def states_from_pages(engine: Any, sequences: Sequence[Sequence[int]], first: int) -> Tensor:
    """Return the states (N, H) of all tokens after the `first` ones of each sequence.

    They are computed from keys and values in pages, as by decode steps.
    """
    hidden_states(engine, sequences)
    runner = engine.runner
    pages = pages_of(runner, sequences)
    cached = [first] * len(sequences)
    ids, positions, new, _ = runner._pack(sequences, pages, cached)
    step = extend_step(new, cached, pages, runner.page_size)
    return runner._body(ids, positions, step).clone()


def pages_of(runner: Any, sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return pages for each sequence, the first of the cache, after making room for them."""
    pages = []
    count = 0
    for sequence in sequences:
        own = -(-len(sequence) // runner.page_size)
        pages.append(list(range(count, count + own)))
        count += own
    if runner.num_pages < count:
        runner.allocate(count)
    return pages


@torch.inference_mode()
def log_probs(engine: Any, states: Tensor) -> Tensor:
    """Return log-probs (N, V) of all tokens after states (N, H)."""
    return engine.runner.logits(states).float().log_softmax(-1)


def kl(truth: Tensor, other: Tensor) -> Tensor:
    """Return KL(truth || other) (N,) of log-probs (N, V)."""
    return (truth.exp() * (truth - other)).sum(-1).clamp(min=0)


def damp(model: PreTrainedModel) -> None:
    """Rescale random weights; see the module's docstring."""
    config: Any = model.config
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_((2 * config.num_hidden_layers) ** 0.5)
        if not config.tie_word_embeddings:
            model.get_input_embeddings().weight.div_(config.initializer_range)  # pyright: ignore


def measure(model: PreTrainedModel, device: torch.device, small: str = "fp8") -> dict[str, float]:
    """Return the KLs of one set of weights, with `small` for the engine in eight bits."""
    vocabulary: int = model.config.vocab_size
    prompts = draw_prompts(SEQUENCES, PROMPT_TOKENS, vocabulary, seed=0, draw=0)
    sequences: list[list[int]] = []
    states = {}
    heads = {}
    # the engine that draws comes first
    for name in ("bfloat16", "float32", small):
        engine = make_engine(model, device, **SETTINGS[name])
        if not sequences:
            sequences = draw(engine, prompts, DRAWN_TOKENS)
        else:
            draw(engine, prompts, 1)  # which makes the decoder
        if "kv_cache_dtype" in SETTINGS[small]:
            states[name] = states_from_pages(engine, sequences, PROMPT_TOKENS)
        else:
            states[name] = hidden_states(engine, sequences)
        heads[name] = [log_probs(engine, chunk).cpu() for chunk in states[name].split(CHUNK)]
        del engine
        gc.collect()
        torch.cuda.empty_cache()

    result = {}
    for truth, other in (("bfloat16", small), ("float32", "bfloat16")):
        parts = []
        equal = []
        for one, two in zip(heads[truth], heads[other]):
            parts.append(kl(one.to(device), two.to(device)))
            equal.append(one.argmax(-1) == two.argmax(-1))
        every = torch.cat(parts)
        result[f"KL({truth} || {other})"] = every.mean().item()
        result[f"largest KL({truth} || {other})"] = every.max().item()
        result[f"equal likeliest tokens ({truth}, {other})"] = (
            torch.cat(equal).float().mean().item()
        )
    certain = torch.cat([part.exp().amax(-1) for part in heads["float32"]])
    result["mean probability of the likeliest token"] = certain.mean().item()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    kinds = [kind for kind in SETTINGS if "8" in kind]
    parser.add_argument("--kind", choices=kinds, default="fp8", help="parts in eight bits [fp8]")
    asked = parser.parse_args()
    folder: Path = asked.folder
    small = asked.kind
    device = torch.device("cuda", 0)
    results = {}

    if any(folder.glob("*.safetensors")):
        pretrained: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES["cuda"])
        results["pretrained"] = measure(pretrained.to(device).eval(), device, small)
    else:
        model = random_model(str(folder), "cuda")
        results["transformers' initialization"] = measure(model, device, small)
        damp(model)
        results["damped"] = measure(model, device, small)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
