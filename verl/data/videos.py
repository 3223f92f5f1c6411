"""Read the videos of a row: a file, frames, or an array of them, and how many frames to keep."""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from verl.data.files import errors_of_media
from verl.data.rgb import identity_of, opened, upright_rgb
from verl.models.pictures import Frames
from verl.utils.errors import DataError

# Keys of a video that is given as a dict, by the names of qwen-vl-utils.
SOURCES = ("video", "path")
_NUMBERS = ("fps", "min_frames", "max_frames", "min_pixels", "max_pixels")
_FPS = 2.0
_MIN_FRAMES = 4
_MAX_FRAMES = 768
_DIGESTED_BYTES = 4 * 1024**2


class Video(NamedTuple):
    """A video as a row has it, see `read_video`, in contrast to an image."""

    source: Any


class Asked(NamedTuple):
    """A video's path, frames or array, and the settings in its dict."""

    source: Any
    fps: float = _FPS  # of a file: frames to keep a second; of frames: how many there are a second
    min_frames: int = _MIN_FRAMES
    max_frames: int = _MAX_FRAMES
    min_pixels: int | None = None
    max_pixels: int | None = None

    @classmethod
    def of(cls, source: Any) -> "Asked":
        """Read a video that is a dict, or the video itself. Raises DataError for a wrong key."""
        if not isinstance(source, dict):
            return cls(source)

        sources: list[Any] = []
        given: dict[str, Any] = {}
        for key, value in source.items():
            if value is None or key == "type":
                continue
            if key in SOURCES:
                sources.append(value)
            else:
                given[key] = value
        if len(sources) != 1 or not given.keys() <= set(_NUMBERS):
            raise DataError(
                f"expected a video with one of the keys {', '.join(SOURCES)}, and of "
                f"{', '.join(_NUMBERS)} those that are needed, got {list(source)}"
            )

        numbers: dict[str, Any] = {}
        for key, value in given.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            # pandas writes NaN for a number that is missing.
            is_valid = is_number and 0 < value < math.inf
            if is_valid and key != "fps":
                is_valid = float(value).is_integer()
            if not is_valid:
                raise DataError(f"a video's {key} must be a number above 0, got {value!r}")
            numbers[key] = value if key == "fps" else int(value)
        return cls(sources[0], **numbers)

    def choose_of_file(self, total: int, fps: float) -> list[int]:
        """Choose frames of a file at even distances, in pairs: the rule of qwen-vl-utils."""
        count = total / fps * self.fps
        count = min(max(count, self.min_frames), self.max_frames, total)
        count = max(int(count) // 2 * 2, min(total, 2))
        return _even(total, count)

    def choose_of_list(self, total: int) -> list[int]:
        """Choose at most `max_frames` of frames that are given, at even distances."""
        return _even(total, min(total, self.max_frames))


def _even(total: int, count: int) -> list[int]:
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def read_video(
    source: Any,
    find: Callable[[str], Path],
    read: Callable[[Any], Any],
    decode_file: Callable[..., tuple[np.ndarray, list[int], int, float]],
) -> tuple[str, Callable[[], Frames]]:
    """Return the digest of a video, by its content, and a function that decodes its frames.

    Args:
        source: a path, a list of frames, an array, or a dict with one of these, see `Asked`.
        find: finds the file of a path.
        read: returns a frame's encoded bytes, or an image of PIL.
        decode_file: `VideoProcessor.decode`.
    """
    asked = Asked.of(source)
    digest = hashlib.blake2b(str(asked[1:]).encode(), digest_size=16)
    if isinstance(asked.source, str | Path):
        path = find(str(asked.source))
        # A part at a time: a video may be large, and many threads read some.
        with errors_of_media(path), path.open("rb") as content:
            while part := content.read(_DIGESTED_BYTES):
                digest.update(part)
        return digest.hexdigest(), lambda: _of_file(asked, *decode_file(path, asked.choose_of_file))

    frames = _array(asked.source)
    if frames is not None:
        digest.update(f"{frames.shape}".encode())
        digest.update(np.ascontiguousarray(frames).tobytes())
        return digest.hexdigest(), lambda: _of_list(asked, list(frames), _image_of)

    contents = _each_frame(asked.source, read)
    for content in contents:
        digest.update(hashlib.blake2b(identity_of(content), digest_size=16).digest())
    return digest.hexdigest(), lambda: _of_list(asked, contents, opened)


def _of_file(asked: Asked, frames: np.ndarray, places: list[int], total: int, fps: float) -> Frames:
    images = [_image_of(frame) for frame in _colors_last(frames)]
    return _frames(asked, images, places, total, fps)


def _of_list(asked: Asked, contents: Sequence[Any], open_image: Callable[[Any], Any]) -> Frames:
    total = len(contents)
    places = asked.choose_of_list(total)
    chosen = [contents[place] for place in places]
    images = _each_frame(chosen, open_image)
    return _frames(asked, images, places, total, asked.fps)


def _frames(asked: Asked, images: list[Any], places: list[int], total: int, fps: float) -> Frames:
    images = [upright_rgb(image) for image in images]
    for number, image in enumerate(images):
        if image.size != images[0].size:
            raise DataError(
                f"frame {places[number]} has {image.width} x {image.height} pixels, but frame 0 "
                f"{images[0].width} x {images[0].height}. Give all frames of a video one size"
            )
    return Frames(
        images=images,
        times=[place / fps for place in places],
        fps=len(places) / total * fps,
        min_pixels=asked.min_pixels,
        max_pixels=asked.max_pixels,
    )


def _colors_last(frames: np.ndarray) -> np.ndarray:
    """Turn (T, 3, H, W) into (T, H, W, 3)."""
    if frames.shape[1] == 3 and frames.shape[3] != 3:
        return frames.transpose(0, 2, 3, 1)
    return frames


def _image_of(frame: np.ndarray) -> Any:
    from PIL import Image

    return Image.fromarray(frame)


def _array(source: Any) -> np.ndarray | None:
    """Return decoded frames (T, H, W, 3), from an array or a tensor; None for another source.

    Raises DataError for another shape or type of numbers.
    """
    if hasattr(source, "numpy"):
        source = source.numpy()
    if not isinstance(source, np.ndarray) or source.dtype == object:
        return None

    if source.ndim == 4:
        source = _colors_last(source)
    if source.ndim != 4 or source.shape[3] != 3 or source.dtype != np.uint8 or not source.size:
        raise DataError(
            "a video that is an array must be uint8 of shape (frames, height, width, 3) or "
            f"(frames, 3, height, width), got {source.dtype} of {source.shape}"
        )
    return source


def _each_frame(source: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Read each frame of a list. Raises DataError with the number of a bad one."""
    if not isinstance(source, list | tuple | np.ndarray) or len(source) == 0:
        raise DataError(
            "expected a video as a path, a list of frames, an array, or a dict with the key "
            f"video, got {type(source).__name__}: {str(source)[:60]!r}"
        )
    frames = []
    for number, frame in enumerate(source):
        try:
            frames.append(read(frame))
        except DataError as error:
            raise DataError(f"frame {number}: {error}") from error
    return frames
