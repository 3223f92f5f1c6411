"""The first rank reads the files of a model and sends the others their shards."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed import jobs
from tests.distributed.ranks import Ranks
from tests.tiny_models import save_tiny
from verl.models.critic import CriticModel
from verl.models.load import load_causal_lm


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt_oss", {}),  # parameters outside linear modules
        ("gemma2", {}),  # computed buffers
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ranks_get_the_weights_of_the_first_rank(
    two_ranks: Ranks, tmp_path: Path, family: str, settings: dict[str, Any], dtype: str
):
    save_tiny(tmp_path, family, **settings)
    model = load_causal_lm(tmp_path, dtype=dtype)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for answer in two_ranks.call(jobs.weights_that_were_read, tmp_path, dtype):
        assert answer.keys() == expected.keys()
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)


def test_adapters_come_from_the_first_rank(two_ranks: Ranks, tmp_path: Path):
    save_tiny(tmp_path)
    first, second = two_ranks.call(jobs.weights_that_were_read, tmp_path, "float32", 4)
    assert any("lora_A" in name and value.abs().max() > 0 for name, value in first.items())
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0)


def test_different_model_folders_are_an_error(two_ranks: Ranks, tmp_path: Path):
    save_tiny(tmp_path / "first")
    save_tiny(tmp_path / "second", intermediate_size=64)
    for rank, text in enumerate(
        two_ranks.call(jobs.mismatch_of_folders, [tmp_path / "first", tmp_path / "second"])
    ):
        if rank > 0:
            assert "other shapes on this rank" in text
            assert "same model folder" in text


def test_critic_without_weights_has_all_parameter_names(tmp_path: Path):
    save_tiny(tmp_path / "model")
    critic = CriticModel.from_pretrained(tmp_path / "model")
    critic.save_pretrained(tmp_path / "critic")
    for folder in ("model", "critic"):
        empty = CriticModel.from_pretrained(tmp_path / folder, weights=False)
        shapes = {name: value.shape for name, value in empty.named_parameters()}
        assert shapes == {name: value.shape for name, value in critic.named_parameters()}
        assert all(value.is_meta for value in empty.parameters())


def test_missing_tensor_is_reported_by_the_reading_rank(tmp_path: Path):
    """Report a missing tensor only with weights: loading without them reads no weight file."""
    folder = save_tiny(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "lacks")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "lacks" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Exception, match="lack 1 tensors"):
        load_causal_lm(tmp_path / "lacks", dtype="float32")
    assert load_causal_lm(tmp_path / "lacks", dtype="float32", weights=False).device.type == "meta"
