"""GRPO steps of a random model of Qwen2.5-1.5B's shape on one CUDA device, by the real trainer.

64 prompts of 256 random tokens, 8 responses of 512 forced tokens each, one optimizer step: fp32
parameters and moments, bf16 compute, the embedded engine in bf16. Nothing is downloaded: the model
is made on the device and written to a temporary folder (3 GB). The first step is a warm-up; the
table at the end shows the others.

Run `python bench/gpu_step.py`, or `python bench/gpu_step.py --tiny` to try the script on CPU in
seconds.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# the package next to this folder, installed or not
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from make_tiny_model import make_tokenizer
from rollout_models import SHAPES
from runs import read_metrics
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config.load import config_from_dict
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "sync_weights")


class RandomPrompts:
    """A dataset of prompts of random tokens."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.ids = torch.randint(
            vocabulary, (count, length), generator=torch.Generator().manual_seed(0)
        ).tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, item: int) -> dict[str, Any]:
        return {
            "raw_prompt_ids": self.ids[item],
            "raw_prompt": [{"role": "user", "content": ""}],
            "data_source": "random",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {},
            "index": item,
        }


def even_share(batch: DataProto, return_dict: bool = False) -> Any:
    """Reward the share of even token ids of a response, on its last token."""
    mask = batch.batch["response_mask"]
    share = ((batch.batch["responses"] % 2 == 0) * mask).sum(-1) / mask.sum(-1)
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    scores[torch.arange(len(mask)), mask.sum(-1) - 1] = share
    return {"reward_tensor": scores, "reward_extra_info": {}} if return_dict else scores


def write_model(
    folder: Path, shape: dict[str, Any], device: torch.device, *, gain: float = 1.0
) -> int:
    """Write a random model in bf16, and a small tokenizer, whose ids all fit.

    Logits are `gain` times as large as those of transformers' initialization.

    Returns:
        The number of parameters.
    """
    tokenizer: Any = make_tokenizer(seed=0)
    config = Qwen2Config(
        **shape,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_position_embeddings=4096,
        bos_token_id=None,
    )

    torch.manual_seed(0)
    with device:
        model: Any = Qwen2ForCausalLM(config)
    model.model.norm.weight.data.mul_(gain)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    return sum(parameter.numel() for parameter in model.parameters())


def make_config(arguments: argparse.Namespace, folder: Path, device: torch.device) -> Any:
    actor: dict[str, Any] = {"optim": {"lr": 1e-6}}
    if arguments.micro_tokens is not None:
        actor["ppo_max_token_len_per_gpu"] = arguments.micro_tokens
    return config_from_dict(
        {
            "data": {
                "train_files": "random tokens",  # not opened: the trainer is given a dataset
                "train_batch_size": arguments.prompts,
                "max_prompt_length": arguments.prompt_tokens,
                "max_response_length": arguments.new_tokens,
            },
            "actor_rollout_ref": {
                "model": {
                    "path": str(folder / "model"),
                    "enable_gradient_checkpointing": not arguments.no_checkpointing,
                },
                "rollout": {"n": arguments.samples, "ignore_eos": True},
                "actor": actor,
            },
            "algorithm": {"adv_estimator": "grpo"},
            "trainer": {
                "device": device.type,
                "total_training_steps": arguments.steps,
                "logger": ["console", "file"],
                "default_local_dir": str(folder / "run"),
                "resume_mode": "disable",
            },
        }
    )


def print_table(
    steps: list[dict[str, float]], arguments: argparse.Namespace, name: str, parameters: int
) -> None:
    """Print means over the steps after the first."""
    counted = steps[1:]

    def mean(key: str) -> float:
        return sum(step.get(key, 0.0) for step in counted) / len(counted)

    def peak(key: str) -> float:
        return max(step[key] for step in steps)

    rows = arguments.prompts * arguments.samples
    generated = rows * arguments.new_tokens
    trained = rows * (arguments.prompt_tokens + arguments.new_tokens)
    total = mean("timing_s/step")
    print(
        f"\n{name}: {parameters / 1e6:,.1f} M parameters, {arguments.prompts} prompts x "
        f"{arguments.samples} samples, {arguments.prompt_tokens} + {arguments.new_tokens} tokens, "
        f"torch {torch.__version__}, mean of {len(counted)} step(s) after a warm-up of "
        f"{steps[0]['timing_s/step']:.1f} s"
    )
    print("| phase | seconds | share | tokens/s |\n|---|---|---|---|")
    tokens = {"gen": generated, "old_log_prob": trained, "update_actor": trained}
    for phase in PHASES:
        seconds = mean(f"timing_s/{phase}")
        if seconds > 0:
            speed = f"{tokens[phase] / seconds:,.0f}" if phase in tokens else ""
            print(f"| {phase} | {seconds:.3f} | {seconds / total:.1%} | {speed} |")
    print(f"| step | {total:.3f} | 100% | {trained / total:,.0f} |")
    flops = 6 * parameters * trained / mean("timing_s/update_actor") / 1e12
    print(f"update: {flops:.1f} TFLOP/s (6 x parameters x tokens)")
    print(
        f"peak memory: {peak('perf/max_memory_allocated_gb'):.1f} GiB allocated, "
        f"{peak('perf/max_memory_reserved_gb'):.1f} GiB reserved; the engine's own, while it "
        f"generates: {peak('rollout/memory_gib'):.1f} GiB; rollout and trainer probabilities "
        f"differ by at most {max(step['training/rollout_probs_diff_max'] for step in steps):.2e}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, on CPU")
    parser.add_argument("--steps", type=int, default=3, help="the first is a warm-up")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)

    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument(
        "--micro-tokens", type=int, help="tokens of a forward-backward pass; default: the config's"
    )
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--folder", type=Path, help="where the temporary folder goes")
    arguments = parser.parse_args()

    if arguments.tiny:
        arguments.prompts = 4
        arguments.samples = 2
        arguments.prompt_tokens = 16
        arguments.new_tokens = 12

    if arguments.steps < 2:
        parser.error(
            f"--steps must be at least 2, as the first is a warm-up, got {arguments.steps}."
        )

    return arguments


def main() -> None:
    arguments = parse_arguments()
    started = time.perf_counter()
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit(
            "gpu_step.py needs a CUDA device, and PyTorch sees none. Try the script itself with "
            "--tiny."
        )

    device = torch.device("cpu" if arguments.tiny else "cuda")
    name = "tiny" if arguments.tiny else "1.5b"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        parameters = write_model(folder / "model", SHAPES[name], device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"model written after {time.perf_counter() - started:.1f} s", flush=True)
        prompts = RandomPrompts(
            arguments.prompts * 2, arguments.prompt_tokens, SHAPES[name]["vocab_size"]
        )
        trainer = PPOTrainer(
            make_config(arguments, folder, device),
            reward_fn=even_share,
            val_reward_fn=even_share,
            train_dataset=prompts,
        )
        trainer.init_workers()
        print(f"trainer ready after {time.perf_counter() - started:.1f} s", flush=True)
        trainer.fit()
        steps = read_metrics(folder / "run")

    print_table(steps, arguments, name, parameters)
    print(f"total: {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
