"""How far the log-probs of a rollout are from the trainer's, for the embedded engine and for vLLM.

Both engines answer the same prompts by the same weights at temperature 1 and return the log-probs
of the tokens they draw; the actor's own pass, in the dtype of training, computes those of each
engine's tokens. With d = trainer - rollout the table has, over all response tokens, the mean of |d|
and its standard error over responses, the 99th percentile and the largest |d|, the mean importance
ratio exp(d), which is 1 without a mismatch, the estimate mean(exp(d) - 1 - d) of KL(rollout ||
trainer), and the mean log-prob, a measure of how peaked the model is.

`--model` is a folder with a pretrained model, which is prompted with text of its own, or a shape of
`rollout_models.py`, whose random weights are prompted with random tokens and, as they are nearly
uniform over the vocabulary, have their logits multiplied by `--gain`.

Run `python bench/agreement.py --device cuda`, or `python bench/agreement.py --device cpu --model
FOLDER --vllm-python VENV/bin/python` where vLLM is in an environment of its own. On a CPU it needs
heads of 32 at least: `widen_heads.py`.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_step import write_model
from processes import run_python
from rollout_models import SHAPES, versions
from rollout_work import Job, Workload, draw_prompts
from torch import Tensor

from verl.config.load import config_from_dict
from verl.models.load import load_tokenizer
from verl.protocol import DataProto
from verl.rollout import Completion, Request, SamplingParams, assemble, trajectories_of
from verl.workers import ActorWorker, RolloutWorker

VLLM_MEMORY = 0.5  # of a GPU, which the trainer shares; a CPU has VLLM_CPU_KVCACHE_SPACE
VLLM_ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
Prompts = list[tuple[int, ...]]


def make_worker(asked: argparse.Namespace, model: Path) -> RolloutWorker:
    actor_rollout_ref = {
        "model": {"path": str(model)},
        "rollout": {"n": asked.samples, "dtype": asked.dtype},
        "actor": {"fsdp_config": {"compute_dtype": asked.dtype}},
    }
    lengths = {"max_prompt_length": asked.prompt_tokens, "max_response_length": asked.new_tokens}
    # no file is opened
    data = {"train_files": "none", "train_batch_size": asked.prompts, **lengths}
    trainer = {"device": asked.device}

    config = config_from_dict(
        {"data": data, "actor_rollout_ref": actor_rollout_ref, "trainer": trainer}
    )
    device = torch.device(asked.device)
    tokenizer = load_tokenizer(model)
    actor = ActorWorker(config.actor_rollout_ref, total_steps=1, device=device, tokenizer=tokenizer)
    rollout = RolloutWorker(
        config.actor_rollout_ref, device=device, tokenizer=tokenizer, actor=actor
    )

    rollout.take_weights()
    return rollout


def roll_out(
    worker: RolloutWorker, prompts: Prompts, *, samples: int, tokens: int, step: int
) -> list[Completion]:
    ids = [tuple(range(row * samples, (row + 1) * samples)) for row in range(len(prompts))]
    requests = [Request(prompt_ids=prompt, sample_ids=own) for prompt, own in zip(prompts, ids)]
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return list(worker.engine.generate(requests, params, seed=0, step=step))


def make_prompts(worker: RolloutWorker, asked: argparse.Namespace) -> Prompts:
    if asked.model in SHAPES:
        return draw_prompts(
            asked.prompts, asked.prompt_tokens, SHAPES[asked.model]["vocab_size"], seed=0, draw=0
        )
    begin = worker.tokenizer.bos_token_id
    if begin is None:
        raise SystemExit(
            f"agreement.py: a text must begin with some token, but the tokenizer of {asked.model} "
            "has no BOS."
        )
    text = roll_out(
        worker, [(begin,)], samples=asked.prompts, tokens=asked.prompt_tokens - 1, step=0
    )
    return [(begin, *each.token_ids) for each in text]


def roll_out_vllm(asked: argparse.Namespace, model: Path, prompts: Prompts) -> list[Completion]:
    """Let vLLM draw in a process of its own, as `rollout.py` runs it."""
    lengths = {"prompt_tokens": asked.prompt_tokens, "lengths": f"fixed:{asked.new_tokens}"}
    job = Job(
        folder=str(model),
        device=asked.device,
        dtype=asked.dtype,
        load_format="auto",
        max_num_seqs=1024,
        gpu_memory_utilization=VLLM_MEMORY,
        deterministic=False,
        repeats=1,
        seed=0,
        vocabulary=0,  # no prompt is drawn there
        workloads=(Workload(prompts=len(prompts), samples=asked.samples, **lengths),),
    )

    job.write(asked.out / "job.json")
    (asked.out / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    script = Path(__file__).with_name("agreement_vllm.py")
    log = asked.out / "vllm.log"
    environment = VLLM_ON_CPU if asked.device == "cpu" else {}

    problem = run_python(
        [str(script), str(asked.out)], log, environment=environment, python=asked.vllm_python
    )
    if problem:
        raise SystemExit(
            f"agreement.py: vLLM failed: {problem}. --vllm-python names an interpreter that has it."
        )

    answer = json.loads((asked.out / "vllm.json").read_text(encoding="utf-8"))
    print(answer["versions"])
    samples = enumerate(answer["samples"])
    return [
        Completion(sample_id=number, finish_reason="length", **sample) for number, sample in samples
    ]


def both_log_probs(
    worker: RolloutWorker, prompts: Prompts, completions: list[Completion]
) -> tuple[Tensor, Tensor]:
    """Return the log-probs (B, R) of trainer and rollout.

    All responses have R tokens, so nothing is masked.
    """
    rollout = worker.config.rollout
    samples = len(completions) // len(prompts)
    rows = [prompt for prompt in prompts for _ in range(samples)]
    sizes = {"prompt_length": rollout.prompt_length, "response_length": rollout.response_length}
    trajectories = trajectories_of(rows, completions)
    columns = assemble(trajectories, **sizes, pad_token_id=worker.tokenizer.pad_token_id)
    answer = worker.actor.compute_log_prob(DataProto.from_dict(tensors=columns))
    return answer.batch["old_log_probs"].cpu(), columns["rollout_log_probs"]


def describe(trainer: Tensor, rollout: Tensor) -> str:
    """Return one engine's cells of the table."""
    d = trainer.double() - rollout.double()
    of_rows = d.abs().mean(1)
    error = of_rows.std() / len(of_rows) ** 0.5
    kl = (d.expm1() - d).mean()
    return (
        f"{of_rows.mean():.2e} ± {error:.0e} | {d.abs().quantile(0.99):.2e} | {d.abs().max():.2e} "
        f"| {d.exp().mean():.6f} | {kl:.2e} | {rollout.mean():.3f}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument(
        "--model", help=f"a folder, or of {', '.join(SHAPES)} [cpu: tiny; cuda: 1.5b]"
    )
    parser.add_argument(
        "--gain", type=float, default=8.0, help="factor of a random model's logits [8]"
    )

    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="[bfloat16]"
    )
    parser.add_argument("--engines", default="ours,vllm", help="[ours,vllm]")
    sizes = {"prompts": 32, "samples": 8, "prompt-tokens": 64, "new-tokens": 256}
    for name, count in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"[{count}]")
    parser.add_argument(
        "--vllm-python", default=sys.executable, help="interpreter of an environment with vLLM"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/agreement"),
        help="folder for vLLM's log and tokens",
    )

    asked = parser.parse_args()
    asked.model = asked.model or {"cpu": "tiny", "cuda": "1.5b"}[asked.device]
    asked.out = asked.out.resolve()
    return asked


