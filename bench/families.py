"""A table of model families: the speed of rollout, update and log-probs on one CUDA device.

Each family runs `rollout.py` (64 prompts x 16, 256 in, a tail to 1,024) and `training.py` (groups
of 8, 512 + 1,024 tokens, compiled layers, no checkpointing) on random weights of its published
shape, with fewer layers where one device cannot hold all of them. Where vLLM is installed it runs
on the same prompts. A rollout counts against its additive roofline (`roofline.py`), update and
log-prob pass against the device's dense bf16 peak (MFU of active parameters).

Run `python bench/families.py`, or for example with `--families qwen3-30b-a3b,gemma3-4b --work
rollout`; `--tiny` tries the script on CPU. The table lies in the folder `--out` as families.json,
next to the folders of the two scripts.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollout_models import is_known

HERE = Path(__file__).parent
# family -> shape of the rollout, shape of the update: 16 bytes a parameter, and activations
FAMILIES = {
    "1.5b": ("1.5b", "1.5b"),
    "qwen3-4b": ("qwen3-4b", "qwen3-4b@18"),
    "llama-8b": ("llama-8b", "llama-8b@12"),
    "gemma3-4b": ("gemma3-4b", "gemma3-4b@17"),
    "qwen3-30b-a3b": ("qwen3-30b-a3b@24", "qwen3-30b-a3b@8"),
    "mixtral-8x7b": ("mixtral-8x7b@12", "mixtral-8x7b@3"),
    "gpt-oss-20b": ("gpt-oss-20b@12", "gpt-oss-20b@6"),
}
TINY_FAMILIES = {"tiny": ("tiny", "tiny"), "tiny-moe": ("tiny-moe", "tiny-moe")}
WORK = ("rollout", "update")
UPDATE_WORK = {
    "--engines": "ours-compiled",
    "--lengths": "fixed:1536",
    "--prompt-tokens": "512",
    "--samples": "8",
    "--checkpointing": "off",
}
HEADER = (
    "| family | rollout | tok/s | of the roofline | ratio to vLLM | update | tok/s | MFU | "
    "log-probs tok/s | MFU |"
)


@dataclass(kw_only=True)
class Line:
    """The figures of one family; None where they were not asked for or failed."""

    family: str
    rollout_shape: str
    update_shape: str
    rollout_tokens_per_s: float | None = None
    of_roofline: float | None = None
    ratio_to_vllm: float | None = None
    update_tokens_per_s: float | None = None
    update_mfu: float | None = None
    log_prob_tokens_per_s: float | None = None
    log_prob_mfu: float | None = None

    def cells(self) -> list[str]:
        """Return the texts of the table."""
        return [
            self.family,
            self.rollout_shape,
            _count(self.rollout_tokens_per_s),
            _share(self.of_roofline),
            _ratio(self.ratio_to_vllm),
            self.update_shape,
            _count(self.update_tokens_per_s),
            _share(self.update_mfu),
            _count(self.log_prob_tokens_per_s),
            _share(self.log_prob_mfu),
        ]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", help=f"of {', '.join(FAMILIES)}; several with commas [all]")
    parser.add_argument("--work", default=",".join(WORK), help="rollout, update or both [both]")
    parser.add_argument("--repeats", type=int, default=2, help="timed runs; the best counts [2]")
    parser.add_argument("--update-tokens", type=int, default=262_144, help="of a mini-batch")
    parser.add_argument("--micro-tokens", type=int, default=24_576, help="of a pass")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few tokens, on CPU")
    parser.add_argument("--out", type=Path, default=Path("outputs/families"))

    arguments = parser.parse_args(words)
    known = TINY_FAMILIES if arguments.tiny else FAMILIES
    arguments.families = (arguments.families or ",".join(known)).split(",")
    arguments.work = arguments.work.split(",")
    shapes = {}
    for family in arguments.families:
        # a shape with a number of layers of its own may stand for a family
        shapes[family] = known.get(family, (family, family))
        if family not in known and not is_known(family):
            parser.error(f"--families must be of {', '.join(known)}, got '{family}'.")
    for work in arguments.work:
        if work not in WORK:
            parser.error(f"--work must be of {', '.join(WORK)}, got '{work}'.")
    arguments.shapes = shapes
    return arguments


def run_script(script: str, words: Sequence[str], result: Path) -> Any:
    """Run a script next to this one; return its JSON, or None where it wrote none."""
    result.unlink(missing_ok=True)
    subprocess.run([sys.executable, str(HERE / script), *words], check=False)
    if not result.exists():
        print(f"families.py: {script} {' '.join(words)} failed", flush=True)
        return None
    return json.loads(result.read_text(encoding="utf-8"))


def measure_rollout(arguments: argparse.Namespace, line: Line) -> None:
    out = arguments.out / line.family / "rollout"
    has_vllm = not arguments.tiny and importlib.util.find_spec("vllm") is not None
    engines = "ours,vllm" if has_vllm else "ours"
    words = ["--models", line.rollout_shape, "--engines", engines, "--out", str(out)]
    words += ["--repeats", str(arguments.repeats), *(["--tiny"] if arguments.tiny else [])]
    report = run_script("rollout.py", words, out / "rollout.json")
    if report is None or line.rollout_shape not in report["models"]:
        return
    (table,) = report["models"][line.rollout_shape]["tables"].values()
    if "ours" in table:
        line.rollout_tokens_per_s = table["ours"]["tokens_per_s"]
        line.of_roofline = table["ours"]["of_roofline"]
        line.ratio_to_vllm = table["ours"].get("ratio_to_vllm")


def measure_update(arguments: argparse.Namespace, line: Line) -> None:
    out = arguments.out / line.family / "training"
    words = ["--models", line.update_shape, "--out", str(out)]
    words += ["--repeats", str(arguments.repeats)]
    if arguments.tiny:
        words += ["--tiny", "--engines", "ours-compiled", "--lengths", "fixed:64"]
    else:
        for option, value in UPDATE_WORK.items():
            words += [option, value]
        words += ["--tokens", str(arguments.update_tokens)]
        if "@" in line.update_shape:  # 2 bytes a parameter more, which such a shape leaves room for
            words.append("--keep-gathered")
        words += ["--micro-tokens", str(arguments.micro_tokens)]
    reports = run_script("training.py", words, out / "training.json")
    if reports is None or "ours-compiled" not in reports[0]["results"]:
        return
    result = reports[0]["results"]["ours-compiled"]
    line.update_tokens_per_s = result["tokens"] / result["update_s"]
    line.update_mfu = result["update_mfu"]
    line.log_prob_tokens_per_s = result["tokens"] / result["log_prob_s"]
    line.log_prob_mfu = result["log_prob_mfu"]


def main() -> None:
    arguments = parse_arguments()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for family, (rollout, update) in arguments.shapes.items():
        line = Line(family=family, rollout_shape=rollout, update_shape=update)
        lines.append(line)
        if "rollout" in arguments.work:
            measure_rollout(arguments, line)
        if "update" in arguments.work:
            measure_update(arguments, line)
        text = json.dumps([asdict(each) for each in lines], indent=2)
        (arguments.out / "families.json").write_text(text, encoding="utf-8")

    print(f"\n{HEADER}\n|{'---|' * HEADER.count(' |')}")
    for line in lines:
        print(f"| {' | '.join(line.cells())} |")


def _count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    main()
