"""Samples that are taken out of the engine and go on, with and without their keys and values."""

import pytest
import torch

from tests.rollout.engines import PROMPTS, make_engine, requests, talkative_model
from verl.rollout import Completion, Continuation, Request, SamplingParams

PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True)
SAMPLES = 2
STEPS = 20  # before the samples are taken out


def go_on(aborted: list[Completion], steps: int = 0) -> list[Request]:
    """Return requests that continue samples."""
    continued = []
    for each in aborted:
        begun = Continuation(
            step=steps,
            number=each.sample_id,
            token_ids=tuple(each.token_ids),
            log_probs=tuple(each.log_probs),
        )
        prompt = PROMPTS[each.sample_id // SAMPLES]
        continued.append(
            Request(prompt_ids=tuple(prompt), sample_ids=(each.sample_id,), continuations=(begun,))
        )
    return continued


def finish(engine) -> dict[int, Completion]:
    found = {}
    while engine.has_work:
        for completion in engine.step():
            found[completion.sample_id] = completion
    return found


def interrupted(model, keep: bool, change: float = 0.0, **settings):
    """Draw, take all samples out, change the weights, and go on. Returns samples and engine."""
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = {"max_model_len": 128, "num_pages": 200, "page_size": 4, **settings}
    engine = make_engine(model, **settings)
    engine.submit(requests(PROMPTS, SAMPLES), PARAMS, seed=3, step=0)
    for _ in range(STEPS):
        engine.step()
    aborted = engine.freeze() if keep else engine.abort()
    assert len(aborted) == len(PROMPTS) * SAMPLES
    engine.forget_prefixes()
    engine.check_integrity()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        weights[name] = tensor + change * noise
    engine.update_weights(weights.items())
    engine.submit(go_on(aborted), PARAMS, seed=3, step=0)
    return finish(engine), engine


def tokens(samples: dict[int, Completion]) -> dict[int, list[int]]:
    return {number: sample.token_ids for number, sample in samples.items()}


def test_kept_keys_are_not_computed_again():
    """With the same weights they are the keys that would be computed."""
    anew, engine = interrupted(talkative_model("qwen2"), keep=False)
    computed = engine.statistics()["prefill_tokens"]
    kept, engine = interrupted(talkative_model("qwen2"), keep=True)
    assert tokens(kept) == tokens(anew)
    for number, sample in kept.items():
        assert sample.log_probs == pytest.approx(anew[number].log_probs, abs=1e-4)
    # All but the tokens of each last page, which is not full.
    assert engine.statistics()["prefill_tokens"] <= 4 * len(kept) < computed / 4
    engine.check_integrity()


def test_kept_keys_are_those_of_the_old_weights_and_no_other_sample_finds_them():
    change = 0.02
    anew, fresh = interrupted(talkative_model("qwen2"), keep=False, change=change)
    kept, engine = interrupted(talkative_model("qwen2"), keep=True, change=change)
    number = 0
    assert kept[number].log_probs[-1] != pytest.approx(anew[number].log_probs[-1], abs=1e-4)

    for each in (engine, fresh):
        each.submit(requests(PROMPTS, SAMPLES), PARAMS, seed=5, step=1)
    ours = finish(engine)
    theirs = finish(fresh)
    assert tokens(ours) == tokens(theirs)
    for number, sample in ours.items():
        assert sample.log_probs == pytest.approx(theirs[number].log_probs, abs=1e-5)


def test_kept_pages_make_room_for_others():
    """A cache that holds two samples at once: they go on one after the other."""
    tight = {"num_pages": 45, "max_num_seqs": 6}
    kept, engine = interrupted(talkative_model("qwen2"), keep=True, **tight)
    anew, _ = interrupted(talkative_model("qwen2"), keep=False, **tight)
    assert tokens(kept) == tokens(anew)
    engine.check_integrity()


def test_sleep_and_forget_kept_leave_no_page_in_use():
    for drop in ("sleep", "forget_kept"):
        engine = make_engine(talkative_model("qwen2"), max_model_len=128, page_size=4)
        engine.submit(requests(PROMPTS, SAMPLES), PARAMS, seed=3, step=0)
        for _ in range(STEPS):
            engine.step()
        engine.freeze()
        assert engine._pages.num_free < engine._pages.num_pages
        getattr(engine, drop)()
        assert engine._pages.num_free == engine._pages.num_pages
        engine.check_integrity()
