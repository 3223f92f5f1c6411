"""The cost of the record (`trainer.record`) in a toy training, on a CPU.

One training in one process, whose record is on in one block of steps and off in the next. The cost
is the median difference of neighboring blocks, which see the same load of the machine. A block
ends when the record's thread is idle, so that its work counts, whatever it overlaps with.

`python bench/record_cost.py [--blocks N] [key=value ...]` prints seconds a step, by the clock and
by the processor.
"""

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from verl.config.load import load_config
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

# The training of `make quickstart`, with neither validation nor checkpoints.
TOY = [
    *("data.dataset_name=toy", "data.train_batch_size=4", "actor_rollout_ref.model.path=toy"),
    *("trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=-1"),
    *("trainer.log_interval=1000000", "trainer.resume_mode=disable", "trainer.progress=False"),
]
WARM_UP_BLOCKS = 4


class Alternating(PPOTrainer):
    """A training whose record is on in every other block of steps."""

    steps_a_block: int
    wall_s: list[float]
    cpu_s: list[float]

    def measure(self, steps_a_block: int) -> None:
        """Train, and keep the seconds of every block."""
        self.steps_a_block = steps_a_block
        self.wall_s = []
        self.cpu_s = []
        self.started = time.perf_counter(), time.process_time()
        self.fit()

    def run_step(self, prompts: DataProto) -> None:
        """Run a step, and turn the record on or off after the last one of a block."""
        super().run_step(prompts)
        if self.global_step % self.steps_a_block:
            return

        recorder = self.recorder
        recorder.wait()
        now = time.perf_counter(), time.process_time()
        self.wall_s.append((now[0] - self.started[0]) / self.steps_a_block)
        self.cpu_s.append((now[1] - self.started[1]) / self.steps_a_block)
        recorder.is_on = not recorder.is_on
        self.started = time.perf_counter(), time.process_time()


def cost(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the median of a step without the record, and median and error of the record's part."""
    steady = seconds[WARM_UP_BLOCKS:]
    on, off = steady[0::2], steady[1::2]
    # Each block with the record lies between two without it, and the reverse.
    differences = [one - other for one, other in zip(on, off)]
    differences += [one - other for one, other in zip(on[1:], off)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return statistics.median(off), statistics.median(differences), error


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=84, help="[84]")
    parser.add_argument("--steps-a-block", type=int, default=10, help="[10]")
    parser.add_argument("keys", nargs="*", help="key=value")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)

    steps = arguments.blocks * arguments.steps_a_block
    with tempfile.TemporaryDirectory(prefix="record-cost-") as folder:
        where = [f"trainer.default_local_dir={folder}", f"trainer.max_steps={steps}"]
        trainer = Alternating(load_config([*TOY, *where, *arguments.keys]))
        trainer.init_workers()
        trainer.measure(arguments.steps_a_block)

    for clock, seconds in (("clock", trainer.wall_s), ("processor", trainer.cpu_s)):
        step_s, part_s, error_s = cost(seconds)
        print(
            f"{clock}: {step_s * 1e3:.2f} ms a step without the record, {part_s * 1e3:+.3f} "
            f"(+-{error_s * 1e3:.3f}) ms with it, {part_s / step_s:.2%}"
        )


if __name__ == "__main__":
    main()
