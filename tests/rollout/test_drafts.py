"""Drafts change the number of steps, and no token."""

import numpy as np
import pytest
import torch

from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model
from tests.tiny_models import tiny_model
from verl.config.rollout import RolloutConfig, SpeculativeConfig
from verl.rollout import Request, SamplingParams, check_engine
from verl.rollout.embedded.drafts import NgramDrafts
from verl.rollout.embedded.pages import PageAllocator
from verl.rollout.embedded.samples import Group, Sample
from verl.rollout.embedded.scheduler import Scheduler
from verl.utils.errors import ConfigError

NGRAM = SpeculativeConfig(method="ngram", max_rows=256)
# Repeats itself soon, so that drafts are right.
REPEATING = {"temperature": 0.3, "max_new_tokens": 48}


def scheduler_of(samples: list[Sample]) -> Scheduler:
    """Return a scheduler whose samples run and have drawn nothing."""
    scheduler = Scheduler(
        samples, PageAllocator(64, page_size=4), max_num_seqs=8, max_num_batched_tokens=512
    )
    scheduler.admit()
    return scheduler


def draw(scheduler: Scheduler, slot: int, token_ids: list[int]) -> None:
    for token in token_ids:
        one = np.array([slot])
        scheduler.record(one, np.array([token]), np.zeros(1, np.float32))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gpt2", "qwen3_moe"])
def test_drafts_change_no_bit_of_a_deterministic_engine(family: str):
    model = talkative_model(family)
    plain = make_engine(model, deterministic=True)
    drafting = make_engine(model, deterministic=True, speculative=NGRAM)

    expected = run(plain, PROMPTS, n=4, **REPEATING)
    assert run(drafting, PROMPTS, n=4, **REPEATING) == expected
    statistics = drafting.statistics()
    assert 0 < statistics["accepted_tokens"] < statistics["drafted_tokens"]
    assert statistics["decode_steps"] <= plain.statistics()["decode_steps"]
    assert statistics["generated_tokens"] == plain.statistics()["generated_tokens"]
    drafting.check_integrity()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "deepseek_v2", "gpt_oss", "bloom"])
def test_drafts_of_windows_caps_sinks_latents_and_biases_change_no_token(family: str):
    model = talkative_model(family).double()
    settings = {"dtype": "float64", "max_num_seqs": 5}
    params = {**REPEATING, "temperature": 0.05}
    expected = run(make_engine(model, **settings), PROMPTS, n=4, **params)
    drafting = make_engine(model, **settings, speculative=NGRAM)
    drawn = run(drafting, PROMPTS, n=4, **params)

    assert drafting.statistics()["accepted_tokens"] > 0
    for ours, theirs in zip(drawn, expected):
        assert ours.token_ids == theirs.token_ids
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_wrong_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    model = talkative_model("qwen2").to(dtype)
    settings = {"dtype": str(dtype).removeprefix("torch."), "deterministic": True}
    expected = run(make_engine(model, **settings), PROMPTS, n=3)
    random = np.random.default_rng(0)

    def guess(self: NgramDrafts, scheduler: Scheduler, slots: np.ndarray, most: int):
        left = scheduler.limits[slots] - scheduler.launched[slots] - 1
        counts = random.integers(0, left.clip(max=most) + 1)
        return [random.integers(0, 90, count).tolist() for count in counts]

    monkeypatch.setattr(NgramDrafts, "propose", guess)
    engine = make_engine(model, **settings, speculative=NGRAM)
    assert run(engine, PROMPTS, n=3) == expected
    assert engine.statistics()["drafted_tokens"] > 100


