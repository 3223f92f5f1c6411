"""An engine accepts requests at any time: samples arrive while others run, and are aborted with the
tokens drawn so far."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.engines import make_engine, talkative_model
from verl.rollout import Completion, Continuation, Request, Room, SamplingParams
from verl.rollout.base import GenerateOnly, OptionalVerbs
from verl.utils.errors import RolloutError

PARAMS = SamplingParams(max_new_tokens=20, ignore_eos=True)
LONG = tuple(range(5, 65))


def requests(count: int, first: int = 0, samples: int = 2) -> list[Request]:
    """Return prompts of several lengths; sample ids count from `first`."""
    found = []
    for number in range(first, first + count):
        prompt = tuple(5 + (7 * number + place) % 90 for place in range(3 + number % 5))
        ids = tuple(range(number * samples, (number + 1) * samples))
        found.append(Request(prompt_ids=prompt, sample_ids=ids))
    return found


def finish(engine: Any) -> list[Completion]:
    completions = []
    while engine.has_work:
        completions += engine.step()
    return completions


def by_id(completions: list[Completion]) -> dict[int, Completion]:
    found = {completion.sample_id: completion for completion in completions}
    assert len(found) == len(completions), "each sample once"
    return found


def small_engine(**settings: Any) -> Any:
    return make_engine(talkative_model("qwen2"), page_size=4, **settings)


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 3}, {"deterministic": True}])
def test_late_samples_equal_those_of_one_call(settings):
    expected = by_id(list(small_engine(**settings).generate(requests(6), PARAMS, seed=0, step=1)))
    engine = small_engine(**settings)
    engine.submit(requests(2), PARAMS, seed=0, step=1)
    completions = engine.step() + engine.step()
    engine.submit(requests(3, first=2), PARAMS, seed=0, step=1)
    completions += engine.step()
    engine.submit(requests(1, first=5), PARAMS, seed=0, step=1)
    found = by_id(completions + finish(engine))
    assert found.keys() == expected.keys()
    for number, completion in found.items():
        assert completion.token_ids == expected[number].token_ids
        np.testing.assert_allclose(completion.log_probs, expected[number].log_probs, atol=1e-4)
    engine.check_integrity()


def test_a_late_prompt_can_be_longer_than_all_earlier_ones():
    engine = small_engine(num_pages=None)
    engine.submit(requests(1), PARAMS, seed=0, step=1)
    first = engine.step()
    long = Request(prompt_ids=LONG, sample_ids=(100, 101))
    engine.submit([long], PARAMS, seed=0, step=1)
    found = by_id(first + finish(engine))
    alone = by_id(list(small_engine().generate([long], PARAMS, seed=0, step=1)))
    assert found.keys() == {0, 1, 100, 101}
    assert found[100].token_ids == alone[100].token_ids


def test_the_most_pages_in_use_are_those_of_all_tables():
    """A long prompt, which needs larger tables, comes when most samples have left."""
    engine = small_engine(num_pages=None)
    engine.submit(requests(8), PARAMS, seed=0, step=1)
    for _ in range(12):
        engine.step()
    engine.abort(range(1, 16))
    peak = engine._pages.peak
    engine.submit([Request(prompt_ids=LONG, sample_ids=(100,))], PARAMS, seed=0, step=1)
    assert engine._pages.num_pages > peak, "it has other tables"
    finish(engine)
    assert engine.statistics()["peak_pages"] == peak


def test_an_aborted_sample_returns_the_tokens_drawn_so_far():
    whole = by_id(list(small_engine().generate(requests(3), PARAMS, seed=0, step=1)))
    engine = small_engine(max_num_seqs=4)
    engine.submit(requests(3), PARAMS, seed=0, step=1)
    for _ in range(4):
        assert engine.step() == []
    aborted = by_id(engine.abort([1, 5, 77]))
    assert aborted.keys() == {1, 5}, "an id that is not at work is ignored"
    count = len(aborted[1].token_ids)
    assert 1 <= count < 20
    assert aborted[1].token_ids == whole[1].token_ids[:count]
    np.testing.assert_allclose(aborted[1].log_probs, whole[1].log_probs[:count], atol=1e-4)
    assert aborted[5].token_ids == [], "it has not begun"
    assert {each.finish_reason for each in aborted.values()} == {"abort"}

    rest = by_id(finish(engine))
    assert rest.keys() == {0, 2, 3, 4}
    assert rest[4].token_ids == whole[4].token_ids
    engine.check_integrity()


def test_an_engine_is_idle_after_its_work_is_aborted():
    engine = small_engine()
    engine.submit(requests(3), PARAMS, seed=0, step=1)
    engine.step()
    assert len(engine.abort()) == 6
    assert not engine.has_work
    assert engine.step() == []
    engine.check_integrity()
    engine.sleep()


def continued(requests: list[Request], aborted: dict[int, Completion]) -> list[Request]:
    """Return requests for the aborted samples, under other ids and in another step's call."""
    again = []
    for request in requests:
        begun = []
        for sample_id in request.sample_ids:
            if sample_id in aborted:
                tokens = tuple(aborted[sample_id].token_ids)
                log_probs = tuple(aborted[sample_id].log_probs)
                begun.append(
                    Continuation(step=1, number=sample_id, token_ids=tokens, log_probs=log_probs)
                )
        if begun:
            again.append(
                Request(
                    prompt_ids=request.prompt_ids,
                    sample_ids=tuple(1000 + each.number for each in begun),
                    continuations=tuple(begun),
                )
            )
    return again


