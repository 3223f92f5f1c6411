"""One GRPO step of a small model on CPU: ours, TRL's, and the floor of this machine, in one call.

Both sides run in a process of their own, one after the other, on the same model, prompts and
reward: 16 prompts x 8 samples x 64 forced tokens, one optimizer step, no KL. Every figure is a
median over the steps after the warm-up. The whole batch is one update, so neither side needs a pass
of its own for old log-probs.

Run `python bench/grpo_cpu.py` on a machine that does nothing else: with 2 threads on 2 cores,
any other work makes both sides several times slower. TRL is no dependency of ours; where it is not
installed, ours runs alone.
"""

import argparse
import importlib.util
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from digit_task import WARMUP_STEPS, add_task_arguments
from floor import Work, cached_bytes, measure_machine, read_shape, rollout_floor, update_floor
from make_tiny_model import make
from processes import require_python

HERE = Path(__file__).parent
# A row of the table: its name, and which phases of ours and of TRL's make it up.
ROWS = (
    ("generation", ("gen",), ("gen",)),
    ("log-probs", ("old_log_prob",), ("log_probs",)),
    ("update", ("update_actor",), ("loss_forward", "backward", "optimizer")),
    ("reward", ("reward",), ("reward",)),
    ("rest", ("adv", "sync_weights", "rest"), ("rest",)),
    ("step", ("step",), ("step",)),
)


def run_side(
    script: str, arguments: argparse.Namespace, model: Path, folder: Path
) -> dict[str, Any]:
    """Run one side in a process of its own and return its result."""
    answer = folder / f"{script}.json"
    command = [str(HERE / script), "--model", str(model), "--json", str(answer)]
    for name in ("steps", "prompts", "samples", "new", "lr", "threads"):
        command += [f"--{name}", str(getattr(arguments, name))]
    require_python(command, num_threads=arguments.threads)
    return json.loads(answer.read_text(encoding="utf-8"))


def print_table(
    ours: dict[str, Any], peer: dict[str, Any] | None, floors: dict[str, float]
) -> None:
    columns = ["seconds a step", "ours", "floor"] + (["TRL", "TRL / ours"] if peer else [])
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for name, mine, theirs in ROWS:
        own = sum(ours[phase] for phase in mine)
        cells = [name, f"{own:.3f}", f"{floors[name]:.3f}" if name in floors else ""]
        if peer:
            other = sum(peer[phase] for phase in theirs)
            cells += [f"{other:.3f}", f"{other / own:.2f}" if name in floors else ""]
        print("| " + " | ".join(cells) + " |")


def print_details(name: str, side: dict[str, Any], tokens: int) -> None:
    print(
        f"{name}: {tokens / side['gen']:,.0f} tok/s generating, {tokens / side['step']:,.0f} tok/s "
        f"over the step; {side['response_tokens']:.0f} tokens a response; reward "
        f"{side['reward_first']:.3f} -> {side['reward_last']:.3f}; {side['versions']}"
    )


def print_sides(ours: dict[str, Any], peer: dict[str, Any] | None, tokens: int) -> None:
    """Print speed, rewards and versions of both sides. `tokens` are those of a step's responses."""
    print_details("ours", ours, tokens)
    if peer:
        print_details("TRL", peer, tokens)
        print(
            f"TRL's update: {peer['loss_forward']:.3f} s forward, {peer['backward']:.3f} s "
            f"backward, {peer['optimizer']:.3f} s optimizer"
        )
    else:
        print("TRL is not installed, so ours ran alone. To compare: pip install trl")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_task_arguments(parser, needs_model=False)
    arguments = parser.parse_args()

    if arguments.steps <= WARMUP_STEPS:
        parser.error(
            f"--steps must be above {WARMUP_STEPS}, the steps that are not counted, got "
            f"{arguments.steps}."
        )

    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or folder / "model"
        if not (model / "config.json").is_file():
            make(model)
        ours = run_side("verl_side.py", arguments, model, folder)
        peer = None
        if importlib.util.find_spec("trl") is not None:
            peer = run_side("trl_peer.py", arguments, model, folder)
        shape = read_shape(model)

    work = Work(
        prompts=arguments.prompts,
        prompt=ours["prompt_tokens"],
        samples=arguments.samples,
        new=arguments.new,
    )
    machine = measure_machine(cached_bytes(shape, work))
    floors = {
        "generation": rollout_floor(machine, shape, work),
        "update": update_floor(machine, shape, work),
    }
    floors["step"] = sum(floors.values())

    print(
        f"{work.prompts} prompts x {work.samples} samples x {work.new} tokens, {arguments.threads} "
        f"threads, median of steps {WARMUP_STEPS + 1}..{arguments.steps}"
    )
    print_table(ours, peer, floors)
    print_sides(ours, peer, work.rows * work.new)
    print(
        f"floor: {machine.gflops:.0f} GFLOP/s fp32 (matrix product of 1,024), "
        f"{machine.gb_per_s:.1f} GB/s (copy of the key-value cache's size)"
    )
    if arguments.json:
        result = {"ours": ours, "trl": peer, "floor": floors, **asdict(machine)}
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
