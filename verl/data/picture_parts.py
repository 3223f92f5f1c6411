"""Find the pictures of a row in its messages: placeholders, parts of contents, and columns.

A message's `<image>`, or a part {"type": "image"} of its content, stands for the next image of the
row's column. A part may also have an image of its own. The same holds for videos.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.data.chat import Messages, as_messages
from verl.data.files import is_no_media
from verl.data.videos import SOURCES as VIDEO_SOURCES
from verl.data.videos import Video
from verl.utils.errors import DataError

PLACEHOLDERS = {"image": "<image>", "video": "<video>"}  # in the text of a message
# Keys of a part, or of a dict, with an image.
IMAGE_SOURCES = ("image", "image_url", "url", "path", "bytes")
_IN_TEXT = re.compile("(<image>|<video>)")


def messages_and_sources(
    prompt: Any, images: Any, videos: Any = None
) -> tuple[Messages, tuple[Any, ...]]:
    """Return the messages of a row, and its images and videos at their places. Most rows have none.

    `images` is the row's image column: one image, a list of them, or None. `videos` is the same.
    """
    given = {"image": _as_list(images), "video": _as_videos(videos)}
    if not any(given.values()) and not has_picture_parts(prompt):
        messages = as_messages(prompt)
        _check_no_placeholder(messages)
        return messages, ()
    messages, sources = picture_parts(prompt, given)
    return messages, tuple(sources)


def _as_videos(videos: Any) -> list[Any]:
    """Return the videos of a row. An array of numbers is one video, a list has several."""
    if is_no_media(videos):
        return []
    if isinstance(videos, str | dict) or getattr(videos, "ndim", 1) == 4:
        return [videos]
    return _as_list(videos)


def _as_list(images: Any) -> list[Any]:
    if is_no_media(images):
        return []
    if isinstance(images, list | tuple):
        return list(images)
    if hasattr(images, "tolist") and not hasattr(images, "tobytes"):
        return images.tolist()
    return [images]


def _check_no_placeholder(messages: Messages) -> None:
    """Raise DataError for a placeholder in a row without pictures, which would stay a text.

    That of videos is a tag of HTML, too.
    """
    if has_image_placeholder(messages):
        raise DataError(
            f"has a placeholder ({PLACEHOLDERS['image']}) and no images. Write the images into the "
            "column that data.image_key names, or take the placeholder out"
        )


def has_image_placeholder(messages: Messages) -> bool:
    """Return whether the text of a message has a place for an image."""
    placeholder = PLACEHOLDERS["image"]
    return any(placeholder in str(message.get("content")) for message in messages)


def picture_parts(prompt: Any, given: Mapping[str, Sequence[Any]]) -> tuple[Messages, list[Any]]:
    """Split contents into parts at their pictures; return messages and the sources of pictures.

    `given` has the images and the videos of the row. Raises DataError where placeholders differ
    from them in number.
    """
    if not isinstance(prompt, list):
        prompt = as_messages(prompt)

    # A message is checked as if its pictures were texts.
    checked = without_picture_parts(prompt)

    rest = {kind: iter(sources) for kind, sources in given.items()}
    placeholders = dict.fromkeys(given, 0)
    messages: Messages = []
    sources: list[Any] = []
    for message, plain in zip(prompt, checked):
        parts: list[dict[str, Any]] = []
        for part in _parts(message.get("content")):
            kind = part["type"]
            if kind in given:
                own = _own_source(part)
                placeholders[kind] += own is None
                source = next(rest[kind], None) if own is None else own
                sources.append(Video(source) if kind == "video" else source)
                part = {"type": kind}
            parts.append(part)
        messages.append({**plain, "content": parts} if parts else plain)

    for kind, own in given.items():
        if placeholders[kind] != len(own):
            raise DataError(
                f"has {placeholders[kind]} placeholders ({PLACEHOLDERS[kind]}, or parts of type "
                f"{kind}) for {len(own)} {kind}s. Write one where each {kind} belongs"
            )
    return messages, sources


def with_placeholders(prompt: Any) -> Messages:
    """Return a prompt's messages with an unread part, as {"type": "image"}, for each picture."""
    if not isinstance(prompt, list):
        return as_messages(prompt)
    unread: dict[str, list[None]] = {"image": [], "video": []}
    for message in prompt:
        for part in _parts(message.get("content")):
            if part["type"] in unread and _own_source(part) is None:
                unread[part["type"]].append(None)
    messages, _ = picture_parts(prompt, unread)
    return messages


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a content: texts, split at placeholders, images and videos."""
    kinds = {placeholder: kind for kind, placeholder in PLACEHOLDERS.items()}
    for part in content if isinstance(content, list) else [content]:
        kind = _kind(part)
        if kind is not None:
            yield {**part, "type": kind}
            continue
        text = part.get("text") if isinstance(part, dict) else part
        for piece in _IN_TEXT.split(text or ""):
            if piece in kinds:
                yield {"type": kinds[piece]}
            elif piece:
                yield {"type": "text", "text": piece}


def _kind(part: Any) -> str | None:
    """Return whether a part is an "image" or a "video"; None if it is neither."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    for name in PLACEHOLDERS:
        if kind in (name, f"{name}_url") or (kind is None and part.get(name) is not None):
            return name
    return None


def _own_source(part: dict[str, Any]) -> Any:
    if part["type"] == "video":
        # The part itself says which frames of the video are asked for.
        return part if any(part.get(key) is not None for key in VIDEO_SOURCES) else None
    for key in IMAGE_SOURCES:
        value = part.get(key)
        if value is not None:
            return value
    return None


def has_picture_parts(prompt: Any) -> bool:
    """Return whether a content of the messages has a part that is an image or a video."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_kind(part) is not None for part in content):
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
    texts = []
    for part in content:
        kind = _kind(part)
        texts.append(part if kind is None else PLACEHOLDERS[kind])
    return {**message, "content": texts}
