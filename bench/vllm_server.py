"""GRPO steps with vLLM and with the embedded engine: hand-over of weights, and the whole step.

In one call on one CUDA device, with vLLM's own generation of as many tokens. The run starts the
server with the interpreter of this script, or with `--server-python`; it shares the device with the
trainer. The work is that of `gpu_step.py`. vLLM alone is `rollout.py --engines vllm`. The bound of
a step is vLLM's own generation and our update.

Run `python bench/vllm_server.py`, with `--models 1.5b,7b` for several shapes; on a CPU `python
bench/vllm_server.py --tiny --server-python VENV/bin/python` tries the script. With `--lora-rank 32
--engines vllm,vllm-merged,embedded` it trains LoRA, and compares servers that get the adapters
alone with servers that get merged weights. The engine vllm-in-process is vLLM within this process,
which sleeps while the trainer works: `--engines vllm-in-process,vllm,embedded` needs vLLM in the
environment of this script. The engine sglang is a server of SGLang, without vLLM's own generation
to compare: `--engines sglang,embedded --server-python VENV/bin/python`, and its flags in
`--server-flags '{"attention_backend": "triton"}'`.

With `--interleaved` vLLM's own generation is timed in each step, right after the run's, on the
engine of vllm-in-process: the same prompts without the trainer, with an empty prefix cache. A host
whose speed changes from minute to minute then counts for both. Its time is left out of the step's.

With `--hand-over-only` nothing is trained: no gradients and no moments take memory, so that a 7B
fits next to an engine: `--hand-over-only --models 7b --prompts 8 --new-tokens 16`. With
`--optimizer AdamW8bit` the moments of a 7B that is trained take a quarter of their memory.
"""

import argparse
import asyncio
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_step
import torch
from rollout_models import SHAPES
from runs import read_metrics

from verl.config.rollout import EngineKwargsConfig
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

HAND_OVER = ("update_weights_s", "update_weights_gb_per_s", "map_cache_s")
PHASES = ("gen", "old_log_prob", "update_actor", "sync_weights", "step")
# vLLM has no kernel for smaller heads on a CPU.
TINY: dict[str, Any] = {**SHAPES["tiny"], "num_attention_heads": 2, "num_key_value_heads": 2}


class Row(NamedTuple):
    """The results of one engine with one model."""

    model: str
    engine: str
    alone_s: float | None  # vLLM's own generation
    means: dict[str, Any]


class HandOvers(PPOTrainer):
    """Steps without an update, which hand over the weights as they are."""

    def init_workers(self) -> None:
        """Start the roles, the actor without its optimizer.

        The log-prob pass would leave room for the moments of a first step, which never comes.
        """
        super().init_workers()
        self.actor_wg.worker.engine.optimizer = None

    def update(self, batch: DataProto) -> None:
        """Train nothing."""


