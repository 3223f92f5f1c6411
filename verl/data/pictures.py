"""Read pictures and videos from files, bytes or objects, and prepare them for the model."""

import base64
import contextlib
import hashlib
import io
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from verl.data.chat import Messages, apply_chat_template
from verl.data.files import Rows, errors_of_media, is_no_media
from verl.data.picture_parts import IMAGE_SOURCES, messages_and_sources
from verl.data.rgb import identity_of, loaded, opened, upright_rgb
from verl.data.videos import Video, read_video
from verl.models.pictures import Picture, Pictures
from verl.utils.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import DataConfig
    from verl.config.sft import SFTDataConfig
    from verl.models.processor import PictureProcessor

KEPT_BYTES = 1 << 30  # most bytes of prepared pictures that are kept
_BASE64_IMAGES = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")  # PNG, JPEG, GIF and WebP
_BASE64 = re.compile(r"data:image/[\w.+-]+;base64,")

# By the id of the processor that each holds. An attribute of the processor would be written into
# its files.
_readers: "WeakValueDictionary[int, PictureReader]" = WeakValueDictionary()


def reader_of(processor: Any) -> "PictureReader | None":
    """Return the reader that uses a processor of transformers; None if there is none."""
    return _readers.get(id(processor))


class PictureReader:
    """Prepares each picture once, by its content, and keeps the latest.

    Args:
        processor: the model's.
        tokenizer: renders prompts.
        keeps_images: whether a prepared picture has the image, too, for rewards or for engines
            that prepare it themselves.
        for_servers: whether the pictures go to servers, which take no videos.
    """

    def __init__(
        self,
        processor: "PictureProcessor",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        keeps_images: bool = False,
        for_servers: bool = False,
    ) -> None:
        self.processor = processor
        _readers[id(processor.processor)] = self
        self.most_bytes = KEPT_BYTES
        self._keeps_images = keeps_images or for_servers
        self._for_servers = for_servers
        self.tokenizer = tokenizer
        self._kept: OrderedDict[str, Picture] = OrderedDict()
        self._kept_bytes = 0
        self._lock = Lock()

    def __reduce__(self) -> Any:
        """Pickle a reader for another process, which keeps pictures of its own."""
        make = partial(
            PictureReader, keeps_images=self._keeps_images, for_servers=self._for_servers
        )
        return make, (self.processor, self.tokenizer)

    @property
    def reads_videos(self) -> bool:
        """Whether the model's family reads videos."""
        return self.processor.videos is not None

    def encode(
        self, prompt: Any, images: Any, folder: Path, videos: Any = None
    ) -> tuple[list[int], Messages, Pictures]:
        """Return token ids, messages and pictures of a row.

        A message's `<image>`, or a part {"type": "image"} of its content, stands for the next of
        the row's images; a part may also have a picture of its own. In the messages that are
        returned, each is the part {"type": "image"}. The same holds for videos.

        Args:
            prompt: messages, or a text.
            images: the row's images, see `prepare`; one or a list, or None.
            folder: where relative paths begin.
            videos: the row's videos, see `verl.data.videos`; one or a list, or None.
        """
        messages, sources = messages_and_sources(prompt, images, videos)
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
        """Prepare the pictures of a row. Raises DataError with the number of a bad one.

        A source is an image, or a `Video`.
        """
        pictures: list[Picture] = []
        counts = {"image": 0, "video": 0}
        for source in sources:
            kind = "video" if isinstance(source, Video) else "image"
            try:
                if isinstance(source, Video):
                    pictures.append(self.prepare_video(source.source, folder))
                else:
                    pictures.append(self.prepare(source, folder))
            except DataError as error:
                raise DataError(f"{kind} {counts[kind]} of the row: {error}") from error
            counts[kind] += 1

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
        """Return a prepared picture, from memory where its content was seen before.

        Args:
            source: a path, an address with base64, bytes, a dict of these, or an image of PIL.
            folder: where a relative path begins.
        """
        content = _content_of(source, folder)
        digest = hashlib.blake2b(identity_of(content), digest_size=16)
        digest.update(self.processor.fingerprint.encode())
        key = digest.hexdigest()
        known = self._find(key)
        if known is not None:
            return known

        image = upright_rgb(opened(content))
        picture = self.processor.prepare(image, key)
        if self._keeps_images:
            picture = replace(picture, png=_png(image))
        return self._keep(picture)

    def prepare_video(self, source: Any, folder: Path = Path()) -> Picture:
        """Return a prepared video, from memory where its content was seen before."""
        videos = self.processor.videos
        if videos is None:
            raise DataError("this model's family does not read videos. Leave the row out")
        if self._for_servers:
            raise DataError(
                "servers get no videos. Leave the row out, or set "
                "actor_rollout_ref.rollout.name=embedded"
            )

        digest, decode = read_video(
            source,
            find=partial(_find_file, folder=folder),
            read=partial(_content_of, folder=folder),
            decode_file=videos.decode,
        )
        key = f"{digest} {self.processor.fingerprint}"
        known = self._find(key)
        if known is not None:
            return known
        return self._keep(videos.prepare(decode(), key))

    def share(self, picture: Picture) -> Picture:
        """Return the picture in memory that has the same content, or keep this one."""
        return self._find(picture.key) or self._keep(picture)

    def _find(self, key: str) -> Picture | None:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def _keep(self, picture: Picture) -> Picture:
        with self._lock:
            if picture.key in self._kept:  # another thread was faster
                return self._kept[picture.key]
            self._kept[picture.key] = picture
            self._kept_bytes += _num_bytes(picture)
            while self._kept_bytes > self.most_bytes and len(self._kept) > 1:
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= _num_bytes(oldest)
        return picture

    def places(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Return the place of each picture's placeholder.

        Raises DataError if they are others than those of the pictures.
        """
        kinds = dict.fromkeys((self.processor.placeholder_id, self.processor.token_id), "image")
        texts = [self.processor.placeholder]
        if self.processor.videos is not None:
            kinds[self.processor.videos.token_id] = "video"
            texts.append(self.processor.videos.token)

        places = [place for place, each in enumerate(ids) if each in kinds]
        found = [kinds[ids[place]] for place in places]
        expected = ["image" if picture.seconds is None else "video" for picture in pictures]
        if found != expected:
            names = "', '".join(texts)
            raise DataError(
                f"the chat template writes {len(found)} of its picture tokens ('{names}') for "
                f"{len(expected)} images and videos, or in another order. Set "
                "data.custom_chat_template to one that writes them, and keep these tokens out of "
                "texts"
            )
        return places


def refuse_media(
    file: str | Path,
    rows: Rows,
    config: "DataConfig | SFTDataConfig",
    pictures: PictureReader | None,
) -> None:
    """Raise DataError for the first row with images or videos that the model does not read.

    The text of such a row depends on them. `pictures` is the reader of the model; None: it reads
    text alone.
    """
    if pictures is None:
        _refuse_values(file, rows, config.image_key)
    if pictures is None or not pictures.reads_videos:
        _refuse_values(file, rows, config.video_key)


def _refuse_values(file: str | Path, rows: Rows, column: str) -> None:
    if column not in rows.columns:
        return
    for number, value in enumerate(rows.column(column)):
        if not is_no_media(value):
            raise DataError(
                f"{file}, row {number}, column '{column}': must be empty, because this model does "
                f"not read it, got {type(value).__name__}. Leave such rows out, or the column if "
                "the text is complete without it, or give a model that reads it."
            )


def _png(image: Any) -> bytes:
    """Encode an image without loss, fast rather than small."""
    encoded = io.BytesIO()
    image.save(encoded, format="PNG", compress_level=1)
    return encoded.getvalue()


def _content_of(source: Any, folder: Path) -> Any:
    """Return the encoded bytes of an image, or an image of PIL."""
    if isinstance(source, dict):
        given = [source[key] for key in reversed(IMAGE_SOURCES) if source.get(key) is not None]
        if not given:
            raise DataError(
                f"expected a value under one of the keys {', '.join(IMAGE_SOURCES)}, got "
                f"{str(source)[:80]}"
            )
        return _content_of(given[0], folder)

    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if isinstance(source, str):
        return _read(source, folder)
    if hasattr(source, "convert") and hasattr(source, "tobytes"):
        return loaded(source)
    raise DataError(
        "expected a path, bytes, a dict with bytes or path, or an image of PIL, got "
        f"{type(source).__name__}: {str(source)[:60]!r}"
    )


def _read(source: str, folder: Path) -> bytes:
    encoded = _BASE64.match(source)
    if encoded is not None:
        try:
            return base64.b64decode(source[encoded.end() :])
        except ValueError as error:
            raise DataError(
                f"the base64 text of the image is damaged or not complete ({error}). Write it "
                "again, or leave the row out"
            ) from error

    file = _find_file(source, folder)
    with errors_of_media(file):
        return file.read_bytes()


def _find_file(source: str, folder: Path) -> Path:
    if source.startswith(("http://", "https://")):
        raise DataError(
            "images and videos are not fetched from the network in training, got "
            f"{source[:80]!r}. Download them, and give paths or bytes"
        )

    path = Path(source.removeprefix("file://")).expanduser()
    places = [path] if path.is_absolute() else [folder.expanduser() / path, path]
    for place in places:
        with contextlib.suppress(OSError):  # a text that is too long for a path
            if place.is_file():
                return place

    if source.startswith(_BASE64_IMAGES):
        raise DataError(
            "got the base64 text of an image without its type. Write 'data:image/png;base64,' "
            f"before it: {source[:40]!r}"
        )
    looked = " or ".join(f"'{str(place)[:200]}'" for place in dict.fromkeys(places))
    raise DataError(f"there is no file {looked}. Correct the path, or write the content instead")


def _num_bytes(picture: Picture) -> int:
    num_bytes = len(picture.png or b"")
    return num_bytes + sum(tensor.numel() * tensor.itemsize for tensor in picture.inputs.values())
