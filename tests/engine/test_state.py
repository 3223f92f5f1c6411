"""Saving and loading: an interrupted run ends bit for bit like an uninterrupted one."""

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.engine.batches import COLUMNS, make_batch, smooth_loss
from tests.tiny_models import tiny_model, tiny_tokenizer
from verl.checkpoint import sharded
from verl.config import OptimConfig
from verl.engine.base import LossOutput, TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.models.critic import CriticModel
from verl.models.packed import PackedCausalLM, PackedValueModel
from verl.utils.errors import CheckpointError

SHAPES = [(5, 9), (2, 3), (12, 10), (7, 1)]
BUDGET = TokenBudget(rows=2)
OPTIM = OptimConfig(lr=1e-2, warmup_style="cosine", lr_warmup_steps=2)


def policy_engine(**overrides) -> TrainEngine:
    module = PackedCausalLM(tiny_model(overrides.pop("family", "qwen2"), **overrides))
    return wrap(module)


def critic_engine(seed: int = 0) -> TrainEngine:
    return wrap(PackedValueModel(CriticModel.from_causal_lm(tiny_model("llama", seed=seed))))


def wrap(module) -> TrainEngine:
    return TrainEngine(
        module,
        EngineOptions(device=torch.device("cpu"), optim=OPTIM, grad_clip=1.0),
        total_steps=8,
    )


def value_loss(outputs, columns, sequence):
    error = outputs["values"] - columns["advantages"]
    return LossOutput(loss=(error.square() * columns["weights"]).sum())


def train(engine: TrainEngine, first: int, count: int) -> list[float]:
    """Train `count` steps from batch `first`; return gradient norms and learning rates."""
    seen = []
    loss_fn = value_loss if isinstance(engine.module, PackedValueModel) else smooth_loss
    for number in range(first, first + count):
        engine.forward_backward(make_batch(SHAPES, seed=number), BUDGET, loss_fn, COLUMNS)
        result = engine.step()
        engine.step_schedule()
        seen += [result.grad_norm, result.lr]
    return seen


@pytest.mark.parametrize(
    "make",
    [
        policy_engine,
        lambda: policy_engine(tie_word_embeddings=True),
        lambda: policy_engine(family="gpt2"),
        lambda: policy_engine(family="qwen3_moe"),
        critic_engine,
    ],
    ids=["qwen2", "tied", "gpt2", "qwen3_moe", "critic"],
)
def test_reload_after_three_steps_continues_exactly(tmp_path: Path, make):
    whole = make()
    first = make()
    second = make()
    undisturbed = train(whole, 0, 5)
    before = train(first, 0, 3)
    first.save(tmp_path)

    with torch.no_grad():
        for parameter in second.module.parameters():
            parameter.add_(1.0)  # earlier steps must not matter

    train(second, 50, 1)
    second.load(tmp_path)
    after = train(second, 3, 2)
    assert before + after == undisturbed
    expected = dict(whole.parameters_for_rollout())
    for name, tensor in second.parameters_for_rollout():
        assert torch.equal(tensor, expected[name]), name

    for (name, one), (_, other) in zip(
        whole.hf_model.named_parameters(), second.hf_model.named_parameters()
    ):
        state = whole.optimizer.state[one]
        other_state = second.optimizer.state[other]
        assert state.keys() == other_state.keys()
        assert all(torch.equal(state[key], other_state[key]) for key in state), name


def test_load_keeps_the_tensors(tmp_path: Path):
    engine = policy_engine()
    aliases = dict(engine.parameters_for_rollout())
    train(engine, 0, 1)
    engine.save(tmp_path)
    saved = {name: tensor.clone() for name, tensor in aliases.items()}
    train(engine, 1, 2)
    engine.load(tmp_path)
    assert all(torch.equal(aliases[name], saved[name]) for name in saved)


def test_background_save_writes_the_state_at_its_start(tmp_path: Path, monkeypatch):
    """Change weights and moments between `save` and the first written byte."""
    begin = threading.Event()
    write = sharded.write_sharded

    def held_back(*args):
        assert begin.wait(30)
        write(*args)

    whole = policy_engine()
    other = policy_engine()
    undisturbed = train(whole, 0, 2)
    monkeypatch.setattr(sharded, "write_sharded", held_back)
    whole.save(tmp_path, in_background=True)
    undisturbed += train(whole, 2, 2)
    assert not whole.is_saved(wait=False)
    assert not (tmp_path / "sharded").exists()

    begin.set()
    assert whole.is_saved(wait=True)
    other.load(tmp_path)
    assert undisturbed[:4] + train(other, 2, 2) == undisturbed