class VLLMAlone:
    """Draws as many tokens after each generation of the run, by vLLM's own calls, and times it."""

    def __init__(self, worker: Any, arguments: argparse.Namespace, prompts: Any) -> None:
        self.seconds: list[float] = []  # of each step
        self._arguments = arguments
        self._prompts = prompts
        self._server = worker.engine.fleet.members[0].server
        self._make_room = worker._make_room
        worker._make_room = self._draw_and_make_room

    def _draw_and_make_room(self) -> None:
        assert self._server.flush()
        started = time.perf_counter()
        self._server._run(self._draw(), 600)
        self.seconds.append(time.perf_counter() - started)
        print(f"vLLM alone: {self.seconds[-1]:.3f} s", flush=True)
        self._make_room()

    async def _draw(self) -> None:
        kinds = importlib.import_module("vllm.sampling_params")
        params = kinds.SamplingParams(
            max_tokens=self._arguments.new_tokens,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=kinds.RequestOutputKind.FINAL_ONLY,
        )

        async def draw(name: str, ids: list[int]) -> None:
            outputs = self._server._engine.generate({"prompt_token_ids": ids}, params, name)
            async for _ in outputs:
                pass

        draws = []
        for row in range(self._arguments.prompts):
            for sample in range(self._arguments.samples):
                name = f"alone-{len(self.seconds)}-{row}-{sample}"
                draws.append(draw(name, self._prompts.ids[row]))
        await asyncio.gather(*draws)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="1.5b", help="of 0.5b, 1.5b, 7b [1.5b]")
    parser.add_argument(
        "--engines",
        default="vllm,embedded",
        help="of vllm, vllm-merged, vllm-in-process, sglang, embedded [vllm,embedded]",
    )
    parser.add_argument("--lora-rank", type=int, default=0, help="0: train all weights [0]")
    parser.add_argument("--steps", type=int, default=4, help="at least 3; 1 is a warm-up [4]")
    parser.add_argument("--hand-over-only", action="store_true", help="train nothing")
    parser.add_argument(
        "--interleaved", action="store_true", help="time vLLM alone in each step, in process"
    )
    parser.add_argument("--no-alone", action="store_true", help="do not run vLLM alone")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument(
        "--server-memory", type=float, default=0.3, help="share of the device [0.3]"
    )
    parser.add_argument("--proof-every", type=int, default=1, help="so many hand-overs [1]")
    parser.add_argument("--optimizer", help="the actor's [AdamW]")
    parser.add_argument("--server-python", default=sys.executable)
    parser.add_argument("--server-flags", type=json.loads, default={}, help="a JSON object")
    parser.add_argument("--no-seeds", action="store_true", help="samples have no seeds")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    arguments = parser.parse_args()
    if arguments.steps < 3:
        parser.error(
            f"--steps must be at least 3 to have a third hand-over, got {arguments.steps}."
        )
    if arguments.interleaved:
        if not arguments.no_seeds or arguments.engines.split(",")[0] != "vllm-in-process":
            parser.error("--interleaved needs --no-seeds and --engines vllm-in-process first.")
        arguments.no_alone = True
    arguments.micro_tokens = None
    arguments.no_checkpointing = False
    if arguments.tiny:
        arguments.models = "tiny"
        arguments.prompts = 4
        arguments.samples = 2
        arguments.prompt_tokens = 16
        arguments.new_tokens = 12
    return arguments


def make_config(arguments: argparse.Namespace, folder: Path, engine: str) -> Any:
    """Configure a run with one engine, which writes to `folder / engine`."""
    config = gpu_step.make_config(arguments, folder, device_of(arguments))
    config.trainer.default_local_dir = str(folder / engine)
    config.actor_rollout_ref.model.lora_rank = arguments.lora_rank
    if arguments.optimizer is not None:
        config.actor_rollout_ref.actor.optim.optimizer = arguments.optimizer

    name, _, way = engine.partition("-")
    rollout = config.actor_rollout_ref.rollout
    rollout.name = name
    rollout.fingerprint_interval = arguments.proof_every
    rollout.seed_samples = not arguments.no_seeds
    rollout.in_process = way == "in-process"
    if name != "embedded":
        rollout.lora_weights = "merged" if way == "merged" else None
        rollout.engine_kwargs = EngineKwargsConfig(**{name: arguments.server_flags})
        rollout.server_python = None if rollout.in_process else arguments.server_python
        rollout.gpu_memory_utilization = arguments.server_memory
        rollout.enforce_eager = arguments.tiny
    return config


def train(arguments: argparse.Namespace, folder: Path, engine: str, shape: dict) -> dict[str, Any]:
    """Run the steps with one engine, and return the summary of them."""
    config = make_config(arguments, folder, engine)
    rollout = config.actor_rollout_ref.rollout
    prompts = gpu_step.RandomPrompts(
        arguments.prompts * 2, arguments.prompt_tokens, shape["vocab_size"]
    )
    trainer_class = HandOvers if arguments.hand_over_only else PPOTrainer
    trainer = trainer_class(
        config,
        reward_fn=gpu_step.even_share,
        val_reward_fn=gpu_step.even_share,
        train_dataset=prompts,
    )
    trainer.init_workers()
    alone = None
    if arguments.interleaved and rollout.in_process:
        alone = VLLMAlone(trainer.rollout_wg.worker, arguments, prompts)
    trainer.fit()

    if rollout.name != "embedded":
        fleet = trainer.rollout_wg.worker.engine.fleet
        owner = fleet.members[0].server if rollout.in_process else fleet._restarter
        owner.close()
    del trainer
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    steps = read_metrics(folder / engine)[1:]
    return summary(steps, None if alone is None else alone.seconds[1:])


