"""Videos of rows become pictures of several frames, and every bad one is an error with file and
row."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.pictured import dataset, open_reader
from tests.data.pictured import row as row_of
from tests.tiny_vision_models import IMAGE, VIDEO
from tests.vision_folders import save_vision_folder, some_image
from verl.config.sft import SFTDataConfig
from verl.data.pictures import PictureReader
from verl.data.sft_dataset import SFTDataset
from verl.data.videos import Asked, read_video
from verl.models import processor as processor_module
from verl.models import videos
from verl.models.load import load_causal_lm
from verl.models.processor import copy_processor
from verl.utils.errors import DataError, MissingDependencyError

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
FRAMES = [some_image(number) for number in range(5)]
SETTINGS = {
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "merge_size": 2,
}


def reader_of(folder: Path, family: str = "qwen2_5_vl", **settings: Any) -> PictureReader:
    save_vision_folder(folder, family)
    name = "Qwen3VLVideoProcessor" if family == "qwen3_vl" else "Qwen2VLVideoProcessor"
    content = json.dumps({**SETTINGS, "video_processor_type": name})
    (folder / "video_preprocessor_config.json").write_text(content)
    return open_reader(folder, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module")
def reader(folder: Path) -> PictureReader:
    return reader_of(folder)


def png(image: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def pixels(images: Any) -> np.ndarray:
    return np.stack([np.asarray(image) for image in images])


def row(text: str = "<video>Hi", **columns: Any) -> dict[str, Any]:
    return row_of(text, **columns)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_patches_of_a_group_are_those_of_its_frames(family: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, family)
    video = reader.prepare_video(FRAMES)  # the last frame is a group of its own, repeated
    assert video.inputs["image_grid_thw"].tolist() == [[3, 10, 6]]
    assert (video.grid, video.num_tokens) == ((5, 3), 3 * 15)
    patches = video.inputs["pixel_values"].view(3, 60, 3, 2, 16)
    for number, frame in enumerate(FRAMES):
        alone = reader.prepare(frame).inputs["pixel_values"].view(60, 3, 2, 16)
        group, place = divmod(number, 2)
        assert torch.equal(patches[group, :, :, place], alone[:, :, place])
    assert torch.equal(patches[2, :, :, 1], patches[2, :, :, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_inputs_are_those_of_the_models_own_processor(
    family: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    from transformers import AutoProcessor, AutoVideoProcessor

    reader = reader_of(tmp_path, family)
    frames = [some_image(number, (17, 33)) for number in range(5)]
    image = some_image(9, (16, 30))
    ids, messages, (video, _) = reader.encode("A <video> <image>", [image], Path(), [frames])
    of_videos = AutoVideoProcessor.from_pretrained(tmp_path)
    whole = AutoProcessor.from_pretrained(tmp_path, video_processor=of_videos)(
        text=[reader.tokenizer.apply_chat_template(messages, tokenize=False)],
        images=[image],
        videos=[pixels(frames)],
        videos_kwargs={
            "do_sample_frames": False,
            "video_metadata": [{"total_num_frames": 5, "fps": 2.0, "frames_indices": [*range(5)]}],
        },
        return_tensors="pt",
    )
    assert ids[: len(whole["input_ids"][0])] == whole["input_ids"][0].tolist()
    assert torch.equal(video.inputs["image_grid_thw"], whole["video_grid_thw"])
    # One step of 255 is a resized pixel that was rounded differently.
    torch.testing.assert_close(
        video.inputs["pixel_values"], whole["pixel_values_videos"], atol=0.016, rtol=0
    )


def test_the_time_of_a_frame_is_a_part_of_its_position_or_a_text(tmp_path: Path) -> None:
    frames = FRAMES[:4]
    for family, times in (("qwen2_vl", ((0, 1),)), ("qwen2_5_vl", ((0, 4),))):
        video = reader_of(tmp_path / family, family).prepare_video(frames)
        assert (video.times, video.seconds) == (times, 1.0)
        assert set(video.token_ids) == {VIDEO}
    reader = reader_of(tmp_path / "qwen3_vl", "qwen3_vl")
    video = reader.prepare_video({"video": frames, "fps": 4.0})
    assert (video.times, video.seconds) == (((0,), (0,)), 0.5)
    text = str(reader.tokenizer.decode(video.token_ids))
    assert text.startswith("<0.1 seconds><|vision_start|><|video_pad|>")
    assert "<|vision_end|><0.6 seconds><|vision_start|>" in text


def test_videos_come_as_paths_bytes_objects_and_arrays(folder: Path, reader: PictureReader) -> None:
    encoded = [png(frame) for frame in FRAMES]
    names = []
    for number, content in enumerate(encoded):
        (folder / f"frame{number}.png").write_bytes(content)
        names.append(f"frame{number}.png")
    first = reader.prepare_video(names, folder)
    for source in (names, encoded, {"video": names}, {"type": "video", "path": names, "fps": None}):
        assert reader.prepare_video(source, folder) is first  # prepared once
    array = pixels(FRAMES)
    for source in (FRAMES, array, array.transpose(0, 3, 1, 2), torch.tensor(array)):
        same = reader.prepare_video(source, folder)
        assert torch.equal(same.inputs["pixel_values"], first.inputs["pixel_values"])
        assert same.token_ids == first.token_ids
    assert reader.prepare_video({"video": names, "fps": 1}, folder).seconds == 2.0
    smaller = reader.prepare_video({"video": names, "max_pixels": 256}, folder)
    assert smaller.grid == (2, 1)


def test_frames_are_chosen_at_even_distances() -> None:
    asked = Asked.of({"video": "a.mp4", "max_frames": 6.0})
    assert asked.choose_of_file(100, 10.0) == [0, 20, 40, 59, 79, 99]
    assert asked.choose_of_file(30, 10.0) == [0, 6, 12, 17, 23, 29]
    assert asked.choose_of_file(3, 30.0) == [0, 2]
    assert asked.choose_of_file(1, 30.0) == [0]
    assert asked.choose_of_list(9) == [0, 2, 3, 5, 6, 8]
    assert Asked("a.mp4", fps=1.0).choose_of_file(60, 10.0) == [0, 12, 24, 35, 47, 59]
    assert Asked("a.mp4").choose_of_list(3) == [0, 1, 2]


def test_fewer_frames_have_the_same_duration(reader: PictureReader) -> None:
    whole = reader.prepare_video({"video": FRAMES[:4] * 2, "fps": 4})
    thinned = reader.prepare_video({"video": FRAMES[:4] * 2, "fps": 4, "max_frames": 4})
    assert (whole.seconds, thinned.seconds) == (0.5, 1.0)


def test_placeholders_take_videos_and_images_in_order(folder: Path, reader: PictureReader) -> None:
    for number, frame in enumerate(FRAMES):
        (folder / f"{number}.png").write_bytes(png(frame))
    own = {"type": "video", "video": ["2.png", "3.png"], "fps": 1.0}
    content = [{"type": "video"}, {"type": "text", "text": "<image> then"}, own, "and <video>"]
    columns = {"images": ["4.png"], "videos": [["0.png", "1.png"], {"video": ["3.png", "0.png"]}]}
    rows = dataset(folder, reader, {"prompt": [{"role": "user", "content": content}], **columns})
    pictures = rows[0]["prepared_pictures"]
    expected = [
        reader.prepare_video(["0.png", "1.png"], folder),
        reader.prepare("4.png", folder),
        reader.prepare_video(own, folder),
        reader.prepare_video(["3.png", "0.png"], folder),
    ]
    assert list(pictures) == expected
    ids = rows[0]["raw_prompt_ids"]
    assert ids.count(VIDEO) == sum(each.num_tokens for each in pictures if each.seconds)
    assert ids.count(IMAGE) == pictures[1].num_tokens
    kinds = [part["type"] for part in rows[0]["raw_prompt"][0]["content"]]
    assert kinds == ["video", "image", "text", "video", "text", "video"]


def test_long_prompts_are_dropped_by_the_tokens_of_videos(
    folder: Path, reader: PictureReader
) -> None:
    for number, frame in enumerate(FRAMES):
        (folder / f"{number}.png").write_bytes(png(frame))
    rows = [row(videos=[["0.png"] * count]) for count in (2, 6)]
    both = dataset(folder, reader, *rows)
    lengths = [len(both[number]["raw_prompt_ids"]) for number in range(2)]
    assert lengths[1] - lengths[0] == 2 * 15
    limit = {"max_prompt_length": lengths[0]}
    assert len(dataset(folder, reader, *rows, filter_overlong_prompts=True, **limit)) == 1
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: the prompt has {lengths[1]} tok"):
        dataset(folder, reader, *rows, truncation="left", **limit)


def test_pictures_work_where_transformers_does_not_know_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (processor_module, videos):
        monkeypatch.setattr(module, "knows_videos", lambda: False)
    reader = reader_of(tmp_path)
    (tmp_path / "0.png").write_bytes(png(FRAMES[0]))
    pictured = row("<image>Hi", images=["0.png"])
    assert len(dataset(tmp_path, reader, pictured)) == 1
    with pytest.raises(MissingDependencyError, match="Videos need transformers"):
        dataset(tmp_path, reader, pictured, row(videos=[["0.png"]]))


BAD = {
    "missing frame": (["good.png", "none.png"], r"frame 1: there is no file .*none.png"),
    "missing file": ("none.mp4", r"there is no file .*none.mp4.*Correct the path"),
    "sizes": (["good.png", "wide.png"], r"frame 1 has 30 x 16 pixels, but frame 0 24 x 40"),
    "damaged frame": (["good.png", "text.png"], r"frame 1: .* no image that pillow knows"),
    "web": ("https://example.com/a.mp4", r"not fetched from the network"),
    "number": (7, r"expected a video as a path"),
    "empty": ([], r"expected a video as a path"),
    "key": ({"video": ["good.png"], "nframes": 4}, r"one of the keys video, path, and of fps"),
    "fps": ({"video": ["good.png"], "fps": 0}, r"a video's fps must be a number above 0, got 0"),
    "no fps": ({"video": ["good.png"], "fps": float("nan")}, r"fps must be a .* above 0, got nan"),
    "frames": ({"video": ["good.png"], "max_frames": 2.5}, r"max_frames must be a number above 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_video_is_an_error_with_file_and_row(
    folder: Path, reader: PictureReader, name: str
) -> None:
    (folder / "good.png").write_bytes(png(FRAMES[0]))
    (folder / "wide.png").write_bytes(png(some_image(1, (16, 30))))
    (folder / "text.png").write_text("hello")
    source, message = BAD[name]
    rows = [row(videos=[["good.png"]]), row(videos=[source])]
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: video 0 of the row: .*{message}"):
        dataset(folder, reader, *rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hi", "has 0 placeholders .*video.* for 1 videos"),
        ("<video><video>Hi", "has 2 placeholders .* for 1 videos"),
        ("<video><image>Hi", "has 1 placeholders .*image.* for 0 images"),
        ("<video>Hi <|video_pad|>", "writes 2 of its picture tokens .* for 1 images and videos"),
    ],
)
def test_placeholders_that_differ_in_number_are_errors(
    folder: Path, reader: PictureReader, text: str, message: str
) -> None:
    (folder / "good.png").write_bytes(png(FRAMES[0]))
    videos = [["good.png"]]
    with pytest.raises(DataError, match=f"rows.jsonl, row 1: .*{message}"):
        dataset(folder, reader, row(videos=videos), row(text, videos=videos))


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((2, 8, 8, 3)), "float64"),
        (np.zeros((8, 8, 3), np.uint8), r"uint8 of \(8, 8, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"\(0, 8, 8, 3\)"),
    ],
)
def test_arrays_of_another_shape_or_type_are_errors(
    reader: PictureReader, array: np.ndarray, found: str
) -> None:
    with pytest.raises(DataError, match=f"must be uint8 of shape .*{found}"):
        reader.prepare_video(array)


def test_a_file_without_a_package_to_decode_it_names_the_package(
    folder: Path, reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(videos, "is_torchcodec_available", lambda: False)
    monkeypatch.setattr(videos, "is_av_available", lambda: False)
    (folder / "any.mp4").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"row 0: video 0 .*cannot be decoded.*pip install av"):
        dataset(folder, reader, row(videos=["any.mp4"]))


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(
    folder: Path, reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked.mp4").write_bytes(b"12345")

    def fail(path: Path, *mode: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(DataError, match=r"locked.mp4' cannot be read .*Make it readable"):
        reader.prepare_video("locked.mp4", folder)


def test_a_large_file_is_never_in_memory_as_a_whole(folder: Path) -> None:
    unused: Any = None
    size = 24 * 1024**2
    large = folder / "large.mp4"
    large.write_bytes(bytes(size))
    tracemalloc.start()
    try:
        digest, _ = read_video("large.mp4", folder.joinpath, unused, unused)
        assert tracemalloc.get_traced_memory()[1] < size / 2
    finally:
        tracemalloc.stop()

    with large.open("r+b") as content:
        content.seek(size - 1)
        content.write(b"1")
    other, _ = read_video("large.mp4", folder.joinpath, unused, unused)
    assert other != digest


def test_a_file_is_decoded_at_the_rate_that_is_asked_for(
    folder: Path, reader: PictureReader
) -> None:
    av = pytest.importorskip("av")
    container = av.open(str(folder / "shades.mp4"), "w")
    stream = container.add_stream("mpeg4", rate=8)
    stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
    for shade in range(24):
        frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 10 * shade, np.uint8))
        container.mux(stream.encode(frame))
    container.mux(stream.encode())
    container.close()

    video = reader.prepare_video({"video": "shades.mp4", "fps": 2}, folder)
    assert (len(video.times[0]), video.seconds) == (3, 1.0)
    shades = video.inputs["pixel_values"].view(3, -1, 3, 2, 16).mean(dim=(1, 2, 4)).flatten()
    assert bool((shades.diff() > 0.3).all())
    (folder / "cut.mp4").write_bytes((folder / "shades.mp4").read_bytes()[:500])
    with pytest.raises(DataError, match="cut.mp4' is damaged or not complete"):
        reader.prepare_video("cut.mp4", folder)


def test_other_families_and_servers_refuse_videos(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other").mkdir()
    other = reader_of(tmp_path / "other", "internvl")
    assert not other.reads_videos
    with pytest.raises(DataError, match="row 0, column 'videos': must be empty"):
        dataset(tmp_path, other, row("Hi", videos=["a.mp4"]))
    part = [{"type": "video", "video": ["a.png"]}]
    with pytest.raises(DataError, match="family does not read videos"):
        other.encode([{"role": "user", "content": part}], None, tmp_path)
    with pytest.raises(DataError, match=r"servers get no videos.*rollout.name=embedded"):
        reader_of(tmp_path / "other", for_servers=True).prepare_video(FRAMES)


def test_answers_are_learnt_behind_the_tokens_of_videos(
    folder: Path, reader: PictureReader
) -> None:
    for number, frame in enumerate(FRAMES):
        (folder / f"{number}.png").write_bytes(png(frame))
    question = {"question": "<video>What?", "answer": "this", "videos": [["0.png", "1.png"]]}
    file = folder / "answers.jsonl"
    file.write_text(json.dumps(question) + "\n")
    config = SFTDataConfig(prompt_key="question", response_key="answer", max_length=512)
    item = SFTDataset(str(file), reader.tokenizer, config, pictures=reader)[0]
    prompt, _, pictures = reader.encode("<video>What?", None, folder, [["0.png", "1.png"]])
    assert item["raw_prompt_ids"] == prompt
    assert item["prepared_pictures"] == pictures


def test_a_saved_model_keeps_the_settings_of_videos(tmp_path: Path) -> None:
    reader_of(tmp_path)
    target = tmp_path / "saved"
    target.mkdir()
    copy_processor(load_causal_lm(tmp_path, dtype="float32"), target)
    name = "video_preprocessor_config.json"
    assert (target / name).read_text() == (tmp_path / name).read_text()