def test_drafts_that_are_right_save_steps_and_stop_where_the_sample_does(
    monkeypatch: pytest.MonkeyPatch,
):
    model = talkative_model("llama")
    params = {"max_new_tokens": 23, "stop": ("a", "12"), "temperature": 1.0}
    plain = make_engine(model, deterministic=True)
    expected = run(plain, PROMPTS, n=4, **params)
    texts = {completion.sample_id: completion.token_ids for completion in expected}

    def foresee(self: NgramDrafts, scheduler: Scheduler, slots: np.ndarray, most: int):
        drafts = []
        for slot in slots.tolist():
            drawn = scheduler.drawn[slot]
            # tokens behind the end, too: the draw there must not count
            future = [*texts[scheduler.sample_id_of(slot)], 7, 7, 7, 7]
            left = int(scheduler.limits[slot] - scheduler.launched[slot] - 1)
            drafts.append(future[drawn : drawn + min(most, left)])
        return drafts

    monkeypatch.setattr(NgramDrafts, "propose", foresee)
    engine = make_engine(model, deterministic=True, speculative=NGRAM)
    assert run(engine, PROMPTS, n=4, **params) == expected
    longest = max(map(len, texts.values()))
    # the first token comes from the prompt, then each step draws five
    assert engine.statistics()["decode_steps"] == -(-(longest - 1) // 5)
    assert "stop" in {completion.finish_reason for completion in expected}


def test_few_pages_and_aborts_lose_no_token():
    model = talkative_model("qwen2")
    expected = run(make_engine(model, deterministic=True), PROMPTS, n=8, **REPEATING)
    tight = make_engine(
        model, deterministic=True, speculative=NGRAM, num_pages=40, page_size=4, max_num_seqs=12
    )
    assert run(tight, PROMPTS, n=8, **REPEATING) == expected
    assert tight.statistics()["preemptions"] > 0

    request = Request(prompt_ids=tuple(PROMPTS[0]), sample_ids=(0, 1))
    tight.submit([request], SamplingParams(**REPEATING), seed=0, step=0)
    for _ in range(6):
        tight.step()
    aborted = {completion.sample_id: completion for completion in tight.abort()}
    for sample_id, completion in aborted.items():
        count = len(completion.token_ids)
        assert count > 0
        assert completion.token_ids == expected[sample_id].token_ids[:count]
        assert completion.log_probs == expected[sample_id].log_probs[:count]
    tight.check_integrity()


def test_recorded_experts_are_those_without_drafts():
    model = tiny_model("qwen3_moe")
    settings = {"deterministic": True, "enable_rollout_routing_replay": True}
    expected = run(make_engine(model, **settings), PROMPTS, n=2, **REPEATING)
    drafting = make_engine(model, **settings, speculative=NGRAM)
    for ours, theirs in zip(run(drafting, PROMPTS, n=2, **REPEATING), expected):
        assert ours.token_ids == theirs.token_ids
        assert ours.routed_experts is not None
        assert np.array_equal(ours.routed_experts, theirs.routed_experts)
    assert drafting.statistics()["accepted_tokens"] > 0


def test_drafts_come_from_prompt_sample_and_group():
    group = Group(prompt=(1, 2, 3, 4, 1, 2), unstarted=3)
    samples = [Sample(number, group, limit=16, key=np.uint64(number)) for number in range(3)]
    scheduler = scheduler_of(samples)
    drafts = NgramDrafts(NGRAM)
    slots = scheduler.running

    # the prompt: after 1, 2 came 3, 4, 1, 2
    assert drafts.propose(scheduler, slots, 4) == [[3, 4, 1, 2]] * 3
    # the sample itself, the latest match first: after 5, 6 came 7
    draw(scheduler, 0, [5, 6, 7, 5, 6])
    assert drafts.propose(scheduler, slots[:1], 1) == [[7]]
    # another sample of the group
    draw(scheduler, 1, [9, 5, 6])
    assert drafts.propose(scheduler, slots[1:2], 3) == [[7, 5, 6]]
    # a sample that has ended
    drafts.keep(group, 7, [20, 21, 22])
    draw(scheduler, 2, [20, 21])
    assert drafts.propose(scheduler, slots[2:], 4) == [[22]]
    # the longest match first: after 3, 4, 1, 2 came 20 last, after 4, 1, 2 came 30
    draw(scheduler, 1, [4, 1, 2, 30, 3, 4, 1, 2])
    assert drafts.propose(scheduler, slots[1:2], 1) == [[20]]


def test_the_tokens_of_a_prompt_are_forgotten_with_its_last_sample():
    engine = make_engine(talkative_model("qwen2"), speculative=NGRAM)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    first = Request(prompt_ids=(5, 6, 7), sample_ids=(0, 1))
    longer = Request(prompt_ids=(8, 9), sample_ids=(2,))
    engine.submit([first], params, seed=0, step=0)
    engine.step()
    engine.step()
    engine.submit([longer], params, seed=0, step=0)
    memories = engine._run.drafts._memories
    assert len(memories) == 1

    ended = 0
    while ended < 2:
        ended += sum(completion.sample_id < 2 for completion in engine.step())
    assert [group.prompt for group in memories] == [(8, 9)]
    engine.abort()
    assert not memories


@pytest.mark.parametrize(
    ("rows", "most"), [(0, 0), (1, 4), (2, 4), (6, 4), (8, 3), (16, 1), (17, 0), (400, 0)]
)
def test_many_rows_leave_no_room_for_drafts(rows: int, most: int):
    assert NgramDrafts(SpeculativeConfig(method="ngram")).tokens_a_sample(rows) == most


def test_shortest_matches_are_not_longer_than_the_longest():
    config = SpeculativeConfig(method="ngram", prompt_lookup_min=5)
    with pytest.raises(ConfigError, match="at most prompt_lookup_max, got 5 and 4"):
        check_engine(RolloutConfig(speculative=config))


def test_engines_that_cannot_verify_refuse_drafts():
    with pytest.raises(ConfigError, match=r"speculative\.method=null"):
        check_engine(RolloutConfig(name="hf", speculative=NGRAM))
