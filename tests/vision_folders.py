"""Folders of tiny models that read pictures, with tokenizer and processor, and images on disk."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tiny_models import tiny_tokenizer
from tests.tiny_vision_models import IMAGE, VOCABULARY, save_tiny_vision

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PICTURE"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN = {
    "class": "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    "settings": {"patch_size": 4, "size": {"shortest_edge": 64, "longest_edge": 1024}},
    "tokens": ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"],
    "picture": "<|vision_start|><|image_pad|><|vision_end|>",
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "internvl": {
        "class": "got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil",
        "settings": {
            "size": {"height": 16, "width": 16},
            "crop_to_patches": True,
            "max_patches": 4,
        },
        "tokens": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "picture": "<IMG_CONTEXT>",
        "processor": {"image_seq_length": 4},
        "names": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    },
    "llava_onevision": {
        "class": (
            "llava_onevision.image_processing_pil_llava_onevision.LlavaOnevisionImageProcessorPil"
        ),
        "settings": {
            "size": {"height": 16, "width": 16},
            "image_grid_pinpoints": [[16, 16], [16, 32], [32, 16]],
        },
        "tokens": ["<image>", "<video>"],
        "picture": "<image>",
        "processor": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    },
    "smolvlm": {
        "class": "smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil",
        "settings": {
            "size": {"longest_edge": 32},
            "max_image_size": {"longest_edge": 16},
            "do_image_splitting": True,
        },
        "tokens": ["<image>", "<fake_token_around_image>", "<global-img>"],
        "picture": "<image>",
        "processor": {"image_seq_len": 4},
    },
    "gemma3": {
        "class": "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        "settings": {
            "size": {"height": 16, "width": 16},
            # A wide image gives its parts as further images.
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 8,
            "pan_and_scan_max_num_crops": 2,
            "pan_and_scan_min_ratio_to_activate": 1.5,
        },
        "tokens": ["<image_soft_token>", "<start_of_image>", "<end_of_image>", "\n\n", "\n\n\n"],
        "picture": "<start_of_image>",
        "processor": {"image_seq_length": 4},
        "names": {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    },
}
FAMILIES = tuple(_PROCESSORS)  # that of SmolVLM needs the package num2words


def save_vision_folder(folder: Path, family: str = "qwen2_5_vl", **arguments: Any) -> Path:
    """Save weights, tokenizer and processor of a tiny model."""
    entry = _PROCESSORS[family]
    save_tiny_vision(folder, family, **arguments)
    tokenizer = tiny_tokenizer()
    fill = [f"<unused {number}>" for number in range(len(tokenizer), IMAGE)]
    tokenizer.add_tokens([*fill, *entry["tokens"]], special_tokens=True)
    assert len(tokenizer) <= VOCABULARY
    assert tokenizer.convert_tokens_to_ids(entry["tokens"][0]) == IMAGE
    for name, token in entry.get("names", {}).items():
        tokenizer.init_kwargs[name] = token
    tokenizer.chat_template = TEMPLATE.replace("PICTURE", entry["picture"])
    tokenizer.save_pretrained(folder)

    module, _, kind = entry["class"].rpartition(".")
    processor = getattr(importlib.import_module(f"transformers.models.{module}"), kind)
    processor(**entry["settings"]).save_pretrained(folder)
    if "processor" in entry:
        (folder / "processor_config.json").write_text(json.dumps(entry["processor"]))
    return folder


def some_image(seed: int = 0, size: tuple[int, int] = (40, 24)) -> Image.Image:
    """Return an image of random pixels, (height, width)."""
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
