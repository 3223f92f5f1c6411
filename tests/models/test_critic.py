"""The value model: values before response tokens, a replaceable head, and its folder."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.models.rows import RESPONSE_LENGTH, padded_rows
from tests.tiny_models import save_tiny, tiny_model
from verl.models.attention import apply_checkpointing
from verl.models.critic import VALUE_HEAD_FILE, CriticModel
from verl.models.packed import PackedBatch, PackedValueModel
from verl.utils.errors import ModelError
from verl.utils.logging import logger


@pytest.mark.parametrize("family", ["opt", "gpt2", "qwen2", "gemma2", "qwen3_moe"])
def test_values_are_the_head_on_the_state_before_each_response_token(family: str) -> None:
    ids, mask = padded_rows()
    reference = tiny_model(family)
    critic = CriticModel.from_causal_lm(tiny_model(family))
    torch.nn.init.normal_(critic.value_head.weight)
    positions = (mask.cumsum(1) - 1).clamp(min=0)

    with torch.no_grad():
        states = reference.base_model(
            input_ids=ids, attention_mask=mask, position_ids=positions
        ).last_hidden_state
        expected = critic.value_head(states).squeeze(-1)[:, -RESPONSE_LENGTH - 1 : -1]
        values = PackedValueModel(critic)(PackedBatch.from_rows(ids, mask, RESPONSE_LENGTH))[
            "values"
        ]

    assert values.dtype == torch.float32
    expected = expected[mask[:, -RESPONSE_LENGTH:].bool()]
    torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)


def test_initial_values_are_near_zero_equal_on_every_rank_and_trainable() -> None:
    torch.manual_seed(1)
    critic = CriticModel.from_causal_lm(tiny_model("qwen2"))
    torch.manual_seed(2)
    twin = CriticModel.from_causal_lm(tiny_model("qwen2"))
    assert torch.equal(critic.value_head.weight, twin.value_head.weight)
    module = PackedValueModel(critic)
    values = module(PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH))["values"]
    assert values.abs().max() < 0.1
    assert values.std() > 0
    values.sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())


def test_the_head_can_be_replaced() -> None:
    critic = CriticModel.from_causal_lm(tiny_model("qwen2"))
    critic.value_head = torch.nn.Sequential(
        torch.nn.Linear(32, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    values = PackedValueModel(critic)(PackedBatch.from_sequences([[5, 6, 7]]))["values"]
    assert values.shape == (2,)


def test_a_saved_critic_gives_the_same_values(tmp_path: Path) -> None:
    critic = CriticModel.from_pretrained(save_tiny(tmp_path / "policy"))
    torch.nn.init.normal_(critic.value_head.weight)
    batch = PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH)
    expected = PackedValueModel(critic)(batch)["values"]
    critic.save_pretrained(tmp_path / "critic")
    loaded = CriticModel.from_pretrained(tmp_path / "critic")
    assert torch.equal(PackedValueModel(loaded)(batch)["values"], expected)
    assert loaded.config.model_type == "qwen2"


@pytest.mark.parametrize(
    "auto_class", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
def test_the_score_of_a_classifier_is_the_value_head(tmp_path: Path, auto_class: Any) -> None:
    config = tiny_model("qwen2").config
    config.num_labels = 1
    classifier = auto_class.from_config(config).float().eval()
    for parameter in classifier.score.parameters():
        torch.nn.init.normal_(parameter)
    classifier.save_pretrained(tmp_path / "classifier")
    ids, mask = padded_rows()
    ids[mask == 0] = config.pad_token_id or 0

    critic = CriticModel.from_pretrained(tmp_path / "classifier")
    critic.save_pretrained(tmp_path / "critic")
    again = CriticModel.from_pretrained(tmp_path / "critic")

    with torch.no_grad():
        states = classifier.base_model(
            input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).last_hidden_state
        expected = classifier.score(states).squeeze(-1)[mask.bool()]
        for loaded in (critic, again):
            values = loaded(ids, mask)[mask.bool()]
            torch.testing.assert_close(values, expected, atol=1e-4, rtol=1e-4)

    empty = CriticModel.from_pretrained(tmp_path / "critic", weights=False)
    assert empty.state_dict().keys() == critic.state_dict().keys(), "ranks have one structure"


def test_a_head_of_a_users_own_stays_new_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Bounded(CriticModel):
        def __init__(self, body: Any) -> None:
            super().__init__(body)
            self.value_head = torch.nn.Sequential(self.value_head, torch.nn.Tanh())

    config = tiny_model("qwen2").config
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    with caplog.at_level("WARNING", logger=logger.name):
        Bounded.from_pretrained(tmp_path)
    assert "its value head is new" in caplog.text


def test_gathered_weights_are_saved_instead_of_local_ones(tmp_path: Path) -> None:
    critic = CriticModel.from_causal_lm(tiny_model("qwen2"))
    doubled = {name: 2 * value for name, value in critic.state_dict().items()}
    critic.save_pretrained(tmp_path, state_dict=doubled)
    loaded = CriticModel.from_pretrained(tmp_path, check=False)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, doubled[name])


def test_a_saved_head_of_another_shape_is_an_error(tmp_path: Path) -> None:
    critic = CriticModel.from_causal_lm(tiny_model("qwen2"))
    critic.value_head = torch.nn.Sequential(torch.nn.Linear(32, 1), torch.nn.Tanh())
    critic.save_pretrained(tmp_path)
    assert (tmp_path / VALUE_HEAD_FILE).is_file()
    with pytest.raises(ModelError, match="another head"):
        CriticModel.from_pretrained(tmp_path)


def test_checkpointing_a_critic_does_not_change_gradients() -> None:
    batch = PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH)
    found = []
    for enabled in (False, True):
        module = PackedValueModel(CriticModel.from_causal_lm(tiny_model("gemma2"))).train()
        if enabled:
            apply_checkpointing(module)
        module(batch)["values"].square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
