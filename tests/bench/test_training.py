"""The training and step benchmarks on CPU: equal work on all sides, FLOPs, limits and errors."""

import json
import sys
import types
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import step
import training
from gpu_step import write_model
from rollout_models import SHAPES, write_config
from training_hf import HF
from training_ours import Ours
from training_torch import Torch
from training_work import Job, draw_rows, measure, update_flops


def make_job(folder: Path, **changes) -> Job:
    settings = {
        "lengths": "tail:40",
        "prompt_tokens": 5,
        "samples": 2,
        "tokens": 300,
        "micro_tokens": 90,
        "checkpointing": True,
        "optimizer": True,
        "lora": 0,
        "entropy": True,
        "compile": False,
        "share_prompts": False,
        "backend": "aot_eager",
        "repeats": 1,
        "seed": 0,
        **changes,
    }
    write_config(folder, "tiny", "cpu")

    return Job(
        folder=str(folder), device="cpu", vocabulary=SHAPES["tiny"]["vocab_size"], **settings
    )


def results(job: Job, *sides) -> list[dict]:
    return [json.loads(json.dumps(measure(side(job), job, 0.0))) for side in sides]


@pytest.mark.parametrize(
    "settings", [{}, {"checkpointing": False, "lora": 4, "optimizer": False}], ids=["all", "lora"]
)
def test_all_sides_compute_the_same(tmp_path, settings):
    first, *others = results(make_job(tmp_path, **settings), Ours, HF, Torch)
    assert first["grad_norm"] > 0
    for other in others:
        for name in ("loss", "log_prob", "update_log_prob", "grad_norm"):
            assert other[name] == pytest.approx(first[name], rel=1e-4), name
        assert {name: other[name] for name in ("rows", "tokens")} == {
            name: first[name] for name in ("rows", "tokens")
        }
    assert set(first["seconds"]) == {
        "log_prob",
        "gradients",
        *(["optimizer"] if "lora" not in settings else []),
    }


def test_shared_prompts_change_only_the_work(tmp_path):
    settings = {"lengths": "fixed:40", "prompt_tokens": 30, "samples": 4, "tokens": 320}
    jobs = [make_job(tmp_path, share_prompts=share, **settings) for share in (False, True)]
    plain, shared = [results(job, Ours)[0] for job in jobs]
    assert shared["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)


def test_rows_are_whole_prompts_within_the_token_limit(tmp_path):
    job = make_job(tmp_path, samples=3, tokens=400)
    rows, again = (
        [(tuple(row.prompt.tolist()), tuple(row.response.tolist())) for row in draw_rows(job)]
        for _ in "ab"
    )
    assert rows == again
    assert len(rows) % 3 == 0
    assert len({prompt for prompt, _ in rows}) == len(rows) // 3
    assert 200 < sum(len(prompt) + len(response) for prompt, response in rows) <= 400
    assert all(len(prompt) == 5 and 1 <= len(response) <= 35 for prompt, response in rows)


def test_flops_of_a_pass(tmp_path):
    """Compare with a count by hand: the head at 35 of 40 tokens, 2 layers, 4 heads of 16."""
    job = make_job(tmp_path, lengths="fixed:40", samples=1, tokens=40)
    body = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128)
    matrices = 2 * body * 40 + 2 * 64 * 2048 * 35
    pairs = 2 * 4 * 64 * 40 * 41 / 2
    assert update_flops(job, draw_rows(job)) == (3 * (matrices + pairs), matrices + pairs)
    adapters = make_job(tmp_path, lengths="fixed:40", samples=1, tokens=40, lora=4)
    assert update_flops(adapters, draw_rows(adapters))[0] == 2 * matrices + 3 * pairs


def test_7b_shape_is_trained_without_optimizer_by_default():
    def optimizer(*words: str) -> bool:
        arguments = training.parse_arguments(["--models", "7b", *words])
        return training.make_job(arguments, "7b", "fixed:4096", "on", "ours").optimizer

    assert not optimizer()
    assert optimizer("--optimizer")
    assert optimizer("--lora", "32")
    assert not optimizer("--lora", "32", "--no-optimizer")


