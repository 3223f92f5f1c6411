"""A custom critic class: padded forward, bounded head, and the errors for an invalid class."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.rows import RESPONSE_LENGTH, padded_rows
from tests.tiny_models import save_tiny, tiny_model
from tests.trainer.runs import PPO, moments, run, same_bits, step_lines, weights
from tests.workers import own_critic
from tests.workers.batches import actor_of, config, critic_of, trajectories
from tests.workers.own_critic import BoundedCritic, BoundedHead
from verl.config import CriticConfig
from verl.models.attention import apply_checkpointing
from verl.models.critic import CriticModel
from verl.models.packed import PackedBatch, PackedValueModel, PaddedValueModel
from verl.utils.errors import ConfigError, ModelError
from verl.workers.critic import critic_class


def batch() -> PackedBatch:
    return PackedBatch.from_rows(*padded_rows(), RESPONSE_LENGTH)


def twins(family: str = "qwen2") -> tuple[BoundedCritic, BoundedHead]:
    """Return models of equal weights, padded and packed, the same at every call."""
    torch.manual_seed(0)
    bodies: Any = [tiny_model(family).base_model for _ in range(2)]
    padded = BoundedCritic(bodies[0])
    packed = BoundedHead(bodies[1])
    packed.load_state_dict(padded.state_dict())
    return padded, packed


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_padded_forward_gives_the_values_and_gradients_of_the_packed_one(
    family: str, checkpointing: bool
) -> None:
    found = []
    for module in (PaddedValueModel(twins(family)[0]), PackedValueModel(twins(family)[1])):
        module.train()
        if checkpointing:
            apply_checkpointing(module)
        values = module(batch())["values"]
        values.square().sum().backward()
        found.append((values.detach(), [parameter.grad for parameter in module.parameters()]))
    (padded, padded_gradients), (packed, packed_gradients) = found
    assert padded.dtype == torch.float32
    assert 0 < padded.min() < padded.max() < 2
    torch.testing.assert_close(padded, packed, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(padded_gradients, packed_gradients, strict=True):
        assert ours is not None
        assert (ours - theirs).norm() <= 1e-3 * theirs.norm() + 1e-6


def test_a_critic_loaded_alone_takes_padded_rows(tmp_path: Path) -> None:
    critic = CriticModel.from_pretrained(save_tiny(tmp_path, "gemma2"))
    for weight in critic.value_head.parameters():
        torch.nn.init.normal_(weight)
    ids, mask = padded_rows()
    values = critic(ids, mask)
    assert values.shape == ids.shape
    ours = values[:, -RESPONSE_LENGTH - 1 : -1][mask[:, -RESPONSE_LENGTH:].bool()]
    torch.testing.assert_close(
        ours, PackedValueModel(critic)(batch())["values"], atol=1e-4, rtol=1e-4
    )


def test_a_subclass_is_loaded_alone_with_its_head(tmp_path: Path) -> None:
    critic = BoundedCritic.from_pretrained(save_tiny(tmp_path / "policy"))
    assert isinstance(critic, BoundedCritic)
    critic.save_pretrained(tmp_path / "critic")
    loaded = BoundedCritic.from_pretrained(tmp_path / "critic")
    assert torch.equal(loaded(*padded_rows()), critic(*padded_rows()))
    with pytest.raises(ModelError, match="saved with another head.*critic.model.custom_cls"):
        CriticModel.from_pretrained(tmp_path / "critic")


def worker(folder: Path, name: str, **keys: Any) -> Any:
    settings = config(folder)
    settings.critic.model.custom_cls.path = own_critic.__file__
    settings.critic.model.custom_cls.name = name
    for key, value in keys.items():
        setattr(settings.critic, key, value)
    return actor_of(settings), critic_of(settings)


def test_the_log_says_that_a_class_computes_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="verl"):
        _, critic = worker(tmp_path, "BoundedCritic")
        assert "BoundedCritic has a forward of its own: it computes on padded rows" in caplog.text
        caplog.clear()
        assert type(worker(tmp_path, "BoundedHead")[1].engine.module) is PackedValueModel
        assert "padded" not in caplog.text
    assert type(critic.engine.module) is PaddedValueModel


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (
            "WrongShape",
            ModelError,
            r"WrongShape.forward must return one value per token.*got shape \(\d+,\)",
        ),
        (
            "WideHead",
            ModelError,
            r"value head must map states \(\.\.\., 32\) to values.*became \(\d+, 2\)",
        ),
        (
            "Scattered",
            ModelError,
            r"Scattered has weights outside of body and value_head, first \['scale'\]",
        ),
        (
            "not_a_critic",
            ConfigError,
            "name=not_a_critic must be a subclass of verl.models.critic.CriticModel",
        ),
        (
            "BoundedCritik",
            ConfigError,
            "has no 'BoundedCritik'. Nearest names in it: BoundedCritic",
        ),
    ],
)
def test_an_invalid_class_is_reported_in_one_sentence(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        actor, critic = worker(tmp_path, name)
        critic.compute_values(trajectories(actor))


def test_a_missing_file_is_named_with_its_key() -> None:
    settings = CriticConfig()
    settings.model.custom_cls.path = "missing.py"
    settings.model.custom_cls.name = "Own"
    message = (
        r"^critic\.model\.custom_cls\.path: expected a Python file at 'missing\.py', found none"
    )
    with pytest.raises(ConfigError, match=message):
        critic_class(settings.model)


def test_ranks_cannot_share_the_tokens_of_a_padded_row(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="ulysses_sequence_parallel_size=2 .*BoundedCritic computes padded"
    ):
        worker(tmp_path, "BoundedCritic", ulysses_sequence_parallel_size=2)


def test_a_bounded_padded_critic_trains_and_resumes(tmp_path: Path) -> None:
    own = [
        *PPO,
        f"critic.model.custom_cls.path={own_critic.__file__}",
        "critic.model.custom_cls.name=BoundedCritic",
    ]
    saved = [*own, "trainer.save_freq=1"]
    assert run(tmp_path / "whole", *saved) == 0
    assert run(tmp_path / "parts", *saved, "trainer.max_steps=1") == 0

    assert run(tmp_path / "parts", *saved) == 0
    for step in (1, 2):
        for part in (weights, moments):
            assert same_bits(
                part(tmp_path / "whole", step, "critic"), part(tmp_path / "parts", step, "critic")
            )

    before, after = (weights(tmp_path / "whole", step, "critic") for step in (1, 2))
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("value_head.2." in name for name in moved)
    assert any("body." in name for name in moved)
    assert all(0 <= line["critic/values/mean"] <= 2 for line in step_lines(tmp_path / "whole"))
