"""Read the pictures of a row: from files, bytes or objects to prepared pictures in its prompt."""

import base64
import hashlib
import io
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from verl.data.chat import Messages, apply_chat_template, as_messages
from verl.models.pictures import Picture, Pictures
from verl.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.models.processor import PictureProcessor

PLACEHOLDER = "<image>"  # in the text of a message
KEPT_BYTES = 1 << 30  # most bytes of prepared pictures that are kept
_PART = "image"
_SOURCES = ("image", "image_url", "url", "path", "bytes")  # keys of a part with its own picture
_BASE64 = re.compile(r"data:image/[\w.+-]+;base64,")


class PictureReader:
    """Prepares each picture once, by its content, and keeps the latest.

    Args:
        processor: the model's.
        tokenizer: renders prompts.
        keeps_images: whether a prepared picture has the image, too, for engines that prepare it
            themselves.
    """

    def __init__(
        self,
        processor: "PictureProcessor",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        keeps_images: bool = False,
    ) -> None:
        self.processor = processor
        self._keeps_images = keeps_images
        self.tokenizer = tokenizer
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()

    def encode(
        self, prompt: Any, images: Any, folder: Path
    ) -> tuple[list[int], Messages, Pictures]:
        """Return token ids, messages and pictures of a row.

        A message's `<image>`, or a part {"type": "image"} of its content, stands for the next of
        the row's images; a part may also have a picture of its own. In the messages that are
        returned, each is the part {"type": "image"}.

        Args:
            prompt: messages, or a text.
            images: the row's images, see `open_picture`; one or a list, or None.
            folder: where relative paths begin.
        """
        messages, sources = messages_and_images(prompt, images)
        pictures = self.prepare_all(sources, folder)
        ids = apply_chat_template(self.tokenizer, messages)
        return self.expand(ids, pictures), messages, pictures

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the ids of a rendered text with the tokens of its pictures."""
        expanded: list[int] = []
        begin = 0
        for place, picture in zip(self.places(ids, pictures), pictures):
            self._append(expanded, ids[begin:place])
            self._append(expanded, picture.token_ids)
            begin = place + 1
        self._append(expanded, ids[begin:])
        return expanded

    def _append(self, expanded: list[int], ids: Sequence[int]) -> None:
        """Append ids. Newlines of both sides become the tokens of all of them in one text.

        A tokenizer may have a token for several newlines, and Gemma 3 writes some around a picture.
        """
        begin = len(expanded)
        while begin and self._is_newlines(expanded[begin - 1]):
            begin -= 1
        end = 0
        while end < len(ids) and self._is_newlines(ids[end]):
            end += 1

        if begin == len(expanded) or end == 0:
            expanded += ids
            return
        text = self.tokenizer.decode([*expanded[begin:], *ids[:end]])
        expanded[begin:] = self.tokenizer.encode(text, add_special_tokens=False)
        expanded += ids[end:]

    def _is_newlines(self, token: int) -> bool:
        text = str(self.tokenizer.decode([token]))
        return bool(text) and not text.strip("\n")

    def prepare_all(self, sources: Sequence[Any], folder: Path) -> Pictures:
        """Prepare the pictures of a row. Raises DataError with the number of a bad one."""
        pictures: list[Picture] = []
        for number, source in enumerate(sources):
            try:
                pictures.append(self.prepare(source, folder))
            except DataError as error:
                raise DataError(f"image {number} of the row: {error}") from error
        self.check_number(pictures)
        return tuple(pictures)

    def check_number(self, pictures: Sequence[Picture]) -> None:
        """Raise DataError for more pictures in a row than the model's family is supported with."""
        if self.processor.family.one_picture and len(pictures) > 1:
            raise DataError(
                f"has {len(pictures)} images, but this model's family is supported with one image "
                "a row. Leave the row out, or join the images to one"
            )

    def prepare(self, source: Any, folder: Path = Path()) -> Picture:
        """Return a prepared picture, from memory where its content was seen before."""
        content = _content_of(source, folder)
        encoded = content if isinstance(content, bytes) else _pixels(content)
        digest = hashlib.blake2b(encoded, digest_size=16)
        digest.update(self.processor.fingerprint.encode())
        key = digest.hexdigest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]

        image = open_picture(content) if isinstance(content, bytes) else content
        image = image.convert("RGB")
        picture = self.processor.prepare(image, key)
        if self._keeps_images:
            picture = replace(picture, png=_png(image))
        return self._keep(picture)

    def _keep(self, picture: Picture) -> Picture:
        with self._lock:
            if picture.key in self._kept:  # another thread was faster
                return self._kept[picture.key]
            self._kept[picture.key] = picture
            self._kept_bytes += _num_bytes(picture)
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _num_bytes(oldest)
        return picture

    def places(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the place of each picture's placeholder. Raises DataError for another number."""
        tokens = (self.processor.placeholder_id, self.processor.token_id)
        places = [place for place, each in enumerate(ids) if each in tokens]
        if len(places) != len(pictures):
            found = len(places)
            raise DataError(
                f"the chat template writes {found} of its picture tokens "
                f"('{self.processor.placeholder}') for {len(pictures)} images. Set "
                "data.custom_chat_template to one that writes images, and keep this token out of "
                "texts"
            )
        return places


def _png(image: Any) -> bytes:
    """Encode an image without loss, fast rather than small."""
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def messages_and_images(prompt: Any, images: Any) -> tuple[Messages, tuple[Any, ...]]:
    """Return the messages of a row, and its images at their places. Most rows have none.

    `images` is the row's image column: one image, a list of them, or None.
    """
    given = _as_list(images)
    if not given and not _has_picture_parts(prompt):
        return as_messages(prompt), ()
    messages, sources = picture_parts(prompt, given)
    return messages, tuple(sources)


def picture_parts(prompt: Any, images: Sequence[Any]) -> tuple[Messages, list[Any]]:
    """Split contents into parts at their pictures; return messages and the sources of pictures.

    Raises DataError where placeholders and images differ in number.
    """
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        as_messages(prompt)  # raises the error of a prompt that is none

    # A message is checked as if its pictures were texts.
    rest = iter(images)
    placeholders = 0
    messages: Messages = []
    sources: list[Any] = []
    checked = without_picture_parts(prompt)
    for message, plain in zip(prompt, checked):
        parts: list[dict[str, Any]] = []
        for part in _parts(message.get("content")):
            if part["type"] == _PART:
                own = _own_source(part)
                placeholders += own is None
                source = next(rest, None) if own is None else own
                sources.append(source)
                part = {"type": _PART}
            parts.append(part)
        messages.append({**plain, "content": parts} if parts else plain)

    if placeholders != len(images):
        raise DataError(
            f"has {placeholders} placeholders ({PLACEHOLDER}, or parts of type image) for "
            f"{len(images)} images. Write one where each image belongs"
        )
    return messages, sources


def with_placeholders(prompt: Any) -> Messages:
    """Return a prompt's messages with the part {"type": "image"} for each picture, unread."""
    if not isinstance(prompt, list):
        return as_messages(prompt)
    unread = 0
    for message in prompt:
        for part in _parts(message.get("content")):
            unread += part["type"] == _PART and _own_source(part) is None
    messages, _ = picture_parts(prompt, [None] * unread)
    return messages


def open_picture(encoded: bytes) -> Any:
    """Decode an image. Raises DataError for one that is damaged or has too many pixels."""
    from PIL import Image, UnidentifiedImageError

    try:
        image = Image.open(io.BytesIO(encoded))
        pixels = image.width * image.height
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and pixels > limit:
            raise DataError(_too_large(f"{image.width} x {image.height}", limit))
        image.load()
    except Image.DecompressionBombError as error:
        raise DataError(_too_large(str(error), Image.MAX_IMAGE_PIXELS)) from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{len(encoded)} bytes are no image that pillow knows, they begin with "
            f"{encoded[:16]!r}. Write it as PNG or JPEG"
        ) from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the image is damaged or not complete ({error}). Copy it again, or leave the row out"
        ) from error
    return image


