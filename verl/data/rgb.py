"""Open images of PIL, and turn them into three channels of eight bits."""

import io
import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl.utils.errors import DataError
from verl.utils.logging import say_once

_ORIENTATION = 0x0112  # number of the note in EXIF

_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
_LARGEST_BYTE = 255
_LARGEST_SHORT = 65535


def open_picture(encoded: bytes) -> Any:
    """Decode an image. Raises DataError for one that is damaged or has too many pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _decoding():
            image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:
        raise DataError(
            f"{len(encoded)} bytes are no image that pillow knows, or only a part of one; they "
            f"begin with {encoded[:16]!r}. Copy it again, or write it as PNG or JPEG"
        ) from error

    pixels = image.width * image.height
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise DataError(_too_large(f"{image.width} x {image.height}", limit))
    _report_frames(image)
    return loaded(image)


def _report_frames(image: Any) -> None:
    """Log once that of several frames the first is read.

    Cameras and phones write photographs as MPO, whose further frames are previews.
    """
    with _decoding():
        has_several = image.format != "MPO" and getattr(image, "is_animated", False)
    if has_several:
        say_once(
            f"An image of the data has several frames or pages ({image.format}); models read the "
            "first one of each such image. Give its frames as a video where all of them count.",
            logging.WARNING,
        )


def loaded(image: Any) -> Any:
    """Return an image with its pixels, which PIL reads late. Raises DataError if it cannot."""
    with _decoding():
        image.load()
    return image


@contextmanager
def _decoding() -> Iterator[None]:
    """Raise DataError where PIL cannot decode an image; a format that it does not know stays."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:
        raise
    except Image.DecompressionBombError as error:
        raise DataError(_too_large(str(error).rstrip("."), Image.MAX_IMAGE_PIXELS)) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(
            f"the image is damaged or not complete ({error}). Copy it again, or leave the row out"
        ) from error


def _too_large(found: str, limit: int | None) -> str:
    return (
        f"an image may have {limit} pixels, got {found}. Make it smaller, or raise "
        "PIL.Image.MAX_IMAGE_PIXELS in model.external_lib"
    )


def upright_rgb(image: Any) -> Any:
    """Return an image in RGB, turned as the camera's note in it says. See `as_rgb`."""
    from PIL import Image

    turns = Image.Transpose
    turn = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(_orientation(image))
    image = as_rgb(image)
    return image if turn is None else image.transpose(turn)


def opened(content: Any) -> Any:
    """Return an image of PIL, given as one or by its encoded bytes."""
    return open_picture(content) if isinstance(content, bytes) else content


def identity_of(content: Any) -> bytes:
    """Return bytes that differ between images: encoded ones, or size and pixels of one of PIL."""
    if isinstance(content, bytes):
        return content
    image = upright_rgb(content)
    return f"{image.size}".encode() + image.tobytes()


def _orientation(image: Any) -> int:
    """Return how a camera held an image, 1 to 8; 1 where its notes are damaged or say nothing."""
    try:
        found = image.getexif().get(_ORIENTATION)
    except (SyntaxError, struct.error, ValueError, TypeError, OSError, LookupError):
        say_once(
            "The notes of a camera (EXIF) in an image are damaged. Such images are read as their "
            "pixels stand, without a turn.",
            logging.WARNING,
        )
        return 1
    return found if isinstance(found, int) else 1


def as_rgb(image: Any) -> Any:
    """Return an image in RGB.

    Transparent parts become white, as vLLM and qwen-vl-utils show them to a model: the colors that
    a file has there are arbitrary. Gray values of 16 bits and floats are scaled, where PIL would
    clip them. Raises DataError for floats outside of known ranges.
    """
    from PIL import Image

    if image.mode == "F":
        image = _floats_in_eight_bits(image)
    elif image.mode.startswith("I"):
        image = _in_eight_bits(image)
    if image.mode in _WITH_ALPHA or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _in_eight_bits(image: Any) -> Any:
    """Scale an image of integers to eight bits."""
    from PIL import Image

    values = np.asarray(image)
    # Mode I has 32 bits. pillow before 11 reads files of 16 bits so, and programs write 8 bits.
    is_short = image.mode != "I" or values.max(initial=0) > _LARGEST_BYTE
    if is_short:
        scale = _LARGEST_BYTE / _LARGEST_SHORT
        values = (values.clip(0, _LARGEST_SHORT) * scale).round()
    return Image.fromarray(values.clip(0, _LARGEST_BYTE).astype(np.uint8))


def _floats_in_eight_bits(image: Any) -> Any:
    """Scale an image of floats, whose white is the smallest of 1, 255 and 65535 that fits."""
    from PIL import Image

    values = np.asarray(image)
    darkest = values.min(initial=0)
    brightest = values.max(initial=0)
    whites = [white for white in (1, _LARGEST_BYTE, _LARGEST_SHORT) if brightest <= white]
    if not darkest >= 0 or not whites:  # NaN is in no range
        raise DataError(
            "an image of floats must have values from 0 to 1, 255 or 65535, got "
            f"{values.min():.4g} to {values.max():.4g}. Scale its values, or write it as PNG of 8 "
            "or 16 bits"
        )
    scaled = (values * (_LARGEST_BYTE / whites[0])).round()
    return Image.fromarray(scaled.astype(np.uint8))
