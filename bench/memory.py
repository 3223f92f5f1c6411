"""Predicted against measured memory of every phase of a step, on one CUDA device.

Each case is a process: the plan of `verl plan` for its configuration, then the real training engine
and the real rollout engine, with weights of zeros (memory does not depend on them) and rows of full
length. A phase's peak counts torch's allocator and the rollout's own memory outside of it; rows are
printed as they come.

Run `python bench/memory.py`, or some cases with `--cases 1.5b,7b-full`; `--tiny` tries the script
on CPU, where nothing is measured. Logs and results lie in the folder `--out`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from processes import run_python
from rollout_models import versions, write_config
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForCausalLM

from verl.config.load import config_from_dict
from verl.diagnostics.memory_plan import MemoryPlan, plan_memory
from verl.engine.base import TrainEngine
from verl.engine.microbatch import TokenBudget
from verl.engine.options import EngineOptions
from verl.engine.totals import LossOutput
from verl.models.attention import IMPLEMENTATION, prepare
from verl.models.packed import PackedCausalLM
from verl.protocol import DataProto
from verl.rollout import Request, SamplingParams, create_rollout_engine
from verl.rollout.base import Completions
from verl.utils.peaks import phase_peaks
from verl.utils.units import GIB
from verl.workers.trained import add_adapters, parameter_dtype

ROLE = "actor_rollout_ref"
PHASES = ("load", "weights to the rollout", "rollout", "old log-probs", "actor update")
HEADER = (
    "| case | phase | tokens a pass | predicted GiB | measured GiB | error | outside of it GiB | "
    "mostly |"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. `prompts` are of half the row's length, `rows` in passes of `tokens`."""

    shape: str
    tokens: int
    rows: int
    length: int = 4096
    changes: dict[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    phases: Sequence[str] = PHASES


KEPT = {f"{ROLE}.model.enable_gradient_checkpointing": False}
EAGER = {f"{ROLE}.actor.use_torch_compile": False}
LOG_PROBS = ("load", "old log-probs")
CASES = {
    "0.5b": Case(shape="0.5b", tokens=32_768, rows=16),
    "1.5b": Case(shape="1.5b", tokens=32_768, rows=16),
    "1.5b-kept": Case(shape="1.5b", tokens=16_384, rows=8, changes=KEPT),
    "1.5b-kept-eager": Case(shape="1.5b", tokens=16_384, rows=8, changes={**KEPT, **EAGER}),
    "1.5b-eager": Case(shape="1.5b", tokens=32_768, rows=16, changes=EAGER),
    # The reference is the actor without its adapters.
    "7b-lora": Case(shape="7b", tokens=16_384, rows=8, changes={f"{ROLE}.model.lora_rank": 32}),
    # 16 bytes a parameter of 139 GiB; the engine sleeps, there is no reference.
    "7b-full": Case(shape="7b", tokens=8192, rows=4),
    "vocabulary-32k": Case(
        shape="1.5b", tokens=32_768, rows=8, vocabulary=32_768, phases=LOG_PROBS
    ),
    "vocabulary-256k": Case(
        shape="1.5b", tokens=32_768, rows=8, vocabulary=262_144, phases=LOG_PROBS
    ),
}
TINY = {
    "tiny": Case(shape="tiny", tokens=128, rows=4, length=64),
    "tiny-lora": Case(
        shape="tiny", tokens=128, rows=4, length=64, changes={f"{ROLE}.model.lora_rank": 4}
    ),
    "tiny-vocabulary": Case(
        shape="tiny", tokens=128, rows=4, length=64, vocabulary=4096, phases=LOG_PROBS
    ),
}


def make_config(case: Case, folder: Path, device: str) -> Any:
    """Configure GRPO with two passes over one mini-batch, so that old log-probs are computed."""
    values = {
        "data.train_files": "none",
        "data.train_batch_size": case.rows // 2,
        "data.max_prompt_length": case.length // 2,
        "data.max_response_length": case.length // 2,
        "algorithm.adv_estimator": "grpo",
        f"{ROLE}.model.path": str(folder),
        f"{ROLE}.rollout.n": 2,
        f"{ROLE}.rollout.max_num_seqs": 64,
        f"{ROLE}.actor.ppo_epochs": 2,
        f"{ROLE}.actor.ppo_max_token_len_per_gpu": case.tokens,
        "trainer.device": device,
        **case.changes,
    }

    return config_from_dict(values)


def zero_model(folder: Path, dtype: torch.dtype | str) -> Any:
    """Make a model of zeros on the host.

    Pages of zeros are mapped when they are first written to, so 7B parameters take no time.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION
        )

    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(
                    torch.zeros(parameter.shape, dtype=parameter.dtype)
                )

    model.tie_weights()
    rotary = model.base_model.rotary_emb
    # its buffers are computed, not loaded
    model.base_model.rotary_emb = type(rotary)(config=config)
    prepare(model)

    return model


def make_batch(case: Case) -> DataProto:
    half = case.length // 2
    shape = (case.rows, half)
    mask = torch.ones(shape, dtype=torch.int64)
    columns = {
        "input_ids": torch.randint(
            100, (case.rows, case.length), generator=torch.Generator().manual_seed(0)
        ),
        "attention_mask": torch.ones(case.rows, case.length, dtype=torch.int64),
        "response_mask": mask,
        "advantages": torch.randn(shape, generator=torch.Generator().manual_seed(1)),
        "old_log_probs": torch.zeros(shape),
        "weights": mask / mask.sum(),
    }

    uids = np.array([str(row // 2) for row in range(case.rows)], dtype=object)
    return DataProto(
        batch=TensorDict(columns, batch_size=[case.rows]), non_tensor_batch={"uid": uids}
    )


def loss(
    outputs: dict[str, torch.Tensor], columns: dict[str, torch.Tensor], sequence: torch.Tensor
) -> LossOutput:
    ratio = (outputs["log_probs"] - columns["old_log_probs"]).exp()
    entropy = outputs["entropy"].detach()
    return LossOutput(
        loss=-(ratio * columns["advantages"] * columns["weights"]).sum(),
        means={"entropy": entropy},
        sums={},
    )


class Run:
    """The phases of one case, as the actor makes them."""

    def __init__(self, case: Case, config: Any, folder: Path, device: torch.device) -> None:
        self.case = case
        self.config = config
        self.device = device
        roles = config.actor_rollout_ref
        model = zero_model(folder, parameter_dtype(roles.model, device))
        self.rollout: Any = None

        options = EngineOptions.of(roles.actor, device, policy=roles)
        with phase_peaks.phase("load", device):
            add_adapters(model, roles.model, f"{ROLE}.model")
            self.engine = TrainEngine(
                PackedCausalLM(model), replace(options, share_prompts=False), total_steps=10
            )
            self.rollout = create_rollout_engine(
                roles.rollout, model=model, tokenizer=None, device=device
            )

        self.batch = make_batch(case)
        self.budget = TokenBudget(max_tokens=case.tokens)

    @property
    def rollout_bytes(self) -> int:
        """Return the size of the rollout engine's own memory, outside torch's allocator."""
        if self.device.type != "cuda" or self.rollout._asleep:
            return 0
        return (
            self.rollout.twin.copied_bytes
            + self.rollout.runner.num_pages * self.rollout.runner.page_bytes
        )

    def sync(self) -> None:
        if self.rollout._asleep:
            self.rollout.wake()
        self.rollout.update_weights(self.engine.parameters_for_rollout())

    def generate(self) -> None:
        half = self.case.length // 2
        prompts = self.batch.batch["input_ids"][::2, :half].tolist()
        requests = [
            Request(prompt_ids=tuple(ids), sample_ids=(2 * n, 2 * n + 1))
            for n, ids in enumerate(prompts)
        ]
        # Pages for responses of full length come with the call; a few tokens then show the memory
        # of a step.
        self.draw(requests, half).close()
        list(self.draw(requests, 4))

    def draw(self, requests: list[Request], tokens: int) -> Completions:
        params = SamplingParams(max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
        return self.rollout.generate(requests, params, seed=0, step=1)

    def log_probs(self) -> None:
        self.engine.infer(self.batch, self.budget, temperature=1.0, entropy=True)

    def update(self) -> None:
        with self.engine.on_device(optimizer=True):
            self.engine.forward_backward(
                self.batch,
                self.budget,
                loss,
                ("advantages", "old_log_probs"),
                temperature=1.0,
                entropy=True,
            )
            if self.engine.step().skipped:
                raise RuntimeError("the gradient is not finite")

    def measure(self) -> dict[str, dict[str, int]]:
        """Return bytes by phase, as in a later step: with moments, and with compiled layers."""
        found = {"load": self._taken("load")}
        todo = {
            "weights to the rollout": self.sync,
            "rollout": self.generate,
            "old log-probs": self.log_probs,
            "actor update": self.update,
        }
        self._sleep()

        self.update()
        for phase in PHASES[1:]:
            if phase not in self.case.phases:
                continue
            if phase in ("old log-probs", "actor update"):
                self._sleep()
            with phase_peaks.phase(phase, self.device):
                todo[phase]()
            found[phase] = self._taken(phase)

        return found

    def _sleep(self) -> None:
        if not self.rollout._asleep:
            self.rollout.sleep()

    def _taken(self, phase: str) -> dict[str, int]:
        peak = phase_peaks.phases[phase]
        own = self.rollout_bytes
        return {"taken": peak.allocated + own, "outside": peak.outside - own}


def run_case(case: Case, folder: Path, device: torch.device) -> list[dict[str, Any]]:
    write_config(folder, case.shape, device.type)
    if case.vocabulary is not None:
        changed = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        changed.update(vocab_size=case.vocabulary, eos_token_id=case.vocabulary - 1)
        (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    config = make_config(case, folder, device.type)
    plan = plan_memory(config)
    measured = Run(case, config, folder, device).measure()
    return [describe(plan, phase, measured[phase]) for phase in PHASES if phase in case.phases]


def describe(plan: MemoryPlan, name: str, measured: dict[str, int]) -> dict[str, Any]:
    phase = next(each for each in plan.phases if each.phase == name)
    return {
        "phase": name,
        "tokens": None if phase.passes is None else phase.passes.tokens,
        "predicted": phase.device_bytes,
        "parts": phase.device,
        **measured,
    }


def row(name: str, result: dict[str, Any]) -> str:
    largest = sorted(result["parts"].items(), key=lambda part: -part[1])[:4]
    taken = result["taken"]
    cells = [
        name,
        result["phase"],
        "" if result["tokens"] is None else str(result["tokens"]),
        f"{result['predicted'] / GIB:.2f}",
        f"{taken / GIB:.2f}" if taken else "not measured",
        f"{result['predicted'] / taken - 1:+.1%}" if taken else "",
        f"{result['outside'] / GIB:.2f}" if taken else "",
        ", ".join(f"{part} {count / GIB:.2f}" for part, count in largest),
    ]
    return "| " + " | ".join(cells) + " |"


def parse_arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help=f"of {', '.join(CASES)}; several with commas [all]")
    parser.add_argument("--limit-s", type=float, default=180.0, help="time limit of a case [180]")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on CPU")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/memory"), help="folder for logs and JSON"
    )

    parser.add_argument("--case", help="run this one in this process, and write its JSON")
    arguments = parser.parse_args(words)
    known = TINY if arguments.tiny else CASES
    arguments.cases = list(known) if arguments.cases is None else arguments.cases.split(",")

    for name in [*arguments.cases, *([arguments.case] if arguments.case else [])]:
        if name not in known:
            parser.error(f"--cases must be of {', '.join(known)}, got '{name}'.")

    return arguments


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    out: Path = arguments.out.resolve()
    device = torch.device("cpu" if arguments.tiny else "cuda")

    if device.type == "cuda" and not torch.cuda.is_available():
        print(
            "memory.py needs a CUDA device, and PyTorch sees none. Try the script itself with "
            "--tiny."
        )
        return 1

    known = TINY if arguments.tiny else CASES
    if arguments.case:
        results = run_case(known[arguments.case], out / arguments.case, device)
        (out / f"{arguments.case}.json").write_text(json.dumps(results), encoding="utf-8")
        return 0

    print(f"{versions(device.type)}\n{HEADER}\n|{'---|' * HEADER.count(' |')}", flush=True)
    failed = []
    for name in arguments.cases:
        start = time.perf_counter()
        file = out / f"{name}.json"
        file.unlink(missing_ok=True)
        command = [
            __file__,
            "--case",
            name,
            "--out",
            str(out),
            *(["--tiny"] if arguments.tiny else []),
        ]
        # As the trainer is best run: rows of other lengths leave holes in torch's allocator
        # otherwise.
        environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        problem = run_python(
            command, out / f"{name}.log", limit_s=arguments.limit_s, environment=environment
        )
        if problem is not None:
            failed.append(name)
            print(f"| {name} | FAILED: {problem} |", flush=True)
            continue
        for result in json.loads(file.read_text(encoding="utf-8")):
            print(row(name, result), flush=True)
        print(f"| {name} | {time.perf_counter() - start:.0f} s in all |", flush=True)

    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
