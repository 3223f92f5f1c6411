"""Features of pictures that are kept: found by key, dropped when the tower changes, bounded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_vision_models import FAMILIES, IMAGE, tiny_vision_model
from verl.models.features import FeatureStore, store_of, use_store
from verl.models.pictures import Picture
from verl.models.vision import (
    example_picture,
    freeze_vision_tower,
    keep_features,
    picture_features,
    picture_parameters,
    towers_within,
)
from verl.utils.errors import DataError, ModelError


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    model = tiny_vision_model(request.param)
    for parameter in picture_parameters(model):
        parameter.requires_grad_(False)
    return model


def pictures_of(model: Any, count: int) -> list[Picture]:
    return [replace(example_picture(model, seed), key=str(seed)) for seed in range(count)]


def calls_of(model: Any) -> Callable[[], int]:
    """Count the calls of a model's vision tower."""
    calls: list[int] = []
    towers_within(model)[0].register_forward_hook(lambda *_: calls.append(1))
    return lambda: len(calls)


def assert_equal(found: tuple[Any, list[Any]], expected: tuple[Any, list[Any]]) -> None:
    for one, other in zip([found[0], *found[1]], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_kept_features_are_those_of_the_tower_in_any_order(model: Any) -> None:
    first, second, third = pictures_of(model, 3)
    expected = picture_features(model, [third, first, second])
    store = keep_features(model)
    assert store is not None
    num_calls = calls_of(model)
    with torch.inference_mode():  # as a rollout computes them
        picture_features(model, [first, third])
    before = num_calls()

    # one of three is missing, in the middle of the others
    assert_equal(picture_features(model, [third, first, second]), expected)
    assert num_calls() > before
    before = num_calls()
    assert_equal(picture_features(model, [third, first, second]), expected)
    assert num_calls() == before
    assert len(store) == 3

    found = picture_features(model, [first])[0]
    assert not found.is_inference()
    assert not found.requires_grad


def test_a_changed_tower_drops_what_it_computed(model: Any) -> None:
    pictures = pictures_of(model, 2)
    store = keep_features(model)
    old = picture_features(model, pictures)[0]
    with torch.no_grad():
        for parameter in picture_parameters(model):
            parameter.mul_(1.5)
    new = picture_features(model, pictures)[0]
    assert store_of(model) is store
    assert (new - old).abs().max() > 1e-3


def test_a_tower_that_becomes_trainable_computes_every_time() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    freeze_vision_tower(model)
    pictures = pictures_of(model, 1)
    assert keep_features(model) is not None
    picture_features(model, pictures)
    model.base_model.visual.requires_grad_(True)
    num_calls = calls_of(model)
    assert picture_features(model, pictures)[0].requires_grad
    assert num_calls() == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_a_trained_part_keeps_nothing(family: str) -> None:
    model = tiny_vision_model(family)
    picture_parameters(model)[-1].requires_grad_(True)
    for parameter in picture_parameters(model)[:-1]:
        parameter.requires_grad_(False)
    assert keep_features(model) is None
    assert store_of(model) is None


def test_two_pictures_with_one_key_are_an_error() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    freeze_vision_tower(model)
    (picture,) = pictures_of(model, 1)
    keep_features(model)
    picture_features(model, [picture])
    with pytest.raises(DataError, match="Two pictures have the key '0'"):
        picture_features(model, [replace(picture, token_ids=(IMAGE, IMAGE))])


def test_a_picture_with_other_tokens_than_features_is_an_error() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    freeze_vision_tower(model)
    (picture,) = pictures_of(model, 1)
    keep_features(model)
    with pytest.raises(ModelError, match="features for pictures with 2 tokens in all"):
        picture_features(model, [replace(picture, token_ids=(IMAGE, IMAGE))])


def test_a_full_store_lets_only_earlier_rounds_go() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    freeze_vision_tower(model)
    first, second, third, fourth = pictures_of(model, 4)
    features = picture_features(model, [first])[0]
    store = FeatureStore(picture_parameters(model), max_bytes=2 * features.nbytes)
    use_store(model, store)
    device = torch.device("cpu")

    picture_features(model, [first, second, third])
    assert store.find(first, device) is not None
    assert store.find(third, device) is None
    assert store.num_bytes == 2 * features.nbytes

    store.begin_round()
    picture_features(model, [second])  # stays, because this round uses it
    picture_features(model, [fourth])
    assert store.find(first, device) is None
    assert store.find(second, device) is not None
    assert store.find(fourth, device) is not None
    assert store.num_bytes == 2 * features.nbytes