def _too_large(found: str, limit: int | None) -> str:
    return (
        f"an image may have {limit} pixels, got {found}. Make it smaller, or raise "
        "PIL.Image.MAX_IMAGE_PIXELS in model.external_lib"
    )


def _content_of(source: Any, folder: Path) -> Any:
    """Return the encoded bytes of an image, or an image of PIL."""
    if isinstance(source, dict):
        given = [source[key] for key in reversed(_SOURCES) if source.get(key) is not None]
        if not given:
            raise DataError(f"expected one of the keys {', '.join(_SOURCES)}, got {list(source)}")
        return _content_of(given[0], folder)
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str):
        return _read(source, folder)
    if hasattr(source, "convert") and hasattr(source, "tobytes"):
        return source
    raise DataError(
        "expected a path, bytes, a dict with bytes or path, or an image of PIL, got "
        f"{type(source).__name__}: {str(source)[:60]!r}"
    )


def _read(source: str, folder: Path) -> bytes:
    encoded = _BASE64.match(source)
    if encoded is not None:
        return base64.b64decode(source[encoded.end() :])
    if source.startswith(("http://", "https://")):
        raise DataError(
            f"images are not fetched from the network in training, got {source[:80]!r}. Download "
            "them, and give paths or bytes"
        )
    path = Path(source.removeprefix("file://")).expanduser()
    places = [path] if path.is_absolute() else [folder / path, path]
    for place in places:
        if place.is_file():
            return place.read_bytes()
    looked = " and ".join(f"'{place}'" for place in dict.fromkeys(places))
    raise DataError(f"there is no file {looked}. Correct the path, or write the image as bytes")


def _pixels(image: Any) -> bytes:
    image = image.convert("RGB")
    return f"{image.size}".encode() + image.tobytes()


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content: texts, split at placeholders, and images."""
    for part in content if isinstance(content, list) else [content]:
        if _is_picture(part):
            yield {**part, "type": _PART}
            continue
        text = part.get("text") if isinstance(part, dict) else part
        pieces = (text or "").split(PLACEHOLDER)
        for number, piece in enumerate(pieces):
            if number:
                yield {"type": _PART}
            if piece:
                yield {"type": "text", "text": piece}


def _is_picture(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    kind = part.get("type")
    return kind in ("image", "image_url") or (kind is None and part.get("image") is not None)


def _has_picture_parts(prompt: Any) -> bool:
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(map(_is_picture, content)):
            return True
    return False


def without_picture_parts(prompt: Any) -> Messages:
    """Return a prompt's messages as `as_messages` does, with an image where each part has one."""
    if not isinstance(prompt, list):
        return as_messages(prompt)
    return as_messages([_without_pictures(message) for message in prompt])


def _without_pictures(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [PLACEHOLDER if _is_picture(part) else part for part in content]
    return {**message, "content": texts}


def _own_source(part: dict[str, Any]) -> Any:
    for key in _SOURCES:
        value = part.get(key)
        if value is not None:
            return value
    return None


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    if isinstance(images, list | tuple):
        return list(images)
    if hasattr(images, "tolist") and not hasattr(images, "tobytes"):
        return images.tolist()
    return [images]


def _num_bytes(picture: Picture) -> int:
    num_bytes = len(picture.png or b"")
    return num_bytes + sum(tensor.numel() * tensor.itemsize for tensor in picture.inputs.values())
