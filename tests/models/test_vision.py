"""Packed sequences with pictures have the numbers and gradients of transformers' own models, one by
one, and would not if positions, features or the bounds of a picture were wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from tests.models.grouped import kernel_forward
from tests.models.rows import KeepFloat64
from tests.tiny_models import tiny_model
from tests.tiny_vision_models import (
    FAMILIES,
    IMAGE,
    VIDEO,
    save_tiny_vision,
    tiny_vision_model,
)
from verl.models import attention, vision
from verl.models import packed as packed_module
from verl.models.attention import eager_attention
from verl.models.kernels import varlen
from verl.models.load import load_causal_lm
from verl.models.packed import PackedBatch, PackedCausalLM
from verl.models.pictures import Picture, three_part_positions, tokens_ahead
from verl.models.probe import check_packed
from verl.models.vision import FAMILIES as SUPPORTED
from verl.models.vision import (
    example_picture,
    example_video,
    freeze_vision_tower,
    knows_videos,
    language_layers,
    model_arguments,
    picture_features,
)
from verl.utils.errors import DataError, ModelError

VIDEO_FAMILIES = [
    name for name, family in SUPPORTED.items() if family.video_pixels is not None and knows_videos()
]
STAND_IN = 100  # a token that no row has
Sequences = tuple[list[list[int]], list[tuple[Picture, ...]], list[int]]


def sequences(model: Any) -> Sequences:
    """Return ids, pictures and prompt lengths of four rows, two of them with one prompt."""
    one, other = (example_picture(model, seed) for seed in (0, 1))
    prompt = [5, 9, *one.token_ids, 14, 7]
    two = [11, *other.token_ids, 8, 3, *one.token_ids, 12]
    # The policy may draw the id of a picture token; it is a token like any other then.
    ids = [[*prompt, 31, 32, IMAGE, 33], [*prompt, 41, 42], [*two, 51, 52, 53], [17, 18, 19, 20]]
    pictures: list[tuple[Picture, ...]] = [(one,), (one,), (other, one), ()]
    lengths = [len(prompt), len(prompt), len(two), 2]
    if model.config.model_type in VIDEO_FAMILIES:
        first, second = (example_video(model, seed) for seed in (2, 3))
        mixed = [13, *first.token_ids, 6, *one.token_ids, 10, *second.token_ids, 4]
        ids += [[*mixed, 61, 62], [*mixed, 71, 72, 73]]
        pictures += [(first, one, second)] * 2
        lengths += [len(mixed)] * 2
    return ids, pictures, lengths


def packed_batch(model: Any, *, shared: bool = True) -> PackedBatch:
    ids, pictures, prompts = sequences(model)
    batch = PackedBatch.from_sequences(ids).with_pictures(pictures, prompts)
    # Predict the responses alone.
    starts = [0]
    for each in ids:
        starts.append(starts[-1] + len(each))
    places = []
    for start, each, prompt in zip(starts, ids, prompts):
        places += range(start + prompt, start + len(each))
    index = torch.tensor(places)
    batch = packed_module.replace(batch, predict=index - 1, targets=batch.input_ids[index])
    numbers = [0, 0, 2, 3, 4, 4][: len(ids)]
    return batch.with_shared_prompts(numbers, prompts) if shared else batch


def expected_log_probs(model: Any) -> Tensor:
    """Compute log-probs by transformers' own forward, row by row.

    A row's response is fed as text: transformers would look for a picture at a drawn picture token.
    """
    log_probs = []
    with eager_attention(model):
        for each, own, prompt in zip(*sequences(model)):
            ids = torch.tensor([each])
            arguments = model_arguments(model, ids, own)
            body = model.base_model
            if own and IMAGE in each[prompt:]:
                arguments = with_drawn_picture_token(model, ids, own, prompt)
            states = body(**arguments, use_cache=False).last_hidden_state
            logits = model.get_output_embeddings()(states)[0].double().log_softmax(-1)
            targets = ids[0, prompt:, None]
            log_probs.append(logits[prompt - 1 : -1].gather(1, targets)[:, 0])
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    return torch.cat(log_probs)


def with_drawn_picture_token(
    model: Any, ids: Tensor, own: tuple[Picture, ...], prompt: int
) -> dict[str, Any]:
    """Let transformers see another token, and give its embedding the values of the drawn one."""
    changed = ids.clone()
    changed[0, prompt:][ids[0, prompt:] == IMAGE] = STAND_IN
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight[STAND_IN] = weight[IMAGE]
    return model_arguments(model, changed, own)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_are_those_of_single_rows(family: str, shared: bool) -> None:
    model = tiny_vision_model(family)
    expected = expected_log_probs(model).detach()
    with torch.no_grad():
        ours = PackedCausalLM(model)(packed_batch(model, shared=shared))["log_probs"]
    assert expected.std() > 0.5
    torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_single_rows(family: str) -> None:
    model = tiny_vision_model(family, dtype=torch.float64)
    with KeepFloat64():
        expected_log_probs(model).square().sum().backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    rows: Any = model.get_input_embeddings().weight.grad
    rows[IMAGE] += rows[STAND_IN]
    rows[STAND_IN] = 0
    model.zero_grad(set_to_none=True)

    batch = packed_batch(model)
    with KeepFloat64():
        PackedCausalLM(model)(batch)["log_probs"].square().sum().backward()
    # A bias of keys has the gradient 0 but for rounding.
    least = 1e-6 * max(float(each.norm()) for each in expected.values() if each is not None)
    compared = 0
    for name, parameter in model.named_parameters():
        want = expected[name]
        if want is None or parameter.grad is None:
            assert want is None or not want.any(), name
            continue
        error = (parameter.grad - want).norm() / want.norm().clamp(min=least)
        assert error < 1e-7, (name, error)
        compared += 1
    assert compared > 30
    towers = [
        name for name, each in model.named_parameters() if "vis" in name and each.grad is not None
    ]
    assert len(towers) > 10


@pytest.mark.parametrize("shared", [False, True])
def test_kernel_calls_compute_pictures_that_see_themselves(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the kernels' path of CUDA, on a kernel for the CPU."""
    calls: list[Any] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, sequences: Any, scale: float) -> Any:
        calls.append(sequences)
        return kernel_forward(q, k, v, sequences, scale)

    model = tiny_vision_model("gemma3", dtype=torch.float64)
    expected = expected_log_probs(model).detach()
    monkeypatch.setattr(attention, "varlen_can", lambda *_: True)
    monkeypatch.setattr(varlen, "forward", counted)
    with torch.no_grad(), KeepFloat64():
        ours = PackedCausalLM(model)(packed_batch(model, shared=shared))["log_probs"]
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
    # One layer without a window, and two with one, which shared prompts leave to blocks.
    assert len(calls) == (3 if shared else 2 + 2 * 2)


