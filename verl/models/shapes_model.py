"""The model of the packaged task `shapes`: a tiny Qwen2.5-VL for pictures of 24 x 24 pixels.

It is made from a configuration, with drawn weights, when it is first asked for.
"""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl.models.load import quiet_transformers

CELLS = 3  # cells in a row and in a column of a picture
CELL = 8  # pixels; each cell is one token
_VERSION = 1  # raise it when the model changes

PAD, END, UNKNOWN = "<|pad|>", "<|im_end|>", "<|unk|>"
ROLES = ("<|user|>", "<|assistant|>")
VISION = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
WORDS = (
    *("how", "many", "?", "red", "green", "blue", "squares", "circles", "diamonds"),
    *map(str, range(10)),
)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of a few words."""
    special = (PAD, END, UNKNOWN, *ROLES, *VISION)
    vocabulary = {token: number for number, token in enumerate((*special, *WORDS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore
    backend.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[*ROLES, *VISION],
        chat_template=TEMPLATE,
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Make a model from a configuration, with drawn weights."""
    ids = tokenizer.get_vocab()
    start, image, video, end = (ids[token] for token in VISION)

    config = Qwen2_5_VLConfig(
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,  # a tiny model with the usual 0.02 is flat
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "mrope_section": [2, 3, 3],
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": CELL // 2,
            "window_size": CELLS * CELL,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
    )

    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def shapes_folder(cache: Path) -> Path:
    """Return the folder of the model with seed 0, made in `cache` if it is not there yet."""
    folder = cache / f"shapes-model-v{_VERSION}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=cache))
        save_shapes_model(made, seed=0)
        try:
            os.replace(made, folder)
        except OSError:  # another process was faster
            shutil.rmtree(made)
    return folder


def save_shapes_model(folder: Path, seed: int) -> None:
    """Write a model with weights of a seed, in the form that transformers and verl load."""
    tokenizer = make_tokenizer()
    with quiet_transformers():
        make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = (CELLS * CELL) ** 2
    size = {"shortest_edge": pixels, "longest_edge": pixels}
    Qwen2VLImageProcessorPil(patch_size=CELL // 2, size=size).save_pretrained(folder)
