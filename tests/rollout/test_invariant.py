"""Batch-invariant computation on the CPU, bit for bit."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from tests.tiny_models import DETERMINISTIC_FAMILIES, tiny_model
from verl.models import logprobs
from verl.models.attention import Facts, Layout, block_attention, layer_facts, prepare
from verl.models.logprobs import Head
from verl.rollout.embedded import audit, invariant
from verl.rollout.types import SamplingParams
from verl.utils.errors import ConfigError

SLICES = [(0, 1), (5, 6), (149, 150), (0, 2), (7, 22), (3, 4), (60, 93), (1, 65), (20, 150)]
FACTS = {
    "plain": Facts(scale=0.3, window=None, cap=None, sinks=None),
    "window": Facts(scale=0.3, window=70, cap=None, sinks=None),
    "cap and sinks": Facts(
        scale=0.3, window=9, cap=1.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0])
    ),
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("columns", "inner"), [(128, 64), (33, 37), (300, 1000)])
def test_a_row_of_a_product_depends_on_nothing_but_the_row(threads, dtype, columns, inner):
    x = random(150, inner, dtype=dtype)
    weight = random(columns, inner, seed=1).to(dtype)
    bias = random(columns).to(dtype)

    for bias_or_none in (None, bias):
        whole = invariant.linear(x, weight, bias_or_none)
        expected = F.linear(
            x.double(), weight.double(), None if bias_or_none is None else bias.double()
        )
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
        assert (whole.double() - expected).norm() <= tolerance * expected.norm()
        for start, stop in SLICES:
            assert torch.equal(
                invariant.linear(x[start:stop], weight, bias_or_none), whole[start:stop]
            )
        # At another place in its block, with other rows, from memory that is not aligned.
        assert torch.equal(
            invariant.linear(x.roll(11, 0), weight, bias_or_none).roll(-11, 0), whole
        )
        unaligned = torch.empty(150 * inner + 1, dtype=dtype)[1:].view(150, inner).copy_(x)
        assert torch.equal(invariant.linear(unaligned, weight, bias_or_none), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "function", [F.silu, F.gelu, torch.sigmoid, F.softplus, torch.exp, torch.tanh]
)
def test_an_element_does_not_depend_on_its_place(threads, dtype, function):
    x = 4 * random(100_003, dtype=dtype)
    whole = invariant.elementwise(function, x)
    torch.testing.assert_close(whole, function(x))
    for start, stop in [(0, 1), (5, 22), (100, 165), (3, 40_004), (7, 100_003)]:
        assert torch.equal(invariant.elementwise(function, x[start:stop]), whole[start:stop])
    matrix = x[:99_000].view(300, 330)[:, :165]
    assert torch.equal(
        invariant.elementwise(function, matrix), whole[:99_000].view(300, 330)[:, :165]
    )


def attention_written_out(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, facts: Facts
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (tensor.double().repeat_interleave(groups, 1) for tensor in (k, v))
    scores = torch.einsum("bhd,bhld->bhl", q.double(), k) * facts.scale
    if facts.cap is not None:
        scores = facts.cap * torch.tanh(scores / facts.cap)
    key = torch.arange(k.shape[2])
    last = positions[:, None]
    seen = (key <= last) & (key > last - (facts.window or k.shape[2]))
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if facts.sinks is not None:
        column = facts.sinks.double().view(1, -1, 1).expand(q.shape[0], -1, 1)
        scores = torch.cat([scores, column], dim=-1)
    return torch.einsum("bhl,bhld->bhd", scores.softmax(-1)[..., : k.shape[2]], v)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
@pytest.mark.parametrize(
    ("dtype", "heads"), [(torch.float32, 1), (torch.float32, 2), (torch.bfloat16, 6)]
)
def test_a_decoded_row_attends_only_to_its_own_keys(threads, facts, dtype, heads):
    lengths = [1, 200, 64, 65, 63, 128, 7, 130, 19, 90, 111]
    q = random(11, 6, 12, dtype=dtype)
    k, v = (random(11, heads, 200, dim, dtype=dtype, seed=dim) for dim in (12, 16))
    positions = torch.tensor(lengths) - 1
    together = invariant.decode_attention(q, k, v, positions, facts)
    tolerance = (
        {"rtol": 2e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    )

    torch.testing.assert_close(
        together.double(), attention_written_out(q, k, v, positions, facts), **tolerance
    )
    for row, length in enumerate(lengths):
        one = slice(row, row + 1)
        alone = invariant.decode_attention(
            q[one], k[one, :, :length], v[one, :, :length], positions[one], facts
        )
        assert torch.equal(alone[0], together[row])

    beyond = k.clone()
    beyond[torch.arange(200) > positions[:, None, None].expand(11, heads, 1)] = 7.0
    again = invariant.decode_attention(
        q.flip(0), beyond.flip(0), v.flip(0), positions.flip(0), facts
    )
    assert torch.equal(again.flip(0), together)


@pytest.mark.parametrize("facts", FACTS.values(), ids=FACTS.keys())
def test_a_prefilled_sequence_attends_only_to_itself(threads, facts):
    lengths = (3, 1, 40, 2, 90, 40, 17)
    q, k, v = (
        random(sum(lengths), heads, dim, seed=heads) for heads, dim in ((6, 12), (2, 12), (2, 16))
    )
    together = invariant.prefill_attention(q, k, v, Layout(lengths, offsets(lengths)), facts)
    torch.testing.assert_close(
        together,
        block_attention(q, k, v, Layout(lengths, offsets(lengths)), facts),
        rtol=1e-5,
        atol=1e-5,
    )

    for start, length in zip(offsets(lengths).tolist(), lengths):
        mine = slice(start, start + length)
        alone = invariant.prefill_attention(
            q[mine], k[mine], v[mine], Layout((length,), offsets([length])), facts
        )
        assert torch.equal(alone, together[mine])


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {}])
def test_a_single_row_draws_the_same_as_in_a_batch(threads, params, monkeypatch):
    monkeypatch.setattr("verl.rollout.sampling.CHUNK_LOGITS", 40_001 * 4)
    # chunks of four rows: the ninth is alone in its own
    monkeypatch.setattr(invariant, "CHUNK_LOGITS", 40_001 * 4)
    settings = SamplingParams(**{"max_new_tokens": 1, "temperature": 1.0, **params})
    logits = 3 * random(9, 40_001)
    keys = torch.arange(18, dtype=torch.int32).view(9, 2)
    tokens, log_probs = invariant.draw(logits, settings, keys)
    for row in range(9):
        one = slice(row, row + 1)
        alone = invariant.draw(logits[one], settings, keys[one])
        assert torch.equal(alone[0], tokens[one])
        assert torch.equal(alone[1], log_probs[one])


@pytest.mark.parametrize("head", [Head(), Head(scale=0.7), Head(scale=1.3, cap=3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_the_trainer(head, dtype):
    hidden = random(150, 48, dtype=dtype)
    weight = random(101, 48, seed=1).to(dtype)
    bias = random(101, seed=2).to(dtype)
    logits = invariant.head_logits(hidden, weight, bias, head)
    expected = logprobs.head_logits(hidden, weight, bias, head)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5
    )
    for start, stop in SLICES:
        assert torch.equal(
            invariant.head_logits(hidden[start:stop], weight, bias, head), logits[start:stop]
        )


def invariant_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    scaling: Any = None,
    dropout: float = 0.0,
    **asked,
) -> tuple[Tensor, None]:
    facts = layer_facts(module, query.shape[-1], scaling, asked)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return invariant.prefill_attention(q, k, v, module.verl_packing.layout, facts)[None], None


AttentionInterface.register("verl_invariant_test", invariant_attention)


def invariant_model(family: str, device: str = "cpu", **settings: Any) -> PreTrainedModel:
    model = tiny_model(family, **settings).to(device)  # pyright: ignore[reportArgumentType]
    prepare(model)
    model.set_attn_implementation("verl_invariant_test")
    invariant.make_invariant(model, torch.device(device))
    return model


@torch.inference_mode()
def hidden_states(model: Any, sequences: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the last hidden states (L, H) of each of the packed sequences."""
    lengths = tuple(len(sequence) for sequence in sequences)
    ids = torch.cat(list(sequences))[None].to(model.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
    with model.verl_packing.holding(Layout(lengths, offsets(lengths).to(model.device))):
        states = model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False
        )
    return states.last_hidden_state[0].split(lengths)


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (length,), generator=generator) for length in lengths]