def log_prob_distance(model: Any) -> float:
    expected = expected_log_probs(model).detach()
    with torch.no_grad():
        ours = PackedCausalLM(model)(packed_batch(model))["log_probs"]
    return (ours.double() - expected).abs().max().item()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_plain_positions_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(length: int, places: Tensor, pictures: Any) -> tuple[Tensor, int]:
        return torch.arange(length).expand(3, -1), 0

    monkeypatch.setattr(packed_module, "three_part_positions", plain)
    model = tiny_vision_model(family)
    assert log_prob_distance(model) > 1e-2
    with pytest.raises(ModelError, match="with pictures"):
        check_packed(model)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_videos_without_time_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_vision_model(family)
    expected = expected_log_probs(model).detach()
    monkeypatch.setattr(vision, "video_times", lambda config, frames, seconds: ((0,) * frames,))
    with torch.no_grad():
        ours = PackedCausalLM(model)(packed_batch(model))["log_probs"]
    assert (ours.double() - expected).abs().max() > 1e-2
    with pytest.raises(ModelError, match="with pictures"):
        check_packed(model)


def test_text_goes_on_behind_the_time_of_a_long_video() -> None:
    """Check the rule of the paper. transformers' own forward from 5.3 on begins text earlier."""
    video = Picture("v", (VIDEO,) * 8, VIDEO, {}, grid=(1, 2), times=((0, 3, 6, 9),), seconds=3.0)
    positions, shift = three_part_positions(11, torch.arange(1, 9), [video])
    assert positions[0].tolist() == [0, 1, 1, 4, 4, 7, 7, 10, 10, 11, 12]
    assert positions[1].tolist() == [0, *[1] * 8, 11, 12]
    assert positions[2].tolist() == [0, *[1, 2] * 4, 11, 12]
    assert shift == 13 - 11


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_features_are_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = packed_module.place_pictures

    def swapped(*arguments: Any) -> Any:
        placed = place(*arguments)
        return placed._replace(rows=placed.rows.flip(0))

    monkeypatch.setattr(packed_module, "place_pictures", swapped)
    model = tiny_vision_model(family)
    assert log_prob_distance(model) > 1e-2
    with pytest.raises(ModelError, match="with pictures"):
        check_packed(model)