@pytest.mark.parametrize(
    ("parse", "words", "message"),
    [
        (training.parse_arguments, ["--engines", "ours,xyz"], "xyz"),
        (training.parse_arguments, ["--models", "3b"], "3b"),
        (training.parse_arguments, ["--lengths", "fixed:32768"], "row of 32768"),
        (training.parse_arguments, ["--prompt-tokens", "4096"], "1..4095"),
        (step.parse_arguments, ["--engines", "vllm"], "vllm"),
        (step.parse_arguments, ["--steps", "1"], "at least 2"),
        (step.parse_arguments, ["--micro-tokens", "100"], "row of 1280"),
    ],
)
def test_invalid_command_lines_are_rejected(capsys, parse, words, message):
    with pytest.raises(SystemExit):
        parse(words)
    assert message in capsys.readouterr().err


def test_fewer_prompts_are_scaled_and_reported(capsys):
    """Use assumed times of TRL for a quarter of the prompts."""
    arguments = step.parse_arguments(
        ["--engines", "ours,trl", "--trl-prompts", "16", "--trl-steps", "1"]
    )
    made = {"generate": 2.0, "update": 3.0, "step": 6.0}
    step.print_table(arguments, {"ours": {"steps": [made, made]}, "trl": {"steps": [made]}})
    said = capsys.readouterr().out
    assert "| step | 6.000 | 24.000 | 4.00 |" in said
    assert "| rest | 1.000 | 4.000 | 4.00 |" in said
    assert "trl ran 16 of 64 prompts; its times are x 4." in said
    assert "trl made one step" in said


class FakeLLM:
    """Records vLLM's documented calls, and answers with the requested number of tokens."""

    def __init__(self, model: str, **settings) -> None:
        assert settings["enable_sleep_mode"]
        self.module = AutoModelForCausalLM.from_pretrained(model)
        self.module.load_weights = self.load_weights
        self.calls: list[str] = []

    def load_weights(self, weights) -> set[str]:
        own = dict(self.module.named_parameters())
        for name, tensor in weights:
            own[name].data.copy_(tensor)
        return {name for name, _ in weights}

    def generate(self, prompts, params, use_tqdm):
        self.calls.append("generate")
        token = types.SimpleNamespace(logprob=-1.0)
        answers = [
            [token_id % 9 for token_id in range(row, row + each["max_tokens"])]
            for row, each in enumerate(params)
        ]

        return [
            types.SimpleNamespace(
                outputs=[
                    types.SimpleNamespace(
                        token_ids=ids, logprobs=[{token_id: token} for token_id in ids]
                    )
                ]
            )
            for ids in answers
        ]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags[0]}")

    def apply_model(self, function):
        return [function(self.module)]

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


@pytest.mark.slow
def test_assembled_step_transfers_its_weights(tmp_path, monkeypatch):
    fake = types.SimpleNamespace(LLM=FakeLLM, SamplingParams=dict, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ("rollout_vllm", "step_assembled"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import step_assembled

    write_model(tmp_path / "model", SHAPES["tiny"], torch.device("cpu"))
    arguments = step.parse_arguments(
        ["--tiny", "--lengths", "tail:12", "--old-log-probs", "--out", str(tmp_path)]
    )
    job = step.make_job(arguments, "trl")  # like the others, but not compiled
    made: list = []
    monkeypatch.setattr(step_assembled, "BUCKET_BYTES", 10_000)
    monkeypatch.setattr(step_assembled, "SleepingVLLM", keeping(step_assembled.SleepingVLLM, made))
    monkeypatch.setattr(step_assembled, "Torch", keeping(step_assembled.Torch, made))
    result = step_assembled.run(job)
    rollout, trainer = made
    turn = ["generate", "sleep 2", "wake weights", "wake kv_cache", "reset"]
    assert rollout.engine.calls == [
        "sleep 2",
        "wake weights",
        "wake kv_cache",
        "reset",
        *turn,
        *turn,
    ]
    for name, weight in rollout.engine.module.named_parameters():
        trained = dict(trainer.model.named_parameters())[name]
        assert torch.equal(weight, trained.detach().to(torch.bfloat16).to(weight.dtype)), name
    assert result["response_tokens"] == job.limits().sum()
    assert result["grad_norm"] > 0
    for seconds in result["steps"]:
        assert set(seconds) == {"generate", "weights", "rest", "old log-probs", "update", "step"}


def keeping(make, made: list):
    def kept(*arguments):
        made.append(make(*arguments))
        return made[-1]

    return kept
