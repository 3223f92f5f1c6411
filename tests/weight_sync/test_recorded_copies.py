"""Hand-overs that are replayed: the copies of a model's own `load_weights`, and nothing else."""

import logging
import re

import pytest
import torch
from torch import nn

from verl.weight_sync.recorded_copies import RecordedLoad

HIDDEN, HEADS, KEYS, VOCABULARY = 8, 8, 4, 10


class FusedModel(nn.Module):
    """Loads tensors of Hugging Face names into fused parameters, as inference engines do.

    Args:
        head: "tied" ignores the head's tensor, "same" writes it into the embedding as well, and
            "own" has a parameter for it.
    """

    def __init__(self, head="own"):
        super().__init__()
        self.head = head
        self.calls = 0

        def parameter(*shape):
            return nn.Parameter(torch.zeros(*shape, dtype=torch.bfloat16), requires_grad=False)

        self.qkv = parameter(HEADS + 2 * KEYS, HIDDEN)
        self.gate_up = parameter(12, HIDDEN)
        self.norm = parameter(HIDDEN)
        self.embedding = parameter(16, HIDDEN)  # padded
        if head == "own":
            self.lm_head = parameter(VOCABULARY, HIDDEN)
        self.register_buffer("scale", torch.ones(2))

    def load_weights(self, weights):
        self.calls += 1
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name, tensor):
        rows = {"q": (0, HEADS), "k": (HEADS, KEYS), "v": (HEADS + KEYS, KEYS)}
        if name in rows:
            self.qkv.data.narrow(0, *rows[name]).copy_(tensor)
        elif name in ("gate", "up"):
            self.gate_up.data.chunk(2)[name == "up"].copy_(tensor.view(6, HIDDEN))
        elif name == "norm":
            # A slice of the handed tensor, as of a rank that has a part of it.
            self.norm.data.copy_(tensor.narrow(0, 2, HIDDEN))
        elif name == "head" and self.head == "own":
            self.lm_head.data.copy_(tensor)
        elif name == "embedding" or (name == "head" and self.head == "same"):
            self.embedding[:VOCABULARY].data.copy_(tensor)
            self.embedding[VOCABULARY:].data.fill_(0)


SHAPES = {
    "q": (HEADS, HIDDEN),
    "k": (KEYS, HIDDEN),
    "v": (KEYS, HIDDEN),
    "gate": (6, HIDDEN),
    "up": (6, HIDDEN),
    "norm": (HIDDEN + 4,),
    "embedding": (VOCABULARY, HIDDEN),
    "head": (VOCABULARY, HIDDEN),
}


def hand_over(seed, split=4, dtype=torch.bfloat16, **shapes):
    """Return the buckets of one hand-over. The memory of a bucket is overwritten after it."""
    torch.manual_seed(seed)
    names = list(SHAPES)
    values = {}
    for name in names:
        values[name] = torch.randn(shapes.get(name, SHAPES[name])).to(dtype)
    values["head"] = values["embedding"].clone()

    def buckets():
        for first in range(0, len(names), split):
            bucket = [(name, values[name].clone()) for name in names[first : first + split]]
            yield iter(bucket)
            for _, tensor in bucket:
                tensor.fill_(float("nan"))

    return buckets()


def check_loaded(model, seed, **settings):
    """The model has what `load_weights` of a fresh model gives."""
    expected = type(model)(model.head)
    for bucket in hand_over(seed, **settings):
        expected.load_weights(bucket)
    for (name, one), other in zip(model.named_parameters(), expected.parameters()):
        assert torch.equal(one, other), name


