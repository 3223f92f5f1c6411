"""Engines answer pictures as transformers' own `generate` does, and tell prompts with equal tokens
and different pictures apart."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import cases
from tests.rollout.engines import make_engine, tokens_of
from tests.tiny_vision_models import FAMILIES, tiny_vision_model
from verl.models import packed
from verl.models.attention import eager_attention
from verl.models.pictures import Picture
from verl.models.vision import (
    example_picture,
    example_video,
    family_of,
    knows_videos,
    model_arguments,
)
from verl.rollout import Completion, Request, SamplingParams
from verl.rollout.embedded import samples
from verl.rollout.types import Continuation
from verl.utils.errors import ConfigError, ModelError, RolloutError

NEW_TOKENS = 20


def questions(model: Any) -> list[tuple[tuple[int, ...], tuple[Picture, ...]]]:
    """Return prompts and pictures: two with equal tokens, one of two pictures, and one of text.

    For families that read videos, also two of a video with equal tokens.
    """
    one, other, third = (example_picture(model, seed) for seed in range(3))
    around = (5, 9), (14, 7, 11, 8)
    asked = [
        ((*around[0], *one.token_ids, *around[1]), (one,)),
        ((*around[0], *other.token_ids, *around[1]), (other,)),
        ((3, *third.token_ids, 6, *one.token_ids, *around[1], *range(20, 45)), (third, one)),
        ((17, 18, 19, 20, 21), ()),
    ]
    if family_of(model.config).video_pixels is not None and knows_videos():
        for seed in range(2):
            video = example_video(model, seed)
            prompt = (13, *video.token_ids, 6, *one.token_ids, *around[1])
            asked.append((prompt, (video, one)))
    return asked


def answers(engine: Any, asked: list[Any], n: int = 1, **params: Any) -> list[Completion]:
    requests = []
    for number, (prompt, pictures) in enumerate(asked):
        ids = tuple(range(number * n, (number + 1) * n))
        requests.append(Request(prompt_ids=prompt, sample_ids=ids, pictures=pictures))
    settings = SamplingParams(**{"max_new_tokens": NEW_TOKENS, "temperature": 0.0, **params})
    completions = list(engine.generate(requests, settings, seed=0, step=0))
    return sorted(completions, key=lambda each: each.sample_id)


def expected_answers(model: Any, asked: list[Any]) -> list[list[int]]:
    expected = []
    with eager_attention(model):
        for prompt, pictures in asked:
            arguments = model_arguments(model, torch.tensor([prompt]), pictures)
            output = model.generate(
                **arguments,
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            expected.append(output[0, len(prompt) :].tolist())
    return expected


@pytest.mark.parametrize(
    ("family", "name"),
    cases(
        FAMILIES,
        ["embedded", "hf"],
        quick=lambda family, name: name == "embedded" or family == "qwen2_5_vl",
    ),
)
def test_greedy_tokens_are_those_of_transformers(family: str, name: str) -> None:
    model = tiny_vision_model(family)
    asked = questions(model)
    expected = expected_answers(model, asked)
    assert expected[0] != expected[1], "the pictures make no difference"
    assert len(expected) == 4 or expected[4] != expected[5], "the videos make no difference"
    assert len({token for answer in expected for token in answer}) > 20
    engine = make_engine(model, name)
    assert tokens_of(answers(engine, asked)) == expected


@pytest.mark.parametrize("name", ["embedded", "hf"])
def test_pictures_with_another_number_of_tokens_name_the_processor(name: str) -> None:
    model = tiny_vision_model("internvl")
    picture = example_picture(model)
    short = replace(picture, token_ids=picture.token_ids[1:])
    asked = [((5, *short.token_ids, 9), (short,))]
    with pytest.raises(ModelError, match=r"features for pictures with \d+ tokens in all. Prepare"):
        answers(make_engine(model, name), asked)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "gemma3"])
def test_preempted_samples_and_small_caches_change_nothing(family: str) -> None:
    model = tiny_vision_model(family)
    asked = questions(model)
    whole = answers(make_engine(model), asked, n=3, temperature=1.0)
    engine = make_engine(model, num_pages=24, page_size=4, max_num_batched_tokens=32)
    assert tokens_of(answers(engine, asked, n=3, temperature=1.0)) == tokens_of(whole)
    assert engine.statistics()["preemptions"] > 0
    engine.check_integrity()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_prefixes_are_found_by_the_content_of_pictures(family: str) -> None:
    model = tiny_vision_model(family)
    asked = questions(model)[:2]
    engine = make_engine(model, page_size=4, enable_prefix_caching=True)
    answers(engine, asked)
    assert engine.statistics()["cached_tokens"] == 0  # equal tokens, other pictures

    longer = [((*prompt, 33, 34, 35), pictures) for prompt, pictures in asked]
    second = answers(engine, longer)
    full_pages = sum(len(prompt) // 4 * 4 for prompt, _ in asked)
    assert engine.statistics()["cached_tokens"] == full_pages
    assert tokens_of(second) == expected_answers(model, longer)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
@pytest.mark.parametrize("page_size", [2, 4, 16])
def test_pages_of_frozen_samples_do_not_cut_a_picture(family: str, page_size: int) -> None:
    model = tiny_vision_model(family)
    picture = example_picture(model)
    # The last full page of 16 tokens ends within the picture.
    prompt = (*range(60, 73), *picture.token_ids, 8)
    expected = expected_answers(model, [(prompt, (picture,))])[0]
    engine = make_engine(model, page_size=page_size, num_pages=64)
    greedy = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)

    request = Request(prompt_ids=prompt, sample_ids=(0,), pictures=(picture,))
    assert len(expected) > 4
    engine.submit([request], greedy, seed=0, step=0)
    for _ in range(2):
        engine.step()
    (frozen,) = engine.freeze()
    assert 0 < len(frozen.token_ids) < NEW_TOKENS
    begun = Continuation(
        step=0,
        number=0,
        token_ids=tuple(frozen.token_ids),
        log_probs=tuple(frozen.log_probs),
    )
    engine.submit([replace(request, continuations=(begun,))], greedy, seed=0, step=0)
    (completion,) = [each for _ in range(NEW_TOKENS) for each in engine.step()]
    assert completion.token_ids == expected
    engine.check_integrity()


def test_the_vision_tower_runs_once_for_a_group() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    engine = make_engine(model)
    calls: list[int] = []
    tower: Any = engine.twin.module.base_model.visual
    tower.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    asked = questions(model)[:1]
    answers(engine, asked, n=8, temperature=1.0)
    assert calls == [len(asked[0][1][0].inputs["pixel_values"])]


def test_a_cached_prefix_does_not_cut_a_picture() -> None:
    model = tiny_vision_model("gemma3")
    picture = example_picture(model)
    engine = make_engine(model, page_size=8, num_pages=64, enable_prefix_caching=True)
    first = (*range(60, 73), *picture.token_ids, *range(7, 14))
    answers(engine, [(first, (picture,))])
    # Of three full pages that are known, the second ends within the picture.
    for prompt, cached in (((*first[:17], 3, 4), 0), ((*first, 5, 6), 24)):
        asked = [(prompt, (picture,))]
        found = answers(engine, asked)
        assert engine.statistics()["cached_tokens"] == cached
        assert tokens_of(found) == expected_answers(model, asked)


def test_a_causal_mask_over_a_picture_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packed, "tokens_ahead", lambda length, *_: torch.zeros(length, dtype=torch.int64)
    )
    model = tiny_vision_model("gemma3")
    asked = questions(model)
    assert tokens_of(answers(make_engine(model), asked)) != expected_answers(model, asked)


def test_a_lost_shift_of_positions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "three_part_positions", lambda *arguments: (None, 0))
    model = tiny_vision_model("qwen2_5_vl")
    asked = questions(model)
    assert tokens_of(answers(make_engine(model), asked)) != expected_answers(model, asked)


def test_names_without_content_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = samples.hashlib.blake2b(b"the same for all", digest_size=8)
    monkeypatch.setattr(samples.hashlib, "blake2b", lambda *arguments, **settings: digest)
    model = tiny_vision_model("qwen2_5_vl")
    asked = questions(model)[:2]
    engine = make_engine(model, page_size=2, enable_prefix_caching=True, max_num_seqs=1)
    long = [((*prompt, *range(40, 60)), pictures) for prompt, pictures in asked]
    assert tokens_of(answers(engine, long)) != expected_answers(model, long)


def test_long_videos_are_refused_by_the_slow_engine() -> None:
    model = tiny_vision_model("qwen2_vl")
    video = example_video(model, frames=4)
    asked = [((5, *video.token_ids, 9), (video,))]
    assert tokens_of(answers(make_engine(model, "hf"), [((5, 9), ())]))
    with pytest.raises(RolloutError, match=r"up to 4 in time, but a frame of 2 x 3 .*=embedded"):
        answers(make_engine(model, "hf"), asked)
    assert tokens_of(answers(make_engine(model), asked))


def test_pictures_that_do_not_fit_are_refused() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    prompt, pictures = questions(model)[0]
    engine = make_engine(model)
    with pytest.raises(RolloutError, match="Request 0: the prompt has 5 picture tokens"):
        answers(engine, [((*prompt[:2], *prompt[3:]), pictures)])
    with pytest.raises(ConfigError, match="deterministic=true does not support models that read"):
        make_engine(model, deterministic=True)
