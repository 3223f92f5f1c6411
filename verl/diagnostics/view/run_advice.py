"""Findings about a recorded run: where it stalls, learns nothing, or drifts."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from verl.tracking.records import Run, have_pictures
from verl.utils.errors import DataError

_FEW = 10  # newest steps that a finding is about
_STALL = 10  # times the median seconds of a step
_DEAD_SHARE = 0.5
_CLIPPED_SHARE = 0.2
_GROWTH = 3.0
_LEAST_MISMATCH = 1e-3  # mean |p - q|; less is rounding
_FLAT_STEPS = 20
_WEIGHT = {"problem": 0, "warning": 1, "note": 2}

Finding = dict[str, Any]
Findings = Iterator[Finding]


def advise_on(run: Run, *, is_live: bool) -> list[Finding]:
    """Return findings with `kind` (problem, warning, note), `title`, `text` and a `metric`."""
    found = [
        *_failures(run),
        *(_stall(run) if is_live else ()),
        *_dead_groups(run),
        *_clipped(run),
        *_mismatch(run),
        *_entropy(run),
        *_flat_reward(run),
        *_where_time_goes(run),
    ]
    return sorted(found, key=lambda finding: _WEIGHT[finding["kind"]])


def _failures(run: Run) -> Findings:
    for event in run.events:
        if event["event"] == "failed":
            step = event["step"]
            text = event["text"]
            if not _drew_pictures(run, step):
                text += f" The step again: verl capsule {run.folder} --step {step}"
            yield _finding("problem", f"The run failed in step {step}", text)
    skipped = [event["step"] for event in run.events if event["event"] == "skipped"]
    if skipped:
        text = "Loss or gradient were not finite. Look at the samples of these steps."
        steps = ", ".join(map(str, skipped[-_FEW:]))
        yield _finding("problem", f"Updates were skipped in step {steps}", text)
    for damage in run.damage[:1]:
        yield _finding("warning", "The record is damaged", damage)


def _drew_pictures(run: Run, step: int) -> bool:
    """Return whether the step cannot be executed again, because records hold no pictures."""
    try:
        return have_pictures(run.samples(step).prompts)
    except DataError:  # not kept, or damaged; `verl capsule` names what is missing
        return False


def _stall(run: Run) -> Findings:
    seconds = _newest(run, "timing_s/step")
    if len(seconds) < 3:
        return
    last = max(line.time for line in run.steps.values())
    waited = time.time() - last
    usual = statistics.median(seconds)
    if waited > _STALL * usual and waited > 60:
        text = f"A step takes {usual:.1f} s; the last one ended {waited:.0f} s ago."
        yield _finding("problem", "No step has ended for long", text, "timing_s/step")


def _dead_groups(run: Run) -> Findings:
    shares = []
    for step in run.kept_steps[-_FEW:]:
        line = run.steps.get(step)
        if line is not None and "groups/flat_share" in line.metrics:
            shares.append(line.metrics["groups/flat_share"])
    if shares and statistics.mean(shares) > _DEAD_SHARE:
        text = (
            f"{statistics.mean(shares):.0%} of the newest groups have one score for all samples, "
            "so they teach nothing. Raise rollout.n, choose prompts of another difficulty, or set "
            "algorithm.filter_groups.enable=True."
        )
        yield _finding("warning", "Most groups have no variance", text, "groups/flat_share")


def _clipped(run: Run) -> Findings:
    shares = _newest(run, "response_length/clip_ratio")
    if shares and statistics.mean(shares) > _CLIPPED_SHARE:
        text = (
            f"{statistics.mean(shares):.0%} of the newest responses fill data.max_response_length "
            "and were most likely cut off. Raise it, or reward shorter answers."
        )
        yield _finding("warning", "Responses are cut off", text, "response_length/clip_ratio")


def _mismatch(run: Run) -> Findings:
    name = "training/rollout_probs_diff_mean"
    values = list(run.find_metric(name).values())
    if len(values) < 8:
        return
    quarter = len(values) // 4
    first = statistics.mean(values[:quarter])
    last = statistics.mean(values[-quarter:])
    if last > _LEAST_MISMATCH and last > _GROWTH * first:
        text = (
            f"The mean difference of token probabilities went from {first:.2g} to {last:.2g}. Use "
            "algorithm.rollout_correction, or rollout.deterministic=true to find the cause."
        )
        yield _finding("warning", "Rollout and trainer drift apart", text, name)


def _entropy(run: Run) -> Findings:
    values = list(run.find_metric("actor/entropy").values())
    if len(values) >= _FEW and values[0] > 0 and values[-1] < 0.05 * values[0]:
        text = (
            f"It went from {values[0]:.3g} to {values[-1]:.3g}: samples of a group become equal. "
            "Lower the learning rate, raise clip_ratio_high, or add entropy_coeff."
        )
        yield _finding("warning", "Entropy has collapsed", text, "actor/entropy")


def _flat_reward(run: Run) -> Findings:
    values = list(run.find_metric("critic/score/mean").values())
    if len(values) < _FLAT_STEPS:
        return
    half = len(values) // 2
    spread = statistics.pstdev(values) or 1e-12
    gain = statistics.mean(values[half:]) - statistics.mean(values[:half])
    if gain < 0.1 * spread:
        text = (
            f"Its mean over the second half of the run is {gain:+.3g} against the first. Look at "
            "the worst samples, and try verl reward check."
        )
        yield _finding("warning", "The reward does not rise", text, "critic/score/mean")


def _where_time_goes(run: Run) -> Findings:
    total = sum(_newest(run, "timing_s/step"))
    if total <= 0:
        return
    shares = {}
    for name in next(reversed(run.steps.values())).metrics:
        phase = name.removeprefix("timing_s/")
        if name.startswith("timing_s/") and phase not in ("step", "testing"):
            shares[phase] = sum(_newest(run, name)) / total
    largest = sorted(shares.items(), key=lambda item: -item[1])[:3]
    text = ", ".join(f"{phase} {share:.0%}" for phase, share in largest)
    yield _finding("note", "Where the time goes", f"Of the newest steps: {text}.", "timing_s/step")


def _newest(run: Run, metric: str) -> list[float]:
    return list(run.find_metric(metric).values())[-_FEW:]


def _finding(kind: str, title: str, text: str, metric: str = "") -> Finding:
    return {"kind": kind, "title": title, "text": text, "metric": metric}
