"""Render a memory plan as text with tables, and as JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl.diagnostics.advice import Advice
from verl.diagnostics.phase_plan import MemoryPlan, PhasePlan
from verl.utils.peaks import Peak
from verl.utils.text_table import aligned
from verl.utils.units import GIB

Peaks = dict[str, Peak]  # by role and phase

_BAR = 40  # characters of a full device
# Code that is imported or compiled while a run works takes 0.1 to 0.4 GiB of its process. Less
# than this is not compared with a plan, which counts no code.
_LEAST_COMPARED_ON_CPU = 2 * GIB
_DATA = "Data: not read, so files may be missing. Every row counts with the most tokens."


def render(plan: MemoryPlan, advice: Sequence[Advice], measured: Peaks | None = None) -> str:
    """Render batch, data, pages, phases, placement, verdict and advice.

    Args:
        plan: the plan.
        advice: changes that make it fit.
        measured: peaks by role and phase, under the names of `profile`.
    """
    shape = plan.roles["actor"].footprint.shape
    lines = [
        f"Model: {shape.family}, {_count(shape.numel)} parameters, {shape.layers} layers, hidden "
        f"{shape.hidden}, vocabulary {shape.vocabulary}; {_count(shape.trained_numel)} trained",
        f"Batch: {plan.batch}",
        _DATA,
        *([] if plan.rollout is None else [f"Cache: {plan.rollout}"]),
        "",
        *_table(plan, measured),
        *_note(plan, measured),
        "",
        *_drawing(plan),
        "",
        *_verdict(plan, advice),
    ]

    if not shape.is_llama_like:
        lines.append(
            f"The family '{shape.family}' is not of those that the formulae were measured with: "
            "take its activations for a bound by analogy with Llama's layer."
        )
    lines += _pictures(plan)

    return "\n".join(lines)


def as_json(
    plan: MemoryPlan,
    advice: Sequence[Advice],
    measured: Peaks | None = None,
    **others: Mapping[str, Any],
) -> str:
    """Render the plan for programs, and `others` next to it; sizes are bytes."""
    placement = plan.placement
    phases = []
    for phase in plan.phases:
        passes = phase.passes and {
            "tokens": phase.passes.tokens,
            "picture_tokens": phase.passes.picture_tokens,
            "chosen": phase.passes.chosen,
        }
        entry: dict[str, object] = {
            "role": phase.role,
            "phase": phase.phase,
            "device": phase.device_bytes,
            "parts": phase.device,
            "host": phase.host,
            "passes": passes,
        }
        if measured is not None and phase.name in measured:
            entry["measured"] = measured[phase.name]._asdict()
        phases.append(entry)

    proposals = [
        {
            "changes": each.changes,
            "device": each.plan.worst.device_bytes,
            "host": each.plan.host_bytes,
        }
        for each in advice
    ]

    rollout = None
    if plan.rollout is not None:
        rollout = asdict(plan.rollout) | {"at_once": plan.rollout.at_once}
    return json.dumps(
        {
            "fits": plan.fits,
            "problems": plan.problems,
            "device": plan.worst.device_bytes,
            "device_size": placement.device_bytes,
            "host": plan.host_bytes,
            "hosts": placement.hosts,
            "ranks_a_host": placement.ranks_a_host,
            "ranks": placement.roles,
            "batch": asdict(plan.batch),
            "rollout": rollout,
            "pictures": asdict(plan.pictures),
            "phases": phases,
            "advice": proposals,
            **others,
        },
        indent=2,
    )


def _pictures(plan: MemoryPlan) -> list[str]:
    """Describe the vision tower, the patches of the largest pass, and pictures on the host."""
    shape = plan.roles["actor"].footprint.shape
    tower = shape.tower
    if tower is None:
        return []

    if tower.trained:
        trains = "trained"
    elif tower.connector_trained:
        trains = "frozen, with a trained connector"
    else:
        trains = "frozen"
    most = max(phase.passes.picture_tokens for phase in plan.phases if phase.passes is not None)
    lines = [
        f"Pictures: a vision tower with its connector, {_count(shape.tower_numel)} parameters, "
        f"{trains}: {tower.layers} layers, width {tower.width}, MLP {tower.intermediate}; "
        f"{tower.tile_patches / tower.tile_tokens:.3g} patches a token. The plan takes every token "
        f"of a prompt for one of a picture: at most {tower.patches(most)} patches a pass, and "
        f"{_gib(plan.pictures.prepared)} GiB of prepared pictures a step on the first host."
    ]
    if plan.pictures.kept:
        lines.append(
            "Features of the frozen tower stay on the host: at most "
            f"{_gib(plan.pictures.kept)} GiB of each actor process."
        )
    return lines


def _table(plan: MemoryPlan, measured: Peaks | None) -> list[str]:
    header = ["role", "phase", "device GiB", "host GiB", "tokens a pass", "mostly"]
    if measured is not None:
        header[3:3] = ["measured GiB", "error"]
    rows = [header]

    for phase in plan.phases:
        tokens = ""
        if phase.passes is not None:
            tokens = f"{phase.passes.tokens}{' (chosen)' if phase.passes.chosen else ''}"
        row = [
            phase.role,
            phase.phase,
            _gib(phase.device_bytes),
            _gib(phase.host),
            tokens,
            _mostly(phase),
        ]
        if measured is not None:
            row[3:3] = _measured(phase, measured.get(phase.name), plan.placement.on_cuda)
        rows.append(row)

    return aligned(rows, right=("device GiB", "host GiB", "measured GiB", "error", "tokens a pass"))


def _note(plan: MemoryPlan, measured: Peaks | None) -> list[str]:
    """Explain "measured" on a CPU."""
    if measured is None or plan.placement.on_cuda:
        return []
    return [
        "Measured: growth of this process since its models began to load, at the end of a phase. "
        "It includes code that was imported or compiled since then (0.1 to 0.4 GiB), which the "
        f"plan does not count, so phases below {_LEAST_COMPARED_ON_CPU // GIB} GiB show no error."
    ]


def _measured(phase: PhasePlan, peak: Peak | None, on_cuda: bool) -> list[str]:
    if peak is None:
        return ["", ""]
    taken = peak.allocated + peak.outside if on_cuda else peak.host
    predicted = phase.device_bytes if on_cuda else phase.host
    if not on_cuda and max(predicted, taken) < _LEAST_COMPARED_ON_CPU:
        return [_gib(taken), ""]
    return [_gib(taken), f"{predicted / max(1, taken) - 1:+.0%}"]


def _mostly(phase: PhasePlan) -> str:
    largest = sorted(phase.device.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {_gib(count)}" for name, count in largest)


def _drawing(plan: MemoryPlan) -> list[str]:
    """Draw the parts that each rank holds, and how full a device is in each phase."""
    placement = plan.placement
    lines = [
        (
            f"Placement: {placement.hosts} host(s) x {placement.ranks_a_host} rank(s), "
            f"{placement.device.type}"
        )
    ]

    for role in plan.roles.values():
        setup = role.footprint.setup
        cut = f"in {setup.shard_ranks} part(s)" if setup.shards else "whole"
        copies = role.ranks // setup.shard_ranks
        away = []
        if setup.param_offload:
            away.append("parameters")
        if setup.optimizer_offload:
            away.append("moments")
        if setup.offload_policy:
            away.append("parameters, gradients and moments")

        line = f"  {role.name:<12} weights {cut}, {copies} copy(ies)"
        if len(placement.colocated(role.name)) < len(placement.roles):
            line += f", on the ranks {_spans(placement.roles[role.name])}"
        if role.sequence_ranks > 1:
            line += f", {role.sequence_ranks} ranks share a row's tokens"
        if away:
            line += f"; on the host between phases: {' and '.join(away)}"
        lines.append(line)

    most = placement.device_bytes or plan.worst.device_bytes
    for phase in plan.phases:
        filled = round(_BAR * phase.device_bytes / max(1, most))
        bar = ("#" * min(filled, _BAR)).ljust(_BAR, ".") + "!" * (filled > _BAR)
        lines.append(f"  [{bar}] {phase.name}")

    return lines


def _verdict(plan: MemoryPlan, advice: Sequence[Advice]) -> list[str]:
    worst = plan.worst
    placement = plan.placement
    host = max(plan.phases, key=lambda phase: phase.host)
    lines = [
        f"Host: at most {_gib(host.host)} GiB ({host.name}) without the processes themselves and "
        "the data set."
    ]

    if placement.device_bytes is None:
        lines.append(f"Device: at most {_gib(worst.device_bytes)} GiB ({worst.name}).")
    elif plan.fits:
        lines.append(
            f"It fits: at most {_gib(worst.device_bytes)} GiB ({worst.name}) of "
            f"{_gib(placement.device_bytes)}."
        )
    else:
        lines.append(f"It does NOT fit on {_gib(placement.device_bytes)} GiB:")
        lines += [f"  - {problem}" for problem in plan.problems]

    if plan.fits is False:
        if advice:
            lines.append("Nearest changes that make it fit, any one line:")
            lines += [f"  {each}" for each in advice]
        else:
            lines.append(
                "No three changes of keys make it fit: a smaller model, LoRA, or larger cards "
                "would."
            )

    return lines


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} G" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _gib(num_bytes: float) -> str:
    """Format GiB with one decimal, or with two significant digits below 0.1, for small models."""
    gib = num_bytes / GIB
    return f"{gib:.1f}" if gib >= 0.1 else f"{gib:.2g}"


def _spans(numbers: Sequence[int]) -> str:
    """Format ranks as spans: 0-5 for 0, 1, 2, 3, 4, 5."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    spans = []
    for start, end in zip(starts, ends):
        spans.append(str(start) if start == end else f"{start}-{end}")
    return ", ".join(spans)
