"""One readable line a step."""

import math

from verl.tracking.backends import Metrics, Rows, TrackerBackend, tracker_backends

# What the line shows, and the metrics it is taken from: the first that a step has.
# KL is the distance to the reference where there is one, else between the policy before and after the update.
_ACTOR_LOSS = ("actor/loss", "actor/pg_loss")
_REWARD = ("critic/score/mean", "critic/rewards/mean")
_KL = ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl")
_CRITIC_LOSS = ("critic/vf_loss",)
_SUPERVISED_LOSS = ("train/loss",)
_LENGTH = ("response_length/mean",)
_SECONDS = ("timing_s/step", "perf/time_per_step")

# Samples and characters of each that `log_generations` prints; the other trackers hold them all.
_FEW_ROWS = 3
_FEW_CHARACTERS = 400


@tracker_backends.register("console")
class ConsoleBackend(TrackerBackend):
    """Prints `[Step 1/10] Actor loss: 0.0123 | Reward: 0.3333 | KL: 0.0012 | ...` every `log_interval` steps.

    The first and the last step are always printed, and so are validation scores, on a line of their own.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        total = self.settings.total_steps
        head = f"[Step {step}/{total}]" if total is not None else f"[Step {step}]"
        if self._is_due(step) and any(name in metrics for name in (*_ACTOR_LOSS, *_REWARD, *_SUPERVISED_LOSS)):
            print(f"{head} {step_line(metrics)}", flush=True)
        scores = [
            f"{name.removeprefix('val-core/')}: {value:.4f}" for name, value in metrics.items() if _is_score(name)
        ]
        if scores:
            print(f"Validation after step {step}: {' | '.join(scores)}", flush=True)

    def log_generations(self, rows: Rows, step: int) -> None:
        for row in rows[:_FEW_ROWS]:
            print(f"[Step {step}] Sample", flush=True)
            for name, value in row.items():
                text = str(value)
                print(f"  {name}: {text[:_FEW_CHARACTERS]}{' ...' if len(text) > _FEW_CHARACTERS else ''}", flush=True)

    def _is_due(self, step: int) -> bool:
        return step % self.settings.log_interval == 0 or step in (1, self.settings.total_steps)


def step_line(metrics: Metrics) -> str:
    """The line of a step, without its number. A loss that the step has not (the actor waits for its critic) is n/a."""
    if any(name in metrics for name in _SUPERVISED_LOSS):
        tokens_per_s = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        return (
            f"Loss: {_number(metrics, _SUPERVISED_LOSS)} | Learning rate: {metrics['train/lr']:.3g} | Gradient norm: "
            f"{metrics['train/grad_norm']:.3f} | {tokens_per_s:.0f} tokens/s | {_number(metrics, _SECONDS, 2)} s/step"
        )
    parts = [
        f"Actor loss: {_number(metrics, _ACTOR_LOSS)}",
        f"Reward: {_number(metrics, _REWARD)}",
        f"KL: {_number(metrics, _KL)}",
    ]
    if any(name in metrics for name in _CRITIC_LOSS):
        parts.append(f"Critic loss: {_number(metrics, _CRITIC_LOSS)}")
    if any(name in metrics for name in _LENGTH):
        parts.append(f"Response length: {_number(metrics, _LENGTH, 1)}")
    if any(name in metrics for name in _SECONDS):
        parts.append(f"{_number(metrics, _SECONDS, 2)} s/step")
    return " | ".join(parts)


def _is_score(name: str) -> bool:
    return name.startswith("val-core/")


def _number(metrics: Metrics, names: tuple[str, ...], digits: int = 4) -> str:
    value = next((metrics[name] for name in names if name in metrics), None)
    if value is None:
        return "n/a"
    text = f"{value:.{digits}f}"
    # -0.0000 would look like a finding.
    return text.removeprefix("-") if math.isfinite(value) and float(text) == 0 else text