def test_background_failure_is_raised_once(tmp_path: Path, monkeypatch):
    engine = policy_engine()
    monkeypatch.setattr(sharded.FileSystemWriter, "write_data", lambda *_: 1 / 0)
    engine.save(tmp_path, in_background=True)
    with pytest.raises(CheckpointError, match="writing .*sharded: ZeroDivisionError") as caught:
        engine.is_saved(wait=True)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    monkeypatch.undo()
    engine.save(tmp_path, in_background=True)
    assert engine.is_saved(wait=True)
    engine.load(tmp_path)


def test_partial_loading(tmp_path: Path, caplog):
    engine = policy_engine()
    other = policy_engine()
    train(engine, 0, 2)
    engine.save(tmp_path / "all")
    other.load(tmp_path / "all", optimizer=False, extra=False)
    assert not other.optimizer.state
    assert torch.equal(other.hf_model.lm_head.weight, engine.hf_model.lm_head.weight)
    assert train(other, 0, 1)[1] == 0.0, "the first step of a new warm-up"

    engine.save(tmp_path / "weights", optimizer=False)
    with pytest.raises(CheckpointError, match="load_contents"):
        other.load(tmp_path / "weights")
    other.load(tmp_path / "weights", optimizer=False)
    assert train(other, 0, 1)[1] == OPTIM.lr, "after it"
    assert "begins anew" not in caplog.text
    other.load(tmp_path / "all", extra=False)
    assert "The learning-rate schedule begins anew" in caplog.text


def test_saved_folder_is_a_hugging_face_model(tmp_path: Path):
    engine = policy_engine(tie_word_embeddings=True)
    train(engine, 0, 3)
    engine.save(tmp_path, tokenizer=tiny_tokenizer(), merged=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface", dtype="auto")
    assert model.dtype == torch.float32
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved = dict(model.named_parameters())
    assert saved.keys() == dict(engine.parameters_for_rollout()).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in engine.parameters_for_rollout())
    assert (tmp_path / "huggingface" / "tokenizer.json").is_file()
    assert (tmp_path / "huggingface" / "generation_config.json").is_file()


def test_half_precision_module_is_saved_in_fp32(tmp_path: Path):
    module = PackedCausalLM(tiny_model("qwen2", dtype=torch.bfloat16))
    engine = TrainEngine(module, EngineOptions(device=torch.device("cpu")))
    engine.save(tmp_path, merged=True)
    state = load_file(tmp_path / "huggingface" / "model.safetensors")
    assert all(tensor.dtype == torch.float32 for tensor in state.values())


def test_missing_parts_are_named(tmp_path: Path):
    engine = policy_engine()
    with pytest.raises(CheckpointError, match="progress.json"):
        engine.load(tmp_path)
    engine.save(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"'model\..*' of shape \(64, 32\) in .* has it in shape \(128, 32\)"
    ):
        policy_engine(vocab_size=64).load(tmp_path)
    (tmp_path / "sharded" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        engine.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("[]", "null", "{}", "[" * 10**5, "9" * 5000, '{"has_optimizer": 1}'),
        '{"has_optimizer": true, "schedule_position": "3"}',
        '{"has_optimizer": true, "schedule_position": true}',
        '{"has_optimizer": true, "lowered_budgets": []}',
        '{"has_optimizer": true, "token_budgets": {"update": null}}',
    ],
)
def test_invalid_progress_file_is_named(tmp_path: Path, content: str):
    engine = policy_engine()
    engine.save(tmp_path)
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"progress\.json cannot be read .*another") as caught:
        engine.load(tmp_path)
    assert len(str(caught.value)) < 500


def test_policy_checkpoint_is_not_a_critic(tmp_path: Path):
    wrap(PackedCausalLM(tiny_model("llama"))).save(tmp_path)
    with pytest.raises(CheckpointError, match="not a critic"):
        critic_engine().load(tmp_path)


@pytest.mark.parametrize("change", [{"num_hidden_layers": 1}, {"tie_word_embeddings": True}])
def test_checkpoint_with_further_weights_is_of_another_model(tmp_path: Path, change):
    policy_engine().save(tmp_path, optimizer=False)
    engine = policy_engine(**change)
    before = {name: tensor.clone() for name, tensor in engine.hf_model.named_parameters()}

    with pytest.raises(CheckpointError, match=r"lacks: \d+, the first is 'model\..*Another model"):
        engine.load(tmp_path, optimizer=False)
    for name, tensor in engine.hf_model.named_parameters():
        assert torch.equal(tensor, before[name])
