"""A packed batch split over sequence-parallel ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.models.packed import PackedBatch


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    parts=st.integers(2, 5),
    share=st.booleans(),
)
def test_each_token_and_prediction_is_in_one_part(lengths, parts, share):
    sequences = [
        [7, 7, 7, *range(10 * i + 1, 10 * i + 1 + length)] for i, length in enumerate(lengths)
    ]
    whole = PackedBatch.from_sequences(sequences)
    if share:
        whole = PackedBatch.from_rows(*_padded(sequences))
        whole = whole.with_shared_prompts([0] * len(lengths), [3] * len(lengths))

    split = [whole.split(parts, part) for part in range(parts)]
    added = -len(whole.input_ids) % parts
    assert len({len(part.input_ids) for part in split}) == 1
    assert torch.equal(torch.cat([part.input_ids for part in split])[added:], whole.input_ids)
    assert torch.equal(torch.cat([part.position_ids for part in split])[added:], whole.position_ids)
    seen = torch.zeros_like(whole.targets)

    for part in split:
        # The layout covers all tokens, with the padding first.
        assert part.lengths[bool(added) :] == whole.lengths
        assert part.cu_seqlens.tolist()[-1] == len(whole.input_ids) + added
        assert (part.shared, part.num_predictions) == (whole.shared, len(whole.targets))
        assert torch.equal(part.targets, whole.targets[part.places])
        assert torch.equal(
            part.input_ids[part.predict], whole.input_ids[whole.predict[part.places]]
        )
        seen[part.places] += 1

    assert bool((seen == 1).all())


def _padded(sequences: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, int]:
    width = max(len(sequence) for sequence in sequences)
    ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
    mask = torch.tensor(
        [[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences]
    )
    return ids, mask, width - 3


def test_split_into_one_part_returns_the_batch():
    batch = PackedBatch.from_sequences([[1, 2, 3]])
    assert batch.split(1, 0) is batch
