"""Rows with pictures or videos, and datasets of them."""

import io
import json
from pathlib import Path
from typing import Any

from tests.vision_folders import some_image
from verl.config import DataConfig
from verl.data.pictures import PictureReader
from verl.data.rl_dataset import RLDataset
from verl.models.load import load_tokenizer
from verl.models.processor import load_picture_processor


def open_reader(folder: Path, **settings: Any) -> PictureReader:
    """Return the reader of a saved model of pictures."""
    tokenizer = load_tokenizer(folder)
    processor = load_picture_processor(folder, tokenizer)
    assert processor is not None
    return PictureReader(processor, tokenizer, **settings)


def dataset(folder: Path, reader: PictureReader, *rows: dict[str, Any], **config: Any) -> RLDataset:
    """Write rows to a file of a folder, and read them."""
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"max_prompt_length": 512, **config}
    return RLDataset(str(file), reader.tokenizer, DataConfig(**settings), pictures=reader)


def row(text: str, **columns: Any) -> dict[str, Any]:
    """Return a row with a message of the user."""
    return {"prompt": [{"role": "user", "content": text}], "data_source": "x", **columns}


def png(seed: int = 0, size: tuple[int, int] = (40, 24)) -> bytes:
    """Return a file of `some_image`."""
    stream = io.BytesIO()
    some_image(seed, size).save(stream, "PNG")
    return stream.getvalue()
