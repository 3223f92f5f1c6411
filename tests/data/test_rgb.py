"""Images of every mode become three channels of eight bits, turned as their camera says."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.vision_folders import some_image
from verl.data.pictures import PictureReader
from verl.data.rgb import as_rgb, open_picture
from verl.utils.errors import DataError
from verl.utils.logging import say_once


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


def test_pictures_are_told_apart_by_their_transparency(reader: PictureReader) -> None:
    color = some_image(1, (40, 24))
    hidden = color.copy()
    hidden.putalpha(0)
    assert reader.prepare(hidden).key != reader.prepare(color).key
    white = Image.new("RGB", color.size, "white")
    assert reader.prepare(hidden).key == reader.prepare(white).key


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