def test_a_causal_mask_over_a_picture_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        packed_module, "tokens_ahead", lambda length, *_: torch.zeros(length, dtype=torch.int64)
    )
    model = tiny_vision_model("gemma3")
    assert log_prob_distance(model) > 1e-2
    with pytest.raises(ModelError, match="with pictures"):
        check_packed(model)


@pytest.mark.parametrize("shared", [False, True])
def test_ranks_that_share_tokens_know_what_all_tokens_see(shared: bool) -> None:
    batch = packed_batch(tiny_vision_model("gemma3"), shared=shared)
    assert batch.ahead is not None
    length = len(batch.input_ids)
    for parts in (2, 5):
        added = -length % parts
        for part in range(parts):
            ahead = batch.split(parts, part).ahead
            assert ahead is not None
            assert ahead.tolist() == [*([0] * added), *batch.ahead.tolist()]
    # The last token of a picture sees no later one.
    assert batch.input_ids[batch.ahead > 0].unique().tolist() == [IMAGE]
    assert int((batch.ahead == 3).sum()) == (3 if shared else 4)


def test_a_picture_sees_itself_up_to_the_next_plain_token() -> None:
    def picture(tokens: str) -> Picture:
        ids = tuple(IMAGE if each == "x" else 5 for each in tokens)
        return Picture(key=tokens, token_ids=ids, token_id=IMAGE, inputs={})

    # Two pictures side by side, the first of which has plain tokens within.
    places = torch.tensor([1, 2, 5, 6, 7, 8])
    pictures = [picture("xx..xx"), picture("xx")]
    assert tokens_ahead(10, places, pictures).tolist() == [0, 1, 0, 0, 0, 1, 0, 1, 0, 0]
    assert tokens_ahead(3, places[:0], []).tolist() == [0, 0, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_passes_the_check_at_load(family: str) -> None:
    check_packed(tiny_vision_model(family))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_transformers(family: str) -> None:
    model = tiny_vision_model(family)
    ids, pictures, prompts = sequences(model)
    for each, own, prompt in zip(ids, pictures, prompts):
        if not own:
            continue
        row = torch.tensor(each)
        kinds = (row == IMAGE).int() + 2 * (row == VIDEO).int()
        kinds[prompt:] = 0
        arguments = model_arguments(model, row[None], own)
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        grids = {name: arguments[name] for name in names if name in arguments}
        body: Any = model.base_model
        want, delta = body.get_rope_index(row[None], kinds[None], **grids)
        places = kinds.nonzero().squeeze(1)
        ours, shift = three_part_positions(len(each), places, own)
        assert torch.equal(ours, want[:, 0])
        assert shift == delta.item()


def test_the_vision_tower_runs_once_for_each_picture() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    calls: list[int] = []
    tower: Any = model.base_model.visual
    tower.register_forward_hook(
        lambda module, args, kwargs, out: calls.append(len(args[0])), with_kwargs=True
    )
    batch = packed_batch(model)
    patches = len(example_picture(model).inputs["pixel_values"])
    calls.clear()
    with torch.no_grad():
        PackedCausalLM(model)(batch)
    # Two pictures and two videos of three frames, in six sequences of which five have some.
    assert calls == [(2 + 2 * 3) * patches]


def test_a_cut_prompt_is_an_error_before_the_forward() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    picture = example_picture(model)
    ids = [[5, *picture.token_ids[:-1], 9, 10]]
    with pytest.raises(DataError, match=r"5 picture tokens .* have 6 features"):
        PackedBatch.from_sequences(ids).with_pictures([(picture,)], [len(ids[0]) - 1])


@pytest.mark.parametrize("family", ["internvl", "gemma3"])
def test_other_counts_of_features_and_tokens_are_an_error(family: str) -> None:
    model = tiny_vision_model(family)
    picture = example_picture(model)
    short = replace(picture, token_ids=picture.token_ids[1:])
    with pytest.raises(ModelError, match=r"4 features for pictures with 3 tokens in all"):
        picture_features(model, [short])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tiny_model("llama"), r"family 'llama' reads text alone. Give the critic"),
        (tiny_vision_model("gemma3"), r"prepared for another family .* 'gemma3'. Give the critic"),
    ],
    ids=["text", "gemma3"],
)
def test_pictures_that_a_role_does_not_read_are_an_error(model: Any, message: str) -> None:
    picture = example_picture(tiny_vision_model("qwen2_5_vl"))
    ids = [[5, *picture.token_ids, 9, 10]]
    batch = PackedBatch.from_sequences(ids).with_pictures([(picture,)], [len(ids[0]) - 1])
    with pytest.raises(ModelError, match=message):
        PackedCausalLM(model)(batch)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_pictures_behind_the_prompt_are_read_as_those_in_it(family: str) -> None:
    model = tiny_vision_model(family)
    one, other = (example_picture(model, seed) for seed in (0, 1))
    opening = [5, 9, *one.token_ids, 14, 7]
    rows = []
    for called in ([31, 32], [41]):
        # The last picture token was drawn by the model.
        rows.append([*opening, *called, 8, *other.token_ids, 3, 12, IMAGE, 33])
    pictures = [(one, other)] * 2
    prompts = [len(opening)] * 2
    starts = [0, len(rows[0])]
    places = []
    for start, row in zip(starts, rows):
        places += range(start + len(opening), start + len(row))
    index = torch.tensor(places)

    def batch(pictures: list[tuple[Picture, ...]], lengths: list[int]) -> PackedBatch:
        made = PackedBatch.from_sequences(rows).with_pictures(pictures, lengths)
        return packed_module.replace(made, predict=index - 1, targets=made.input_ids[index])

    behind = batch(pictures, prompts)
    model_of_batch = PackedCausalLM(model)
    with torch.no_grad():
        expected = model_of_batch(batch(pictures, [len(row) - 3 for row in rows]))["log_probs"]
        assert torch.equal(model_of_batch(behind)["log_probs"], expected)
        shared = model_of_batch(behind.with_shared_prompts([0, 0], prompts))["log_probs"]
        torch.testing.assert_close(shared, expected, rtol=1e-4, atol=1e-4)
        swapped = model_of_batch(batch([(other, one)] * 2, prompts))["log_probs"]
        assert (swapped - expected).abs().max() > 1e-2


