"""Rows have their pictures in the prompt, and every bad one is an error with file and row."""

import json
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.data.pictured import dataset, open_reader, png
from tests.data.pictured import row as row_of
from tests.vision_folders import save_vision_folder
from verl.config import DataConfig
from verl.config.sft import SFTDataConfig
from verl.data.collate import collate
from verl.data.picture_parts import messages_and_sources
from verl.data.pictures import PictureReader
from verl.data.rl_dataset import RLDataset
from verl.data.rlhf_dataset import RLHFDataset
from verl.data.sft_dataset import SFTDataset
from verl.utils.errors import DataError


def bomb(side: int) -> bytes:
    """Return the header of a PNG of side x side pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 999))


def row(text: str = "<image>Hi", **columns: Any) -> dict[str, Any]:
    return row_of(text, **columns)


def test_paths_begin_in_the_folder_of_a_file_in_the_home_folder(
    reader: PictureReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.png").write_bytes(png())
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset(tmp_path, reader, row("<image>Hi", images=["one.png"]))
    config = DataConfig(max_prompt_length=512)
    data = RLDataset("~/rows.jsonl", reader.tokenizer, config, pictures=reader)
    assert len(data[0]["prepared_pictures"]) == 1


def test_placeholders_and_parts_take_images_in_order(folder: Path, reader: PictureReader) -> None:
    for number in range(3):
        (folder / f"{number}.png").write_bytes(png(number))
    own = {"type": "image", "image": "2.png"}
    content = [{"type": "image"}, {"type": "text", "text": "then"}, own, "and <image>"]
    rows = dataset(
        folder,
        reader,
        {"prompt": [{"role": "user", "content": content}], "images": ["0.png", "1.png"]},
        {"prompt": [{"role": "user", "content": "no picture <here>"}], "images": []},
    )
    pictures = rows[0]["prepared_pictures"]
    expected = [reader.prepare(f"{number}.png", folder) for number in (0, 2, 1)]
    assert list(pictures) == expected
    assert rows[0]["raw_prompt"][0]["content"][-2:] == [
        {"type": "text", "text": "and "},
        {"type": "image"},
    ]
    assert rows[1]["prepared_pictures"] == ()
    batch = collate([rows[0], rows[1]]).repeat(3)
    assert batch.non_tensor_batch["prepared_pictures"][2][0] is pictures[0]


def test_long_prompts_are_dropped_by_their_picture_tokens(
    folder: Path, reader: PictureReader
) -> None:
    (folder / "small.png").write_bytes(png(0, (16, 16)))
    (folder / "large.png").write_bytes(png(1, (32, 32)))
    files = ["small.png", "large.png"]
    rows = [row(images=[name]) for name in files]
    both = dataset(folder, reader, *rows)
    lengths = [len(both[number]["raw_prompt_ids"]) for number in range(2)]
    assert lengths[1] - lengths[0] == 16 - 4
    kept = dataset(
        folder, reader, *rows, max_prompt_length=lengths[0], filter_overlong_prompts=True
    )
    assert len(kept) == 1
    for truncation in ("error", "left"):
        with pytest.raises(DataError, match=rf"rows.jsonl, row 1: the prompt has {lengths[1]} tok"):
            dataset(folder, reader, *rows, max_prompt_length=lengths[0], truncation=truncation)


def test_only_rows_of_text_are_cut(folder: Path, reader: PictureReader) -> None:
    (folder / "small.png").write_bytes(png(0, (16, 16)))
    rows = [row(images=["small.png"]), row("x" * 300)]
    cut = dataset(folder, reader, *rows, max_prompt_length=60, truncation="left")
    assert len(cut[1]["raw_prompt_ids"]) == 60


BAD = {
    "missing": ("missing.png", r"there is no file '.*missing.png' or 'missing.png'\. Corr"),
    "truncated": ("truncated.png", r"damaged or not complete"),
    "text": ("text.png", r"no image that pillow knows"),
    "bomb": ("bomb.png", r"an image may have \d+ pixels, got .*1600000000"),
    "large": ("large.png", r"an image may have \d+ pixels, got 10000 x 10000"),
    "web": ("https://example.com/a.png", r"not fetched from the network"),
    "number": (7, r"expected a path, bytes"),
    "keys": ({"file": "a.png"}, r"expected a value under one of the keys .*, got {'file': 'a\.png"),
    "nulls": ({"bytes": None}, r"expected a value under one of the keys .*, got {'bytes': None}"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_an_error_with_file_and_row(
    folder: Path, reader: PictureReader, name: str
) -> None:
    (folder / "good.png").write_bytes(png())
    (folder / "truncated.png").write_bytes(png(1)[:-400])
    (folder / "text.png").write_text("hello")
    (folder / "bomb.png").write_bytes(bomb(40_000))
    (folder / "large.png").write_bytes(bomb(10_000))
    source, message = BAD[name]
    rows = [row(images=["good.png"]), row(images=[source])]
    with pytest.raises(DataError, match=rf"rows.jsonl, row 1: image 0 of the row: .*{message}"):
        dataset(folder, reader, *rows)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Hi", "has 0 placeholders .* for 1 images"),
        ("<image><image>Hi", "has 2 placeholders .* for 1 images"),
        ("<image>Hi <|image_pad|>", "writes 2 of its picture tokens .* for 1 images"),
    ],
)
def test_placeholders_that_differ_in_number_are_errors(
    folder: Path, reader: PictureReader, text: str, message: str
) -> None:
    (folder / "good.png").write_bytes(png())
    with pytest.raises(DataError, match=f"rows.jsonl, row 1: .*{message}"):
        dataset(folder, reader, row(images=["good.png"]), row(text, images=["good.png"]))


def test_placeholders_in_a_file_without_the_column_name_the_columns_found(
    folder: Path, reader: PictureReader
) -> None:
    """The column has another name, or `data.image_key` is misspelled."""
    message = "the column 'images' is missing; columns found: prompt, .*image.*in data.image_key"
    with pytest.raises(DataError, match=message):
        dataset(folder, reader, row("Hi"), row(image=["good.png"]))


def test_a_chat_in_json_text_is_an_error_with_images_too() -> None:
    text = json.dumps([{"role": "user", "content": "<image>Hi"}])
    with pytest.raises(DataError, match=r"got the JSON text of one.*Apply json\.loads"):
        messages_and_sources(text, ["cat.png"])


@pytest.mark.parametrize("empty", [None, "", [], {"bytes": None, "path": None}])
def test_an_empty_value_is_no_picture(
    folder: Path, reader: PictureReader, empty: Any, tmp_path: Path
) -> None:
    rows = dataset(folder, reader, row("Hi", images=empty, videos=empty))
    assert rows[0]["prepared_pictures"] == ()
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row("Hi", images=empty, videos=empty)) + "\n")
    RLDataset(str(file), reader.tokenizer, DataConfig())  # nor for a model of text


@pytest.mark.parametrize("truncation", ["error", "left"])
def test_parts_with_images_need_no_column(
    reader: PictureReader, tmp_path: Path, truncation: str
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "How many?"}]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [{"role": "user", "content": content}]}) + "\n")
    config = DataConfig(max_prompt_length=512, truncation=truncation)
    dataset = RLDataset(str(file), reader.tokenizer, config, pictures=reader)
    assert len(dataset[0]["prepared_pictures"]) == 1
    with pytest.raises(DataError, match="prompts with pictures are never cut"):
        config = DataConfig(max_prompt_length=3, truncation=truncation)
        RLDataset(str(file), reader.tokenizer, config, pictures=reader)


def test_the_dataset_of_verl_05_reads_pictures_by_its_processor(
    reader: PictureReader, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(png())
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row(images=["a.png"])) + "\n")
    settings = {"max_prompt_length": 512}
    processor = reader.processor.processor
    assert "image_processor" in repr(processor), "it can still be copied and written"
    dataset = RLHFDataset(str(file), reader.tokenizer, settings, processor=processor)
    assert len(dataset[0]["prepared_pictures"]) == 1


def test_threads_prepare_the_pictures_of_a_batch(reader, tmp_path, monkeypatch) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    rows = [row(images=[f"{number}.png"]) for number in range(4)]
    data = dataset(tmp_path, reader, *rows)
    one_by_one = [data[item] for item in (3, 1, 2)]
    used = set()
    prepare = PictureReader.prepare

    def watched(self, *arguments):
        used.add(threading.current_thread())
        return prepare(self, *arguments)

    monkeypatch.setattr(PictureReader, "prepare", watched)
    together = data.__getitems__([3, 1, 2])
    assert threading.main_thread() not in used
    assert [item["raw_prompt_ids"] for item in together] == [
        item["raw_prompt_ids"] for item in one_by_one
    ]
    keys = [item["prepared_pictures"][0].key for item in together]
    assert keys == [item["prepared_pictures"][0].key for item in one_by_one]
    assert len(set(keys)) == 3

    reader._kept.clear()
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match="row 1: image 0 of the row: there is no file '.*1.png'"):
        data.__getitems__([0, 1])


def test_a_subclass_with_items_of_its_own_makes_them_in_order(reader, tmp_path) -> None:
    class Marked(RLDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            made.append((item, threading.current_thread()))
            return super().__getitem__(item)

    made: list[tuple[int, threading.Thread]] = []
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row("Hi")) + "\n" for _ in range(3)))
    data = Marked(str(file), reader.tokenizer, DataConfig(), pictures=reader)
    data.__getitems__([2, 0, 1])
    assert made == [(item, threading.main_thread()) for item in (2, 0, 1)]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_answers_are_learnt_behind_the_tokens_of_pictures(family: str, tmp_path: Path) -> None:
    reader = open_reader(save_vision_folder(tmp_path, family))
    tokenizer = reader.tokenizer
    (tmp_path / "a.png").write_bytes(png())
    rows = [{"question": "<image>\nWhat?", "answer": "this", "images": ["a.png"]}]
    rows.append({"question": "Hi", "answer": "Ho", "images": []})
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(prompt_key="question", response_key="answer", max_length=512)
    dataset = SFTDataset(str(file), tokenizer, config, pictures=reader)
    for number, row in enumerate(rows):
        item = dataset[number]
        prompt, _, _ = reader.encode(row["question"], row["images"], tmp_path)
        assert item["raw_prompt_ids"] == prompt
        assert str(tokenizer.decode(item["response_ids"])).startswith(row["answer"])
        learnt = [id for id, is_learnt in zip(item["response_ids"], item["learnt"]) if is_learnt]
        assert tokenizer.decode(learnt) == f"{row['answer']}<|im_end|>"


LLAVA = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {% for part in "
    "message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ '\n' + part['text'] }}{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_reads_parts_alone_writes_texts(tmp_path: Path) -> None:
    reader = open_reader(save_vision_folder(tmp_path, "llava_onevision"))
    tokenizer = reader.tokenizer
    tokenizer.chat_template = LLAVA
    system = {"role": "system", "content": "Be brief."}
    ids, messages, _ = reader.encode([system, {"role": "user", "content": "Why?"}], None, Path())
    assert messages[1]["content"] == "Why?"
    assert tokenizer.decode(ids) == (
        "<|im_start|>system \nBe brief.<|im_end|><|im_start|>user \nWhy?<|im_end|>"
        "<|im_start|>assistant\n"
    )

    file = tmp_path / "rows.jsonl"
    (tmp_path / "a.png").write_bytes(png())
    rows = [
        {"prompt": "Why?", "answer": "so"},
        {"prompt": "<image>Why?", "answer": "so", "images": ["a.png"]},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SFTDataConfig(prompt_key="prompt", response_key="answer", max_length=512)
    dataset = SFTDataset(str(file), tokenizer, config, pictures=reader)
    for item in (dataset[0], dataset[1]):
        assert str(tokenizer.decode(item["raw_prompt_ids"])).count("Why?") == 1
        learnt = [id for id, is_learnt in zip(item["response_ids"], item["learnt"]) if is_learnt]
        assert str(tokenizer.decode(learnt)).strip() == "so<|im_end|>"
