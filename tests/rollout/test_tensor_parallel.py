"""Ranks that share one engine draw the tokens of one process."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.cases import cases
from tests.distributed.ranks import Ranks
from tests.rollout.engines import PROMPTS, make_engine, run, talkative_model, tokens_of
from tests.tiny_models import tiny_model
from verl.distributed.collectives import ALONE, Axis
from verl.distributed.mesh import RolloutMesh, init_mesh, init_rollout_mesh
from verl.rollout import Completion
from verl.rollout.embedded.tensor_parallel import check_tensor_parallel
from verl.utils.errors import ConfigError

# Covered by these families: biases of all kinds (llama, phi, gpt_neox), norms per head (qwen3),
# windows and caps in the module's own layers (mistral, gemma2), parallel feed-forward (cohere,
# phi), experts (qwen3_moe).
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "cohere",
    "phi",
    "gpt_neox",
    "qwen3_moe",
]
QUICK = ["qwen3", "gemma2", "phi", "qwen3_moe"]  # one or more with each of these features
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def shared_engine(model: Any, device: str = "cpu", **settings: Any) -> Any:
    mesh = init_mesh(torch.device(device))
    ranks = init_rollout_mesh(mesh, 2).tensor
    return make_engine(model.to(mesh.device), device=str(mesh.device), ranks=ranks, **settings)


def completions(
    family: str, arguments: dict, settings: dict, n: int, params: dict
) -> tuple[list[Completion], dict]:
    """Return the completions of one of the two ranks, and its statistics."""
    engine = shared_engine(talkative_model(family, **arguments), **settings)
    return run(engine, PROMPTS, n, **params), engine.statistics()


def worst_difference(ours: list[Completion], theirs: list[Completion]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        (torch.tensor(a.log_probs) - torch.tensor(b.log_probs)).abs().max().item() for a, b in pairs
    )


@pytest.mark.parametrize("family", cases(FAMILIES, quick=lambda family: family in QUICK))
def test_two_ranks_draw_the_tokens_of_one(two: Ranks, family: str):
    greedy = {"temperature": 0, "max_new_tokens": 40}
    alone = run(make_engine(talkative_model(family)), PROMPTS, **greedy)
    for shared, _ in two.call(completions, family, {}, {}, 1, greedy):
        assert tokens_of(shared) == tokens_of(alone)
    exact = {"dtype": torch.float64}
    alone = run(make_engine(talkative_model(family, **exact)), PROMPTS, 3, temperature=1.3)
    for shared, _ in two.call(completions, family, exact, {}, 3, {"temperature": 1.3}):
        assert tokens_of(shared) == tokens_of(alone)
        assert worst_difference(shared, alone) <= 1e-5


def test_both_ranks_preempt_and_count_alike(two: Ranks):
    tight: dict[str, Any] = {"num_pages": 7, "max_num_seqs": 5}
    alone = make_engine(talkative_model("qwen2"), **tight)
    expected = run(alone, PROMPTS, 4)
    (first, counts), (second, others) = two.call(completions, "qwen2", {}, tight, 4, {})
    assert tokens_of(first) == tokens_of(second) == tokens_of(expected)
    for name, count in alone.statistics().items():
        if not name.endswith("_s") and name != "memory_gib":
            assert counts[name] == others[name] == count
    assert counts["preemptions"] > 0


def rounded(family: str) -> list[Completion]:
    return run(shared_engine(talkative_model(family), dtype="bfloat16"), PROMPTS, temperature=0)


def test_bfloat16_is_close(two: Ranks):
    alone = run(make_engine(talkative_model("qwen3")), PROMPTS, temperature=0)
    for shared in two.call(rounded, "qwen3"):
        for ours, exact in zip(shared, alone, strict=True):
            assert ours.token_ids[0] == exact.token_ids[0]
            assert ours.log_probs[0] == pytest.approx(exact.log_probs[0], abs=0.2)


def across_an_update(family: str) -> tuple[list[list[Completion]], bool, int, int]:
    model = talkative_model(family)
    news = talkative_model(family, seed=1)
    whole = [parameter.clone() for parameter in model.parameters()]
    engine = shared_engine(model)
    before = run(engine, PROMPTS)
    engine.sleep()
    engine.wake()
    engine.update_weights(news.named_parameters())
    after = run(engine, PROMPTS)
    engine.check_integrity()
    untouched = all(torch.equal(one, other) for one, other in zip(whole, model.parameters()))
    return [before, after], untouched, engine.runner.page_bytes, engine.twin.copied_bytes


def test_new_weights_are_sharded_like_the_first(two: Ranks):
    alone = make_engine(talkative_model("llama"))
    expected = [run(make_engine(talkative_model("llama", seed=seed)), PROMPTS) for seed in (0, 1)]
    run(alone, PROMPTS)
    assert tokens_of(expected[0]) != tokens_of(expected[1]), "too dull to fail"

    for found, untouched, page_bytes, copied_bytes in two.call(across_an_update, "llama"):
        assert [tokens_of(one) for one in found] == [tokens_of(one) for one in expected]
        assert untouched, "the engine's slices are its own"
        assert page_bytes == alone.runner.page_bytes // 2
        size = {name: weight.numel() * 4 for name, weight in alone.twin.module.named_parameters()}
        whole = sum(
            size[name]
            for name in size
            if "layers" not in name or "norm" in name or name.endswith("o_proj.bias")
        )
        assert copied_bytes == whole + (sum(size.values()) - whole) // 2


def in_any_batch(family: str, in_order: bool) -> list[list[Completion]]:
    found = []
    batches: list[dict[str, Any]] = [{}, {"max_num_seqs": 3}, {"num_pages": 7}]
    for settings in batches:
        engine = shared_engine(talkative_model(family), deterministic=True, **settings)
        engine.parallel._in_order = in_order  # the default for three ranks and more
        found.append(run(engine, PROMPTS, 2, max_new_tokens=10))
    return found


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
def test_deterministic_gives_the_same_bits_in_every_batch(two: Ranks, family: str):
    found = [
        each
        for in_order in (False, True)
        for batches in two.call(in_any_batch, family, in_order)
        for each in batches
    ]
    assert all(each == found[0] for each in found)


def with_another_head(family: str) -> list[Completion]:
    model: Any = talkative_model(family)
    mesh = init_rollout_mesh(init_mesh(CPU), 2)
    if mesh.tensor.rank == 1:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(-1)
    return run(make_engine(model, ranks=mesh.tensor), PROMPTS, 2)


def test_the_first_rank_draws_for_all(two: Ranks):
    first, second = two.call(with_another_head, "qwen2")
    assert (
        tokens_of(first)
        == tokens_of(second)
        == tokens_of(run(make_engine(talkative_model("qwen2")), PROMPTS, 2))
    )
    assert worst_difference(first, second) > 1, "or both heads were the same"


def rollout_mesh(size: int) -> RolloutMesh:
    mesh = init_rollout_mesh(init_mesh(CPU), size)
    # groups cannot travel
    data, tensor = (Axis(axis.size, axis.rank) for axis in (mesh.data, mesh.tensor))
    return RolloutMesh(data, tensor)


def test_neighbors_share_an_engine(two: Ranks):
    assert two.call(rollout_mesh, 1) == [RolloutMesh(Axis(2, rank), ALONE) for rank in (0, 1)]
    assert two.call(rollout_mesh, 2) == [RolloutMesh(Axis(1, 0), Axis(2, rank)) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("gpt2", {}, 2, "no plan for cutting the model family 'gpt2'. Set .*=1"),
        (
            "qwen2",
            {"base_model_tp_plan": {"embed_tokens": "embedding_rowwise"}},
            2,
            "no plan for cutting the model family 'qwen2'. Set .*=1",
        ),
        (
            "phi3",
            {},
            2,
            "'phi3', because 'layers.*qkv_proj' is 'colwise_gather_output' .* Set .*=1",
        ),
        (
            "qwen2",
            {},
            4,
            "'qwen2' .* got 4 and num_attention_heads=4, num_key_value_heads=2.*Set it to 2",
        ),
        ("qwen3", {"num_key_value_heads": 4, "num_attention_heads": 12}, 8, "Set it to 4"),
        ("gemma2", {"intermediate_size": 50}, 4, "intermediate_size=50. Set it to 2"),
        ("qwen3_moe", {"moe_intermediate_size": 15}, 2, "moe_intermediate_size=15. Set it to 1"),
    ],
)
def test_models_that_cannot_be_sharded_are_rejected_by_name(
    family: str, changes: dict, size: int, message: str
):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_tensor_parallel(tiny_model(family, **changes).config, size)