def test_a_cut_response_with_pictures_is_an_error() -> None:
    model = tiny_vision_model("qwen2_5_vl")
    picture = example_picture(model)
    ids = [[5, *picture.token_ids, 9, 10, *picture.token_ids[:-1]]]
    with pytest.raises(DataError, match=r"behind the prompt stand 5 .* have 6 features"):
        PackedBatch.from_sequences(ids).with_pictures([(picture, picture)], [8])


def test_a_folder_is_loaded_with_its_vision_tower(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "qwen2_5_vl")
    model: Any = load_causal_lm(tmp_path, dtype="float32")
    assert model.base_model.visual.config._attn_implementation == "sdpa"
    assert model.base_model.language_model.config._attn_implementation == "verl_packed"
    freeze_vision_tower(model)
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    assert frozen
    assert all(".visual." in name for name in frozen)


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    AutoConfig.for_model("mistral3").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"'mistral3' reads pictures in a way .* not supported"):
        load_causal_lm(tmp_path, dtype="float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_language_model_next_to_a_heavy_tower(family):
    model: Any = tiny_vision_model(family)
    layers = language_layers(PackedCausalLM(model))
    assert len(layers) == model.config.get_text_config().num_hidden_layers
    (tower,) = vision.towers_within(model)[:1]
    tower.more = torch.nn.ModuleList(torch.nn.Linear(200, 200) for _ in range(5))
    assert language_layers(PackedCausalLM(model)) == layers
