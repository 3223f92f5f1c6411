"""Print one readable line for each step."""

from verl.tracking.backends import Metrics, Rows, TrackerBackend, tracker_backends
from verl.utils.streams import show

Entry = tuple[str, str, tuple[str, ...]]

# Entries of a step's line: form, digits, and metrics, the first present of which is shown. Without
# any of them the entry is left out, apart from the actor's loss.
_ACTOR_LOSS: Entry = ("Actor loss: {}", ".4f", ("actor/pg_loss",))
_REINFORCED: tuple[Entry, ...] = (
    _ACTOR_LOSS,
    # missing where a teacher is learned from without a reward
    ("Reward: {}", ".4f", ("critic/score/mean", "critic/rewards/mean")),
    ("Distillation loss: {}", ".4f", ("actor/distillation_loss",)),
    # to the reference, where there is one
    ("KL: {}", ".4f", ("actor/kl_loss", "actor/reward_kl_penalty")),
    ("Critic loss: {}", ".4f", ("critic/vf_loss",)),
    ("Response length: {}", ".1f", ("response_length/mean",)),
    ("{} s/step", ".2f", ("timing_s/step", "perf/time_per_step")),
)
_SUPERVISED: tuple[Entry, ...] = (
    ("Loss: {}", ".4f", ("train/loss",)),
    ("Learning rate: {}", ".3g", ("train/lr",)),
    ("Gradient norm: {}", ".3f", ("train/grad_norm",)),
    ("{} tokens/s", ".0f", ("tokens/s",)),
    ("{} s/step", ".2f", ("timing_s/step", "perf/time_per_step")),
)

# First parts of the names that runs measure by themselves. Other names are a user's own.
SECTIONS = frozenset(
    {
        "actor",
        "agent_loop",
        "critic",
        "environment",
        "fully_async",
        "groups",
        "num_turns",
        "perf",
        "prompt_length",
        "response_length",
        "reward",
        "rollout",
        "rollout_corr",
        "rollouter",
        "timing_per_token_ms",
        "timing_s",
        "tools",
        "train",
        "trainer",
        "training",
        "val",
        "val-aux",
        "val-core",
    }
)
_OF_PARTNER = "policy_"  # begins the section of a second trained policy
_MOST_OWN = 6  # metrics of a user's own names in a line

# Samples, and characters of each, that `log_generations` prints; other trackers have them all.
_FEW_ROWS = 3
_FEW_CHARACTERS = 400


@tracker_backends.register("console")
class ConsoleBackend(TrackerBackend):
    """Print one line every `log_interval` steps.

    Example: `[Step 1/10] Actor loss: 0.0123 | Reward: 0.3333 | KL: 0.0012 | ...`. Metrics of a
    user's own names, such as `mine/spread`, follow, up to six of them. The first and the last step
    are always printed, and so are validation scores, on a separate line.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        total = self.settings.total_steps
        head = f"[Step {step}/{total}]" if total is not None else f"[Step {step}]"
        line = step_line(metrics)
        if line and self._is_due(step):
            show(f"{head} {line}")

        scores = []
        for name, value in metrics.items():
            if name.startswith("val-core/"):
                scores.append(f"{name.removeprefix('val-core/')}: {value:.4f}")
        if scores:
            show(f"Validation after step {step}: {' | '.join(scores)}")

    def log_generations(self, rows: Rows, step: int) -> None:
        by_prompt = {}  # the first sample of each: trackers have the others
        for number, row in enumerate(rows):
            by_prompt.setdefault(row.get("uid", number), row)

        for row in list(by_prompt.values())[:_FEW_ROWS]:
            show(f"[Step {step}] Sample")
            for name, value in row.items():
                text = str(value)
                if len(text) > _FEW_CHARACTERS:
                    text = f"{text[:_FEW_CHARACTERS]} ..."
                show(f"  {name}: {text}")

    def _is_due(self, step: int) -> bool:
        return step % self.settings.log_interval == 0 or step in (1, self.settings.total_steps)


def step_line(metrics: Metrics) -> str:
    """Format the line of a step, without its number; "" where it has nothing to show."""
    return " | ".join([*_usual_entries(metrics), *_own_entries(metrics)])


def _usual_entries(metrics: Metrics) -> list[str]:
    """Format the usual metrics of a step that trained.

    A missing loss of the actor is n/a: it may be waiting for its critic.
    """
    if not any(name.startswith(("actor/", "critic/", "train/")) for name in metrics):
        return []

    entries = _REINFORCED
    if "train/loss" in metrics:
        entries = _SUPERVISED
        metrics = _with_speed(metrics)

    parts = []
    for entry in entries:
        form, digits, names = entry
        value = next((metrics[name] for name in names if name in metrics), None)
        if value is not None:
            parts.append(form.format(_number(value, digits)))
        elif entry is _ACTOR_LOSS:
            parts.append(form.format("n/a"))
    return parts


def _own_entries(metrics: Metrics) -> list[str]:
    """Format the first metrics of a user's own names, and count the others."""
    own = [name for name in metrics if _is_own(name)]

    parts = []
    for name in own[:_MOST_OWN]:
        value = metrics[name]
        digits = ".4g"
        if isinstance(value, int):
            digits = "d"
        parts.append(f"{name}: {_number(value, digits)}")
    if len(own) > _MOST_OWN:
        parts.append(f"{len(own) - _MOST_OWN} more")
    return parts


def _is_own(name: str) -> bool:
    section = name.partition("/")[0]
    return section not in SECTIONS and not section.startswith(_OF_PARTNER)


def _with_speed(metrics: Metrics) -> Metrics:
    """Add the tokens a second, if tokens and seconds of the step are known."""
    tokens = metrics.get("perf/total_num_tokens")
    seconds = metrics.get("perf/time_per_step")
    if tokens is None or not seconds:
        return metrics
    return {**metrics, "tokens/s": tokens / seconds}


def _number(value: float, digits: str) -> str:
    text = format(value, digits)
    if float(text) == 0:
        return text.removeprefix("-")  # -0.0000 would look like a result
    return text
