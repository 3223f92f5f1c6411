"""One readable line a step."""

from verl.tracking.backends import Metrics, Rows, TrackerBackend, tracker_backends

# What the line of a step shows: form, digits, and the metrics it is taken from, the first that is
# there.
_ALWAYS = (
    ("Actor loss: {}", ".4f", ("actor/loss", "actor/pg_loss")),
    ("Reward: {}", ".4f", ("critic/score/mean", "critic/rewards/mean")),
)
_WHERE_MEASURED = (
    # to the reference, where there is one
    ("KL: {}", ".4f", ("actor/kl_loss", "actor/reward_kl_penalty")),
    ("Critic loss: {}", ".4f", ("critic/vf_loss",)),
    ("Response length: {}", ".1f", ("response_length/mean",)),
    ("{} s/step", ".2f", ("timing_s/step", "perf/time_per_step")),
)
_SUPERVISED = (
    ("Loss: {}", ".4f", ("train/loss",)),
    ("Learning rate: {}", ".3g", ("train/lr",)),
    ("Gradient norm: {}", ".3f", ("train/grad_norm",)),
    ("{} tokens/s", ".0f", ("tokens/s",)),
    ("{} s/step", ".2f", ("timing_s/step", "perf/time_per_step")),
)

# Samples and characters of each that `log_generations` prints; the other trackers hold them all.
_FEW_ROWS = 3
_FEW_CHARACTERS = 400


@tracker_backends.register("console")
class ConsoleBackend(TrackerBackend):
    """Prints `[Step 1/10] Actor loss: 0.0123 | Reward: 0.3333 | KL: 0.0012 | ...` every
    `log_interval` steps.

    The first and the last step are always printed, and so are validation scores, on a line of their
    own.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        total = self.settings.total_steps
        head = f"[Step {step}/{total}]" if total is not None else f"[Step {step}]"
        if self._is_due(step) and any(
            name.startswith(("actor/", "critic/", "train/")) for name in metrics
        ):
            print(f"{head} {step_line(metrics)}", flush=True)
        scores = {
            name.removeprefix("val-core/"): metrics[name]
            for name in metrics
            if name.startswith("val-core/")
        }
        if scores:
            print(
                (
                    f"Validation after step {step}: "
                    f"{' | '.join(f'{k}: {v:.4f}' for k, v in scores.items())}"
                ),
                flush=True,
            )

    def log_generations(self, rows: Rows, step: int) -> None:
        for row in rows[:_FEW_ROWS]:
            print(f"[Step {step}] Sample", flush=True)
            for name, value in row.items():
                text = str(value)
                print(
                    (
                        f"  {name}: "
                        f"{text[:_FEW_CHARACTERS]}{' ...' if len(text) > _FEW_CHARACTERS else ''}"
                    ),
                    flush=True,
                )

    def _is_due(self, step: int) -> bool:
        return step % self.settings.log_interval == 0 or step in (1, self.settings.total_steps)


def step_line(metrics: Metrics) -> str:
    """The line of a step, without its number. A loss that the step has not (the actor waits for its
    critic) is n/a."""
    if "train/loss" in metrics:
        rate = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        metrics, shown = {**metrics, "tokens/s": rate}, _SUPERVISED
    else:
        shown = [
            *_ALWAYS,
            *(entry for entry in _WHERE_MEASURED if any(name in metrics for name in entry[2])),
        ]
    return " | ".join(form.format(_number(metrics, names, digits)) for form, digits, names in shown)


def _number(metrics: Metrics, names: tuple[str, ...], digits: str) -> str:
    value = next((metrics[name] for name in names if name in metrics), None)
    if value is None:
        return "n/a"
    text = format(value, digits)
    return text.removeprefix("-") if float(text) == 0 else text  # -0.0000 would look like a finding
