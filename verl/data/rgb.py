"""Images of PIL as three channels of eight bits."""

from typing import Any

import numpy as np

_WITH_ALPHA = ("RGBA", "RGBa", "LA", "La", "PA")
_LARGEST_BYTE = 255
_LARGEST_SHORT = 65535


def as_rgb(image: Any) -> Any:
    """Return an image in RGB.

    Transparent parts become white, as vLLM and qwen-vl-utils show them to a model: the colors that
    a file has there are arbitrary. Gray values of 16 bits are scaled, where PIL would clip them.
    """
    from PIL import Image

    if image.mode.startswith("I"):
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
