"""Functions of padded tensors under verl 0.5's names, against torch and values by hand."""

import math
import warnings

import pytest
import torch
from tensordict import TensorDict

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import verl.utils.torch_functional as F  # pyright: ignore[reportMissingImports]
    from verl.utils.model import (  # pyright: ignore[reportMissingImports]
        compute_position_id_with_mask,
    )


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_log_probs_and_entropy():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 7)
    labels = torch.randint(7, (2, 5))
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(
        F.logprobs_from_logits(logits, labels), distribution.log_prob(labels)
    )
    torch.testing.assert_close(F.entropy_from_logits(logits), distribution.entropy())
    of_response = F.log_probs_from_logits_response(labels, logits, 2)
    expected = logits.log_softmax(-1)[:, 2:4].gather(-1, labels[:, 3:, None]).squeeze(-1)
    torch.testing.assert_close(of_response, expected)


def test_masked_statistics():
    values = torch.tensor([[1.0, 2.0, 99.0], [3.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert F.masked_sum(values, mask) == 6
    assert F.masked_mean(values, mask) == 2
    assert F.masked_mean(values, mask, axis=-1).tolist() == [1.5, 3.0]
    assert F.masked_var(values, mask) == 1
    assert F.masked_var(values, mask, unbiased=False) == pytest.approx(2 / 3)
    whitened = F.masked_whiten(values, mask)
    torch.testing.assert_close(whitened[mask.bool()], torch.tensor([-1.0, 0.0, 1.0]))
    assert F.masked_whiten(values, mask, shift_mean=False)[mask.bool()].mean() == 2
    with pytest.raises(ValueError, match="at least 2 values"):
        F.masked_var(values, torch.tensor([[1, 0, 0], [0, 0, 0]]))


def test_masks_and_positions():
    responses = torch.tensor([[5, 9, 2, 9, 9], [5, 5, 5, 5, 5], [2, 5, 2, 5, 5]])
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    assert F.get_response_mask(responses, eos_token=2).tolist() == mask
    either = F.get_response_mask(responses, eos_token=[2, 9], dtype=torch.bool)
    assert either.sum(-1).tolist() == [2, 5, 1]
    attention = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert compute_position_id_with_mask(attention).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2]]


def test_padding_and_truncation():
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0, 3).tolist() == [[1, 0, 0], [2, 3, 0]]
    assert F.pad_2d_list_to_length([[1], [2, 3]], 0).tolist() == [[1, 0], [2, 3]]
    row = torch.tensor([[1, 2, 3, 4, 5]])
    ones = torch.ones_like(row)
    assert F.pad_sequence_to_length(row[:, :2], 4, 9).tolist() == [[1, 2, 9, 9]]
    assert F.pad_sequence_to_length(row[:, :2], 4, 9, left_pad=True).tolist() == [[9, 9, 1, 2]]
    assert F.pad_sequence_to_length(row, 4, 9) is row

    padded, mask = F.postprocess_data(row, ones, 6, 9)
    assert padded.tolist() == [[9, 1, 2, 3, 4, 5]]
    assert mask.tolist() == [[0, 1, 1, 1, 1, 1]]
    for truncation, kept in (("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])):
        cut, _ = F.postprocess_data(row, ones, 3, 9, truncation=truncation)
        assert cut.tolist() == [kept]
    with pytest.raises(ValueError, match="max_length=3"):
        F.postprocess_data(row, ones, 3, 9)
    with pytest.raises(AssertionError, match="truncation"):
        F.postprocess_data(row, ones, 3, 9, truncation="centre")

    left = torch.tensor([[0, 0, 7], [5, 6, 7]])
    assert F.remove_pad_token(left, torch.tensor([[0, 0, 1], [1, 1, 1]])) == [[7], [5, 6, 7]]


def test_tensordict_slices():
    whole = TensorDict({"x": torch.arange(6)}, batch_size=[6])
    parts = F.split_dict_tensor_into_batches(whole, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AssertionError, match="must divide the 6 rows"):
        F.split_dict_tensor_into_batches(whole, 4)


def learning_rates(schedule, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_learning_rates():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = F.get_cosine_schedule_with_warmup(optimizer, 2, 6, min_lr_ratio=0.2)
    cosine = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(5)]
    assert learning_rates(schedule, 7) == pytest.approx([0, 0.5, *cosine])

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = F.get_constant_schedule_with_warmup(optimizer, 2)
    assert learning_rates(schedule, 4) == pytest.approx([0, 0.5, 1, 1])
