"""Engines on tiny models, and the results of transformers on them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.tiny_models import tiny_model, tiny_tokenizer
from verl.config.rollout import RolloutConfig
from verl.distributed.collectives import ALONE, Axis
from verl.rollout import Completion, Request, SamplingParams, create_rollout_engine

# Models with large weights sometimes generate end-of-sequence, which is wanted; lengths cross the
# borders of pages and windows.
PROMPTS = [
    [7, 11, 13, 17, 19],
    [5 + (7 * i) % 90 for i in range(37)],
    [9 + (11 * i) % 80 for i in range(16)],
]


# Tied to large embeddings, the heads of these repeat the last token forever, and no test of tokens
# could fail.
_REPEATS_WHEN_TIED = ("gpt2", "gemma2", "gemma3", "cohere", "minicpm3", "bloom")


def talkative_model(family: str, **arguments: Any) -> PreTrainedModel:
    """Return a tiny model with several different tokens in its greedy responses."""
    if family in _REPEATS_WHEN_TIED:
        arguments = {"tie_word_embeddings": False, **arguments}
    return tiny_model(family, **arguments)


def make_engine(
    model: PreTrainedModel,
    name: str = "embedded",
    device: str = "cpu",
    ranks: Axis = ALONE,
    **settings: Any,
) -> Any:
    config = RolloutConfig(name=name, **{"prompt_length": 64, "response_length": 64, **settings})
    device_of_engine = torch.device(device)
    return create_rollout_engine(
        config, model=model, tokenizer=tiny_tokenizer(), device=device_of_engine, ranks=ranks
    )


def requests(prompts: Sequence[Sequence[int]], n: int = 1) -> list[Request]:
    """Return samples 0..n-1 of the first prompt, then those of the second ..."""
    return [
        Request(prompt_ids=tuple(prompt), sample_ids=tuple(range(i * n, (i + 1) * n)))
        for i, prompt in enumerate(prompts)
    ]


def run(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    n: int = 1,
    *,
    seed: int = 0,
    step: int = 0,
    **params: Any,
) -> list[Completion]:
    """Return all completions in order of sample ids, after checking that each came once."""
    settings = SamplingParams(**{"max_new_tokens": 24, **params})
    completions = list(engine.generate(requests(prompts, n), settings, seed=seed, step=step))
    assert sorted(completion.sample_id for completion in completions) == list(
        range(len(prompts) * n)
    )
    return sorted(completions, key=lambda completion: completion.sample_id)


def play_turns(engine: Any, turns: int = 4) -> dict[int, Completion]:
    """Continue every prompt for several turns, each begun when the one before ends.

    The turns of prompts have different lengths, so that they begin at different times.
    """
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    texts = {row: [*PROMPTS[row % 3], 20 + row] for row in range(9)}
    done: dict[int, Completion] = {}

    def begin(row: int, turn: int) -> None:
        ids = (row + 100 * turn,)
        request = Request(prompt_ids=tuple(texts[row]), sample_ids=ids, limits=(3 + row,))
        engine.submit([request], params, seed=1, step=0)

    for row in texts:
        begin(row, 0)
    while engine.has_work:
        for completion in engine.step():
            done[completion.sample_id] = completion
            turn, row = divmod(completion.sample_id, 100)
            texts[row] += [*completion.token_ids, 7, 9 + row, 30]
            if turn + 1 < turns:
                begin(row, turn + 1)
    engine.check_integrity()
    return done


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


def transformers_greedy(
    model: PreTrainedModel, prompt: Sequence[int], max_new_tokens: int
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    generate: Any = model.generate
    output = generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@torch.no_grad()
def forward_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return log-probs (R,) of one forward of the sequence through the trainer's own module."""
    ids = torch.tensor([[*prompt, *response]], device=model.device)
    logits = (
        model(ids, attention_mask=torch.ones_like(ids)).logits[0, len(prompt) - 1 : -1].float()
        / temperature
    )
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()


def check_bits_of_a_thousand(model: PreTrainedModel, **settings: Any) -> None:
    """Check that `deterministic` gives the same bits for equal seeds.

    Compares samples alone, among a thousand, and after preemption.
    """
    n = 334
    crowd = run(make_engine(model, deterministic=True, **settings), PROMPTS, n=n)
    tight = make_engine(model, deterministic=True, num_pages=400, **settings)
    assert run(tight, PROMPTS, n=n) == crowd
    assert tight.statistics()["preemptions"] > 0
    engine = make_engine(model, deterministic=True, **settings)
    for sample_id in (0, n, 2 * n, len(crowd) - 1):
        alone = Request(prompt_ids=tuple(PROMPTS[sample_id // n]), sample_ids=(sample_id,))
        assert list(
            engine.generate([alone], SamplingParams(max_new_tokens=24), seed=0, step=0)
        ) == [crowd[sample_id]]
