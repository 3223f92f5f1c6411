"""The reader makes the tokens and inputs of a model's own processor, and names every bad image."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from tests.data.pictured import open_reader, png
from tests.tiny_vision_models import IMAGE
from tests.vision_folders import FAMILIES, save_vision_folder, some_image
from verl.data.pictures import PictureReader
from verl.models.load import load_tokenizer
from verl.models.processor import load_picture_processor
from verl.utils.errors import DataError, ModelError


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