@pytest.mark.parametrize("settings", [{}, {"max_num_seqs": 4}, {"deterministic": True}])
def test_an_interruption_changes_no_draw(settings):
    whole = by_id(list(small_engine(**settings).generate(requests(4), PARAMS, seed=0, step=1)))
    engine = small_engine(**settings)
    engine.submit(requests(4), PARAMS, seed=0, step=1)
    for steps in (3, 5, 1):
        for _ in range(steps):
            assert engine.step() == []
        aborted = by_id(engine.abort())
        assert not engine.has_work
        aborted = {number % 1000: completion for number, completion in aborted.items()}
        engine.submit(continued(requests(4), aborted), PARAMS, seed=0, step=99)

    found = by_id(finish(engine))
    assert len(found) == 8
    for number, completion in whole.items():
        assert found[1000 + number].token_ids == completion.token_ids
        np.testing.assert_allclose(found[1000 + number].log_probs, completion.log_probs, atol=1e-4)
    engine.check_integrity()


def test_a_sample_without_room_for_a_token_cannot_continue():
    done = Continuation(step=1, number=0, token_ids=(5,) * 20, log_probs=(-1.0,) * 20)
    request = Request(prompt_ids=(5, 6), sample_ids=(0,), continuations=(done,))
    with pytest.raises(RolloutError, match="has drawn 20 tokens and may draw 20"):
        small_engine().submit([request], PARAMS, seed=0, step=1)


def test_an_iterator_that_is_closed_early_aborts():
    engine = small_engine()
    completions = engine.generate(requests(3), PARAMS, seed=0, step=1)
    next(completions)
    completions.close()
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("kind", ["embedded", "hf", "generate only"])
def test_the_id_of_a_sample_at_work_is_rejected(kind):
    engine: Any = GenerateOnly(Listed(completion(0), completion(1)))
    if kind != "generate only":
        engine = make_engine(talkative_model("qwen2"), kind)
    engine.submit(requests(1), PARAMS, seed=0, step=1)
    with pytest.raises(RolloutError, match="Sample id 0 is being generated already"):
        engine.submit(requests(1), PARAMS, seed=0, step=1)
    assert by_id(finish(engine)).keys() == {0, 1}, "what is at work goes on"


def test_other_sampling_parameters_than_those_at_work_are_rejected():
    engine = small_engine()
    engine.submit(requests(1), PARAMS, seed=0, step=1)
    with pytest.raises(RolloutError, match="other sampling parameters"):
        engine.submit(requests(1, first=7), SamplingParams(max_new_tokens=3), seed=0, step=1)
    assert by_id(finish(engine)).keys() == {0, 1}, "what is at work goes on"


def test_random_submissions_and_aborts_lose_no_sample_and_no_page():
    random = np.random.default_rng(0)
    engine = small_engine(num_pages=40, max_num_seqs=8, enable_prefix_caching=True)
    expected = by_id(list(small_engine().generate(requests(60), PARAMS, seed=0, step=1)))
    waiting = requests(60)
    found: dict[int, Completion] = {}

    while waiting or engine.has_work:
        if waiting and random.random() < 0.4:
            count = int(random.integers(1, 6))
            engine.submit(waiting[:count], PARAMS, seed=0, step=1)
            del waiting[:count]
        completions = engine.step()
        if random.random() < 0.15:
            completions += engine.abort(random.integers(0, 120, 6).tolist())
        for completion in completions:
            assert completion.sample_id not in found
            found[completion.sample_id] = completion

    assert found.keys() == expected.keys()
    for number, completion in found.items():
        count = len(completion.token_ids)
        assert completion.token_ids == expected[number].token_ids[:count]
        assert completion.finish_reason == "abort" or count == 20

    engine.check_integrity()


@pytest.mark.parametrize("kind", ["hf", "generate only"])
def test_engines_that_generate_whole_calls_have_the_verbs_too(kind):
    engine: Any = make_engine(talkative_model("qwen2"), "hf", max_num_seqs=2)
    if kind == "generate only":
        engine = GenerateOnly(small_engine())
    engine.submit(requests(1), PARAMS, seed=0, step=1)
    if kind == "hf":
        engine.submit(requests(1, first=1), PARAMS, seed=0, step=1)
    first = engine.step()
    aborted = engine.abort([1, 3])
    rest = finish(engine)
    found = by_id(first + aborted + rest)
    assert found.keys() == ({0, 1, 2, 3} if kind == "hf" else {0, 1})


