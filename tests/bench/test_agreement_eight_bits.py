"""The distributions that `bench/agreement_eight_bits.py` compares, on a CPU in float32."""

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import agreement_eight_bits

from tests.tiny_models import tiny_model


def test_distributions_are_those_of_the_model_and_kl_sees_a_difference():
    model: Any = tiny_model("qwen2")
    engine = agreement_eight_bits.make_engine(model, torch.device("cpu"), dtype="float32")
    sequences = agreement_eight_bits.draw(engine, [[5, 6, 7], [9, 10, 11, 12, 13]], 30)
    assert [len(sequence) for sequence in sequences] == [33, 35]
    states = agreement_eight_bits.hidden_states(engine, sequences)
    found = agreement_eight_bits.log_probs(engine, states)

    parts = []
    for sequence in sequences:
        logits = model(input_ids=torch.tensor([sequence])).logits[0].detach()
        parts.append(logits.log_softmax(-1))
    truth = torch.cat(parts)
    torch.testing.assert_close(found, truth, rtol=0, atol=1e-4)
    assert agreement_eight_bits.kl(truth, found).max() < 1e-6

    moved = (truth + 0.1 * torch.randn(truth.shape[1])).log_softmax(-1)
    expected = torch.nn.functional.kl_div(moved, truth, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(agreement_eight_bits.kl(truth, moved), expected)
    assert expected.mean() > 1e-3


def test_damping_makes_layers_small_against_the_stream():
    model: Any = tiny_model("qwen2", tie_word_embeddings=False)
    before = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    agreement_eight_bits.damp(model)
    layers = model.config.num_hidden_layers
    torch.testing.assert_close(
        model.model.layers[0].mlp.down_proj.weight.detach(), before / (2 * layers) ** 0.5
    )