def check_family(model: Any) -> None:
    """Check that a sequence has the same hidden states alone, with another and among seventeen.

    Only known operations may run.
    """
    mine, *others = sequences(33, 5, *range(2, 65, 4))
    with audit.refuse_variant_operations("test"):
        alone = hidden_states(model, [mine])[0]
    assert torch.equal(hidden_states(model, [others[0], mine])[1], alone)
    assert torch.equal(hidden_states(model, [mine, *others])[0], alone)
    assert torch.equal(hidden_states(model, [*others[:9], mine, *others[9:]])[9], alone)
    token = mine[:1]
    assert torch.equal(hidden_states(model, [token])[0], hidden_states(model, [*others, token])[-1])


@pytest.mark.parametrize("family", DETERMINISTIC_FAMILIES)
def test_the_hidden_states_of_a_sequence_do_not_depend_on_its_batch(family):
    model = invariant_model(family)
    check_family(model)
    [ours], [plain] = (
        hidden_states(model, sequences(40)),
        hidden_states(packed_model(family), sequences(40)),
    )
    torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-3)


def test_the_check_notices_products_of_any_number_of_rows(monkeypatch):
    """Replace the linear layers by those of torch."""
    x = random(65, 32)
    weight = random(32, 32, seed=1)
    if torch.equal(F.linear(x[:1], weight), F.linear(x, weight)[:1]):
        pytest.skip("this BLAS computes one row like many")
    monkeypatch.setattr(invariant, "_blocked_linear", F.linear)
    with pytest.raises(AssertionError):
        check_family(invariant_model("llama"))


