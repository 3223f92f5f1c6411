"""Items of any dataset become one batch; padded prompts become lists of ids."""

import numpy as np
import pytest
import torch

from verl.data.collate import collate
from verl.utils.errors import DataError


def test_padded_prompts_are_replaced_by_lists():
    item = {
        "input_ids": torch.tensor([0, 0, 5, 6]),
        "attention_mask": torch.tensor([0, 0, 1, 1]),
        "position_ids": torch.tensor([0, 0, 0, 1]),
        "level": 2,
    }
    batch = collate([item, {**item, "attention_mask": torch.tensor([0, 1, 1, 1])}])
    assert batch.non_tensor_batch["raw_prompt_ids"].tolist() == [[5, 6], [0, 5, 6]]
    assert batch.batch is None
    assert set(batch.non_tensor_batch) == {"raw_prompt_ids", "level"}


def test_unpadded_ids_take_precedence_over_padded_ones():
    for ids in ([5, 6], np.array([5, 6]), torch.tensor([5, 6])):
        batch = collate([{"raw_prompt_ids": ids, "input_ids": torch.tensor([0, 5, 6])}])
        assert batch.non_tensor_batch["raw_prompt_ids"].tolist() == [[5, 6]]
        assert type(batch.non_tensor_batch["raw_prompt_ids"][0]) is list
    assert collate([{"input_ids": [5, 6]}]).non_tensor_batch["raw_prompt_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize(
    "ids", ["abc", [1.5, 2.5], ["1"], [[1], [2, 3]], [[1, 2]], torch.tensor([0.5]), [True]]
)
def test_prompt_ids_that_are_no_whole_numbers_are_an_error(ids):
    with pytest.raises(DataError, match="must be a list of token ids, whole numbers, got "):
        collate([{"raw_prompt_ids": ids}])


def test_messages_alone_are_encoded():
    """Datasets of verl 0.7 leave token ids to the agent loops."""
    items = [{"raw_prompt": [{"role": "user", "content": "ab"}], "dummy_tensor": torch.zeros(1)}]
    batch = collate(items, lambda messages: [len(messages[0]["content"])])
    assert batch.non_tensor_batch["raw_prompt_ids"].tolist() == [[2]]
    assert batch.non_tensor_batch["raw_prompt"][0] == items[0]["raw_prompt"]


def test_the_prompt_of_a_row_is_encoded():
    def encode(messages):
        return [len(message["content"]) for message in messages]

    messages = [{"role": "user", "content": "ab"}]
    batch = collate([{"prompt": messages, "level": 1}, {"prompt": "abc", "level": 2}], encode)
    assert set(batch.non_tensor_batch) == {"raw_prompt_ids", "raw_prompt", "level"}
    assert batch.non_tensor_batch["raw_prompt_ids"].tolist() == [[2], [3]]
    assert batch.non_tensor_batch["raw_prompt"][0] == messages

    with pytest.raises(
        DataError, match="The prompt of an item must be a list of messages.*int: '3'"
    ):
        collate([{"prompt": 3}], encode)


def test_the_prompt_of_a_row_is_found_under_the_key_of_the_configuration():
    def encode(messages):
        return [len(message["content"]) for message in messages]

    items = [{"question": "ab", "prompt": "of another column"}]
    batch = collate(items, encode, "question")
    assert batch.non_tensor_batch["raw_prompt_ids"].tolist() == [[2]]
    assert batch.non_tensor_batch["prompt"].tolist() == ["of another column"]
    assert collate([{"prompt": "abc"}], encode, "question").non_tensor_batch["raw_prompt_ids"][
        0
    ] == [3]
    with pytest.raises(DataError, match="The question of an item must be a list"):
        collate([{"question": 3}], encode, "question")
    with pytest.raises(DataError, match=r"raw_prompt or question \(messages\), got keys \['text'"):
        collate([{"text": "ab"}], encode, "question")


def test_tensors_of_equal_shape_are_stacked():
    rows = [
        {"raw_prompt_ids": [1], "same": torch.zeros(2), "other": torch.zeros(size)}
        for size in (1, 2)
    ]
    batch = collate(rows)
    assert batch.batch["same"].shape == (2, 2)
    assert [tensor.shape[0] for tensor in batch.non_tensor_batch["other"]] == [1, 2]


def test_lists_of_equal_length_stay_objects():
    batch = collate([{"raw_prompt_ids": [1, 2]}, {"raw_prompt_ids": [3, 4]}])
    assert batch.non_tensor_batch["raw_prompt_ids"].shape == (2,)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([{"prompt": "x"}], r"needs raw_prompt_ids .* got keys \['prompt'\]"),
        ([{"raw_prompt_ids": []}], "at least one token"),
        ([{"input_ids": torch.ones(3), "attention_mask": torch.zeros(3)}], "at least one token"),
        ([{"input_ids": torch.ones(1, 3)}], "must be 1-D"),
        ([{"input_ids": torch.ones(3), "attention_mask": torch.ones(2)}], "of equal length"),
        ([{"raw_prompt_ids": [1], "a": 1}, {"raw_prompt_ids": [1]}], "not in all: {'a'}"),
    ],
)
def test_invalid_prompt_is_an_error(items, message):
    with pytest.raises(DataError, match=message):
        collate(items)


def test_a_prompt_without_tokens_is_named_by_its_row_and_messages():
    empty = {"raw_prompt_ids": [], "raw_prompt": [{"role": "user", "content": "Hi"}], "index": 3}
    with pytest.raises(DataError, match=r"got none for row 3 with .*'Hi'.*Leave the row out"):
        collate([empty])
