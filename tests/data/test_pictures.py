"""Images of rows become pictures in the prompt, and every bad one is an error with file and row."""

import base64
import io
import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.data.pictured import dataset, open_reader
from tests.data.pictured import row as row_of
from tests.data.scripts import load_script
from tests.tiny_vision_models import IMAGE
from tests.vision_folders import FAMILIES, save_vision_folder, some_image
from verl.config import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data.collate import collate
from verl.data.picture_parts import messages_and_sources
from verl.data.pictures import PictureReader
from verl.data.rgb import as_rgb, open_picture
from verl.data.rl_dataset import RLDataset
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.models.load import load_tokenizer
from verl.models.processor import load_picture_processor
from verl.rewards.rules import default_compute_score
from verl.utils.errors import DataError, ModelError
from verl.utils.logging import say_once


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_folder(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def reader(folder: Path) -> PictureReader:
    return open_reader(folder)


def png(seed: int = 0, size: tuple[int, int] = (40, 24)) -> bytes:
    stream = io.BytesIO()
    some_image(seed, size).save(stream, "PNG")
    return stream.getvalue()


def bomb(side: int) -> bytes:
    """Return the header of a PNG of side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 999))


def row(text: str = "<image>Hi", **columns: Any) -> dict[str, Any]:
    return row_of(text, **columns)


@pytest.mark.parametrize("text", ["A <image> and <image>?", "<image>\n<image>", "<image><image>\n"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_and_inputs_are_those_of_the_models_own_processor(
    family: str, text: str, tmp_path: Path
) -> None:
    if family == "smolvlm":
        pytest.importorskip("num2words")
    reader = open_reader(save_vision_folder(tmp_path, family))
    tokenizer = reader.tokenizer
    processor = reader.processor
    images = [some_image(0), some_image(1, (16, 30))]
    if processor.family.one_picture:
        images.pop()
        text = text.replace("<image>", "", 1)
    ids, messages, pictures = reader.encode(text, images, Path())

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    whole = processor.processor(
        text=[rendered], images=images, add_special_tokens=False, return_tensors="pt"
    )
    assert ids == whole["input_ids"][0].tolist()
    dim = 1 if family == "smolvlm" else 0  # (rows, tiles, ...)
    for name in pictures[0].inputs:
        joined = torch.cat([picture.inputs[name] for picture in pictures], dim)
        assert torch.equal(joined, torch.as_tensor(whole[name])), name
    assert sum(picture.num_tokens for picture in pictures) == ids.count(IMAGE)


def test_images_come_as_paths_bytes_dicts_addresses_and_objects(
    folder: Path, reader: PictureReader
) -> None:
    (folder / "one.png").write_bytes(png())
    encoded = base64.b64encode(png()).decode()
    sources = [
        "one.png",
        str(folder / "one.png"),
        f"file://{folder}/one.png",
        png(),
        {"bytes": png(), "path": None},
        {"bytes": None, "path": "one.png"},
        f"data:image/png;base64,{encoded}",
        {"url": f"data:image/png;base64,{encoded}"},
    ]
    first = reader.prepare(sources[0], folder)
    for source in sources:
        assert reader.prepare(source, folder) is first  # prepared once
    pixels = reader.prepare(some_image(), folder)
    assert torch.equal(pixels.inputs["pixel_values"], first.inputs["pixel_values"])


def test_paths_begin_in_the_folder_of_a_file_in_the_home_folder(
    reader: PictureReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.png").write_bytes(png())
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset(tmp_path, reader, row("<image>Hi", images=["one.png"]))
    config = DataConfig(max_prompt_length=512)
    data = RLDataset("~/rows.jsonl", reader.tokenizer, config, pictures=reader)
    assert len(data[0]["prepared_pictures"]) == 1


def test_placeholders_and_parts_take_images_in_order(folder: Path, reader: PictureReader) -> None:
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(number))
    own = {"type": "image", "image": "2.png"}
    content = [{"type": "image"}, {"type": "text", "text": "then"}, own, "and <image>"]
    rows = dataset(
        folder,
        reader,
        {"prompt": [{"role": "user", "content": content}], "images": ["0.png", "1.png"]},
        {"prompt": [{"role": "user", "content": "no picture <here>"}], "images": []},
    )
    pictures = rows[0]["prepared_pictures"]
    expected = [reader.prepare(f"{number}.png", folder) for number in (0, 2, 1)]
    assert list(pictures) == expected
    assert rows[0]["raw_prompt"][0]["content"][-2:] == [
        {"type": "text", "text": "and "},
        {"type": "image"},
    ]
    assert rows[1]["prepared_pictures"] == ()
    batch = collate([rows[0], rows[1]]).repeat(3)
    assert batch.non_tensor_batch["prepared_pictures"][2][0] is pictures[0]


def test_long_prompts_are_dropped_by_their_picture_tokens(
    folder: Path, reader: PictureReader
) -> None:
    (folder / "small.png").write_bytes(png(0, (16, 16)))
    (folder / "large.png").write_bytes(png(1, (32, 32)))
    files = ["small.png", "large.png"]
    rows = [row(images=[name]) for name in files]
    both = dataset(folder, reader, *rows)
    lengths = [len(both[number]["raw_prompt_ids"]) for number in range(2)]
    assert lengths[1] - lengths[0] == 16 - 4
    kept = dataset(
        folder, reader, *rows, max_prompt_length=lengths[0], filter_overlong_prompts=True
    )
    assert len(kept) == 1
    for truncation in ("error", "left"):
        with pytest.raises(DataError, match=rf"rows.jsonl, row 1: the prompt has {lengths[1]} tok"):
            dataset(folder, reader, *rows, max_prompt_length=lengths[0], truncation=truncation)


def test_only_rows_of_text_are_cut(folder: Path, reader: PictureReader) -> None:
    (folder / "small.png").write_bytes(png(0, (16, 16)))
    rows = [row(images=["small.png"]), row("x" * 300)]
    cut = dataset(folder, reader, *rows, max_prompt_length=60, truncation="left")
    assert len(cut[1]["raw_prompt_ids"]) == 60


BAD = {
    "missing": ("missing.png", r"there is no file '.*missing.png' or 'missing.png'\. Corr"),
    "truncated": ("truncated.png", r"damaged or not complete"),
    "text": ("text.png", r"no image that pillow knows"),
    "bomb": ("bomb.png", r"an image may have \d+ pixels, got .*1600000000"),
    "large": ("large.png", r"an image may have \d+ pixels, got 10000 x 10000"),
    "web": ("https://example.com/a.png", r"not fetched from the network"),
    "number": (7, r"expected a path, bytes"),
    "keys": ({"file": "a.png"}, r"expected a value under one of the keys .*, got {'file': 'a\.png"),
    "nulls": ({"bytes": None}, r"expected a value under one of the keys .*, got {'bytes': None}"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_an_error_with_file_and_row(
    folder: Path, reader: PictureReader, name: str
) -> None:
    (folder / "good.png").write_bytes(png())
    (folder / "truncated.png").write_bytes(png(1)[:-400])
    (folder / "text.png").write_text("hello")
    (folder / "bomb.png").write_bytes(bomb(40_000))
    (folder / "large.png").write_bytes(bomb(10_000))
    source, message = BAD[name]
    rows = [row(images=["good.png"]), row(images=[source])]
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: image 0 of the row: .*{message}"):
        dataset(folder, reader, *rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hi", "has 0 placeholders .* for 1 images"),
        ("<image><image>Hi", "has 2 placeholders .* for 1 images"),
        ("<image>Hi <|image_pad|>", "writes 2 of its picture tokens .* for 1 images"),
    ],
)
def test_placeholders_that_differ_in_number_are_errors(
    folder: Path, reader: PictureReader, text: str, message: str
) -> None:
    (folder / "good.png").write_bytes(png())
    with pytest.raises(DataError, match=f"rows.jsonl, row 1: .*{message}"):
        dataset(folder, reader, row(images=["good.png"]), row(text, images=["good.png"]))


def test_a_chat_in_json_text_is_an_error_with_images_too() -> None:
    text = json.dumps([{"role": "user", "content": "<image>Hi"}])
    with pytest.raises(DataError, match=r"got the JSON text of one.*Apply json\.loads"):
        messages_and_sources(text, ["cat.png"])


def test_geometry_rows_have_their_pictures(
    tmp_path: Path, folder: Path, reader: PictureReader
) -> None:
    main = load_script("data_preprocess/geo3k.py").main
    raw = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "12 \\sqrt { 3 }"}
    (tmp_path / "a.png").write_bytes(png())
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(raw) + "\n")
    target = tmp_path / "out"
    main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(target)])
    file = str(target / "train.parquet")
    rows = RLDataset(file, reader.tokenizer, DataConfig(max_prompt_length=512), pictures=reader)
    assert rows[0]["prepared_pictures"][0] is reader.prepare(png())
    truth = rows[0]["reward_model"]["ground_truth"]
    answer = "so \\boxed{12\\sqrt{3}}"
    assert default_compute_score(rows[0]["data_source"], answer, truth) == 1.0
    assert default_compute_score(rows[0]["data_source"], "\\boxed{12}", truth) == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": []}, "row 0: the column 'images' must be a list of at least one picture"),
        ({"images": None}, "row 0: the column 'images' must have a value"),
        ({"images": ["missing.png"]}, r"row 0: a picture cannot be read \(FileNotFoundError"),
        ({"images": [{"url": "a"}]}, r"row 0: a picture cannot be read \(KeyError: 'path'"),
        ({"answer": None}, "row 0: the column 'answer' must have a value"),
        ({"problem": 3}, "row 0: the column 'problem' must be a text, got 3"),
    ],
)
def test_geometry_rows_that_lack_a_part_are_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    main = load_script("data_preprocess/geo3k.py").main
    raw = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "12", **change}
    given = {name: value for name, value in raw.items() if value is not None}
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "train.jsonl").write_text(json.dumps(given) + "\n")
    with pytest.raises(DataError, match=f"train.jsonl, {message}"):
        main(["--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")])


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def as_read(content: bytes) -> list[Any]:
    image = as_rgb(open_picture(content))
    assert image.mode == "RGB"
    return np.asarray(image).reshape(-1, 3).tolist()


def test_transparent_parts_of_an_image_are_white() -> None:
    pixels = np.array([[[9, 8, 7, 255], [9, 8, 7, 0], [0, 0, 0, 51]]], dtype=np.uint8)
    white = [[9, 8, 7], [255, 255, 255], [204, 204, 204]]
    assert as_read(encoded(Image.fromarray(pixels, "RGBA"))) == white

    gray = Image.fromarray(np.array([[[9, 255], [9, 0]]], dtype=np.uint8), "LA")
    assert as_read(encoded(gray)) == [[9] * 3, [255] * 3]

    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    stream = io.BytesIO()
    palette.save(stream, "PNG", transparency=1)
    assert as_read(stream.getvalue()) == [[10, 20, 30], [255, 255, 255]]


def test_gray_values_of_16_bits_are_scaled() -> None:
    values = np.array([[0, 257, 32896, 65535]], dtype=np.uint16)
    scaled = [[0] * 3, [1] * 3, [128] * 3, [255] * 3]
    assert as_read(encoded(Image.fromarray(values))) == scaled
    assert as_read(encoded(Image.fromarray(values), "TIFF")) == scaled
    # of 32 bits, as older versions of pillow open them
    assert np.asarray(as_rgb(Image.fromarray(values.astype(np.int32))))[0].tolist() == scaled
    small = Image.fromarray(np.array([[0, 7, 255]], dtype=np.int32))
    assert np.asarray(as_rgb(small))[0, :, 0].tolist() == [0, 7, 255]


@pytest.mark.parametrize("white", [1, 255, 65535])
def test_floats_are_scaled(white: int) -> None:
    values = np.array([[0, 0.2 * white, white]], dtype=np.float32)
    content = encoded(Image.fromarray(values), "TIFF")
    assert as_read(content) == [[0] * 3, [51] * 3, [255] * 3]


@pytest.mark.parametrize("odd", [-0.5, 1e6, np.nan, np.inf])
def test_floats_outside_of_known_ranges_are_refused(odd: float) -> None:
    values = np.array([[0, 0.5, odd]], dtype=np.float32)
    with pytest.raises(DataError, match="must have values from 0 to 1, 255 or 65535, got"):
        as_read(encoded(Image.fromarray(values), "TIFF"))


def test_pictures_are_told_apart_by_their_transparency(reader: PictureReader) -> None:
    color = some_image(1, (40, 24))
    hidden = color.copy()
    hidden.putalpha(0)
    assert reader.prepare(hidden).key != reader.prepare(color).key
    white = Image.new("RGB", color.size, "white")
    assert reader.prepare(hidden).key == reader.prepare(white).key


def test_the_error_of_a_processor_names_the_package_that_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        try:
            raise ModuleNotFoundError("No module named 'pycountry'")
        except ModuleNotFoundError as cause:
            raise ModuleNotFoundError("Could not import module 'MistralBackend'.") from cause

    monkeypatch.setattr(AutoImageProcessor, "from_pretrained", fail)
    with pytest.raises(ModelError, match=r"'MistralBackend'\. The cause: No module .*'pycountry'"):
        load_picture_processor(folder, load_tokenizer(folder))


def test_a_picture_that_pil_reads_late_is_an_error_with_its_number(reader: PictureReader) -> None:
    late = Image.open(io.BytesIO(png()[:900]))
    closed = Image.open(io.BytesIO(png()))
    closed.close()
    for image in (late, closed):
        with pytest.raises(DataError, match=r"^image 1 of the row: the image is damaged or not "):
            reader.prepare_all((png(), image), Path())


def test_a_file_that_cannot_be_read_is_an_error_with_its_name(
    folder: Path, reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "locked.png").write_bytes(png())

    def fail(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(DataError, match=r"locked.png' cannot be read .*Make it readable"):
        reader.prepare("locked.png", folder)


@pytest.mark.parametrize("setting", ["patch_size", "merge_size", "temporal_patch_size"])
def test_a_processor_of_another_model_is_refused(setting: str, tmp_path: Path) -> None:
    file = save_vision_folder(tmp_path) / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, setting: 7}))
    with pytest.raises(ModelError, match=rf"its {setting} must be \d, got 7. Copy preprocessor_"):
        load_picture_processor(tmp_path, load_tokenizer(tmp_path))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_answers_are_learnt_behind_the_tokens_of_pictures(family: str, tmp_path: Path) -> None:
    reader = open_reader(save_vision_folder(tmp_path, family))
    tokenizer = reader.tokenizer
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"question": "<image>\nWhat?", "answer": "this", "images": ["a.png"]}]
    rows.append({"question": "Hi", "answer": "Ho", "images": []})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(prompt_key="question", response_key="answer", max_length=512)
    dataset = SFTDataset(str(file), tokenizer, config, pictures=reader)
    for number, row in enumerate(rows):
        item = dataset[number]
        prompt, _, _ = reader.encode(row["question"], row["images"], tmp_path)
        assert item["raw_prompt_ids"] == prompt
        assert str(tokenizer.decode(item["response_ids"])).startswith(row["answer"])
        learnt = [id for id, is_learnt in zip(item["response_ids"], item["learnt"]) if is_learnt]
        assert tokenizer.decode(learnt) == f"{row['answer']}<|im_end|>"


@pytest.mark.parametrize("images", [None, []])
def test_a_placeholder_without_images_is_an_error(reader: PictureReader, images: Any) -> None:
    with pytest.raises(DataError, match=r"has a placeholder \(<image>\) and no images"):
        reader.encode([{"role": "user", "content": "<image>How many?"}], images, Path())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:image/png;base64,abcde", "the base64 text of the image is damaged"),
        ("abcde" * 2000, "there is no file"),
        ("iVBORw0KGgo" * 2000, "got the base64 text of an image without its type. Write 'data:ima"),
    ],
)
def test_damaged_base64_is_an_error_of_the_row(
    reader: PictureReader, source: str, message: str
) -> None:
    with pytest.raises(DataError, match=f"image 0 of the row: {message}") as error:
        reader.prepare_all([source], Path())
    assert len(str(error.value)) < 1000


def test_a_picture_is_turned_as_its_camera_says(reader: PictureReader) -> None:
    image = some_image(0, (56, 28))
    turned = image.getexif()
    turned[0x0112] = 6  # to be turned by a quarter
    encoded = io.BytesIO()
    image.save(encoded, "PNG", exif=turned)
    picture = reader.prepare(encoded.getvalue())
    expected = reader.prepare(image.rotate(-90, expand=True))
    assert picture.inputs["pixel_values"].equal(expected.inputs["pixel_values"])


def test_pictures_are_told_apart_by_their_turn(reader: PictureReader) -> None:
    image = some_image(0, (56, 28))
    turned = image.copy()
    turned.getexif()[0x0112] = 6
    first = reader.prepare(image)
    second = reader.prepare(turned)
    expected = reader.prepare(image.rotate(-90, expand=True))
    assert second.key == expected.key != first.key


@pytest.mark.parametrize("notes", [b"Exif\0\0garbagegarbage", b"Exif\0\0MM\0*"])
def test_damaged_notes_of_a_camera_change_nothing(
    reader: PictureReader, notes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    image = some_image(5)
    stream = io.BytesIO()
    image.save(stream, "PNG", exif=notes)
    read = reader.prepare(stream.getvalue()).inputs["pixel_values"]
    assert read.equal(reader.prepare(image).inputs["pixel_values"])
    assert "(EXIF) in an image are damaged" in caplog.text


@pytest.mark.parametrize("kind", ["GIF", "PNG", "TIFF"])
def test_the_first_of_several_frames_is_read_and_reported(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    say_once.cache_clear()
    black = Image.new("RGB", (2, 1), "black")
    white = Image.new("RGB", (2, 1), "white")
    assert as_read(encoded(white, kind)) == [[255] * 3] * 2
    assert not caplog.records
    stream = io.BytesIO()
    white.save(stream, kind, save_all=True, append_images=[black])
    assert as_read(stream.getvalue()) == [[255] * 3] * 2
    assert f"An image of the data has several frames or pages ({kind})" in caplog.text


@pytest.mark.parametrize("empty", [None, "", [], {"bytes": None, "path": None}])
def test_an_empty_value_is_no_picture(
    folder: Path, reader: PictureReader, empty: Any, tmp_path: Path
) -> None:
    rows = dataset(folder, reader, row("Hi", images=empty, videos=empty))
    assert rows[0]["prepared_pictures"] == ()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row("Hi", images=empty, videos=empty)) + "\n")
    RLDataset(str(file), reader.tokenizer, DataConfig())  # nor for a model of text


LLAVA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% for part in "
    "message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_reads_parts_alone_writes_texts(tmp_path: Path) -> None:
    reader = open_reader(save_vision_folder(tmp_path, "llava_onevision"))
    tokenizer = reader.tokenizer
    tokenizer.chat_template = LLAVA
    system = {"role": "system", "content": "Be brief."}
    ids, messages, _ = reader.encode([system, {"role": "user", "content": "Why?"}], None, Path())
    assert messages[1]["content"] == "Why?"
    assert tokenizer.decode(ids) == (
        "<|im_start|>system \nBe brief.<|im_end|><|im_start|>user \nWhy?<|im_end|>"
        "<|im_start|>assistant\n"
    )

    file = tmp_path / "rows.jsonl"
    (tmp_path / "a.png").write_bytes(png())
    rows = [
        {"prompt": "Why?", "answer": "so"},
        {"prompt": "<image>Why?", "answer": "so", "images": ["a.png"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(prompt_key="prompt", response_key="answer", max_length=512)
    dataset = SFTDataset(str(file), tokenizer, config, pictures=reader)
    for item in (dataset[0], dataset[1]):
        assert str(tokenizer.decode(item["raw_prompt_ids"])).count("Why?") == 1
        learnt = [id for id, is_learnt in zip(item["response_ids"], item["learnt"]) if is_learnt]
        assert str(tokenizer.decode(learnt)).strip() == "so<|im_end|>"


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_parts_with_images_need_no_column(
    reader: PictureReader, tmp_path: Path, truncation: str
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "How many?"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": content}]}) + "\n")
    config = DataConfig(max_prompt_length=512, truncation=truncation)
    dataset = RLDataset(str(file), reader.tokenizer, config, pictures=reader)
    assert len(dataset[0]["prepared_pictures"]) == 1
    with pytest.raises(DataError, match="prompts with pictures are never cut"):
        config = DataConfig(max_prompt_length=3, truncation=truncation)
        RLDataset(str(file), reader.tokenizer, config, pictures=reader)


def test_the_dataset_of_verl_05_reads_pictures_by_its_processor(
    reader: PictureReader, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(images=["a.png"])) + "\n")
    settings = {"max_prompt_length": 512}
    processor = reader.processor.processor
    assert "image_processor" in repr(processor), "it can still be copied and written"
    dataset = RLHFDataset(str(file), reader.tokenizer, settings, processor=processor)
    assert len(dataset[0]["prepared_pictures"]) == 1


def test_threads_prepare_the_pictures_of_a_batch(reader, tmp_path, monkeypatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    rows = [row(images=[f"{number}.png"]) for number in range(4)]
    data = dataset(tmp_path, reader, *rows)
    one_by_one = [data[item] for item in (3, 1, 2)]
    used = set()
    prepare = PictureReader.prepare

    def watched(self, *arguments):
        used.add(threading.current_thread())
        return prepare(self, *arguments)

    monkeypatch.setattr(PictureReader, "prepare", watched)
    together = data.__getitems__([3, 1, 2])
    assert threading.main_thread() not in used
    assert [item["raw_prompt_ids"] for item in together] == [
        item["raw_prompt_ids"] for item in one_by_one
    ]
    keys = [item["prepared_pictures"][0].key for item in together]
    assert keys == [item["prepared_pictures"][0].key for item in one_by_one]
    assert len(set(keys)) == 3

    reader._kept.clear()
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match="row 1: image 0 of the row: there is no file '.*1.png'"):
        data.__getitems__([0, 1])


def test_a_subclass_with_items_of_its_own_makes_them_in_order(reader, tmp_path) -> None:
    class Marked(RLDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            made.append((item, threading.current_thread()))
            return super().__getitem__(item)

    made: list[tuple[int, threading.Thread]] = []
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row("Hi")) + "\n" for _ in range(3)))
    data = Marked(str(file), reader.tokenizer, DataConfig(), pictures=reader)
    data.__getitems__([2, 0, 1])
    assert made == [(item, threading.main_thread()) for item in (2, 0, 1)]
