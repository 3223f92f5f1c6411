"""Thousands of random requests to engines with too few pages: each is answered once, and no page is
lost."""

from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.cases import cases
from tests.rollout.engines import make_engine, talkative_model
from verl.config.rollout import SpeculativeConfig
from verl.rollout import Completion, Request, SamplingParams

REQUESTS = 2_400
SEEDS = 8
STOPS: list[dict[str, Any]] = [
    {},
    {"ignore_eos": True},
    {"stop_token_ids": (11, 17, 40)},
    {"stop": ("a", "12")},
]


def random_requests(random: np.random.Generator, count: int) -> list[Request]:
    """Return prompts of 1 to 40 tokens, some with a common prefix.

    Each has up to three samples of up to 20 tokens.
    """
    stems = [tuple(random.integers(5, 128, 24).tolist()) for _ in range(3)]
    requests = []
    first = 0

    for _ in range(count):
        own = tuple(random.integers(5, 128, random.integers(1, 17)).tolist())
        prompt = stems[random.integers(3)][: random.integers(25)] + own
        samples = int(random.choice([0, 1, 1, 1, 2, 3]))
        ids = tuple(range(first, first + samples))
        limits = tuple(random.geometric(0.3, samples).clip(max=20).tolist())
        requests.append(
            Request(
                prompt_ids=prompt, sample_ids=ids, limits=limits if random.random() < 0.95 else None
            )
        )
        first += samples

    return requests


def check_answers(
    requests: list[Request], completions: list[Completion], most: int, *, aborted: bool
) -> None:
    limits = {
        sample: limit
        for request in requests
        for sample, limit in zip(
            request.sample_ids, request.limits or [most] * len(request.sample_ids), strict=True
        )
    }
    answered = [completion.sample_id for completion in completions]

    assert len(answered) == len(set(answered))
    assert set(answered) <= set(limits) if aborted else set(answered) == set(limits)
    for completion in completions:
        limit = min(most, limits[completion.sample_id])
        drawn = len(completion.token_ids)
        assert 1 <= drawn == len(completion.log_probs) <= limit
        assert completion.finish_reason == "stop" or drawn == limit


@pytest.mark.parametrize("seed", cases(range(SEEDS), quick=lambda seed: seed < 3))
def test_random_requests_are_answered_once_and_no_page_is_lost(seed: int):
    random = np.random.default_rng(seed)
    engine = make_engine(
        talkative_model("qwen2"),
        num_pages=int(random.integers(14, 40)),  # the longest sample needs 13
        page_size=4,
        max_num_seqs=int(random.integers(5, 40)),
        max_num_batched_tokens=int(random.integers(40, 400)),
        enable_prefix_caching=bool(seed % 2),
        deterministic=seed == 2,
        speculative=SpeculativeConfig(method="ngram" if seed in (2, 3) else None),
    )

    left = REQUESTS // SEEDS
    preemptions = 0.0
    aborts = 0

    while left:
        count = min(left, int(random.integers(1, 80)))
        left -= count
        requests = random_requests(random, count)
        settings = SamplingParams(max_new_tokens=12, **STOPS[random.integers(len(STOPS))])
        answers = engine.generate(requests, settings, seed=seed, step=left)
        aborted = random.random() < 0.25
        aborts += aborted
        completions = list(islice(answers, int(random.integers(count)) if aborted else None))
        answers.close()
        check_answers(requests, completions, 12, aborted=aborted)
        engine.check_integrity()
        preemptions += engine.statistics()["preemptions"]

    assert preemptions > 0
    assert aborts > 0