def test_an_iterator_with_a_failed_step_aborts_nothing_later(monkeypatch):
    """Delete it while the engine runs other samples under the same ids."""
    engine = small_engine()
    failed = engine.generate(requests(3), PARAMS, seed=0, step=1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "decode", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            list(failed)
    engine.submit(requests(3), PARAMS, seed=0, step=1)
    engine.step()
    failed.close()
    assert by_id(finish(engine)).keys() == set(range(6))


def frozen_then_continued(engine: Any, others: Any) -> dict[int, Completion]:
    """Draw some tokens, hand over the weights of the model `others`, and go on after them."""
    engine.submit(requests(2), PARAMS, seed=0, step=1)
    for _ in range(9):
        engine.step()
    aborted = by_id(engine.abort())
    engine.update_weights(others.named_parameters())
    engine.submit(continued(requests(2), aborted), PARAMS, seed=0, step=1)
    return by_id(finish(engine))


def test_samples_that_go_on_use_no_key_of_the_old_weights(monkeypatch):
    """The probe notices an engine that does not flush its cache of prefixes."""
    others = talkative_model("qwen2")
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.mul_(1.1)
    plain = frozen_then_continued(small_engine(enable_prefix_caching=False), others)
    cached = frozen_then_continued(small_engine(enable_prefix_caching=True), others)
    for number, completion in plain.items():
        np.testing.assert_allclose(cached[number].log_probs, completion.log_probs, atol=1e-4)

    engine = small_engine(enable_prefix_caching=True)
    monkeypatch.setattr(engine, "_begin_books", lambda: None)
    stale = frozen_then_continued(engine, others)
    worst = 0.0
    for number, completion in plain.items():
        same = min(len(completion.log_probs), len(stale[number].log_probs))
        difference = np.subtract(stale[number].log_probs[:same], completion.log_probs[:same])
        worst = max(worst, float(np.abs(difference).max()))
    assert worst > 1e-3


class Listed:
    """An engine with `generate` alone, which gives a list that a test has made."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers

    def generate(self, requests, params, *, seed, step):
        return iter(self.answers)


def completion(sample_id: int) -> Completion:
    return Completion(sample_id=sample_id, token_ids=[1], log_probs=[-1.0], finish_reason="length")


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ((completion(0), completion(0)), "returned sample 0, which was not asked for, or a second"),
        ((completion(7),), "returned sample 7, which was not asked for"),
        ((None, completion(0)), "must give verl.rollout.Completion objects, got NoneType"),
    ],
)
def test_wrong_answers_of_generate_are_named(answers: tuple, message: str):
    engine = GenerateOnly(Listed(*answers))
    engine.submit([Request(prompt_ids=(1,), sample_ids=(0,))], PARAMS, seed=0, step=1)
    with pytest.raises(RolloutError, match=message):
        for _ in answers:
            engine.step()


def test_a_generate_that_returns_nothing_is_named():
    class Forgetful(Listed):
        def generate(self, requests, params, *, seed, step):
            return None

    engine = GenerateOnly(Forgetful())
    with pytest.raises(RolloutError, match=r"must return an iterable .* got NoneType\. Yield one"):
        engine.submit([Request(prompt_ids=(1,), sample_ids=(0,))], PARAMS, seed=0, step=1)


def test_a_finish_reason_without_a_meaning_is_an_error():
    with pytest.raises(RolloutError, match="one of stop, length, abort, got 'eos' for sample 3"):
        Completion(sample_id=3, token_ids=[1], log_probs=[-1.0], finish_reason="eos")


def test_samples_that_generate_leaves_out_are_named():
    engine = GenerateOnly(Listed(completion(1)))
    engine.submit([Request(prompt_ids=(1,), sample_ids=(0, 1, 2))], PARAMS, seed=0, step=1)
    assert [each.sample_id for each in engine.step()] == [1]
    engine.abort([2])
    with pytest.raises(RolloutError, match="ended without 1 of 3 samples: 0. It must give"):
        engine.step()
    assert engine.abort() == [], "a sample that was reported is not at work"


def test_an_aborted_sample_may_still_come():
    engine = GenerateOnly(Listed(completion(0), completion(1)))
    engine.submit([Request(prompt_ids=(1,), sample_ids=(0, 1))], PARAMS, seed=0, step=1)
    engine.abort([0])
    assert [each.sample_id for each in engine.step()] == [1]


def test_verbs_that_change_no_token_may_be_left_out():
    engine = OptionalVerbs(Listed())
    engine.reserve(Room(sequences=1, tokens=1))
    engine.forget_prefixes()
