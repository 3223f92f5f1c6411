"""The reward model: the scores of transformers, packed; and rejected models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from tests.models.rows import join_sequences
from tests.tiny_models import VOCABULARY, save_tiny
from tests.tiny_reward_models import save_reward_model, tiny_classifier
from verl.models.reward_model import RewardModel
from verl.utils.errors import ModelError, RewardError

LENGTHS = (40, 13, 1, 27)
PARITY = ("llama", "qwen2", "mistral", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt")


def rows(*, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return ids and mask (B, T), padded on one side."""
    generator = torch.Generator().manual_seed(3)
    width = max(LENGTHS) + 2
    ids = torch.zeros(len(LENGTHS), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(LENGTHS):
        real = slice(width - length, width) if left else slice(0, length)
        ids[row, real] = torch.randint(3, VOCABULARY, (length,), generator=generator)
        mask[row, real] = 1
    return ids, mask


def distance(family: str) -> float:
    """Return the largest difference from transformers' classifier on right-padded rows."""
    ids, mask = rows()
    with torch.no_grad():
        theirs = tiny_classifier(family)(input_ids=ids, attention_mask=mask).logits[:, 0]
        ours = RewardModel(tiny_classifier(family))(input_ids=ids, attention_mask=mask).rewards
    assert ours.dtype == torch.float32
    assert theirs.std() > 1, "too flat to tell a difference"
    return (ours - theirs).abs().max().item()


@pytest.mark.parametrize("family", PARITY)
def test_rewards_are_the_logits_of_transformers(family: str) -> None:
    assert distance(family) <= 1e-5


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_dropping_sequence_isolation_is_noticed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    join_sequences(monkeypatch)
    assert distance(family) > 1e-2


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_padding_side_changes_nothing(family: str) -> None:
    model = RewardModel(tiny_classifier(family))
    with torch.no_grad():
        right, left = (model(*rows(left=side)).rewards for side in (False, True))
        without_mask = model(input_ids=rows(left=True)[0]).rewards
    assert torch.equal(right, left)
    assert torch.equal(right, without_mask)


def test_padding_is_not_computed() -> None:
    model = RewardModel(tiny_classifier())
    seen: list[int] = []
    model.packed.model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    model(*rows())
    assert seen == [sum(LENGTHS)]


def test_a_folder_is_loaded_alone_and_scores_lists_in_passes(tmp_path: Path) -> None:
    model = RewardModel.from_pretrained(save_reward_model(tmp_path, "llama"))
    ids, mask = rows()
    expected = model(ids, mask).rewards.detach()
    sequences = [row[real.bool()].tolist() for row, real in zip(ids, mask)]
    for max_tokens in (1, 50, 1000):
        torch.testing.assert_close(
            model.score(sequences, max_tokens=max_tokens), expected, atol=1e-5, rtol=0
        )
    assert model.max_length == 256
    assert model.tokenizer.chat_template is not None


def test_a_language_model_is_rejected_with_an_alternative(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"is a language model \(Qwen2ForCausalLM\).*num_labels=1.*judge"
    ):
        RewardModel.from_pretrained(save_tiny(tmp_path))


def test_several_labels_are_rejected_with_the_code_that_keeps_one(tmp_path: Path) -> None:
    folder = save_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ModelError, match="has 2 labels.*num_labels=1.*keep the row"):
        RewardModel.from_pretrained(folder)
    model: Any = tiny_classifier(num_labels=2)
    model.score.weight.data = model.score.weight.data[1:2]  # the code in the message
    model.config.num_labels = 1
    model.save_pretrained(tmp_path / "one")
    with torch.no_grad():
        kept = RewardModel.from_pretrained(tmp_path / "one")(*rows()).rewards
        expected = tiny_classifier(num_labels=2)(*rows()).logits[:, 1]
    torch.testing.assert_close(kept, expected, atol=1e-5, rtol=0)


def test_an_encoder_is_rejected_by_name(tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=32,
    )
    config.num_labels = 1
    BertForSequenceClassification(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="BertForSequenceClassification has none.*of a causal family"
    ):
        RewardModel.from_pretrained(tmp_path)


def test_ids_that_are_not_rows_are_reported() -> None:
    model, (ids, mask) = RewardModel(tiny_classifier()), rows()
    with pytest.raises(
        RewardError, match=r"shape \(B, T\).*got \(42,\) and none.*input_ids\[None\]"
    ):
        model(ids[0])
    with pytest.raises(RewardError, match=r"below \d+, got \d+ to 99999"):
        model(torch.where(ids == ids.max(), 99999, ids), mask)
    with pytest.raises(RewardError, match=r"got \(4, 42\) and \(4, 41\)"):
        model(ids, mask[:, 1:])
    with pytest.raises(RewardError, match=r"tensor of shape \(B, T\).*got list"):
        model(ids.tolist())
    with pytest.raises(RewardError, match=r"none of them 0, got shape \(0, 42\)"):
        model(ids[:0])
    assert model.max_length is not None
    long = torch.ones(2, model.max_length + 1, dtype=torch.int64)
    real = torch.ones_like(long)
    real[0, 2:] = 0
    with pytest.raises(RewardError, match=f"Response 1 has {model.max_length + 1} tokens .* reads"):
        model(long, real)


def test_lists_of_ids_are_checked_as_rows_are() -> None:
    model = RewardModel(tiny_classifier())
    assert model.score([]).tolist() == []
    with pytest.raises(RewardError, match="Response 1 has no token"):
        model.score([[7, 8], []])
    with pytest.raises(RewardError, match=r"below \d+, got 7 to 99999"):
        model.score([[7, 99999]])
    assert model.max_length is not None
    with pytest.raises(RewardError, match=f"Response 1 has {model.max_length + 1} tokens .* reads"):
        model.score([[7], [7] * (model.max_length + 1)])


def test_a_score_that_is_not_finite_and_a_row_without_a_token_are_named() -> None:
    model = RewardModel(tiny_classifier())
    ids, mask = rows()
    embeddings: Any = model.packed.model.get_input_embeddings()
    with torch.no_grad():
        embeddings.weight[ids[1, 5]] = torch.nan
    ids[0] = 7
    with pytest.raises(RewardError, match=r"response 1 the score nan, and \d of 4 scores"):
        model(ids, mask)
    with pytest.raises(RewardError, match="response 1 the score nan"):
        model.score([[7, 8], ids[1, :13].tolist()], max_tokens=2)
    mask[2] = 0
    with pytest.raises(RewardError, match="Response 2 has no token"):
        model(ids, mask)