def drop_memory(model):
    """Leave garbage in all parameters, as after a sleep that drops them."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))


@pytest.mark.parametrize("head", ["own", "tied", "same"])
def test_replays_fill_fused_parameters_as_load_weights_does(head):
    model = FusedModel(head)
    loads = RecordedLoad(model)
    loads.load(hand_over(0))
    assert loads.is_recorded
    assert model.calls == 2, "buckets of the first hand-over"
    loads.load(hand_over(1))
    assert model.calls == 4, "the first replay is compared with load_weights"
    # Buckets may be cut elsewhere, and their memory is another one.
    for seed, split in ((2, 4), (3, 3), (4, 100)):
        drop_memory(model)
        loads.load(hand_over(seed, split=split))
        check_loaded(model, seed)
    assert model.calls == 4


def test_parameters_that_moved_are_recorded_anew():
    model = FusedModel()
    loads = RecordedLoad(model)
    for seed in (0, 1):
        loads.load(hand_over(seed))
    model.gate_up.data = torch.zeros_like(model.gate_up)
    assert not loads.is_recorded
    loads.load(hand_over(2))
    check_loaded(model, 2)
    assert loads.is_recorded
    calls = model.calls
    for seed in (3, 4):
        loads.load(hand_over(seed))
        check_loaded(model, seed)
    assert model.calls == calls + 2, "the new record is proved, too"


class FilledTwice(FusedModel):
    def load_one(self, name, tensor):
        if name == "embedding":
            self.embedding[VOCABULARY:].data.fill_(7)
        super().load_one(name, tensor)


def test_of_two_constants_of_one_place_the_last_is_replayed():
    model = FilledTwice()
    loads = RecordedLoad(model)
    for seed in range(3):
        drop_memory(model)
        loads.load(hand_over(seed))
        check_loaded(model, seed)
        assert loads.is_recorded


@pytest.mark.parametrize("change", [{"norm": (HIDDEN + 6,)}, {"dtype": torch.float32}])
def test_a_tensor_of_another_form_ends_replays(change, caplog):
    caplog.set_level(logging.INFO, "verl")
    model = FusedModel()
    loads = RecordedLoad(model)
    for seed in (0, 1):
        loads.load(hand_over(seed))
    for seed in (2, 3):
        loads.load(hand_over(seed, **change))
        check_loaded(model, seed, **change)
    assert not loads.is_recorded
    [message] = [text for text in caplog.messages if "are not replayed" in text]
    assert "FusedModel" in message
    assert "came as" in message


class Scaled(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor * 2 if name == "up" else tensor)


class Transposed(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "gate":
            self.gate_up.data[:6].t()[:6].copy_(tensor[:, :6])


class ChangedLater(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "head":
            self.norm.data.add_(1)


class ChangedUnseen(FusedModel):
    """Writes without an operation of PyTorch, as a kernel of Triton does."""

    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "k":
            self.qkv.data.view(torch.int16).numpy()[0, 0] += 1


class Converted(FusedModel):
    """Keeps weights in another dtype."""

    def __init__(self, head="own"):
        super().__init__(head)
        self.norm = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)


class WithBuffer(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "norm":
            self.scale.copy_(tensor[:2])


class Replacing(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "head":
            self.norm = nn.Parameter(self.norm.data.clone(), requires_grad=False)


class WithGap(FusedModel):
    def load_one(self, name, tensor):
        if name != "v":
            super().load_one(name, tensor)


class Overlapping(FusedModel):
    def load_one(self, name, tensor):
        super().load_one(name, tensor)
        if name == "q":
            self.qkv.data[2:HEADS].copy_(tensor[2:])


class DependsOnValues(FusedModel):
    def load_one(self, name, tensor):
        if name != "norm" or tensor.abs().max() > 0:
            super().load_one(name, tensor)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Scaled, "mul.* reads 'up'"),
        (Transposed, "'gate' goes to separate places of 'gate_up'"),
        (ChangedLater, "add_.* writes to 'norm'"),
        (ChangedUnseen, "'q' is changed after it was copied"),
        (Converted, "'norm' is cast"),
        (WithBuffer, "'norm' is copied to memory that is no parameter's"),
        (Replacing, "a parameter was replaced"),
        (WithGap, "'qkv' is not filled by copies alone"),
        (Overlapping, "parts of 'qkv' are written twice"),
        (DependsOnValues, "reads 'norm'"),
    ],
)
def test_a_model_that_does_more_than_copy_loads_by_itself(kind, reason, caplog):
    caplog.set_level(logging.INFO, "verl")
    model = kind()
    loads = RecordedLoad(model)
    for seed in range(3):
        loads.load(hand_over(seed))
        check_loaded(model, seed)
        assert not loads.is_recorded
    assert model.calls == 6
    assert len(caplog.messages) == 1, "the reason is logged once"
    assert caplog.records[0].levelno == logging.INFO
    assert re.search(reason, caplog.messages[0]), caplog.messages


def test_a_replay_that_differs_from_load_weights_is_dropped(caplog):
    """The proof: a model that begins to do something else after it was recorded."""
    caplog.set_level(logging.INFO, "verl")
    model = FusedModel()
    loads = RecordedLoad(model)
    loads.load(hand_over(0))
    model.__class__ = Scaled
    for seed in (1, 2):
        loads.load(hand_over(seed))
        check_loaded(model, seed)
    assert not loads.is_recorded
    assert "a replay left 'gate_up' with other values" in caplog.text


def test_a_failed_load_is_raised_and_recorded_the_next_time():
    model = FusedModel()
    loads = RecordedLoad(model)
    with pytest.raises(RuntimeError):
        loads.load(hand_over(0, norm=(4,)))
    assert not loads.is_recorded
    loads.load(hand_over(1))
    assert loads.is_recorded
    check_loaded(model, 1)
