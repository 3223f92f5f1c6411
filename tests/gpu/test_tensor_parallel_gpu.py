"""Two GPUs that share one engine over NCCL draw the tokens of one GPU. Starts its own ranks: run it
with plain pytest.

`pytest -m multi_gpu tests/gpu/test_tensor_parallel_gpu.py` on a machine with two devices.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.rollout.engines import (
    PROMPTS,
    forward_log_probs,
    make_engine,
    run,
    talkative_model,
    tokens_of,
)
from tests.rollout.test_tensor_parallel import completions, shared_engine, worst_difference
from tests.trainer.runs import command_line, step_lines
from tests.trainer.test_ranks import TORCHRUN
from verl.rollout import Completion

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

FUSED = ["llama", "mistral", "qwen2", "qwen3"]
THROUGH_THE_MODULE = ["gemma2", "gpt_neox", "qwen3_moe"]
EXACT: dict[str, Any] = {"device": "cuda", "dtype": "float32"}
DRAWS: list[tuple[int, dict[str, Any]]] = [
    (1, {"temperature": 0, "max_new_tokens": 40}),
    (5, {"temperature": 1.3}),
]
ROUNDED: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16"}


def on_cuda(model: Any) -> Any:
    return model.cuda()


def on_one(
    family: str, settings: dict[str, Any], n: int = 1, *, seed: int = 0, **params: Any
) -> list[Completion]:
    return run(
        make_engine(on_cuda(talkative_model(family, seed=seed)), **settings), PROMPTS, n, **params
    )


@pytest.mark.parametrize("family", [*FUSED, *THROUGH_THE_MODULE])
def test_two_gpus_draw_the_tokens_of_one(two_gpus: Ranks, family: str):
    for n, params in DRAWS:
        alone = on_one(family, EXACT, n, **params)
        for shared, _ in two_gpus.call(completions, family, {}, EXACT, n, params):
            assert tokens_of(shared) == tokens_of(alone)
            assert worst_difference(shared, alone) <= 1e-4


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_two_gpus_draw_the_tokens_of_one_with_small_pages(two_gpus: Ranks, family: str):
    small = {**EXACT, "kv_cache_dtype": "fp8"}
    for n, params in DRAWS:
        alone = on_one(family, small, n, **params)
        for shared, _ in two_gpus.call(completions, family, {}, small, n, params):
            assert tokens_of(shared) == tokens_of(alone)


@pytest.mark.parametrize("family", [*FUSED, "gemma2"])
def test_bf16_is_as_close_to_fp32_as_on_one_gpu(two_gpus: Ranks, family: str):
    exact = on_cuda(talkative_model(family, dtype=torch.bfloat16).float())

    def error(sampled: list[Completion]) -> float:
        truths = (forward_log_probs(exact, PROMPTS[c.sample_id // 4], c.token_ids) for c in sampled)
        errors = [
            (torch.tensor(c.log_probs) - truth).abs().mean() for c, truth in zip(sampled, truths)
        ]
        return torch.stack(errors).median().item()

    params: dict[str, Any] = {"ignore_eos": True}
    alone = error(on_one(family, ROUNDED, 4, **params))
    for shared, _ in two_gpus.call(completions, family, {}, ROUNDED, 4, params):
        assert error(shared) <= 1.5 * alone + 0.01


def test_graphs_draw_the_tokens_of_eager_steps(two_gpus: Ranks):
    for params in ({"temperature": 0}, {"top_p": 0.8, "top_k": 20, "temperature": 1.4}):
        graphs, eager = (
            two_gpus.call(completions, "qwen3", {}, {**EXACT, "enforce_eager": flag}, 5, params)
            for flag in (False, True)
        )
        assert [tokens_of(drawn) for drawn, _ in graphs] == [tokens_of(drawn) for drawn, _ in eager]


def across_an_update(family: str) -> tuple[list[list[list[int]]], bool]:
    """Return tokens with the first weights, the second, the first again, and whether graphs were
    reused."""
    model, other = (on_cuda(talkative_model(family, seed=seed)) for seed in (0, 1))
    engine = shared_engine(model, **EXACT)
    drawn = [tokens_of(run(engine, PROMPTS, 2))]
    graphs = dict(engine.runner._graphs)
    engine.sleep()
    engine.wake()
    for news in (other, model):
        engine.update_weights(news.named_parameters())
        drawn.append(tokens_of(run(engine, PROMPTS, 2)))
    return drawn, bool(graphs) and engine.runner._graphs.items() >= graphs.items()


def test_graphs_survive_sleep_and_new_weights(two_gpus: Ranks):
    first, second = (tokens_of(on_one("qwen2", EXACT, 2, seed=seed)) for seed in (0, 1))
    assert first != second, "too dull to fail"
    for drawn, kept in two_gpus.call(across_an_update, "qwen2"):
        assert drawn == [first, second, first]
        assert kept


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_deterministic_gives_the_same_bits_in_every_batch(two_gpus: Ranks, family: str):
    crowd, few = (
        two_gpus.call(
            completions, family, {}, {**ROUNDED, "deterministic": True, "max_num_seqs": most}, 8, {}
        )
        for most in (24, 3)
    )
    assert crowd[0][0] == crowd[1][0] == few[0][0] == few[1][0]


def test_pages_fit_in_the_memory_of_both(two_gpus: Ranks):
    tight = {**EXACT, "num_pages": 9}
    (first, counts), (second, _) = two_gpus.call(completions, "qwen2", {}, tight, 4, {})
    assert counts["preemptions"] > 0
    assert tokens_of(first) == tokens_of(second) == tokens_of(on_one("qwen2", EXACT, 4))


def test_a_run_with_a_shared_engine_terminates(two_gpus: Ranks, tmp_path: Path):
    """Destroy communicators in order: they wait for graphs captured with them, so that another
    order would hang."""
    shared = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    arguments = command_line(tmp_path, shared, "actor_rollout_ref.actor.use_torch_compile=False")
    done = subprocess.run(
        [*TORCHRUN, "-m", "verl.trainer.main_ppo", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = step_lines(tmp_path)
    assert len(lines) == 2
    assert all(line["training/rollout_probs_diff_mean"] < 0.05 for line in lines)