def packed_model(family: str) -> PreTrainedModel:
    model = tiny_model(family)
    prepare(model)
    return model


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(
    ("family", "dtype"), [("qwen3", torch.float32), ("gemma2", torch.bfloat16)]
)
def test_the_same_holds_on_two_threads(threads, family, dtype):
    # wide enough to be divided
    check_family(invariant_model(family, dtype=dtype, intermediate_size=1096))


@pytest.mark.parametrize(
    ("family", "found"),
    [
        ("qwen2", "addmm, mm, silu"),
        ("gpt2", "addmm"),
        ("gemma2", "bmm, gelu, mm"),
        ("gpt_oss", "addmm, bmm, mm, sigmoid"),
    ],
)
def test_models_that_depend_on_the_batch_are_rejected_by_name(family, found):
    model = packed_model(family)
    match = f"deterministic=true is not possible for .*'{family}': .*{found}"
    with pytest.raises(ConfigError, match=match), audit.refuse_variant_operations(family):
        hidden_states(model, sequences(3))


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.mean(0),
        lambda x: x.pow(1.5),
        lambda x: F.mish(x),
        lambda x: torch.einsum("ab,cb->ac", x, x),
        lambda x: x.bfloat16().rsqrt(),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    ],
)
def test_operations_not_known_to_be_invariant_are_rejected(operation):
    with (
        pytest.raises(ConfigError, match="may depend on the rest of the batch"),
        audit.refuse_variant_operations(""),
    ):
        operation(random(4, 8))


def test_operations_of_one_row_are_allowed():
    x = random(4, 8)
    with audit.refuse_variant_operations("test"):
        (
            F.rms_norm(x, (8,), x[0], 1e-6)
            + F.layer_norm(x, (8,))
            + x.pow(2).mean(-1, keepdim=True).sqrt() * x.softmax(-1)
        )


def test_replaced_parameters_are_used_in_the_computation():
    model: Any = invariant_model("qwen2")
    projection = model.model.layers[0].mlp.down_proj
    before = projection(random(3, 48))
    projection.weight = torch.nn.Parameter(2 * projection.weight, requires_grad=False)
    assert torch.equal(projection(random(3, 48)), 2 * before)
    assert type(projection) is torch.nn.Linear
    assert logprobs.head_of(model) == Head()


def test_custom_arithmetic_is_invariant_inside_the_context():
    x = random(150, 64)
    weight = random(128, 64, seed=1)

    def gated(rows: Tensor) -> Tensor:
        return F.silu(F.linear(rows, weight)) * torch.sigmoid(rows @ weight.t())

    with invariant.InvariantOperations():
        whole = gated(x)
        for start, stop in SLICES:
            assert torch.equal(gated(x[start:stop]), whole[start:stop])
        with audit.refuse_variant_operations("test"):
            gated(x)
    torch.testing.assert_close(whole, gated(x), rtol=1e-4, atol=1e-4)


def test_float64_is_rejected_on_cuda():
    with pytest.raises(ConfigError, match="float64"):
        invariant.make_invariant(tiny_model("qwen2", dtype=torch.float64), torch.device("cuda"))
