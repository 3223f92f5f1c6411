"""The rollout benchmark: its bound against a step-by-step count, lengths, checks, two CPU sides."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers, lists

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from floor import Machine, Shape, read_shape
from rollout_hf import HF
from rollout_models import write_config
from rollout_ours import Ours
from rollout_plan import parse_plan
from rollout_work import (
    Answer,
    Ask,
    Job,
    Workload,
    check,
    draw_limits,
    draw_prompts,
    parse_lengths,
    run_job,
)
from roofline import decode_schedule, rollout_roofline

rollout = importlib.import_module(
    "rollout"
)  # imported by name, because type checkers would find tests/rollout first
H200 = Machine(gflops=790e3, gb_per_s=4300.0)


def counted_schedule(
    limits: list[int], prompt_tokens: int, slots: int
) -> tuple[list[int], list[int]]:
    """Compute `decode_schedule` one step at a time."""
    waiting = sorted(limits, reverse=True)
    running = []
    rows = []
    context = []

    while waiting or running:
        while waiting and len(running) < slots:
            limit = waiting.pop(0)
            if limit > 1:  # otherwise the prefill gives its only token
                running.append([1, limit])
        if running:
            rows.append(len(running))
            context.append(sum(prompt_tokens + done for done, _ in running))
        running = [[done + 1, limit] for done, limit in running if done + 1 < limit]
    return rows, context


@given(
    limits=lists(integers(1, 12), min_size=1, max_size=20),
    prompt=integers(1, 9),
    slots=integers(1, 24),
)
def test_schedule_matches_a_count_of_every_step(limits, prompt, slots):
    rows, context = decode_schedule(np.array(limits), prompt, slots)
    assert (rows.tolist(), context.tolist()) == counted_schedule(limits, prompt, slots)
    assert rows.sum() == sum(limits) - len(limits)


def test_bound_of_a_1_5b_model_at_256_rows():
    """Compare with a calculation by hand.

    Matrix products take 2 x 1.54e9 x 256 operations at 790 TFLOP/s. The cache has 28,672 bytes for
    each of 256 x 384 tokens, read at 4.3 TB/s.
    """
    shape = Shape(
        body=1_310_000_000,
        head=233_000_000,
        attention=4 * 12 * 128 * 28,
        cache_bytes=8 * 2 * 128 * 28,
    )
    sizes = {"prompts": 256, "prompt_tokens": 256, "max_num_seqs": 1024, "dtype_bytes": 2}
    bound = rollout_roofline(H200, shape, np.full(256, 256), **sizes)

    assert bound.decode_steps == 255
    assert bound.weights_s / 255 == pytest.approx(1.00e-3, rel=0.01)
    assert bound.cache_s / 255 == pytest.approx(0.655e-3, rel=0.01)
    assert bound.prefill_s == pytest.approx(
        (2 * 1.31e9 * 65536 + 2 * 0.233e9 * 256 + 1.446e12) / 790e12, rel=0.01
    )
    alone = rollout_roofline(H200, shape, np.array([256]), **{**sizes, "prompts": 1})
    # here reading the weights takes longer than the products
    assert alone.weights_s / 255 == pytest.approx(2 * 1.543e9 / 4.3e12, rel=0.01)


def test_untied_embeddings_are_not_read(tmp_path):
    write_config(tmp_path, "7b", "cuda")
    shape = read_shape(tmp_path)
    assert shape.head == 152_064 * 3584
    assert shape.body == 28 * 3584 * (2 * 3584 + 2 * 512 + 3 * 18_944)
    assert shape.cache_bytes == 2 * 4 * 4 * 128 * 28


def test_experts_that_rows_visit_are_read(tmp_path):
    write_config(tmp_path, "qwen3-30b-a3b@2", "cuda")
    shape = read_shape(tmp_path)
    assert shape.experts == 2 * 128 * 3 * 2048 * 768
    assert shape.body == 2 * 2048 * (2 * 32 * 128 + 2 * 4 * 128 + 128)
    assert shape.active == 8 / 128
    sizes = {"prompts": 1, "prompt_tokens": 8, "max_num_seqs": 1024, "dtype_bytes": 2}
    dense = (shape.body + shape.head) * 2 / 4.3e12
    few = rollout_roofline(H200, shape, np.array([2]), **sizes)
    assert few.weights_s == pytest.approx(dense + shape.experts / 16 * 2 / 4.3e12)
    many = rollout_roofline(H200, shape, np.full(512, 2), **sizes)
    assert many.weights_s == pytest.approx(dense + shape.experts * 2 / 4.3e12)


def test_windows_bound_the_keys_that_are_read(tmp_path):
    write_config(tmp_path, "gemma3-4b", "cuda")
    shape = read_shape(tmp_path)
    assert (shape.window, shape.windowed) == (1024, 29 / 34)
    sizes = {"prompts": 1, "prompt_tokens": 4096, "max_num_seqs": 1024, "dtype_bytes": 2}
    bound = rollout_roofline(H200, shape, np.array([2]), **sizes)
    tokens = 4097 * 5 / 34 + 1024 * 29 / 34
    assert bound.cache_s == pytest.approx(tokens * shape.cache_bytes / 2 / 4.3e12)


def test_long_tail_is_as_documented():
    limits = draw_limits("tail:1024", 100_000, seed=1)
    assert limits.min() == 16
    assert limits.max() == 1024
    assert np.median(limits) == pytest.approx(300, rel=0.02)
    assert limits.mean() == pytest.approx(380, rel=0.01)
    assert (limits == 1024).mean() == pytest.approx(1 / 16, rel=0.05)
    assert (draw_limits("tail:1024", 100_000, seed=1) == limits).all()
    assert (draw_limits("tail:1024", 100_000, seed=2) != limits).any()
    assert draw_limits("fixed:7", 3, seed=1).tolist() == [7, 7, 7]


@pytest.mark.parametrize("text", ["tail", "tail:0", "normal:8", "fixed:-3", "fixed:x"])
def test_invalid_lengths_are_rejected(text):
    with pytest.raises(ValueError, match="fixed:L"):
        parse_lengths(text)


def test_no_two_draws_share_a_prompt():
    draws = [prompt for draw in range(3) for prompt in draw_prompts(8, 16, 2048, seed=0, draw=draw)]
    assert len({prompt[:4] for prompt in draws}) == 24


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([Answer(3, True)], "asked for 2 samples and gave 1"),
        ([Answer(3, True), Answer(4, True)], "4 tokens instead of 5"),
        ([Answer(3, True), Answer(5, False)], "not finite"),
    ],
)
def test_answers_of_an_engine_are_checked(answers, message):
    with pytest.raises(RuntimeError, match=message):
        check(answers, [Ask((1, 2), (3, 5))])
    assert check([Answer(3, True), Answer(5, None)], [Ask((1, 2), (3, 5))]) == 8


@pytest.mark.parametrize("side", [Ours, HF])
def test_side_gives_every_sample_its_length(side, tmp_path):
    write_config(tmp_path, "tiny", "cpu")
    workloads = [
        Workload(prompts=3, samples=samples, prompt_tokens=16, lengths="tail:24")
        for samples in (2, 3)
    ]
    job = Job(
        folder=str(tmp_path),
        device="cpu",
        vocabulary=2048,
        max_num_seqs=4,  # fewer than the samples
        gpu_memory_utilization=0.85,
        deterministic=False,
        repeats=2,
        seed=0,
        workloads=tuple(workloads),
    )

    job.write(tmp_path / "job.json")
    result = run_job(side, Job.read(tmp_path / "job.json"))
    for measured, workload in zip(result["workloads"], workloads, strict=True):
        assert measured["tokens"] == workload.limits(0).sum()
        assert len(set(workload.limits(0).ravel().tolist())) > 2
        assert len(measured["seconds"]) == 2
        assert min(measured["seconds"]) > 0

    json.dumps(result)  # the process returns it as JSON


def test_missing_engine_is_reported_at_the_start(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="package vLLM is not installed.*pip install vllm==0.24.0"):
        rollout.refuse_what_cannot_run(parse_plan([]))


def test_invalid_command_lines_are_rejected(capsys):
    for words, message in (
        (["--engines", "ours,xyz"], "got 'xyz'"),
        (["--models", "3b"], "got '3b'"),
        (["--samples", "16,n"], "must be at least 1"),
        (["--repeats", "0"], "must be at least 1"),
        (["--lengths", "tail"], "fixed:L"),
        (["--decode-step", "--samples", "8"], "batch of its own"),
        (["--decode-step", "--max-num-seqs", "64"], "up to --max-num-seqs"),
        (["--decode-step", "64,x"], "needs numbers of rows"),
        (["--before", "."], "need each other"),
    ):
        with pytest.raises(SystemExit):
            parse_plan(words)
        assert message in capsys.readouterr().err.rpartition("error: ")[2]


def test_table_has_the_ratio_to_vllm_and_the_share_of_the_roofline(capsys, tmp_path):
    """Use assumed times: ours 2 s, vLLM 3 s, so the ratio is 1.5."""
    plan = parse_plan(["--models", "tiny", "--lengths", "fixed:32", "--out", str(tmp_path)])
    write_config(tmp_path / "tiny" / "model", "tiny", "cpu")
    results = {}

    for engine, seconds in (("ours", [2.5, 2.0]), ("vllm", [3.0, 3.5])):
        measured = {"seconds": seconds, "tokens": 64 * 16 * 32, "warm_up_s": 0.1, "statistics": {}}
        results[engine] = {"start_up_s": 9.0, "versions": "none", "workloads": [measured]}

    report = rollout.report_model(plan, "tiny", H200, results)
    (table,) = report["tables"].values()
    assert table["ours"]["ratio_to_vllm"] == 1.5
    assert table["ours"]["tokens_per_s"] == 64 * 16 * 32 / 2
    (bound,) = report["rooflines"]
    assert (
        table["vllm"]["of_roofline"]
        == (bound["prefill_s"] + bound["weights_s"] + bound["cache_s"]) / 3
    )

    assert "| ours | 16,384 | 2.000 | 1.50 |" in capsys.readouterr().out


def test_engine_that_fails_is_named_with_its_reason(capsys, tmp_path, monkeypatch):
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('the reason')", encoding="utf-8")
    monkeypatch.setitem(rollout.SCRIPTS, "ours", str(script))
    plan = parse_plan(["--models", "tiny", "--lengths", "fixed:32", "--out", str(tmp_path)])
    (tmp_path / "tiny").mkdir()

    assert rollout.run_side(plan, "tiny", "ours") is None
    assert "tiny: ours FAILED: the reason (code 1, log: " in capsys.readouterr().out


def test_a_decode_step_is_the_difference_of_two_workloads(capsys, tmp_path):
    """Use assumed times: 51 s between the first tokens and the last of 256."""
    words = ["--models", "tiny", "--decode-step", "2,8", "--out", str(tmp_path)]
    plan = parse_plan(words)
    write_config(tmp_path / "tiny" / "model", "tiny", "cpu")
    workloads = [{"seconds": [seconds, 90.0]} for seconds in (1.0, 52.0, 2.0, 104.0)]
    results = {"ours": {"versions": "none", "workloads": workloads}}
    report = rollout.report_model(plan, "tiny", H200, results)

    steps = {rows: table["ours"]["step_ms"] for rows, table in report["decode_step"].items()}
    assert steps == {2: pytest.approx(200), 8: pytest.approx(88e3 / 255)}
    assert "| 2 | ours | 200.000 |" in capsys.readouterr().out
