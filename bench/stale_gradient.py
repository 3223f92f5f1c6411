"""The gradient of stale episodes against that of fresh ones, at the same weights, on CPU.

Trains the work of `async_cpu.py` synchronously for `--rise` steps. W0 are the weights then, and W1
those after one more update, of which `--share` is gone. Batches that W1 drew give the true
gradient; batches that W0 drew give estimates of it, one for each correction. All gradients are the
trainer's own: advantages, correction, loss, and its sum over the tokens. Printed are, with errors
of a bootstrap over the batches:

| column | meaning |
|---|---|
| cosine | between the expected stale gradient and the true one; 1: unbiased |
| size | of the expected stale gradient along the true one; 1: unbiased |
| one batch | mean cosine between the gradient of one batch and the true one |
| ess | effective share of the tokens by their weights |

The products of squared noise are left out, so that cosine and size do not depend on the number of
batches. `python bench/stale_gradient.py` takes five minutes of one core.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from async_cpu import command
from digit_task import write_prompts
from torch import Tensor

from verl.config.algorithm import RolloutCorrectionConfig
from verl.config.load import load_config
from verl.engine.base import StepResult
from verl.protocol import DataProto
from verl.trainer.ppo_trainer import PPOTrainer

SECTION = "algorithm.rollout_correction"
NO_BOUND = f"{SECTION}.rollout_is_threshold=1e30"
# The keys of each correction.
CORRECTIONS = {
    "none": [f"{SECTION}.preset=disabled"],
    "decoupled_token_is": [f"{SECTION}.preset=decoupled_token_is"],
    "token, no bound": [f"{SECTION}.preset=decoupled_token_is", NO_BOUND],
    "decoupled_seq_is": [f"{SECTION}.preset=decoupled_seq_is"],
    "sequence, no bound": [f"{SECTION}.preset=decoupled_seq_is", NO_BOUND],
    "bypass_ppo_clip": [f"{SECTION}.preset=bypass_ppo_clip"],
}
# Weights that no preset has, bounded by 2: the product over the token's turn, and that over all
# tokens up to it.
PRODUCTS = ("turn", "prefix")
DRAWS = 200  # of the bootstrap


class Gradients:
    """A trainer whose updates give their gradient and change nothing."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.arguments = command(given, "together", given.seed, folder)
        self.trainer = PPOTrainer(load_config(self.arguments))
        self.trainer.init_workers()
        actors: Any = self.trainer.actor_wg  # of one process, so the worker is here
        self.engine = actors.worker.engine
        self.parameters = list(self.engine.hf_model.parameters())
        self.prompts = iter(self.trainer.prompt_batches())
        self.found: Tensor | None = None
        self.ess: dict[str, list[float]] = {}

    def train(self, steps: int) -> list[Tensor]:
        """Make updates, and return the weights after them."""
        for _ in range(steps):
            self.trainer.global_step += 1
            self.trainer.step(next(self.prompts))
        return [each.detach().clone() for each in self.parameters]

    def stop_training(self) -> None:
        """Keep the gradient of each update from now on, in place of a step."""
        self.engine.step = self._keep
        self.engine.step_schedule = lambda: None

    def _keep(self) -> StepResult:
        self.found = torch.cat([each.grad.flatten() for each in self.parameters])
        return StepResult(grad_norm=self.found.norm().item(), lr=0.0, skipped=False, offenders=[])

    def draw(self, drawn_by: list[Tensor], learned_by: list[Tensor]) -> DataProto:
        """Return a batch of the first weights, with all that the update by the second ones reads."""
        self._use(CORRECTIONS["decoupled_token_is"])  # which makes the pass for old log-probs
        self.take(drawn_by)
        self.trainer.global_step += 1
        batch = self.trainer.collect(next(self.prompts))
        self.take(learned_by)
        return self.trainer.estimate_advantages(self.trainer.evaluate_policies(batch))

    def take(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, weights, strict=True):
                parameter.copy_(weight)

    def of(self, batch: DataProto, correction: str) -> Tensor:
        """Return the gradient of a batch under one of the corrections."""
        batch = batch.select()
        if correction in PRODUCTS:
            self._use(CORRECTIONS["none"])
            batch.batch["rollout_is_weights"] = product_weights(batch, correction)
        else:
            options = self._use(CORRECTIONS[correction])
            if options.bypass_mode:
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        self.trainer.update(batch)

        if correction in PRODUCTS:
            weights = batch.batch["rollout_is_weights"].double()
            tokens = batch.batch["response_mask"].sum()
            share = (weights.sum() ** 2 / (tokens * (weights**2).sum())).item()
        else:
            share = self.trainer.metrics.pop("rollout_corr/ess", 1.0)
        self.ess.setdefault(correction, []).append(share)
        assert self.found is not None
        return self.found

    def _use(self, keys: list[str]) -> RolloutCorrectionConfig:
        own = [each for each in self.arguments if not each.startswith(SECTION)]
        options = load_config([*own, *keys]).algorithm.rollout_correction
        self.trainer.config.algorithm.rollout_correction = options
        return options