def main() -> None:
    asked = parse_arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary if asked.model in SHAPES else asked.model)
        if asked.model in SHAPES:
            write_model(model, SHAPES[asked.model], torch.device(asked.device), gain=asked.gain)
        measure(asked, model)


def measure(asked: argparse.Namespace, model: Path) -> None:
    """Let the engines draw, and print the table."""
    worker = make_worker(asked, model)
    prompts = make_prompts(worker, asked)
    rollouts = {}
    if "ours" in asked.engines:
        rollouts["ours"] = roll_out(
            worker, prompts, samples=asked.samples, tokens=asked.new_tokens, step=1
        )
    worker.engine.sleep()  # vLLM needs the memory
    if "vllm" in asked.engines:
        rollouts["vLLM"] = roll_out_vllm(asked, model, prompts)

    print(versions(asked.device))
    print(
        f"{asked.model}, {asked.dtype}, {asked.prompts} prompts x {asked.samples}, "
        f"{asked.prompt_tokens} + {asked.new_tokens} tokens"
    )
    print("| engine | mean | p99 | max | ratio | KL | log-prob |\n|---|---|---|---|---|---|---|")
    for engine, completions in rollouts.items():
        trainer, rollout = both_log_probs(worker, prompts, completions)
        print(f"| {engine} | {describe(trainer, rollout)} |", flush=True)


if __name__ == "__main__":
    main()
