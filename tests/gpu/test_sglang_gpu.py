"""Training with a server of SGLang that the run starts, on one GPU with the trainer.

SGLANG_PYTHON is the interpreter of the server's environment. Without it, SGLang must be installed
next to this package.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.rollout_servers import toy

PYTHON = os.environ.get("SGLANG_PYTHON")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        PYTHON is None and importlib.util.find_spec("sglang") is None,
        reason="sglang is not importable here, and SGLANG_PYTHON names no interpreter that has it",
    ),
]
_LINES = 60


def end_of_logs():
    """Return the end of the newest server's log."""
    logs = sorted(
        Path(tempfile.gettempdir()).glob("verl-*.tmp/*.log"), key=lambda log: log.stat().st_mtime
    )
    if not logs:
        return "no server was started"
    lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{logs[-1]}:\n" + "\n".join(lines[-_LINES:])


def flags(**more):
    """Return flags of a server that needs no compiler."""
    return {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_backend_prefill": "disabled",
        **more,
    }


def train(folder, **keys):
    """Train on SGLang; return the metrics of the steps. Print the server's log after a fault."""
    own = {
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.server_python": PYTHON or sys.executable,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.2,
        "trainer.device": "cuda",
    }
    try:
        return toy.train(folder, **own, **keys)
    except BaseException:
        print(end_of_logs())
        raise


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_toy_learns_on_sglang_and_every_push_is_proved(tmp_path, is_deterministic):
    server = flags(enable_deterministic_inference=is_deterministic)
    steps = train(tmp_path, **{"actor_rollout_ref.rollout.engine_kwargs.sglang": server})

    gaps = [step["training/rollout_probs_diff_mean"] for step in steps]
    kls = [step["training/rollout_kl"] for step in steps]
    rewards = [step["critic/rewards/mean"] for step in steps]
    redrawn = [step.get("perf/rollout_num_redrawn", 0) for step in steps]
    figures = f"gaps: {gaps}; kls: {kls}; rewards: {rewards}; redrawn: {redrawn}"
    print(figures)
    assert len(steps) == 10, figures
    assert max(gaps) < 0.02, figures
    assert sum(rewards[-3:]) > sum(rewards[:3]), figures
    assert not any(redrawn), figures


def test_a_model_that_reads_pictures_trains_on_sglang(tmp_path):
    """Each step trains the vision tower, too, so its features must be new after every push."""
    model = toy.save_shapes(tmp_path / "model")
    # The trainer may lack torchvision. Three steps are not worth the graphs' half a minute.
    server = flags(disable_fast_image_processor=True, disable_cuda_graph=True)
    steps = train(
        tmp_path / "run",
        **{
            "data.dataset_name": "shapes",
            "data.train_max_samples": 4,  # the pictures of every step
            "actor_rollout_ref.model.path": str(model),
            "actor_rollout_ref.actor.optim.lr": 1e-2,
            "actor_rollout_ref.rollout.engine_kwargs.sglang": server,
            "trainer.max_steps": 3,
        },
    )
    gaps = [step["training/rollout_probs_diff_mean"] for step in steps]
    print(f"gaps: {gaps}")
    assert len(steps) == 3
    assert max(gaps) < 0.02, gaps