def product_weights(batch: DataProto, which: str) -> Tensor:
    """Return the weight of each token, (B, R)."""
    columns = batch.batch
    own = columns["response_mask"].bool()
    log_ratio = torch.where(own, columns["old_log_probs"] - columns["rollout_log_probs"], 0.0)
    log_weights = log_ratio.cumsum(-1)
    if which == "turn":
        turns = columns["turn_of_token"]
        log_weights = torch.zeros_like(log_ratio)
        for turn in range(int(turns.max()) + 1):
            is_here = own & (turns == turn)
            log_weights += is_here * (log_ratio * is_here).sum(-1, keepdim=True)
    return torch.where(own, log_weights.exp().clamp(max=2.0), 0.0)


def compared(products: Tensor, fresh: Tensor, stale: Tensor) -> Tensor:
    """Return cosine, size, and the mean cosine of one batch.

    Args:
        products: (2 N, 2 N) of the gradients of N fresh batches and N stale ones.
        fresh, stale: numbers of the batches, which may come several times.
    """
    cross = products[fresh][:, stale]
    true_size = _of_pairs(products, fresh)
    stale_size = _of_pairs(products, stale).clamp(min=1e-30)
    size = cross.mean() / true_size
    cosine = cross.mean() / (true_size * stale_size).sqrt()
    one = (cross.mean(0) / products[stale, stale].sqrt()).mean() / true_size.sqrt()
    return torch.stack([cosine, size, one])


def _of_pairs(products: Tensor, rows: Tensor) -> Tensor:
    """Return the mean product of two different batches, an estimate of the squared mean."""
    differ = rows[:, None] != rows[None, :]
    return products[rows][:, rows][differ].mean()


def row_of(name: str, fresh: Tensor, stale: Tensor) -> str:
    """Return a line of the table, with errors."""
    count = len(fresh)
    both = torch.cat([fresh, stale]).double()
    products = both @ both.T
    numbers = torch.arange(count)
    found = compared(products, numbers, numbers + count)

    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(DRAWS):
        first = torch.randint(count, (count,), generator=generator)
        second = torch.randint(count, (count,), generator=generator)
        drawn.append(compared(products, first, second + count))
    errors = torch.stack(drawn).std(0)
    cells = [f"{value:.2f} ± {error:.2f}" for value, error in zip(found, errors)]
    return f"| {name} | {' | '.join(cells)} |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rise", type=int, default=14, help="steps before W0 [14]")
    parser.add_argument("--share", type=float, default=1.0, help="of the way from W0 to W1 [1]")
    parser.add_argument(
        "--batches", type=int, default=64, help="of each kind, 64 episodes each [64]"
    )
    parser.add_argument("--turns", type=int, default=6, help="of an episode [6]")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(model="toy", prompts=8, samples=8, epochs=1)
    parser.set_defaults(correction="decoupled_token_is")
    return parser.parse_args()


def gradients(given: argparse.Namespace, folder: Path) -> tuple[dict[str, Tensor], Gradients]:
    """Return the gradients (N, parameters) of the fresh batches, twice, and of each correction."""
    own = Gradients(given, folder)
    before = own.train(given.rise)
    after = own.train(1)
    after = [one + given.share * (other - one) for one, other in zip(before, after, strict=True)]
    own.stop_training()

    kept: dict[str, list[Tensor]] = {}
    for _ in range(given.batches):
        batch = own.draw(after, after)
        kept.setdefault("true", []).append(own.of(batch, "none"))
    for _ in range(given.batches):
        batch = own.draw(after, after)
        kept.setdefault("fresh", []).append(own.of(batch, "none"))
    own.ess.clear()

    for _ in range(given.batches):
        batch = own.draw(before, after)
        for correction in (*CORRECTIONS, *PRODUCTS):
            kept.setdefault(correction, []).append(own.of(batch, correction))
    return {name: torch.stack(found) for name, found in kept.items()}, own


def main() -> None:
    given = parse_arguments()
    given.steps = given.rise + 1 + 3 * given.batches
    os.environ |= {"BENCH_TURNS": str(given.turns), "BENCH_TOOL_S": "0"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        prompts = Path(place) / "prompts.jsonl"
        write_prompts(prompts, given.prompts * given.steps, given.seed)
        found, own = gradients(given, Path(place) / "run")

    print("| correction | cosine | size | one batch | ess |")
    print("|---|---|---|---|---|")
    true = found.pop("true")
    for name, stale in found.items():
        ess = statistics.mean(own.ess.get(name, [1.0]))
        print(f"{row_of(name, true, stale)} {ess:.2f} |", flush=True)


if __name__ == "__main__":
    main()