def summary(steps: list[dict[str, Any]], alone: list[float] | None) -> dict[str, Any]:
    """Return means of the phases, medians of the hand-overs, and single values of the steps.

    Args:
        steps: metrics of the steps after the warm-up.
        alone: seconds of vLLM's own generation within each of them, which are taken off.
    """
    found: dict[str, Any] = {}
    if alone is not None:
        found["single alone"] = alone
        for step, seconds in zip(steps, alone, strict=True):
            step["timing_s/gen"] -= seconds
            step["timing_s/step"] -= seconds
        for phase in ("gen", "update_actor", "sync_weights", "step"):
            found[f"single {phase}"] = [step[f"timing_s/{phase}"] for step in steps]

    for phase in PHASES:
        found[phase] = statistics.mean(step.get(f"timing_s/{phase}", 0.0) for step in steps)
    for name in HAND_OVER:
        values = [step.get(f"perf/rollout_{name}", float("nan")) for step in steps]
        # The first hand-over is the warm-up's. The second proves the copies that later ones replay.
        found[name] = statistics.median(values[1:])
        found[f"single {name}"] = values
    found["mismatch"] = max(step["training/rollout_probs_diff_mean"] for step in steps)
    found["kl"] = max(abs(step["training/rollout_kl"]) for step in steps)
    return found


def vllm_alone(arguments: argparse.Namespace, model: str) -> float:
    """Return the seconds that vLLM takes for the same generation within its own process."""
    script = Path(__file__).with_name("rollout.py")
    command = [
        *(arguments.server_python, str(script), "--models", model, "--engines", "vllm"),
        *("--prompts", str(arguments.prompts), "--samples", str(arguments.samples)),
        *("--prompt-tokens", str(arguments.prompt_tokens)),
        *("--lengths", f"fixed:{arguments.new_tokens}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout[-3000:], done.stderr[-3000:], flush=True)
    done.check_returncode()
    [row] = [line for line in done.stdout.splitlines() if line.startswith("| vLLM")]
    return float(row.split("|")[3].strip().replace(",", ""))


def measure(arguments: argparse.Namespace, model: str) -> list[Row]:
    """Run all engines with one model."""
    shape = TINY if arguments.tiny else SHAPES[model]
    engines = arguments.engines.split(",")
    has_vllm = any(engine.startswith("vllm") for engine in engines)
    leaves_out = arguments.tiny or arguments.no_alone or arguments.hand_over_only

    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        gpu_step.write_model(folder / "model", shape, device_of(arguments))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

        alone = None
        if has_vllm and not leaves_out:
            alone = vllm_alone(arguments, model)
        for engine in engines:
            means = train(arguments, folder, engine, shape)
            if "single alone" in means:
                alone = statistics.mean(means["single alone"])
            print(json.dumps({"engine": engine, **means}), flush=True)
            rows.append(Row(model, engine, alone, means))
    return rows


def print_table(rows: Sequence[Row]) -> None:
    heads = ["model", "engine", *PHASES, "hand-over s", "GB/s", "mapping of the cache s"]
    heads += ["vLLM alone s", "step / (vLLM alone + our update)"]
    heads.append("mean difference of probabilities")
    print("\n| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")

    for row in rows:
        means = row.means
        cells = [row.model, row.engine, *(f"{means[phase]:.3f}" for phase in PHASES)]
        cells.append(f"{means['update_weights_s']:.3f}")
        cells.append(f"{means['update_weights_gb_per_s']:.2f}")
        cells.append(f"{means['map_cache_s']:.3f}")
        if row.alone_s is None:
            cells += ["", ""]
        else:
            bound_s = row.alone_s + means["update_actor"] + means["old_log_prob"]
            cells += [f"{row.alone_s:.3f}", f"{means['step'] / bound_s:.3f}"]
        cells.append(f"{means['mismatch']:.1e}")
        print("| " + " | ".join(cells) + " |")


def device_of(arguments: argparse.Namespace) -> torch.device:
    return torch.device("cpu" if arguments.tiny else "cuda")


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for model in arguments.models.split(","):
        rows += measure(arguments, model)
    print_table(rows)


if __name__ == "__main__":
    main()
